"""Precision of the state, and the modes a call may run in: autocast, inference, checkpointing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops.memory_cases import Call, Case, make_call
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read
from titans_lm.ops.state import detach_state, map_state

BACKENDS = ["reference", "chunked"]
LOW = [torch.bfloat16, torch.float16, torch.float32]
GATES = ("layer", "head", "channel")


Inputs = Tensor | tuple[Tensor, ...] | None


def cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    if x is None:
        return None
    return tuple(y.detach().to(dtype) for y in x) if isinstance(x, tuple) else x.detach().to(dtype)


def cast_call(call: Call, dtype: torch.dtype) -> Call:
    """The call with tokens, gates and parameters of this dtype, and a state in float32, or float64 for float64."""
    *inputs, state = call.arguments
    network = call.settings["network"]
    parameters = {name: cast(getattr(network, name), dtype) for name in ("norm_weight", "norm_bias", "initial")}
    kept = torch.promote_types(dtype, torch.float32)
    state = map_state(lambda x: x.to(kept) if x.is_floating_point() else x, detach_state(state))
    settings = {**call.settings, "network": replace(network, **parameters)}
    return Call({}, (*(cast(x, dtype) for x in inputs), state), settings)


def some_call(dtype: torch.dtype) -> Call:
    return cast_call(make_call(Case(tokens=11, gates=GATES, offsets=(1, 3), forget_to="init")), dtype)


def dtypes(state: MemoryState) -> set[torch.dtype]:
    return {w.dtype for w in state.M + state.S + state.anchor}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_is_computed_and_kept_in_float32(dtype: torch.dtype, backend: str) -> None:
    call = some_call(dtype)
    o, state, surprise = call(backend)
    assert o.dtype == dtype
    assert dtypes(state) == {torch.float32}
    assert surprise.dtype == torch.float32
    o_wide, state_wide, surprise_wide = cast_call(call, torch.float32)(backend)
    assert torch.equal(o, o_wide.to(dtype))
    assert torch.equal(surprise, surprise_wide)
    for x, y in zip(state.M + state.S, state_wide.M + state_wide.S, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float64_model_stays_float64(backend: str) -> None:
    o, state, surprise = some_call(torch.float64)(backend)
    assert (o.dtype, surprise.dtype, dtypes(state)) == (torch.float64, torch.float64, {torch.float64})


@pytest.mark.parametrize(
    "case", [Case(tokens=40, chunk=16), Case(tokens=40, depth=4), Case(tokens=40, depth=1)], ids=str
)
def test_chunked_in_float32_is_as_precise_as_the_definition(case: Case) -> None:
    """Both against float64. One draw says little: which of the two rounds worse there is chance, up to ten times.

    So the root mean square errors are compared over many draws, output by output, by the mean of their ratios'
    logarithms.
    """
    ratios = []
    for seed in range(12):
        call = cast_call(make_call(replace(case, seed=seed)), torch.float32)
        exact, *rounded = (
            [o, *state.M, *state.S]
            for o, state, _ in (cast_call(call, torch.float64)("reference"), *map(call, BACKENDS))
        )
        for x, by_definition, by_chunks in zip(exact, *rounded, strict=True):
            assert by_chunks.dtype == torch.float32
            own, chunked = ((y.double() - x).square().mean().sqrt() for y in (by_definition, by_chunks))
            assert 0 < own < 1e-4 * x.abs().max()
            ratios.append(chunked / own)
    assert torch.stack(ratios).log().mean().exp() < 1.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype: torch.dtype, backend: str) -> None:
    call = some_call(dtype)
    inputs = [x.requires_grad_() for x in call.arguments[:3]]

    def outcome(autocast: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            o, state, surprise = call(backend)
        found = torch.autograd.grad(o.float().square().sum() + sum(w.sum() for w in state.M), inputs)
        return (o, surprise, *state.M, *state.S, *state.anchor, *found)

    expected, got = outcome(False), outcome(True)
    for x, y in zip(expected, got, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_does_not_change_a_read(dtype: torch.dtype) -> None:
    call = some_call(dtype)
    q, M, network = call.arguments[0], call.arguments[6].M, call.settings["network"]
    expected = read(M, q, network)
    with torch.autocast("cpu", torch.bfloat16):
        got = read(M, q, network)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    wide = cast_call(call, torch.float32)
    assert torch.equal(got, read(M, wide.arguments[0], wide.settings["network"]).to(dtype))


def test_a_read_is_the_networks_forward() -> None:
    """Every query meets the same memory, whichever way the batch is laid out."""
    call = make_call(Case(tokens=5, norm="weight", depth=3))
    q, state, network = call.arguments[0], call.arguments[6], call.settings["network"]
    o = read(state.M, q, network)
    weight = network.norm_weight
    for row in range(2):
        for head in range(2):
            x = z = q[row, :, head]
            for i, W in enumerate(state.M):
                z = (x if i == 0 else torch.nn.functional.gelu(z)) @ W[row, head]
            expected = x + torch.nn.functional.layer_norm(z, z.shape[-1:], weight[head], eps=1e-5)
            torch.testing.assert_close(o[row, :, head], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", LOW)
def test_the_smallest_tokens_do_not_divide_by_zero(dtype: torch.dtype, backend: str) -> None:
    """All-zero tokens and weights: finite values and finite gradients."""
    call = some_call(dtype)
    *inputs, state = call.arguments
    inputs = [tuple(torch.zeros_like(y) for y in x) if isinstance(x, tuple) else torch.zeros_like(x) for x in inputs]
    state = map_state(torch.zeros_like, state)
    leaves = [x.requires_grad_() for x in (*inputs[:5], *inputs[5])]
    o, after = neural_memory(*inputs, state, **call.settings, backend=backend)
    found = torch.autograd.grad(o.float().sum() + sum(w.sum() for w in after.M), leaves)
    assert torch.isfinite(o).all()
    assert all(torch.isfinite(g).all() for g in found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", ["none", "scattered"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_runs_without_recording(mode: type, padding: str, backend: str) -> None:
    """Under no_grad and inference_mode the inner gradients are still taken; the result carries no graph."""
    call = make_call(Case(tokens=11, gates=GATES, offsets=(1, 3), padding=padding))
    o, state, surprise = call(backend)
    with mode():
        o_plain, state_plain, surprise_plain = call(backend)
        _, again = neural_memory(*call.arguments[:6], state_plain, **call.settings, backend=backend)
    assert not o_plain.requires_grad
    assert not any(w.requires_grad for w in (*state_plain.M, *again.M))
    assert torch.equal(o, o_plain)
    assert torch.equal(surprise, surprise_plain)
    assert all(torch.equal(x, y) for x, y in zip(state.M, state_plain.M, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_recorded_for_plain_tensors(backend: str) -> None:
    """The inner loop needs no requires_grad of its inputs and leaves none on its outputs."""
    o, state, surprise = some_call(torch.float32)(backend)
    assert not o.requires_grad
    assert not surprise.requires_grad
    assert not any(w.requires_grad for w in (*state.M, *state.S, *state.anchor))


# torch.func, with which the definition takes its gradients, refuses the saved-tensor hooks of the other kind.
@pytest.mark.parametrize(("backend", "reentrant"), [("reference", True), ("chunked", True), ("chunked", False)])
def test_gradients_through_checkpointing(backend: str, reentrant: bool) -> None:
    call = make_call(Case(tokens=11, gates=GATES, offsets=(1, 3), forget_to="init"))
    leaves = list(call.leaves.values())

    def outcome(*_: Tensor) -> Tensor:
        o, state, _ = call(backend)
        return o.square().sum() + sum((w * w).sum() for w in (*state.M, *state.S))

    expected = torch.autograd.grad(outcome(), leaves)
    for leaf in leaves:
        leaf.grad = None
    checkpoint(outcome, *leaves, use_reentrant=reentrant).backward()
    for name, x in zip(call.leaves, expected, strict=True):
        torch.testing.assert_close(call.leaves[name].grad, x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_by_finite_differences(backend: str) -> None:
    """One check against numbers only: neither autograd nor the oracle is believed."""
    call = make_call(Case(tokens=5, chunk=2, width=3, heads=1, gates=GATES, offsets=(1,), norm="weight"))
    tensors = {n: x for n, x in call.leaves.items() if n in ("q", "k", "v", "theta0", "eta0", "alpha0", "M0", "S1")}
    with torch.no_grad():
        way = {name: torch.randn_like(x) for name, x in tensors.items()}

    def mix() -> Tensor:
        o, state, _ = call(backend)
        return o.square().sum() + sum(w.sum() for w in state.S)

    found = dict(zip(tensors, torch.autograd.grad(mix(), list(tensors.values())), strict=True))
    for name, x in tensors.items():
        ends = []
        with torch.no_grad():
            kept = x.clone()
            for step in (1e-6, -1e-6):
                x.copy_(kept + step * way[name])
                ends.append(mix())
            x.copy_(kept)
        slope = (found[name] * way[name]).sum()
        torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-7)


def test_what_a_memory_forgets_is_a_difference_that_float32_keeps() -> None:
    """Forgetting leads from M to an M_init close by: its gradient is ⟨M̄, M − M_init⟩."""
    generator, found = torch.Generator().manual_seed(0), []
    tokens, initial, near = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in ((3, 1, 40, 2, 64), (2, 64, 64), (1, 2, 64, 64))
    )
    alpha = 0.1 * torch.rand(1, 40, 2, generator=generator, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        q, k, v = tokens.to(dtype)
        target, M, gate = initial.to(dtype), (initial + 1e-3 * near).to(dtype), alpha.to(dtype).requires_grad_()
        state = MemoryState((M,), (torch.zeros_like(M),), (M,), torch.zeros(1, dtype=torch.int64))
        network = MemoryNetwork(residual=False, forget_to="init", initial=(target,))
        shut = torch.zeros_like(gate)
        _, after = neural_memory(q, k, v, shut, shut, gate, state, network=network, chunk_size=16)
        found.append(torch.autograd.grad((after.M[0] * target).sum(), gate)[0].double())
    assert float((found[1] - found[0]).abs().max()) < 5e-3 * float(found[0].abs().max())
