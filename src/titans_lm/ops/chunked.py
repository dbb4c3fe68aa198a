"""The memory by chunks: a short sequence of matrix products, exact against `reference.py`.

A call is cut into segments of some chunks (segment.py). When gradients are asked for, only the state at the start of
each segment is kept, and the backward pass makes the rest again, a segment at a time (adjoint.py): memory grows with
the tokens themselves and the square root of the number of chunks. Small chunks of a linear memory are worked on a tile
at a time (tiles.py), which is then what is called a chunk here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_lm.config import SurpriseSizes
from titans_lm.ops.adjoint import Carried, Parameters, SegmentAdjoint
from titans_lm.ops.gates import Adjoint, ChunkGates, segment_gates
from titans_lm.ops.grid import Grid, make_grid, ragged, uniform
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.segment import Rows, States, Tokens, Weights, answers, as_rows, read, write
from titans_lm.ops.sizes import momentary_sizes, part_sizes
from titans_lm.ops.state import MemoryState, select_rows
from titans_lm.ops.step import can_step, step
from titans_lm.ops.tiles import Piece, make_system, pieces, tile_size, write_tiles
from titans_lm.ops.tiles_adjoint import TileAdjoint

LEAST_CHUNKS = 8
"""Chunks of a segment, where a call has as many."""

State = tuple[Weights, Weights, Weights | None]
"""M, S and the anchor by rows, (R, D_in, D_out); an anchor of None is M itself."""


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass besides its inputs.

    `starts` is the state before every segment but the first. `written` and `read` are z_L of the keys at the anchor and
    of the queries, (N, R, C, D): the size of k and of o, and with them the last layer's products are not made again.
    """

    starts: list[State]
    written: Tensor
    read: Tensor


class Inputs(NamedTuple):
    """Everything a gradient may reach.

    Tokens are laid out in chunks, (N, B, C, H, D), and so are gates, (N, B, C, H) or (N, B, C, H, D_{l−1}), one for
    each of the L memory layers. Weights are (B, H, D_{l−1}, D_l), `initial` is (H, D_{l−1}, D_l) or empty.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Weights
    eta: Weights
    alpha: Weights
    M: Weights
    S: Weights
    anchor: Weights
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    initial: Weights

    def flat(self) -> list[Tensor | None]:
        """All tensors in a row, as autograd wants them."""
        return [x for part in self for x in (part if isinstance(part, tuple) else (part,))]

    @classmethod
    def of(cls, flat: Sequence[Tensor | None], L: int) -> "Inputs":
        """Undo `flat` for a memory of L layers."""
        groups = [tuple(flat[i : i + L]) for i in range(3, 3 + 6 * L, L)]
        norm_weight, norm_bias, *initial = flat[3 + 6 * L :]
        return cls(*flat[:3], *groups, norm_weight, norm_bias, tuple(initial))


def segment_size(chunks: int) -> int:
    """Chunks of a segment of a call: at least 8, and as many as there are then segments."""
    return max(LEAST_CHUNKS, math.isqrt(chunks - 1) + 1)


@dataclass(frozen=True)
class Layout:
    """What a call is besides the tensors of `Inputs`; the tensors of `network` are to be taken from there."""

    network: MemoryNetwork
    present: Tensor | None
    complete: tuple[bool | Tensor, ...]
    anchored: bool
    """Whether the first chunk takes its gradients at `Inputs.anchor`; otherwise at M."""
    surprise: SurpriseSizes
    inside: int | None = None
    """Tokens of a chunk where what is laid out are tiles of them; None where it is the chunks."""

    def rows(self, inputs: Inputs) -> Rows:
        network = replace(
            self.network,
            norm_weight=inputs.norm_weight,
            norm_bias=inputs.norm_bias,
            initial=inputs.initial or None,
        )
        return as_rows(network, inputs.q.shape[1])

    def segments(self) -> list[slice]:
        """The chunks of each segment, at least 8, then as many segments as chunks in one.

        So neither the states between segments nor those inside one outweigh the others.
        """
        N = len(self.complete)
        size = segment_size(N)
        return [slice(start, min(start + size, N)) for start in range(0, N, size)]

    def flags(self, where: slice, heads: int) -> tuple[bool | Tensor, ...]:
        """Which chunks of a segment are complete, tensors by row as (R, 1, 1)."""
        return tuple(
            c.repeat_interleave(heads).view(-1, 1, 1) if isinstance(c, Tensor) else c for c in self.complete[where]
        )

    def gates(self, inputs: Inputs, where: slice, adjoint: bool = False) -> tuple[list[ChunkGates], Adjoint | None]:
        """What the tokens of a segment weigh in every layer, and with `adjoint` the way back to their gates."""
        present = None if self.present is None else self.present[where]
        theta, eta, alpha = (tuple(x[where] for x in gate) for gate in inputs[3:6])
        return segment_gates(theta, eta, alpha, present, adjoint)


def by_row(x: Tensor) -> Tensor:
    """(n, B, C, H, D) as (n, R, C, D), contiguous."""
    return x.transpose(2, 3).flatten(1, 2).contiguous()


def by_batch(x: Tensor, batch: int) -> Tensor:
    """(n, R, C, …) as (n, B, C, H, …)."""
    return x.unflatten(1, (batch, -1)).transpose(2, 3)


def _copied(state: State, into: list[Tensor] | None = None) -> State:
    """Copies of a state's tensors, in the given ones as far as they go."""
    given = iter(into or ())

    def copied(x: Tensor) -> Tensor:
        buffer = next(given, None)
        return x.clone() if buffer is None else buffer.copy_(x)

    return tuple(None if part is None else tuple(copied(x) for x in part) for part in state)


