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
from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.call import CallSpec, Inputs, Saved
from titans_lm.ops.chunk_forward import Weights
from titans_lm.ops.gates import have_channels, stack_gates
from titans_lm.ops.groups import ChunkedCall
from titans_lm.ops.layout import TokenLayout, make_layout, ragged, uniform
from titans_lm.ops.matmul import once_differentiable
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.recurrent import can_step, step
from titans_lm.ops.state import PLAIN, MemoryState, PerToken, select_rows
from titans_lm.ops.tiles import Piece, pieces, tile_size
from titans_lm.ops.wide import is_wide


class _Chunked(torch.autograd.Function):
    """`ChunkedCall` and its gradients; it keeps one state for each group and nothing of a group's inside."""

    @staticmethod
    def forward(ctx: Any, spec: CallSpec, L: int, gates: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ChunkedCall(spec, Inputs.of(tensors, L, gates))
        saved = call.room()
        out, norms, (M, S, anchor) = call.forward(saved, keep=call.is_kept)
        ctx.call = call if call.inside is not None else None
        ctx.spec, ctx.layers, ctx.gates, ctx.anchored = spec, L, gates, [start[2] is not None for start in saved.starts]
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
        L, count = ctx.layers, len(ctx.needs_input_grad) - 3
        everything = ctx.saved_tensors  # once: activation checkpointing unpacks them no second time
        tensors, kept = everything[:count], iter(everything[count:])
        inputs = Inputs.of(tensors, L, ctx.gates)
        saved = Saved([], *[list(islice(kept, count)) for count in ctx.kept])
        for anchored in ctx.anchored:
            M, S = tuple(islice(kept, L)), tuple(islice(kept, L))
            saved.starts.append((M, S, tuple(islice(kept, L)) if anchored else None))
        with torch.autocast(device_type=inputs.q.device.type, enabled=False):
            call, ctx.call = ctx.call or ChunkedCall(ctx.spec, inputs), None  # who keeps a loss need not keep this
            return None, None, None, *call.backward(saved, d_out, d_state).flat()


CallTokens = tuple[Tensor, Tensor, Tensor, Weights, Weights, Weights]
"""q, k, v, θ, η and α of a call."""
Outcome = tuple[Tensor, MemoryState, Tensor | None]


def _run_call(
    tokens: CallTokens,
    state: MemoryState,
    layout: TokenLayout,
    network: MemoryNetwork,
    surprise: SurpriseSizes,
    inside: int | None = None,
    extra: PerToken = PLAIN,
) -> Outcome:
    """Run a call that is laid out on a grid, with gradients if any are asked for."""
    q, L, dtype = tokens[0], len(state.M), tokens[0].dtype
    used = network.forget_to == "init"
    gates, tail = stack_gates(*tokens[3:]), state.tail
    if extra.window is None:
        k, v = [layout.place(x) for x in tokens[1:3]]
    else:
        gates = *gates, extra.window
        windows = zip(tokens[1:3], state.earlier(*tokens[1:3]), strict=True)
        (k, last_k), (v, last_v) = (layout.place_windows(x, before) for x, before in windows)
        tail = (last_k, last_v) if tail else ()
    inputs = Inputs(
        layout.place(q),
        k,
        v,
        tuple([layout.place(x) for x in gates]),
        state.M,
        state.S,
        state.anchor,
        None if extra.threshold is None else layout.place(extra.threshold.unsqueeze(-1)),
        *[None if x is None else x.to(dtype) for x in (network.norm_weight, network.norm_bias)],
        None if network.coefficients is None else network.coefficients.to(dtype).sqrt(),
        tuple([w.to(dtype).contiguous() for w in network.initial or ()]) if used else (),
    )
    aliased = all(map(is_, state.anchor, state.M))
    spec = CallSpec(network, layout.mask(), layout.complete, not aliased, surprise, inside)
    flat = inputs.flat()
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in flat]):
        o, sizes, *tensors = _Chunked.apply(spec, L, len(inputs.gates), *flat)
    else:
        o, sizes, after = ChunkedCall(spec, inputs).forward(None)
        tensors = [*after[0], *after[1], *[x.unflatten(0, (q.shape[0], q.shape[2])) for x in after[2] or ()]]
    M, S, anchor = tuple(tensors[:L]), tuple(tensors[L : 2 * L]), tuple(tensors[2 * L :])
    return (
        layout.restore(o),
        MemoryState(M, S, anchor or M, layout.offset, tail),
        None if sizes is None else layout.restore(sizes),
    )


