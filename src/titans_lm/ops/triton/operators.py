"""The kernels as operators of torch, `titans_lm::memory` and its gradient; a call by them.

Compilers, FSDP and fake tensors see an operator with known shapes and never look inside; autograd is told what its
gradient is. Tokens are in chunks (N, B, C, H, D), gates (N, B, C, H), weights (B, H, D_in, D_out), as in call.py.
"""

from typing import Any

import torch
from torch import Tensor

from titans_lm.ops.layout import TokenLayout, make_layout
from titans_lm.ops.recurrent import can_step, followed, step
from titans_lm.ops.state import Call, MemoryState, Outcome
from titans_lm.ops.triton.call import Inputs, KernelCall, Options, backward, forward

TENSORS = len(Inputs._fields)
FORM = "str activation, bool residual, str objective"
SHARED = "Tensor? norm_weight, Tensor? norm_bias, Tensor[] initial"
GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor[] theta, Tensor[] eta, Tensor[] alpha, Tensor[] M, Tensor[] S, "
    f"Tensor[] anchor, {SHARED}, Tensor? present, Tensor complete, bool[] ends, {FORM}, str precision, bool keep"
)
"""`Inputs` and `Options` of a call, one after the other."""


def _call(*given: Any) -> KernelCall:
    return KernelCall(Inputs(*given[:TENSORS]), Options(*given[TENSORS:]))


@torch.library.custom_op(
    "titans_lm::memory", mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor[], Tensor[])"
)
def memory(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Write and read a call: o, z_L of keys and of queries, surprise, the last state, the states between segments."""
    with torch.cuda.device_of(given[0]):  # where Triton launches
        return forward(_call(*given))


@torch.library.custom_op(
    "titans_lm::memory_backward",
    mutates_args=(),
    schema=f"({GIVEN}, Tensor written, Tensor read, Tensor[] kept, Tensor d_o, Tensor[] d_after) -> Tensor[]",
)
def memory_backward(*given: Any) -> list[Tensor]:
    """The gradients of `memory` by all its tensors that are there, in their order."""
    q = given[0]
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):  # for backward() inside autocast
        return backward(_call(*given[:-5]), *given[-5:])


@memory.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    return _call(*given).room()


@memory_backward.register_fake
def _(*given: Any) -> list[Tensor]:
    groups = [[x] if isinstance(x, Tensor) else x or [] for x in given[:TENSORS]]
    return [x.new_empty(x.shape) for group in groups for x in group]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, written, read, _, after, kept = output
    tensors = [*inputs[: TENSORS + 2], written, read, kept]
    ctx.groups = [len(x) if isinstance(x, (list, tuple)) else None for x in tensors]
    ctx.save_for_backward(*(y for x in tensors for y in (x if isinstance(x, (list, tuple)) else (x,))))
    ctx.options = inputs[TENSORS + 2 :]
    ctx.out, ctx.after = output[0].shape, [x.shape for x in after]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_o: Tensor | None, *others: Any) -> tuple[Any, ...]:
    d_after, saved = others[3], iter(ctx.saved_tensors)
    tensors: list[Any] = [next(saved) if n is None else [next(saved) for _ in range(n)] for n in ctx.groups]
    given, (written, read, kept) = tensors[: TENSORS + 2], tensors[TENSORS + 2 :]
    d_o = written.new_zeros(ctx.out) if d_o is None else d_o
    d_after = [written.new_zeros(shape) if d is None else d for d, shape in zip(d_after, ctx.after, strict=True)]
    found = iter(memory_backward(*given, *ctx.options, written, read, kept, d_o, d_after))
    grads = [
        [next(found) for _ in x] if isinstance(x, list) else None if x is None else next(found) for x in given[:TENSORS]
    ]
    return (*grads, *[None] * (2 + len(ctx.options)))


memory.register_autograd(_backward, setup_context=_setup_context)


def run(call: Call, precision: str) -> Outcome:
    """Write and read a call that the backend's checks have let through; one token alone as the chunked backend does."""
    if can_step(call):
        return step(call)
    q, k, v, state, network, gates = call.q, call.k, call.v, call.state, call.network, call.gates
    L, dtype = len(state.M), q.dtype
    norm = [None if x is None else x.to(dtype) for x in (network.norm_weight, network.norm_bias)]
    decay_target = [w.to(dtype) for w in network.decay_target]
    form = (network.activation, network.residual, network.objective)
    grid = make_layout(state.offset, q.shape[1], call.chunk_size, call.valid)
    aliased = all(a is w for a, w in zip(state.anchor, state.M, strict=True))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in followed(call))
    ends = [flag is True for flag in grid.complete]
    o, _, _, sizes, after, _ = memory(
        *(grid.place(x) for x in (q, k, v)), *([grid.place(x) for x in gate] for gate in gates),
        state.M, state.S, () if aliased else state.anchor, *norm, decay_target,
        grid.mask(), _complete(grid, q), ends, *form, precision, keep,
    )  # fmt: skip
    M, S, anchor = tuple(after[:L]), tuple(after[L : 2 * L]), tuple(after[2 * L :])
    sizes = grid.restore(sizes) if call.return_surprise else None
    return grid.restore(o), MemoryState(M, S, anchor or M, grid.offset), sizes


def _complete(grid: TokenLayout, q: Tensor) -> Tensor:
    """For every chunk and row whether the chunk ends there, (N, B)."""
    flags = torch.ones(grid.chunks, q.shape[0], dtype=torch.bool, device=q.device)
    for i, flag in enumerate(grid.complete):
        if isinstance(flag, Tensor):
            flags[i] = flag
        elif not flag:
            flags[i].fill_(False)
    return flags