def _first_state(layout: Layout, inputs: Inputs) -> State:
    M, S, anchor = (tuple(x.flatten(0, 1) for x in part) for part in (inputs.M, inputs.S, inputs.anchor))
    return M, S, anchor if layout.anchored else None


def _run(layout: Layout, inputs: Inputs, kept: Kept | None) -> tuple[Tensor, Tensor | None, State]:
    """Write and read all segments: outputs (N, B, C, H, D), surprise and the last state; `kept` is filled."""
    rows, segments, state = layout.rows(inputs), layout.segments(), _first_state(layout, inputs)
    N, B, C, H, D = inputs.q.shape
    # What outlives the call comes first: behind and between what does not, it would leave holes that an allocator
    # cannot fill with tensors of the same size.
    last = [torch.empty_like(x) for part in state[:2] for x in part]
    out = inputs.q.new_empty(B, N, C, H, D).transpose(0, 1)
    parts = (3,) if layout.surprise == "parts" else ()
    sizes = inputs.q.new_empty(N, B, C, H, len(inputs.M), *parts) if layout.surprise else None
    states = States(segments[0].stop, state[0])
    for where in segments:
        if kept is not None and where.start > 0:
            state = _copied(state)  # the buffers are used again
            kept.starts.append(state)
        states.begin(*state)
        _lead_on(layout, rows, inputs, where, states, kept, out, sizes)
        n = where.stop - where.start
        state = states.weights(n), states.surprise(n), states.end_anchor()
    return out, sizes, _copied(state, last)


def _lead_on(
    layout: Layout,
    rows: Rows,
    inputs: Inputs,
    where: slice,
    states: States,
    kept: Kept | None,
    out: Tensor,
    sizes: Tensor | None,
) -> None:
    """Write and read a segment; all that is made for it but the states ends with the call."""
    B, H = rows.batch, inputs.q.shape[3]
    tokens = Tokens(*(by_row(x[where]) for x in inputs[:3]))
    gates, _ = layout.gates(inputs, where)
    if layout.inside is None:
        written = write(rows, tokens, gates, states, layout.flags(where, H))
    else:
        system = make_system(tokens.k, gates[0], layout.inside)
        written = write_tiles(rows, tokens, gates[0], states, system)
    z = read(rows, tokens.q, gates, written, states).pre[-1]
    out[where] = by_batch(answers(rows, tokens.q, z), B)
    if kept is not None:
        kept.written[where], kept.read[where] = written.pre[-1], z
    if layout.surprise == "parts" and sizes is not None:
        present = None if layout.present is None else layout.present[where]
        given = [tuple(gate[where] for gate in layer) for layer in zip(*inputs[3:6], strict=True)]
        sizes[where] = by_batch(part_sizes(rows, states, written, gates, given, present), B)
    elif sizes is not None:
        sizes[where] = by_batch(momentary_sizes(written), B)


