"""The kernels as operators of torch, `titans_lm::memory`, its gradient, and `titans_lm::memory_step`; a call by them.

Compilers, FSDP and fake tensors see an operator with known shapes and never look inside; autograd is told what its
gradient is. Tokens are in chunks (N, B, C, H, D), gates (N, B, C, H), weights (B, H, D_in, D_out), as in call.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.layout import TokenLayout, make_layout
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.recurrent import can_step, close
from titans_lm.ops.state import MemoryState
from titans_lm.ops.triton.call import Call, Inputs, Options, backward, forward
from titans_lm.ops.triton.launch import step_rows

TENSORS = len(Inputs._fields)


def _call(*given: Any) -> Call:
    """Put together what `memory` is given."""
    return Call(Inputs(*given[:TENSORS]), Options(*given[TENSORS:]))


@torch.library.custom_op("titans_lm::memory", mutates_args=())
def memory(
    q: Tensor, k: Tensor, v: Tensor, theta: Sequence[Tensor], eta: Sequence[Tensor], alpha: Sequence[Tensor],
    M: Sequence[Tensor], S: Sequence[Tensor], anchor: Sequence[Tensor],
    norm_weight: Tensor | None, norm_bias: Tensor | None, initial: Sequence[Tensor],
    present: Tensor | None, complete: Tensor, ends: Sequence[bool],
    activation: str, residual: bool, objective: str, precision: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Write and read a call: o, z_L of keys and of queries, surprise, the last state, the states between segments."""
    inputs = Inputs(q, k, v, theta, eta, alpha, M, S, anchor, norm_weight, norm_bias, initial)
    return forward(Call(inputs, Options(present, complete, ends, activation, residual, objective, precision, keep)))


@torch.library.custom_op("titans_lm::memory_backward", mutates_args=())
def memory_backward(
    q: Tensor, k: Tensor, v: Tensor, theta: Sequence[Tensor], eta: Sequence[Tensor], alpha: Sequence[Tensor],
    M: Sequence[Tensor], S: Sequence[Tensor], anchor: Sequence[Tensor],
    norm_weight: Tensor | None, norm_bias: Tensor | None, initial: Sequence[Tensor],
    present: Tensor | None, complete: Tensor, ends: Sequence[bool],
    activation: str, residual: bool, objective: str, precision: str, keep: bool,
    written: Tensor, read: Tensor, kept: Sequence[Tensor], d_o: Tensor, d_after: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """The gradients of `memory` by all its tensors that are there, in their order."""
    inputs = Inputs(q, k, v, theta, eta, alpha, M, S, anchor, norm_weight, norm_bias, initial)
    call = Call(inputs, Options(present, complete, ends, activation, residual, objective, precision, keep))
    return backward(call, written, read, kept, d_o, d_after)


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


@torch.library.custom_op("titans_lm::memory_step", mutates_args=())
def memory_step(
    q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor], M: Sequence[Tensor], S: Sequence[Tensor],
    anchor: Sequence[Tensor], norm_weight: Tensor | None, norm_bias: Tensor | None, initial: Sequence[Tensor],
    activation: str, residual: bool, objective: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """One token (B, H, D), without gradients: o, surprise (B, H, L), and the new M and S; gates are (B, H, 3)."""
    network = MemoryNetwork(
        activation, residual, norm_weight, norm_bias, objective, "init" if initial else "zero", tuple(initial) or None
    )
    return step_rows(network, q, k, v, gates, M, S, anchor)


@memory_step.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor], M: Sequence[Tensor], S: Sequence[Tensor],
    anchor: Sequence[Tensor], norm_weight: Tensor | None, norm_bias: Tensor | None, initial: Sequence[Tensor],
    activation: str, residual: bool, objective: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(*q.shape[:2], len(M)), [w.new_empty(w.shape) for w in (*M, *S)]


Gate = tuple[Tensor, ...]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Gate, Gate, Gate],
    state: MemoryState,
    *,
    network: MemoryNetwork,
    chunk_size: int,
    valid: Tensor | None,
    return_surprise: SurpriseSizes,
    precision: str,
) -> tuple[Tensor, MemoryState, Tensor | None]:
    """Write and read a call that the backend's checks have let through."""
    dtype, initial = q.dtype, network.initial if network.forget_to == "init" else None
    norm = [None if x is None else x.to(dtype) for x in (network.norm_weight, network.norm_bias)]
    decay_target = [w.to(dtype) for w in initial or ()]
    form = (network.activation, network.residual, network.objective)
    followed = (q, k, v, *(x for gate in gates for x in gate), *state.M, *state.S, *state.anchor)
    if can_step(q, valid, followed):
        by_layer = [torch.stack(layer, dim=-1).squeeze(1) for layer in zip(*gates, strict=True)]
        token = (x.squeeze(1) for x in (q, k, v))
        o, sizes, after = memory_step(*token, by_layer, state.M, state.S, state.anchor, *norm, decay_target, *form)
        L = len(state.M)
        after = close(MemoryState(tuple(after[:L]), tuple(after[L:]), state.anchor, state.offset + 1), chunk_size)
        return o.unsqueeze(1), after, sizes.unsqueeze(1) if return_surprise else None
    grid = make_layout(state.offset, q.shape[1], chunk_size, valid)
    aliased = all(a is w for a, w in zip(state.anchor, state.M, strict=True))
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*followed, *norm, *decay_target))
    ends = [flag is True for flag in grid.complete]
    o, _, _, sizes, after, _ = memory(
        *(grid.place(x) for x in (q, k, v)), *([grid.place(x) for x in gate] for gate in gates),
        state.M, state.S, () if aliased else state.anchor, *norm, decay_target,
        grid.mask(), _complete(grid, q), ends, *form, precision, keep,
    )  # fmt: skip
    L = len(state.M)
    M, S, anchor = tuple(after[:L]), tuple(after[L : 2 * L]), tuple(after[2 * L :])
    sizes = grid.restore(sizes) if return_surprise else None
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
