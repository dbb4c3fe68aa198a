"""ATLAS' Omega rule: a token writes the errors of the last c, all of them at the anchor of its chunk."""

import re
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import PADDINGS, Case, assert_agree, make_call, taking_turns
from ops.test_ops_exact import LINEAR, NETWORKS, described
from titans_lm.memory import NeuralMemory
from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory


def windows() -> list[Case]:
    """Windows shorter and longer than a chunk and a call; networks, lengths, starts and padding take turns.

    Every pair of a window, a chunk and a padding, of their product a third: the i-th where the three places add up.
    """
    networks = list(NETWORKS.values())
    return [
        Case(
            window=window, padding=padding, objective=("l2", "l2", "dot", "lp")[i // 3 % 4],
            gates=(("layer",) * 3, ("head",) * 3)[i % 2], **taking_turns(i, chunk), **networks[i % len(networks)],
        )
        for i, (window, chunk, padding) in enumerate(product((1, 2, 4, 9), (1, 4, 16), PADDINGS))
        if (i // 21 + i // 7 + i % 7) % 3 == 0
    ]  # fmt: skip


@pytest.mark.parametrize("case", described(windows()[::4] + windows()[3::4]))
def test_the_definition_of_a_window_is_plain_autograd(case: Case) -> None:
    assert_agree(case, "oracle", "reference")


@pytest.mark.parametrize("case", described(windows()))
def test_chunked_is_exact_with_a_window(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "default"])
def test_chunked_is_exact_over_several_groups(network: str) -> None:
    assert_agree(Case(tokens=67, chunk=4, window=6, offsets=(3,), **NETWORKS[network]), "reference", "chunked")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_window_of_one_is_titans(backend: str) -> None:
    """To the bit where its share is 1; and a longer one is too where only the token's own error has one."""
    call = make_call(Case(tokens=11, offsets=(1, 3), forget_to="init"))
    state: MemoryState = call.arguments[-1]
    with torch.no_grad():
        o, end, _ = call(backend)
        for c in (1, 4):
            own = F.one_hot(torch.zeros(2, 11, 2, dtype=torch.int64), c).double()
            tail = tuple(torch.randn(2, c - 1, 2, 4, dtype=torch.float64) for _ in range(2)) if c > 1 else ()
            call.settings["extra"] = PerToken(None, own)
            arguments = (*call.arguments[:-1], state._replace(tail=tail))
            found, after = neural_memory(*arguments, **call.settings, backend=backend)
            tolerance = 0.0 if c == 1 else 1e-13
            torch.testing.assert_close(found, o, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(after.M, end.M, rtol=tolerance, atol=tolerance)


def test_a_window_of_one_token_back_writes_each_token_late() -> None:
    """All of the share at lag 2, one chunk: what is written is Titans' memory of the tokens two before."""
    call = make_call(Case(tokens=8, chunk=16, window=3, **LINEAR))
    q, k, v, theta, eta, alpha, state = call.arguments
    late = F.one_hot(torch.full((2, 8, 2), 2), 3).double()
    settings = {"network": call.settings["network"], "chunk_size": 16}
    o, _ = neural_memory(q, k, v, theta, eta, alpha, state, **settings, extra=PerToken(None, late))
    k, v = (torch.cat((torch.zeros_like(x[:, :2]), x[:, :-2]), dim=1) for x in (k, v))
    expected, _ = neural_memory(q, k, v, theta, eta, alpha, state._replace(tail=()), **settings)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("borders", [[0, 1, 5, 11], list(range(12))], ids=["pieces", "tokens"])
@pytest.mark.parametrize("surprise", [True, "parts"])
def test_a_cut_anywhere_and_single_tokens_change_nothing(borders: list[int], surprise: Any) -> None:
    """The tail carries over what a window reaches back to; sizes of surprise are those of the definition."""
    call = make_call(Case(tokens=11, window=5, forget_to="init", offsets=(2,)))
    *streams, state = call.arguments
    window, settings = call.settings["extra"].window, {"network": call.settings["network"], "chunk_size": 4}
    with torch.no_grad():
        whole, end, sizes = neural_memory(
            *streams, state, **settings, extra=PerToken(None, window), return_surprise=surprise, backend="reference"
        )
        pieces, found = [], []
        for start, stop in pairwise(borders):
            here = slice(start, stop)
            extra = PerToken(None, window[:, here])
            o, state, size = neural_memory(
                *(x[:, here] for x in streams), state, **settings, extra=extra, return_surprise=surprise
            )
            pieces.append(o)
            found.append(size)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(found, 1), sizes, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((state.M, state.tail), (end.M, end.tail), rtol=1e-12, atol=1e-12)


def test_a_hundred_thousand_equal_keys_stay_finite() -> None:
    """In float32, with every gate at the bound of the layer."""
    layer = NeuralMemory(hidden_size=8, num_attention_heads=1, memory_depth=1, omega_window=4)
    for gate in (layer.theta_proj, layer.eta_proj):
        torch.nn.init.constant_(gate.proj.bias, 20.0)
    torch.nn.init.constant_(layer.alpha_proj.proj.bias, -20.0)
    state, most = None, 0.0
    with torch.no_grad():
        for _ in range(10):
            _, state = layer(torch.ones(1, 10_000, 8), state)
            most = max(most, *(w.abs().max().item() for w in (*state.memory.M, *state.memory.S)))
    assert most < 10.0


def test_a_frozen_token_is_never_written() -> None:
    """Neither then nor by a window that would reach back to it."""
    layer = NeuralMemory(hidden_size=8, num_attention_heads=2, chunk_size=4, omega_window=3)
    x = torch.randn(1, 9, 8)
    _, state = layer(x[:, :5])
    _, after = layer(x[:, 5:], state, frozen=True)
    for old, new in zip(state.memory.tail, after.memory.tail, strict=True):
        assert torch.equal(old, new)


def one_call(window: Tensor | None, tail: tuple[Tensor, ...] = (), **changes: Any) -> Any:
    q, gate = F.normalize(torch.randn(2, 3, 2, 4), dim=-1), 0.1 * torch.rand(2, 3, 2)
    state = MemoryState.initial((torch.zeros(2, 4, 4),), 2)._replace(tail=tail)
    gates = changes.pop("gates", (gate, gate, gate))
    network = MemoryNetwork(residual=False, objective=changes.pop("objective", "l2"))
    extra = PerToken(changes.pop("threshold", None), window)
    return neural_memory(q, q, q, *gates, state, network=network, chunk_size=2, extra=extra, **changes)


def tail(tokens: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, tokens, 2, 4, dtype=dtype), torch.zeros(2, tokens, 2, 4, dtype=dtype)


WINDOW, CHANNELS = torch.full((2, 3, 2, 3), 1 / 3), ((torch.zeros(2, 3, 2, 4),),) * 3
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tail alone": ({"window": None, "tail": tail()}, "got a state with a tail of 2 tokens; expected extra.window"),
    "no tail": ({"window": WINDOW}, "got state.tail of shapes [] with a window of 3; expected [(2, 2, 2, 4), (2,"),
    "short tail": ({"window": WINDOW, "tail": tail(1)}, "got state.tail of shapes [(2, 1, 2, 4), (2, 1, 2, 4)] with"),
    "double tail": ({"window": WINDOW, "tail": tail(2, torch.float64)}, "got state.tail in torch.float64; expected"),
    "shape": ({"window": WINDOW[:, :2]}, "got window float32 (2, 2, 2, 3); expected floating point (B, T, H, c)"),
    "integers": ({"window": WINDOW.long()}, "got window int64 (2, 3, 2, 3); expected floating point (B, T, H, c)"),
    "channels": ({"window": WINDOW, "tail": tail(), "gates": CHANNELS}, "got a window with channel-wise gates"),
    "threshold": (
        {"window": WINDOW, "tail": tail(), "objective": "huber", "threshold": torch.ones(2, 3, 2)},
        "got a window with objective='huber'; expected l2, dot or lp",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_window_is_refused(name: str) -> None:
    given, said = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        one_call(**given)


def test_kernels_refuse_a_window() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"with a window; expected .* no window"):
        one_call(WINDOW, tail(), backend="triton")
