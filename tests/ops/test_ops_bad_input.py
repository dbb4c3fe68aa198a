"""Every refusal of the ops says what was got and what was expected; the smallest legal calls are simply right."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read

pytestmark = pytest.mark.usefixtures("unchecked")

B, T, H, D, E = 2, 3, 2, 4, 6


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that fits, with some of them replaced."""
    weights = (torch.randn(H, D, E), torch.randn(H, E, D))
    norm = torch.ones(H, D)
    return {
        **{name: torch.randn(B, T, H, D) for name in "qkv"},
        **{name: 0.1 * torch.rand(B, T, H) for name in ("theta", "eta", "alpha")},
        "state": MemoryState.initial(weights, B),
        "network": MemoryNetwork(norm_weight=norm, norm_bias=0 * norm, forget_to="init", initial=weights),
        "chunk_size": 2,
        **changes,
    }


def state_with(**changes: Any) -> MemoryState:
    return good()["state"]._replace(**changes)


def network_with(**changes: Any) -> MemoryNetwork:
    return replace(good()["network"], **changes)


def other_weights(*sizes: tuple[int, int], rows: int = B, heads: int = H) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(rows, heads, *size) for size in sizes)


def state_of(weights: tuple[torch.Tensor, ...]) -> MemoryState:
    return MemoryState(weights, weights, weights, torch.zeros(B, dtype=torch.int64))


