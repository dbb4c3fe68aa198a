"""The memory by chunks: a short sequence of matrix products, exact against `reference.py`.

A call is cut into groups of some chunks (groups.py). When gradients are asked for, only the state at the start of each
group is kept, and the backward pass makes the rest again, group by group: so memory grows with the tokens, and with the
square root of the number of chunks. A small call, whose time goes to the number of operations, keeps all that it made.
Small chunks of a linear memory are worked on a tile at a time (tiles.py), which then is what is called a chunk.
"""

from dataclasses import replace
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import Tensor

from titans_lm.ops.gates import have_channels, stack_gates
from titans_lm.ops.groups import CallSpec, ChunkedCall, Inputs, Saved
from titans_lm.ops.layout import TokenLayout, make_layout, ragged, uniform
from titans_lm.ops.matmul import once_differentiable
from titans_lm.ops.recurrent import can_step, step
from titans_lm.ops.state import Call, MemoryState, Outcome, select_rows
from titans_lm.ops.tiles import Piece, pieces, tile_size
from titans_lm.ops.wide import is_wide


class _Chunked(torch.autograd.Function):
    """`ChunkedCall` and its gradients; it keeps a state and z_L for each group, or all of a call that is kept."""

    @staticmethod
    def forward(ctx: Any, spec: CallSpec, counts: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ChunkedCall(spec, Inputs.of(tensors, counts))
        saved = call.room()
        out, norms, (M, S, anchor) = call.forward(saved, keep=call.is_kept)
        ctx.call = call if call.inside is not None else None
        ctx.spec, ctx.counts, ctx.anchored = spec, counts, [start[2] is not None for start in saved.starts]
        states = [x for start in saved.starts for part in start for x in part or ()]
        ctx.kept = list(map(len, saved[1:]))
        ctx.save_for_backward(*tensors, *chain(*saved[1:]), *states)
        ctx.set_materialize_grads(False)
        if norms is not None:
            ctx.mark_non_differentiable(norms)
        heads = call.rows.batch, call.rows.heads
        return out, norms, *M, *S, *[x.unflatten(0, heads) for x in anchor or ()]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        d_out, _, *d_state = grad_outputs
        kept = iter(ctx.saved_tensors)  # once: activation checkpointing unpacks them no second time
        inputs = Inputs.of(list(islice(kept, len(ctx.needs_input_grad) - 2)), ctx.counts)
        L = len(inputs.M)
        saved = Saved([], *[list(islice(kept, count)) for count in ctx.kept])
        for anchored in ctx.anchored:
            M, S = tuple(islice(kept, L)), tuple(islice(kept, L))
            saved.starts.append((M, S, tuple(islice(kept, L)) if anchored else None))
        with torch.autocast(device_type=inputs.M[0].device.type, enabled=False):
            call, ctx.call = ctx.call or ChunkedCall(ctx.spec, inputs), None  # who keeps a loss need not keep this
            return None, None, *call.backward(saved, d_out, d_state).flat()


def _run_call(call: Call, layout: TokenLayout, inside: int | None = None) -> Outcome:
    """Run a call that is laid out on a grid, with gradients if any are asked for."""
    q, state, network, extra = call.q, call.state, call.network, call.extra
    L, dtype = len(state.M), q.dtype
    gates, tail = stack_gates(call.theta, call.eta, call.alpha), state.tail
    if extra.window is None:
        k, v = layout.place(call.k), layout.place(call.v)
    else:
        gates = *gates, extra.window
        windows = zip((call.k, call.v), state.earlier(call.k, call.v), strict=True)
        (k, last_k), (v, last_v) = (layout.place_windows(x, before) for x, before in windows)
        tail = (last_k, last_v) if tail else ()
    threshold = () if extra.threshold is None else (layout.place(extra.threshold.unsqueeze(-1)),)
    inputs = Inputs(
        (layout.place(q), k, v, *threshold),
        tuple([layout.place(x) for x in gates]),
        state.M,
        state.S,
        () if all(map(is_, state.anchor, state.M)) else state.anchor,
        *[None if x is None else x.to(dtype) for x in (network.norm_weight, network.norm_bias)],
        None if network.coefficients is None else network.coefficients.to(dtype).sqrt(),
        tuple([w.to(dtype).contiguous() for w in network.decay_target]),
    )
    spec = CallSpec(network, layout.mask(), layout.complete, call.return_surprise, inside)
    flat, counts = inputs.flat(), [len(part) if isinstance(part, tuple) else None for part in inputs]
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in flat]):
        o, sizes, *tensors = _Chunked.apply(spec, counts, *flat)
    else:
        o, sizes, after = ChunkedCall(spec, inputs).forward(None)
        tensors = [*after[0], *after[1], *[x.unflatten(0, (q.shape[0], q.shape[2])) for x in after[2] or ()]]
    M, S, anchor = tuple(tensors[:L]), tuple(tensors[L : 2 * L]), tuple(tensors[2 * L :])
    return (
        layout.restore(o),
        MemoryState(M, S, anchor or M, layout.offset, tail),
        None if sizes is None else layout.restore(sizes),
    )


