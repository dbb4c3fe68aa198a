"""The kernels compute the definition: values, states, surprise and all gradients.

Without a GPU they run in Triton's interpreter, in float64 to 1e-10 and in float32. Memory that torch hands out is
filled with NaN, so whatever a kernel leaves out, or reads without having written it, shows.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.memory_cases import Case, disagreement, make_call
from ops.triton_cases import DEEP, DEVICE, LINEAR, ON_GPU, PER_HEAD, TOLERANCE, assert_kernels_agree, moved
from titans_lm.config import MemoryConfig
from titans_lm.memory import NeuralMemory
from titans_lm.ops import neural_memory

BOTH = pytest.mark.parametrize("network", [LINEAR, DEEP], ids=["linear", "deep"])


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what torch.empty gives with NaN, which torch does where it is to be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=ON_GPU)
    yield
    torch.use_deterministic_algorithms(False)


def test_memory_is_poisoned() -> None:
    assert torch.empty(3, 4).isnan().all()
    assert torch.empty_like(torch.zeros(3)).new_empty(2).isnan().all()


def cases() -> list[Any]:
    """Each thing that a network, a gate or a start can be, with few chunks: a program is slow to interpret."""
    shapes: dict[str, Case] = {
        "linear": Case(tokens=8, **LINEAR),
        "linear-tail-init": Case(tokens=9, forget_to="init", gates=PER_HEAD, **LINEAR),
        "linear-norm": Case(tokens=7, depth=1, rows=1, width=5, chunk=3),
        "linear-dot": Case(tokens=6, objective="dot", **LINEAR),
        "linear-dot-norm": Case(tokens=5, depth=1, rows=1, objective="dot", norm="weight"),
        "linear-whole-tile": Case(tokens=17, depth=1, rows=1, heads=1, width=16, chunk=16),
        "linear-wide": Case(tokens=5, depth=1, rows=1, heads=1, width=20, chunk=3, forget_to="init"),
        "linear-token": Case(tokens=1, offsets=(1, 3), **LINEAR),
        "linear-starts": Case(tokens=7, offsets=(1, 3), padding="middle", forget_to="init", **LINEAR),
        "deep": Case(tokens=8, **DEEP),
        "deep-tail-init": Case(tokens=9, forget_to="init", gates=PER_HEAD, heads=1, **DEEP),
        "deep-silu-bare": Case(tokens=5, heads=1, activation="silu", norm="none", residual=False, **DEEP),
        "deep-relu-dot": Case(tokens=5, heads=1, activation="relu", norm="weight", objective="dot", **DEEP),
        "deep-whole-tile": Case(tokens=17, rows=1, heads=1, width=16, chunk=16, expansion=1, forget_to="init"),
        "deep-token": Case(tokens=1, offsets=(3,), **DEEP),
        "deep-starts": Case(tokens=6, rows=2, heads=1, width=5, offsets=(1, 3), padding="middle", forget_to="init"),
    }
    return [pytest.param(case, id=name) for name, case in shapes.items()]


@pytest.mark.parametrize("case", cases())
def test_kernels_are_exact(case: Case) -> None:
    assert_kernels_agree(case)


@BOTH
def test_kernels_are_exact_in_float32(network: dict[str, Any]) -> None:
    assert_kernels_agree(Case(tokens=6, offsets=(1,), forget_to="init", **network), torch.float32, 2e-4)


@BOTH
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_kernels_are_exact_at_the_edges_of_the_gates(network: dict[str, Any], share: float) -> None:
    """θ = 0, η = 0 and α = 1, here and there and everywhere."""
    edges = ("theta", "eta", "alpha")
    assert_kernels_agree(Case(tokens=6, heads=1, edges=edges, edge_share=share, **network))


@BOTH
def test_several_segments_lead_back_through_each_other(
    network: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four chunks and a tail in two segments: the state between is kept, and only the second has an open end."""
    module = import_module("titans_lm.ops.groups")
    monkeypatch.setattr(module, "LEAST_CHUNKS", 2)
    assert module.group_size(5) == 3
    assert_kernels_agree(Case(tokens=9, chunk=2, heads=1, forget_to="init", **{**network, "rows": 1}))


@BOTH
def test_kernels_do_not_look_past_the_call(network: dict[str, Any]) -> None:
    """Values around the inputs reach nothing: a call on parts of larger tensors is the call on copies of them."""
    call = moved(make_call(Case(tokens=6, **network)), torch.float32)
    *inputs, state = call.arguments
    larger = [torch.full((*x.shape[:1], x.shape[1] + 4, *x.shape[2:]), torch.nan, device=DEVICE) for x in inputs]
    views = [y[:, 2:8].copy_(x.detach()) for x, y in zip(inputs, larger, strict=True)]
    with torch.no_grad():
        expected, _ = neural_memory(*inputs, state, **call.settings, backend="triton")
        got, _ = neural_memory(*views, state, **call.settings, backend="triton")
    assert torch.equal(expected, got)


