"""Small chunks of a linear memory by tiles: the definition to 1e-10, whatever the tile (derivation, section 14)."""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import Case, assert_agree, disagreement, make_call
from titans_lm.config import MemoryConfig
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, tiles
from titans_lm.ops.groups import ChunkedCall

LINEAR = Case(tokens=41, depth=1, residual=False, norm="none", chunk=1)
MIXED = ("layer", "head", "channel")
CASES = [
    LINEAR,
    replace(LINEAR, residual=True, forget_to="init"),
    replace(LINEAR, chunk=2, gates=("channel",) * 3, forget_to="init"),
    replace(LINEAR, chunk=5, gates=MIXED, offsets=(2,), residual=True),
    replace(LINEAR, chunk=5, offsets=(3, 0), padding="scattered", forget_to="init"),
    replace(LINEAR, chunk=2, rows=3, padding="empty row", offsets=(1, 0, 1), gates=MIXED),
    replace(LINEAR, rows=3, padding="left", forget_to="init"),
    replace(LINEAR, rows=3, padding="all empty", offsets=(0,)),
    replace(LINEAR, offsets=(0,), edges=("theta", "eta", "alpha"), forget_to="init"),
    replace(LINEAR, chunk=16, offsets=(9, 2), edges=("alpha",), edge_share=1.0),
    replace(LINEAR, chunk=2, edges=("theta", "eta"), edge_share=1.0, gates=MIXED),
    replace(LINEAR, chunk=5, objective="dot", offsets=(1,), forget_to="init"),
    replace(LINEAR, chunk=2, objective="dot", padding="right", residual=True),
]


def use_tiles_of(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(tiles, "largest_tile", lambda width, by_channel, gpu: tokens)
    monkeypatch.setattr(tiles, "FEWEST_CHUNKS", 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_gives_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, state, surprise and all gradients; 7 is no multiple of a chunk, 41 the whole call."""
    call, found = make_call(case), []
    expected = call.results("reference")
    for tile in (7, 16, 64, case.tokens):
        use_tiles_of(monkeypatch, tile)
        found.append(call.results("chunked"))
        for x, y in zip(expected, found[-1], strict=True):
            wrong = {name: error for name, error in disagreement(x, y).items() if not error <= 1e-10}
            assert not wrong, f"tile {tile}: {wrong}"
    for one, other in pairwise(found):
        for x, y in zip(one, other, strict=True):
            assert max(disagreement(x, y).values()) <= 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_of_a_call_that_is_kept_whole_as_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group made is used for its gradients, and all tiles are one group."""
    monkeypatch.setattr(ChunkedCall, "_is_kept", lambda call, group: not call.lags)
    use_tiles_of(monkeypatch, 16)
    call = make_call(case)
    for x, y in zip(call.results("reference"), call.results("chunked"), strict=True):
        wrong = {name: error for name, error in disagreement(x, y).items() if not error <= 1e-10}
        assert not wrong, f"{case}: {wrong}"


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("gates", [("layer",) * 3, MIXED], ids=["layer", "mixed"])
def test_the_parts_of_surprise(gates: tuple[str, str, str], chunk: int) -> None:
    case = replace(LINEAR, chunk=chunk, gates=gates, offsets=(0, chunk - 1), padding="scattered", forget_to="init")
    call = make_call(case)
    found = {}
    for backend in ("reference", "chunked"):
        *_, sizes = neural_memory(*call.arguments, **call.settings, return_surprise="parts", backend=backend)
        found[backend] = sizes[call.settings["valid"]]
    torch.testing.assert_close(found["chunked"], found["reference"], rtol=1e-10, atol=1e-11)


def test_what_goes_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear memory in small chunks; no other memory, no chunk of a tile's size, and no token on its own."""
    made, make = [], tiles.make_system

    def noted(*given: object) -> object:
        made.append(given)
        return make(*given)

    # the package's attribute of that name is the function
    monkeypatch.setattr(import_module("titans_lm.ops.groups"), "make_system", noted)
    for case, expected in (
        (LINEAR, True),
        (replace(LINEAR, chunk=5), True),
        (replace(LINEAR, objective="dot"), False),
        (replace(LINEAR, norm="weight"), False),
        (replace(LINEAR, depth=2), False),
        (replace(LINEAR, chunk=16), False),
        (replace(LINEAR, tokens=1), False),
    ):
        made.clear()
        make_call(case)("chunked")
        assert bool(made) is expected, case


@pytest.mark.parametrize("case", [LINEAR, CASES[4], replace(CASES[3], rows=1)], ids=str)
def test_a_text_may_be_cut_anywhere_and_end_in_single_tokens(case: Case) -> None:
    call = make_call(case)
    T, valid = case.tokens, call.settings["valid"]
    with torch.no_grad():
        o, state, surprise = call("chunked")
        for borders in ([0, 1, T], [0, 13, 14, T], [0, 20, *range(30, T + 1)]):
            after, parts = call.arguments[6], []
            for start, end in pairwise(borders):
                here = [x[:, start:end] if isinstance(x, Tensor) else tuple(y[:, start:end] for y in x)
                        for x in call.arguments[:6]]  # fmt: skip
                told = {**call.settings, "valid": None if valid is None else valid[:, start:end]}
                *part, sizes = neural_memory(*here, after, **told, return_surprise=True, backend="chunked")
                after = part[1]
                parts.append((part[0], sizes))
            pieces = [torch.cat(x, dim=1) for x in zip(*parts, strict=True)]
            if valid is not None:
                pieces = [x.masked_fill(~valid[:, :, None, None], 0.0) for x in pieces]
            torch.testing.assert_close((*pieces, after), (o, surprise, state), rtol=1e-11, atol=1e-12)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, keep: Tensor) -> Tensor:
    """M ← g M + β kᵀ (v − k g M), o = q M: (B, T, H, D) and (B, T, H)."""
    M, outputs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], q.shape[3]), []
    for t in range(q.shape[1]):
        M = keep[:, t, :, None, None] * M
        error = v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], M)
        M = M + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], M))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("gated", [False, True])