def _run_piece(
    piece: Piece,
    tokens: CallTokens,
    state: MemoryState,
    network: MemoryNetwork,
    chunk_size: int,
    tile: int,
    surprise: SurpriseSizes,
) -> Outcome:
    """Run a piece of a call: a chunk, or whole chunks by tiles, after which every row stands at a border."""
    q, k, v = (x[:, piece.tokens] for x in tokens[:3])
    gates = (tuple(x[:, piece.tokens] for x in gate) for gate in tokens[3:])
    here, length = (q, k, v, *gates), q.shape[1]
    start, size = state.offset, chunk_size
    if piece.tiled:
        start, size = torch.zeros_like(start), tile
    if piece.valid is not None:
        layout = ragged(start, length, size, piece.valid, piece.tiled)
    else:
        layout = uniform(start, 0, length, size) if piece.tiled else make_layout(start, length, size, None)
    if not piece.tiled:
        return _run_call(here, state, layout, network, surprise)
    layout = replace(layout, complete=(True,) * layout.chunks, offset=start)
    # errors of the dot product depend on no memory, so there is nothing to solve
    inside = None if network.objective == "dot" else chunk_size
    return _run_call(here, state._replace(anchor=state.M), layout, network, surprise, inside)


def _joined(parts: tuple[Tensor, ...], apart: bool) -> Tensor:
    """The outputs of pieces, one after another; or each among all tokens of the call, with zeros for the others."""
    return torch.cat(parts, dim=1) if apart and len(parts) > 1 else sum(parts[1:], parts[0])


def chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H D"],
    theta: tuple[Tensor, ...],
    eta: tuple[Tensor, ...],
    alpha: tuple[Tensor, ...],
    state: MemoryState,
    *,
    network: MemoryNetwork,
    chunk_size: int,
    valid: Bool[Tensor, "B T"] | None = None,
    return_surprise: SurpriseSizes = False,
    extra: PerToken = PLAIN,
) -> tuple[Float[Tensor, "B T H D"], MemoryState, Float[Tensor, "B T H L *parts"] | None]:
    """Write and read a chunk at a time; the same values and gradients as `reference`.

    All gradients of a chunk are taken at the anchor, so they come from one batched forward and backward pass as outer
    products h ⊗ δ, and a read at every token is a masked attention per memory layer (docs/derivation.md, section 4).
    Chunks follow one another; batch, heads and the positions of a chunk run side by side. Polynomial keys are made in
    each group, where the memory is wide (wide.py), elsewhere before.
    """
    given = (q, k, v, *theta, *eta, *alpha, *state.M, *state.S, *state.anchor)
    if extra is not PLAIN:
        given += tuple(extra.given())
    polynomial = network.coefficients is not None
    if can_step(q, valid, (*given, network.coefficients) if polynomial else given):
        network, (q, k) = network.make_keys(q, k)
        return step(
            q, k, v, theta, eta, alpha, state,
            network=network, chunk_size=chunk_size, return_surprise=return_surprise, extra=extra,
        )  # fmt: skip
    gates, windows = (theta, eta, alpha), extra.window is not None
    tile = chunk_size if windows else tile_size(network, state, gates, chunk_size, q.shape[1])
    if polynomial and (windows or tile != chunk_size or not is_wide(network, state.M, have_channels(gates))):
        network, (q, k) = network.make_keys(q, k)
    tokens = q, k, v, theta, eta, alpha
    if tile == chunk_size:
        layout = make_layout(state.offset, q.shape[1], tile, valid, windows)
        return _run_call(tokens, state, layout, network, return_surprise, extra=extra)
    cut, several = pieces(state, q.shape[1], chunk_size, valid), []
    for piece in cut:
        o, new, sizes = _run_piece(piece, tokens, state, network, chunk_size, tile, return_surprise)
        # a row without a whole chunk has no border behind it
        state = select_rows(piece.valid.any(1), new, state) if piece.tiled and piece.valid is not None else new
        several.append((o, sizes))
    outputs, surprise = zip(*several, strict=True)
    apart = cut[0].valid is None
    return _joined(outputs, apart), state, _joined(surprise, apart) if return_surprise else None