def _run_piece(piece: Piece, call: Call, tile: int) -> Outcome:
    """Run a piece of a call: a chunk, or whole chunks by tiles, after which every row stands at a border."""
    q, k, v = (x[:, piece.tokens] for x in (call.q, call.k, call.v))
    gates = (tuple(x[:, piece.tokens] for x in gate) for gate in call.gates)
    start, size, length = call.state.offset, call.chunk_size, q.shape[1]
    state = call.state._replace(anchor=call.state.M) if piece.tiled else call.state
    here = Call(q, k, v, *gates, state, call.network, size, None, call.return_surprise)
    if piece.tiled:
        start, size = torch.zeros_like(start), tile
    if piece.valid is not None:
        layout = ragged(start, length, size, piece.valid, piece.tiled)
    else:
        layout = uniform(start, 0, length, size) if piece.tiled else make_layout(start, length, size, None)
    if not piece.tiled:
        return _run_call(here, layout)
    layout = replace(layout, complete=(True,) * layout.chunks, offset=start)
    # errors of the dot product depend on no memory, so there is nothing to solve
    return _run_call(here, layout, None if call.network.objective == "dot" else call.chunk_size)


def _joined(parts: tuple[Tensor, ...], apart: bool) -> Tensor:
    """The outputs of pieces, one after another; or each among all tokens of the call, with zeros for the others."""
    return torch.cat(parts, dim=1) if apart and len(parts) > 1 else sum(parts[1:], parts[0])


def chunked(call: Call) -> Outcome:
    """Write and read a chunk at a time; the same values and gradients as `reference`.

    All gradients of a chunk are taken at the anchor, so they come from one batched forward and backward pass as outer
    products h ⊗ δ, and a read at every token is a masked attention per memory layer (docs/derivation.md, section 4).
    Chunks follow one another; batch, heads and the positions of a chunk run side by side. Polynomial keys are made in
    each group, where the memory is wide (wide.py), elsewhere before.
    """
    polynomial = call.network.coefficients is not None
    if can_step(call):
        return step(call.with_keys() if polynomial else call)
    state, chunk_size, length, valid = call.state, call.chunk_size, call.q.shape[1], call.valid
    gates, windows = (call.theta, call.eta, call.alpha), call.extra.window is not None
    tile = chunk_size if windows else tile_size(call.network, state, gates, chunk_size, length)
    if polynomial and (windows or tile != chunk_size or not is_wide(call.network, state.M, have_channels(gates))):
        call = call.with_keys()
    if tile == chunk_size:
        return _run_call(call, make_layout(state.offset, length, tile, valid, windows))
    cut, several = pieces(state, length, chunk_size, valid), []
    for piece in cut:
        o, new, sizes = _run_piece(piece, replace(call, state=state), tile)
        # a row without a whole chunk has no border behind it
        state = select_rows(piece.valid.any(1), new, state) if piece.tiled and piece.valid is not None else new
        several.append((o, sizes))
    outputs, surprise = zip(*several, strict=True)
    apart = cut[0].valid is None
    return _joined(outputs, apart), state, _joined(surprise, apart) if call.return_surprise else None