class _Chunked(torch.autograd.Function):
    """`_run` and its gradients; it keeps one state for each segment and nothing of a segment's inside."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, L: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = Inputs.of(tensors, L)
        N, B, C, H, D = inputs.q.shape
        kept = Kept([], *(inputs.q.new_empty(N, B * H, C, D) for _ in range(2)))
        out, sizes, (M, S, anchor) = _run(layout, inputs, kept)
        ctx.layout, ctx.layers, ctx.anchored = layout, L, [state[2] is not None for state in kept.starts]
        states = (x for state in kept.starts for part in state for x in part or ())
        ctx.save_for_backward(*tensors, kept.written, kept.read, *states)
        ctx.set_materialize_grads(False)
        if sizes is not None:
            ctx.mark_non_differentiable(sizes)
        lead = inputs.M[0].shape[:2]
        return out, sizes, *(x.unflatten(0, lead) for x in (*M, *S, *(anchor or ())))

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        d_out, _, *d_state = grad_outputs
        L, saved = ctx.layers, ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 2
        inputs, kept, states = (
            Inputs.of(saved[:count], L),
            Kept([], *saved[count : count + 2]),
            iter(saved[count + 2 :]),
        )
        for anchored in ctx.anchored:
            parts = [tuple(next(states) for _ in range(L)) for _ in range(3 if anchored else 2)]
            kept.starts.append((parts[0], parts[1], parts[2] if anchored else None))
        with torch.autocast(device_type=inputs.q.device.type, enabled=False):
            return None, None, *_backward(ctx.layout, inputs, kept, d_out, d_state).flat()


def _backward(
    layout: Layout,
    inputs: Inputs,
    kept: Kept,
    d_out: Tensor | None,
    d_state: Sequence[Tensor | None],
) -> Inputs:
    """The gradients by `inputs`, segment by segment from the last."""
    rows, L, B = layout.rows(inputs), len(inputs.M), inputs.q.shape[1]
    starts = [_first_state(layout, inputs), *kept.starts]
    states = States(layout.segments()[0].stop, starts[0][0])
    shapes = [x for part in (inputs.M, inputs.S, inputs.anchor) for x in part]
    after = [
        (torch.zeros_like(x) if d is None else d.clone(memory_format=torch.contiguous_format)).flatten(0, 1)
        for x, d in zip(shapes, d_state, strict=False)
    ]
    both = [torch.cat(pair, dim=1) for pair in zip(after[:L], after[L : 2 * L], strict=True)]
    carried = Carried(both, after[2 * L :] or None)
    norm = (inputs.q.new_empty(0) if x is None else torch.zeros_like(x) for x in (rows.weight, rows.bias))
    shared = Parameters(*norm, [torch.zeros_like(w) for w in inputs.initial])
    tokens_grad = [torch.empty_like(x) for x in inputs[:3]]
    gates_grad = [tuple(torch.empty_like(x) for x in gate) for gate in inputs[3:6]]
    for where, start in zip(reversed(layout.segments()), reversed(starts), strict=True):
        states.begin(*start)
        d = None if d_out is None else d_out[where]
        _lead_back(layout, rows, inputs, where, states, kept, d, carried, shared, tokens_grad, gates_grad)
    M, S = (tuple(x.unflatten(0, (B, -1)) for x in part) for part in (carried.W, carried.S))
    anchor = tuple(x.unflatten(0, (B, -1)) for x in carried.anchor or ()) if layout.anchored else (None,) * L
    weight, bias = (
        None if x.numel() == 0 else x.squeeze(1).unflatten(0, (B, -1)).sum(0) for x in (shared.weight, shared.bias)
    )
    return Inputs(*tokens_grad, *gates_grad, M, S, anchor, weight, bias, tuple(shared.initial))


def _lead_back(
    layout: Layout,
    rows: Rows,
    inputs: Inputs,
    where: slice,
    states: States,
    kept: Kept,
    d_out: Tensor | None,
    carried: Carried,
    shared: Parameters,
    tokens_grad: list[Tensor],
    gates_grad: list[Weights],
) -> None:
    """Write and read a segment again, and lead its gradients back; all that is made for it ends with the call."""
    gates, back = layout.gates(inputs, where, adjoint=True)
    assert back is not None, "it was asked for"
    tokens = Tokens(*(by_row(x[where]) for x in inputs[:3]))
    complete = layout.flags(where, inputs.q.shape[3])
    d = torch.zeros_like(tokens.q) if d_out is None else by_row(d_out)
    if layout.inside is None:
        written = write(rows, tokens, gates, states, complete, kept.written[where])
        found = read(rows, tokens.q, gates, written, states, kept.read[where])
        adjoint = SegmentAdjoint(rows, tokens, gates, states, written, shared)
        *by_token, by_gates = adjoint.run(d, found, complete, carried)
    else:
        system = make_system(tokens.k, gates[0], layout.inside)
        written = write_tiles(rows, tokens, gates[0], states, system, kept.written[where])
        found = read(rows, tokens.q, gates, written, states, kept.read[where])
        tiles = TileAdjoint(rows, tokens, gates, states, written, shared)
        *by_token, by_gates = tiles.run_tiles(d, found, carried, system, layout.inside)
    for whole, part in zip(tokens_grad, by_token, strict=True):
        whole[where] = by_batch(part, rows.batch)
    for whole, part in zip([x for gate in gates_grad for x in gate], back(by_gates), strict=True):
        whole[where] = part


CallTokens = tuple[Tensor, Tensor, Tensor, Weights, Weights, Weights]
"""q, k, v, θ, η and α of a call."""
Outcome = tuple[Tensor, MemoryState, Tensor | None]


def _run_call(
    tokens: CallTokens,
    state: MemoryState,
    grid: Grid,
    network: MemoryNetwork,
    surprise: SurpriseSizes,
    inside: int | None = None,
) -> Outcome:
    """Run a call that is laid out on a grid, with gradients if any are asked for."""
    q, L, dtype = tokens[0], len(state.M), tokens[0].dtype
    used = network.forget_to == "init"
    inputs = Inputs(
        *(grid.place(x) for x in tokens[:3]),
        *(tuple(grid.place(x) for x in gate) for gate in tokens[3:]),
        state.M,
        state.S,
        state.anchor,
        *(None if x is None else x.to(dtype) for x in (network.norm_weight, network.norm_bias)),
        tuple(w.to(dtype) for w in network.initial or ()) if used else (),
    )
    aliased = all(a is w for a, w in zip(state.anchor, state.M, strict=True))
    layout = Layout(network, grid.mask(), grid.complete, not aliased, surprise, inside)
    flat = inputs.flat()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in flat):
        o, sizes, *tensors = _Chunked.apply(layout, L, *flat)
    else:
        o, sizes, after = _run(layout, inputs, None)
        tensors = [x.unflatten(0, (q.shape[0], q.shape[2])) for part in after for x in part or ()]
    M, S, anchor = tuple(tensors[:L]), tuple(tensors[L : 2 * L]), tuple(tensors[2 * L :])
    return grid.restore(o), MemoryState(M, S, anchor or M, grid.offset), None if sizes is None else grid.restore(sizes)


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
        grid = ragged(start, length, size, piece.valid)
    else:
        grid = uniform(start, 0, length, size) if piece.tiled else make_grid(start, length, size, None)
    if not piece.tiled:
        return _run_call(here, state, grid, network, surprise)
    grid = replace(grid, complete=(True,) * grid.chunks, offset=start)
    # errors of the dot product depend on no memory, so there is nothing to solve
    inside = None if network.objective == "dot" else chunk_size
    return _run_call(here, state._replace(anchor=state.M), grid, network, surprise, inside)


def _joined(parts: tuple[Tensor, ...], apart: bool) -> Tensor:
    """The outputs of pieces, one after another; or each among all tokens of the call, with zeros for the others."""
    return torch.cat(parts, dim=1) if apart and len(parts) > 1 else sum(parts[1:], parts[0])


def chunked(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T H D"],
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
) -> tuple[Float[Tensor, "B T H D"], MemoryState, Float[Tensor, "B T H L *parts"] | None]:
    """Write and read a chunk at a time; the same values and gradients as `reference`.

    All gradients of a chunk are taken at the anchor, so they come from one batched forward and backward pass as outer
    products h ⊗ δ, and a read at every token is a masked attention per memory layer (docs/derivation.md, section 4).
    Chunks follow one another; batch, heads and the positions of a chunk run side by side.
    """
    given = (q, k, v, *theta, *eta, *alpha, *state.M, *state.S, *state.anchor)
    if can_step(q, valid, given):
        return step(
            q, k, v, theta, eta, alpha, state,
            network=network, chunk_size=chunk_size, return_surprise=return_surprise,
        )  # fmt: skip
    tokens = q, k, v, theta, eta, alpha
    tile = tile_size(network, state, (theta, eta, alpha), chunk_size, q.shape[1])
    if tile == chunk_size:
        return _run_call(tokens, state, make_grid(state.offset, q.shape[1], tile, valid), network, return_surprise)
    cut, several = pieces(state, q.shape[1], chunk_size, valid), []
    for piece in cut:
        o, new, sizes = _run_piece(piece, tokens, state, network, chunk_size, tile, return_surprise)
        # a row without a whole chunk has no border behind it
        state = select_rows(piece.valid.any(1), new, state) if piece.tiled and piece.valid is not None else new
        several.append((o, sizes))
    outputs, surprise = zip(*several, strict=True)
    apart = cut[0].valid is None
    return _joined(outputs, apart), state, _joined(surprise, apart) if return_surprise else None
