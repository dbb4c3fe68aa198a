"""The operators as torch sees them: schema, fake tensors, autograd, compiled graphs; and kernels as a compiler does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ops.memory_cases import Case, make_call
from ops.triton_cases import DEEP, DEVICE, LINEAR, moved
from titans_lm.ops.triton.operators import memory, memory_backward

CASES = {
    "linear": Case(tokens=8, heads=1, forget_to="init", **LINEAR),
    "deep": Case(tokens=8, heads=1, **DEEP),
    "deep-open": Case(tokens=7, heads=1, offsets=(0,), **DEEP),
}
each = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def arguments(case: Case, requires_grad: bool = False) -> tuple[Any, ...]:
    """What the operator is given for a case: two chunks of its tokens, and an anchor where rows have one."""
    call = make_call(case)
    q, k, v, *gates, state = call.arguments
    network = call.settings["network"]

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(DEVICE, torch.float32).contiguous().requires_grad_(requires_grad)

    def place(x: Tensor) -> Tensor:
        padded = torch.cat((x, torch.zeros_like(x[:, :1])), 1)[:, : 2 * case.chunk]
        return leaf(padded.unflatten(1, (2, case.chunk)).movedim(1, 0))

    tokens = [place(x) for x in (q, k, v)]
    by_layer = [[place(x) for x in gate.unbind(-1)] for gate in gates]
    ends = [True, case.tokens % case.chunk == 0]
    complete = torch.tensor(ends, device=DEVICE).unsqueeze(1).repeat(1, case.rows)
    norm = [None if x is None else leaf(x) for x in (network.norm_weight, network.norm_bias)]
    return (
        *tokens, *by_layer, *([leaf(w) for w in part] for part in (state.M, state.S)),
        [leaf(w) for w in state.anchor] if case.offsets else [], *norm, [leaf(w) for w in network.initial or ()],
        None, complete, ends, network.activation, network.residual, network.objective, "ieee",
        True,
    )  # fmt: skip


@each
def test_the_operator_keeps_torchs_rules(case: Case) -> None:
    """Schema, autograd registration, fake tensors against real ones, and a graph with symbolic sizes."""
    torch.library.opcheck(memory, arguments(case, requires_grad=True))


@pytest.mark.parametrize("name", ["linear", "deep-open"])
def test_its_gradient_keeps_torchs_rules(name: str) -> None:
    given = arguments(CASES[name])
    o, written, read, _, after, kept = memory(*given)
    more = (written, read, kept, torch.ones_like(o), [torch.ones_like(w) for w in after])
    torch.library.opcheck(memory_backward, (*given, *more))


@each
def test_shapes_are_known_without_running(case: Case) -> None:
    given = arguments(case)
    real = memory(*given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(x: Any) -> Any:
            if isinstance(x, list) and x and isinstance(x[0], Tensor):
                return [fake(y) for y in x]
            return mode.from_tensor(x) if isinstance(x, Tensor) else x

        shapes = memory(*(fake(x) for x in given))
    assert described(real) == described(shapes)


def test_without_a_backward_pass_nothing_is_kept_for_it() -> None:
    """Nine chunks are two segments: z_L and the state between them are for gradients alone."""
    *given, _ = arguments(Case(tokens=8, chunk=4, heads=1, rows=1, **LINEAR))
    for i in (0, 1, 2):
        given[i] = given[i].repeat(5, 1, 1, 1, 1)[:9]
    for i in (3, 4, 5):
        given[i] = [x.repeat(5, 1, 1, 1)[:9] for x in given[i]]
    given[13], given[14] = given[13].repeat(5, 1)[:9], [True] * 9
    o, written, read, _, after, kept = memory(*given, True)
    assert (written.shape, read.shape, [w.shape[0] for w in kept]) == (given[0].squeeze(3).shape, written.shape, [1, 1])
    bare, *empty, _, last, none = memory(*given, False)
    assert torch.equal(o, bare)
    assert all(torch.equal(x, y) for x, y in zip(after, last, strict=True))
    assert [x.numel() for x in empty] == [0, 0]
    assert none == []


def described(outputs: Any) -> list[Any]:
    flat = [y for x in outputs for y in (x if isinstance(x, list) else [x])]
    return [(y.shape, y.dtype, y.stride()) for y in flat]


def test_a_compiled_graph_holds_the_operator_whole() -> None:
    """One graph, no break, forward and backward, and the numbers of the call outside it."""
    given = arguments(CASES["deep"], requires_grad=True)
    leaves = [*given[:3], *given[6]]

    def outcome(*x: Any) -> Tensor:
        o, _, _, _, after, _ = torch.ops.titans_lm.memory(*x)
        return o.square().sum() + after[0].sum()

    compiled = torch.compile(outcome, fullgraph=True, backend="aot_eager")
    for expected, got in zip(
        torch.autograd.grad(outcome(*given), leaves), torch.autograd.grad(compiled(*given), leaves), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_a_backward_pass_inside_autocast_is_in_float32() -> None:
    call = moved(make_call(Case(tokens=9, heads=1, **LINEAR)), torch.float32)
    leaves = list(call.leaves.values())

    def gradients(autocast: bool) -> tuple[Tensor, ...]:
        o, state, _ = call("triton")
        loss = o.square().sum() + state.M[0].square().sum()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(loss, leaves)

    for got, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_through_checkpointing(reentrant: bool) -> None:
    call = moved(make_call(Case(tokens=5, heads=1, offsets=(1,), **LINEAR)))
    leaves = list(call.leaves.values())

    def outcome(*_: Tensor) -> Tensor:
        o, state, _ = call("triton")
        return o.square().sum() + state.M[0].square().sum()

    expected = torch.autograd.grad(outcome(), leaves)
    checkpoint(outcome, *leaves, use_reentrant=reentrant).backward()
    for leaf, x in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, x)


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu() -> None:
    """For the architecture of an H100, in a process without the interpreter: what it takes is beyond this machine."""
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(here.parents[1] / "src"), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(here / "compiled_kernels.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "6 kernels"