REFUSED = {
    "q without heads": (
        {"q": torch.zeros(B, T, D)},
        "got q float32 (2, 3, 4); expected a floating point tensor (B, T, H, D)",
    ),
    "q as a list": ({"q": [[[[0.0]]]]}, "got q of type list; expected a floating point tensor (B, T, H, D)"),
    "k of NumPy": ({"k": torch.zeros(B, T, H, D).numpy()}, "got k of type ndarray; expected a floating point tensor"),
    "mask of NumPy": ({"valid": torch.ones(B, T).bool().numpy()}, "got valid of type ndarray; expected bool (B, T)"),
    "no network": ({"network": None}, "got network of type NoneType; expected a MemoryNetwork"),
    "a number as extra": ({"extra": 0.5}, "got extra of type float; expected PerToken(threshold=…, window=…)"),
    "integer q": ({"q": torch.zeros(B, T, H, D, dtype=torch.long)}, "got q int64 (2, 3, 2, 4); expected a floating"),
    "short k": ({"k": torch.zeros(B, T - 1, H, D)}, "got q float32 (2, 3, 2, 4) and k float32 (2, 2, 2, 4); expected"),
    "wide v": ({"v": torch.zeros(B, T, H, D + 1)}, "and v float32 (2, 3, 2, 5); expected q, k and v of one shape"),
    "mixed dtypes": ({"v": torch.zeros(B, T, H, D).bfloat16()}, "and v bfloat16 (2, 3, 2, 4); expected q, k and v"),
    "chunk_size 0": ({"chunk_size": 0}, "got chunk_size=0; expected an integer of at least 1"),
    "chunk_size 2.0": ({"chunk_size": 2.0}, "got chunk_size=2.0; expected an integer"),
    "chunk_size True": ({"chunk_size": True}, "got chunk_size=True; expected an integer"),
    "float mask": ({"valid": torch.ones(B, T)}, "got valid float32 (2, 3); expected bool (B, T) = (2, 3)"),
    "short mask": (
        {"valid": torch.ones(B, 1, dtype=torch.bool)},
        "got valid bool (2, 1); expected bool (B, T) = (2, 3)",
    ),
    "plain tuple as state": ({"state": tuple(good()["state"])}, "got a state of type tuple; expected MemoryState"),
    "list of weights": ({"state": state_with(M=list(good()["state"].M))}, "got state.M=list; expected a tuple of L"),
    "numbers as weights": (
        {"state": state_with(M=(1.0, 2.0))},
        "got state.M[0] of type float; expected (B, H, D_in, D_out) = (2, 2, 4, …)",
    ),
    "numbers as surprise": ({"state": state_with(S=(None, 2.0))}, "got state.S[0] of type NoneType; expected (B, H"),
    "a list as offset": ({"state": state_with(offset=[0, 0])}, "got state.offset of type list; expected integers (B,)"),
    "no weights": ({"state": state_of(())}, "got state.M=tuple; expected a tuple of L tensors"),
    "other batch": (
        {"state": state_of(other_weights((D, E), (E, D), rows=3))},
        "got state.M[0] of shape (3, 2, 4, 6); expected (B, H, D_in, D_out) = (2, 2, 4, …)",
    ),
    "other heads": (
        {"state": state_of(other_weights((D, E), (E, D), heads=1))},
        "got state.M[0] of shape (2, 1, 4, 6)",
    ),
    "other width": ({"state": state_of(other_weights((5, E), (E, 5)))}, "got state.M[0] of shape (2, 2, 5, 6)"),
    "broken chain": (
        {"state": state_of(other_weights((D, E), (7, D)))},
        "got state.M[1] of shape (2, 2, 7, 4); expected",
    ),
    "wrong end": ({"state": state_of(other_weights((D, E), (E, 5)))}, "got state.M ending in 5 channels; expected 4"),
    "S of another depth": ({"state": state_with(S=other_weights((D, D)))}, "got state.S of other shapes than state.M"),
    "wide anchor": (
        {"state": state_with(anchor=other_weights((D, 8), (8, D)))},
        "got state.anchor of other shapes than state.M; expected the state of one memory",
    ),
    "bf16 state": (
        {"state": state_of(tuple(w.bfloat16() for w in good()["state"].M))},
        "got state.M in torch.bfloat16; expected all of it in float32, or all in float64",
    ),
    "mixed state": (
        {"state": state_with(S=tuple(w.double() for w in good()["state"].S))},
        "got state.S in torch.float64",
    ),
    "float64 on a float32 state": (
        {name: torch.zeros(B, T, H, D, dtype=torch.float64) for name in "qkv"},
        "got q in float64 and a state in float32; expected a float64 state for a float64 model",
    ),
    "one offset": (
        {"state": state_with(offset=torch.zeros(1, dtype=torch.int64))},
        "got state.offset int64 (1,); expected",
    ),
    "float offset": (
        {"state": state_with(offset=torch.zeros(B))},
        "got state.offset float32 (2,); expected integers (B,) = (2,)",
    ),
    "offset of a larger chunk": (
        {"state": state_with(offset=torch.tensor([0, 7]))},
        "got state.offset 7 with chunk_size=2; expected 0 to 1",
    ),
    "negative offset": ({"state": state_with(offset=torch.tensor([-1, 0]))}, "got state.offset -1 with chunk_size=2"),
    "norm of one head": (
        {"network": network_with(norm_weight=torch.ones(D))},
        "got network.norm_weight of shape (4,); expected (H, D) = (2, 4)",
    ),
    "bias of another width": (
        {"network": network_with(norm_bias=torch.ones(H, 5))},
        "got network.norm_bias of shape (2, 5); expected (H, D) = (2, 4)",
    ),
    "other initial memory": (
        {"network": network_with(initial=(torch.zeros(H, D, D),))},
        "got network.initial of shapes [(2, 4, 4)]; expected [(2, 4, 6), (2, 6, 4)], as the state has",
    ),
    "gate without heads": (
        {"theta": torch.zeros(B, T)},
        "got theta of shape (2, 3); expected (B, T, H) = (2, 3, 2), (B, T, H, L) = (2, 3, 2, 2), or a tuple",
    ),
    "gate per layer of a deeper memory": ({"eta": torch.zeros(B, T, H, 3)}, "got eta of shape (2, 3, 2, 3); expected"),
    "gate of another length": ({"alpha": torch.zeros(B, T + 1, H)}, "got alpha of shape (2, 4, 2); expected (B, T, H)"),
    "channels of the outputs": (
        {"alpha": (torch.zeros(B, T, H, E), torch.zeros(B, T, H, D))},
        "got alpha as a tuple of shapes [(2, 3, 2, 6), (2, 3, 2, 4)]; expected channel-wise gates "
        "[(2, 3, 2, 4), (2, 3, 2, 6)]",
    ),
    "channels of one layer": (
        {"theta": (torch.zeros(B, T, H, D),)},
        "got theta as a tuple of shapes [(2, 3, 2, 4)]; exp",
    ),
    "a number as gate": ({"theta": 0.1}, "got theta of float; expected a floating point tensor, or a tuple of them"),
    "numbers as gates": ({"eta": (0.1, 0.2)}, "got eta of float; expected a floating point tensor, or a tuple of them"),
    "integer gate": (
        {"alpha": torch.zeros(B, T, H, dtype=torch.long)},
        "got alpha of torch.int64; expected a floating",
    ),
    "backend misspelt": ({"backend": "chunkd"}, "got backend='chunkd'; did you mean 'chunked'?"),
    "backend unknown": ({"backend": "cuda"}, "got backend='cuda'; expected one of reference, chunked, auto, triton"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str) -> None:
    changes, message = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        neural_memory(**good(**changes))


def test_the_call_they_are_changes_of_is_fine() -> None:
    o, state = neural_memory(**good())
    assert o.shape == (B, T, H, D)
    assert state.offset.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(B, T, D)}, "got q float32 (2, 3, 4); expected a floating point tensor (B, T, H, D)"),
        ({"q": None}, "got q of type NoneType; expected a floating point tensor"),
        ({"network": "gelu"}, "got network of type str; expected a MemoryNetwork"),
        ({"M": other_weights((D, E), (E, 5))}, "got M ending in 5 channels; expected 4, the head dimension of q"),
        ({"M": other_weights((D, D), rows=1)}, "got M[0] of shape (1, 2, 4, 4); expected (B, H, D_in, D_out)"),
        ({"M": torch.zeros(B, H, D, D)}, "got M=Tensor; expected a tuple of L tensors"),
        ({"network": MemoryNetwork(norm_weight=torch.ones(1, D))}, "got network.norm_weight of shape (1, 4)"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    call = {"M": good()["state"].M, "q": torch.zeros(B, T, H, D), "network": good()["network"], **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        read(**call)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "gleu"}, "got activation='gleu'; did you mean 'gelu'?"),
        ({"objective": "l1"}, "got objective='l1'; expected one of l2, dot"),
        ({"forget_to": "initial"}, "got forget_to='initial'; did you mean 'init'?"),
        ({"forget_to": "init"}, 'got forget_to="init" without initial; expected the tuple of weights'),
        ({"residual": "no"}, "got residual='no'; expected True or False"),
        ({"norm_bias": torch.zeros(H, D)}, "got norm_bias without norm_weight; expected both"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MemoryNetwork(**settings)


@pytest.mark.parametrize(
    ("weights", "batch_size", "message"),
    [
        ((), 1, "got no weights; expected a tuple of L tensors (H, D_in, D_out)"),
        ((torch.zeros(D, D),), 1, "got initial weights of shape (4, 4); expected (H, D_in, D_out)"),
        (([1.0],), 1, "got initial weights of type list; expected (H, D_in, D_out)"),
        (torch.zeros(H, D, D), 1, "got weights of type Tensor; expected a tuple of L tensors (H, D_in, D_out)"),
        ((torch.zeros(H, D, D),), 0, "got batch_size=0; expected an integer of at least 1"),
        ((torch.zeros(H, D, D),), 1.5, "got batch_size=1.5; expected an integer of at least 1"),
    ],
)
def test_a_state_cannot_start_from_nothing(weights: Any, batch_size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MemoryState.initial(weights, batch_size)


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize(("rows", "tokens"), [(B, 0), (0, T), (0, 0)])
def test_no_tokens_or_no_rows(rows: int, tokens: int, backend: str) -> None:
    """T = 0 gives empty outputs and the very same state."""
    nothing = torch.zeros(rows, tokens, H, D, dtype=torch.bfloat16)
    state = good()["state"]
    if rows == 0:
        state = MemoryState(*(tuple(w[:0] for w in part) for part in state[:3]), state.offset[:0])
    gates = {name: nothing[..., 0] for name in ("theta", "eta", "alpha")}
    call = good(q=nothing, k=nothing, v=nothing, **gates, state=state, backend=backend)
    o, after = neural_memory(**call)
    assert (o.shape, o.dtype) == ((rows, tokens, H, D), torch.bfloat16)
    assert after is state
    o, after, surprise = neural_memory(**call, return_surprise=True)
    assert (surprise.shape, surprise.dtype) == ((rows, tokens, H, 2), torch.float32)
    with pytest.raises(ValueError, match="got theta of shape"):
        neural_memory(**{**call, "theta": nothing})
    assert read(state.M, nothing, call["network"]).shape == (rows, tokens, H, D)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("chunk_size", [1, 2, 10**6])
def test_one_token_of_one_row_and_head(chunk_size: int, backend: str) -> None:
    """The smallest call: D = 1, C anything. W ← W − 2 θ k (k W − v) with W = 0."""
    q = torch.full((1, 1, 1, 1), 3.0)
    gates = {"theta": torch.full((1, 1, 1), 0.25), "eta": torch.zeros(1, 1, 1), "alpha": torch.zeros(1, 1, 1)}
    state = MemoryState.initial((torch.zeros(1, 1, 1),), 1)
    o, after = neural_memory(
        q, q / 3, 2 * q, *gates.values(), state,
        network=MemoryNetwork(residual=False), chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    assert o.item() == 2 * 0.25 * 6.0 * 3.0
    assert after.offset.item() == (0 if chunk_size == 1 else 1)
