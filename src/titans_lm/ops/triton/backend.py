"""A call of `neural_memory` through the kernels: tokens onto the grid, the operator, and back."""

import torch
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.grid import Grid, make_grid
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.state import MemoryState
from titans_lm.ops.step import can_step, close
from titans_lm.ops.triton.operators import memory, memory_step

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
    """Write and read a call that support.py has let through."""
    dtype, initial = q.dtype, network.initial if network.forget_to == "init" else None
    norm = [None if x is None else x.to(dtype) for x in (network.norm_weight, network.norm_bias)]
    leads_to = [w.to(dtype) for w in initial or ()]
    form = (network.activation, network.residual, network.objective)
    followed = (q, k, v, *(x for gate in gates for x in gate), *state.M, *state.S, *state.anchor)
    if can_step(q, valid, followed):
        by_layer = [torch.stack(layer, dim=-1).squeeze(1) for layer in zip(*gates, strict=True)]
        token = (x.squeeze(1) for x in (q, k, v))
        o, sizes, after = memory_step(*token, by_layer, state.M, state.S, state.anchor, *norm, leads_to, *form)
        L = len(state.M)
        after = close(MemoryState(tuple(after[:L]), tuple(after[L:]), state.anchor, state.offset + 1), chunk_size)
        return o.unsqueeze(1), after, sizes.unsqueeze(1) if return_surprise else None
    grid = make_grid(state.offset, q.shape[1], chunk_size, valid)
    aliased = all(a is w for a, w in zip(state.anchor, state.M, strict=True))
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*followed, *norm, *leads_to))
    ends = [flag is True for flag in grid.complete]
    o, _, _, sizes, after, _ = memory(
        *(grid.place(x) for x in (q, k, v)), *([grid.place(x) for x in gate] for gate in gates),
        state.M, state.S, () if aliased else state.anchor, *norm, leads_to,
        grid.mask(), _complete(grid, q), ends, *form, precision, keep,
    )  # fmt: skip
    L = len(state.M)
    M, S, anchor = tuple(after[:L]), tuple(after[L : 2 * L]), tuple(after[2 * L :])
    sizes = grid.restore(sizes) if return_surprise else None
    return grid.restore(o), MemoryState(M, S, anchor or M, grid.offset), sizes


def _complete(grid: Grid, q: Tensor) -> Tensor:
    """For every chunk and row whether the chunk ends there, (N, B)."""
    flags = torch.ones(grid.chunks, q.shape[0], dtype=torch.bool, device=q.device)
    for i, flag in enumerate(grid.complete):
        if isinstance(flag, Tensor):
            flags[i] = flag
        elif not flag:
            flags[i].fill_(False)
    return flags