def pieces(call: Any, cuts: tuple[int, ...]) -> dict[str, Tensor]:
    """Read a text in pieces, the state carried: outputs, the last state, and gradients of all of it."""
    *inputs, state = call.arguments
    outputs = []
    for start, stop in zip((0, *cuts), (*cuts, inputs[0].shape[1]), strict=True):
        o, state = neural_memory(*(x[:, start:stop] for x in inputs), state, **call.settings, backend="triton")
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    values = {"o": o, **{f"{n}{i}": w for n in ("M", "S", "anchor") for i, w in enumerate(getattr(state, n))}}
    total = sum((x * x).sum() for x in values.values())
    leaves = [x for x in call.leaves.values() if x.requires_grad]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return {n: x.detach() for n, x in values.items()} | {f"d_{i}": g for i, g in enumerate(found) if g is not None}


@BOTH
def test_a_text_in_pieces_is_the_text(network: dict[str, Any]) -> None:
    case = Case(tokens=6, heads=1, forget_to="init", **{**network, "rows": 1})
    whole, parts = (pieces(moved(make_call(case)), cuts) for cuts in ((), (3, 4)))
    wrong = {n: e for n, e in disagreement(whole, parts).items() if not e <= TOLERANCE}
    assert not wrong


@BOTH
@pytest.mark.parametrize("forget_to", ["zero", "init"])
def test_token_by_token_is_the_definition(network: dict[str, Any], forget_to: str) -> None:
    """Without gradients a token has a kernel of its own; rows stand at different places of their chunks."""
    call = make_call(Case(tokens=4, offsets=(2,), forget_to=forget_to, **network))
    expected, last, sizes = call("reference")
    ours = moved(call)
    *inputs, state = ours.arguments
    with torch.no_grad():
        for t in range(4):
            o, state, surprise = neural_memory(
                *(x[:, t : t + 1] for x in inputs), state, **ours.settings, backend="triton", return_surprise=True
            )
            values = {"o": expected[:, t : t + 1], "surprise": sizes[:, t : t + 1]}
            wrong = disagreement(values, {"o": o.cpu().double(), "surprise": surprise.cpu().double()})
            assert all(error <= TOLERANCE for error in wrong.values()), (t, wrong)
    for name in ("M", "S", "anchor"):
        for x, y in zip(getattr(last, name), getattr(state, name), strict=True):
            torch.testing.assert_close(y.cpu().double(), x, rtol=TOLERANCE, atol=1e-2 * TOLERANCE)
    assert state.offset.tolist() == last.offset.tolist()


def test_sixteen_bit_inputs_keep_a_float32_state() -> None:
    call = moved(make_call(Case(tokens=6, heads=1, **DEEP)), torch.float32)
    *inputs, state = call.arguments
    with torch.no_grad():
        low = [x.bfloat16() for x in inputs[:3]]
        o, after = neural_memory(*low, *inputs[3:], state, **call.settings, backend="triton")
        expected, _ = neural_memory(*low, *inputs[3:], state, **call.settings, backend="chunked")
    assert o.dtype == torch.bfloat16
    assert {w.dtype for w in (*after.M, *after.S, *after.anchor)} == {torch.float32}
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)


def test_inputs_stay_as_they_are() -> None:
    """Kernels write the state in place: into copies of it."""
    call = moved(make_call(Case(tokens=6, offsets=(1,), heads=1, **DEEP)))
    *inputs, state = call.arguments
    kept = [x.detach().clone() for x in (*inputs, *state.M, *state.S, *state.anchor)]
    o, after = neural_memory(*inputs, state, **call.settings, backend="triton")
    (o.sum() + after.M[0].sum()).backward()
    for x, y in zip(kept, (*inputs, *state.M, *state.S, *state.anchor), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_memory_layer_runs_on_kernels(depth: int) -> None:
    """Projections, gates and persistent tokens around the op: the same outputs and gradients by either backend."""
    results = []
    for backend in ("chunked", "triton"):
        config = MemoryConfig(
            hidden_size=16, num_attention_heads=2, memory_depth=depth, memory_expansion=2, chunk_size=4,
            memory_backend=backend,
        )  # fmt: skip
        torch.manual_seed(0)
        layer = NeuralMemory(config).to(DEVICE)
        x = torch.randn(1, 9, 16).to(DEVICE).requires_grad_()
        o, _ = layer(x)
        o.square().sum().backward()
        results.append([o.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for chunked, kernels in zip(*results, strict=True):
        torch.testing.assert_close(kernels, chunked, rtol=1e-3, atol=1e-5)