def test_the_delta_rule_over_many_tiles(gated: bool) -> None:
    B, T, H, D = 2, 197, 2, 4
    q, k, v = torch.randn(3, B, T, H, D, dtype=torch.float64)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta, alpha = torch.rand(2, B, T, H, dtype=torch.float64)
    alpha = alpha * 0.5 if gated else torch.zeros_like(alpha)
    keep, none = 1.0 - alpha, torch.zeros_like(alpha)
    state = MemoryState.initial((torch.zeros(H, D, D, dtype=torch.float64),), B)
    network, theta = MemoryNetwork(residual=False), keep * beta / 2
    o, _ = neural_memory(q, k, v / keep[..., None], theta, none, alpha, state, network=network, chunk_size=1)
    torch.testing.assert_close(o, delta_rule(q, k, v, beta, keep), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("momentum", [True, False])
def test_a_hundred_thousand_equal_keys_at_the_bound(momentum: bool) -> None:
    config = MemoryConfig(memory_depth=1, chunk_size=1, momentum=momentum)
    T, D = 100_000, 4
    k = F.normalize(torch.ones(D), dim=0).expand(1, T, 1, D)
    theta = torch.full((1, T, 1), config.theta_max)
    eta = torch.full((1, T, 1), config.eta_max if momentum else 0.0)
    state = MemoryState.initial((torch.zeros(1, D, D),), 1)
    network = MemoryNetwork(residual=False)
    with torch.no_grad():
        o, state = neural_memory(
            k, k, torch.ones(1, T, 1, D), theta, eta, 0 * eta, state, network=network, chunk_size=1
        )
    assert o.abs().max() < 2.1
    torch.testing.assert_close(o[:, -1], torch.ones(1, 1, D), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 5])
def test_float32_beside_float64(chunk: int) -> None:
    """Keys, gates and steps as a layer has them, over several tiles."""
    B, T, H, D = 1, 320, 2, 16
    config = MemoryConfig(memory_depth=1, chunk_size=chunk)
    q, k = (F.normalize(torch.randn(B, T, H, D, dtype=torch.float64), dim=-1) for _ in range(2))
    v, W = torch.randn(B, T, H, D, dtype=torch.float64), torch.randn(H, D, D, dtype=torch.float64) / D
    largest = (config.theta_max, config.eta_max, 0.01)
    gates = [x * most for x, most in zip(torch.rand(3, B, T, H, dtype=torch.float64), largest, strict=True)]
    found = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, *gates, W)]
        network = MemoryNetwork(forget_to="init", initial=(leaves[-1],))
        state = MemoryState.initial((leaves[-1],), B)
        o, state = neural_memory(*leaves[:-1], state, network=network, chunk_size=chunk, backend="chunked")
        mix = o.square().sum() + state.S[0].square().sum()
        found.append({str(i): x.double() for i, x in enumerate((o.detach(), *torch.autograd.grad(mix, leaves)))})
    assert max(disagreement(*found).values()) <= 1e-4


@pytest.mark.parametrize("chunk", [1, 2])
def test_gradients_against_finite_differences(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles_of(monkeypatch, 4)
    case = Case(tokens=7, chunk=chunk, rows=1, heads=1, width=2, depth=1, norm="none", forget_to="init", offsets=(0,))
    call = make_call(case)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:  # gradcheck changes the leaves, which are what the call is made of
        o, state, _ = call("chunked")
        return o, *state.M, *state.S, *state.anchor

    assert torch.autograd.gradcheck(run, tuple(call.leaves.values()), fast_mode=True)


def kept_numbers(chunk: int) -> int:
    """Numbers that a call of 4,096 tokens keeps for its gradients."""
    B, T, H, D = 1, 4096, 1, 16
    q, k, v = torch.randn(3, B, T, H, D).requires_grad_()
    gate = torch.rand(B, T, H) * 0.1
    state = MemoryState.initial((torch.randn(H, D, D),), B)
    kept = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = neural_memory(q, k, v, gate, gate, gate, state, network=MemoryNetwork(), chunk_size=chunk)
    assert o.requires_grad
    return sum(kept.values())


def test_what_is_kept_grows_with_tokens_and_the_root_of_tiles() -> None:
    assert kept_numbers(1) <= 1.1 * kept_numbers(64)


def test_a_long_text_and_many_tiles() -> None:
    assert_agree(replace(LINEAR, tokens=200, width=5, gates=("head",) * 3), "reference", "chunked")
