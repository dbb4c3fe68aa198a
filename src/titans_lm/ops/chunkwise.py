"""The memory by chunks: a short sequence of matrix products, exact against `reference.py`.

A call is cut into groups of some chunks (chunk_forward.py). When gradients are asked for, only the state at the start
of each group is kept, and the backward pass makes the rest again, a group at a time (chunk_backward.py): memory grows
with the tokens themselves and the square root of the number of chunks. A small call, whose time goes to the number of
operations, keeps all that it made. Small chunks of a linear memory are worked on a tile at a time (tiles.py), which is
then what is called a chunk here.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from operator import is_
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_lm.config import SurpriseSizes
from titans_lm.ops.anchor import LARGEST_GROUP, AnchorBackward, end_gates, read_anchors
from titans_lm.ops.call import CallSpec, Inputs, Inside, Saved, State, copied
from titans_lm.ops.chunk_backward import ChunkBackward, Parameters, StateGrads
from titans_lm.ops.chunk_forward import (
    BatchedNetwork,
    ChunkStates,
    ReadCache,
    Tokens,
    Weights,
    WriteCache,
    network_output,
    read,
    write,
)
from titans_lm.ops.gates import Adjoint, ChunkGates, by_gate, chunk_gates, stack_gates
from titans_lm.ops.layout import TokenLayout, make_layout, merge_heads, ragged, split_heads, uniform
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.recurrent import can_step, step
from titans_lm.ops.state import PLAIN, MemoryState, PerToken, select_rows
from titans_lm.ops.surprise import momentary_norms, surprise_norms
from titans_lm.ops.tiles import Piece, System, make_system, pieces, tile_size, write_tiles
from titans_lm.ops.tiles_adjoint import TileBackward

LEAST_CHUNKS = 8
"""Chunks of a group, where a call has as many."""
KEPT = 2**20
"""Numbers that the inside of a call of one group may have, about, to be kept and not made again."""
KEPT_SHARE = 64
"""On a GPU, whose time goes to the number of operations at most sizes: the share of its memory, 1 / 64, that the inside
of a call may take to be kept; the call then is one group."""


@functools.cache
def _memory(device: torch.device) -> int:
    """Bytes of memory that a GPU has."""
    return torch.cuda.get_device_properties(device).total_memory


def group_size(chunks: int) -> int:
    """Chunks of a group of a call: at least 8, and as many as there are then groups."""
    return max(LEAST_CHUNKS, math.isqrt(chunks - 1) + 1)


def lagging_group(chunks: int, size: int) -> int:
    """The same of chunks of `size` tokens that are read at their anchors."""
    return min(group_size(chunks), max(1, LARGEST_GROUP // size))


class ChunkedCall:
    """A call laid out in chunks, group after group of them: forward, and from the last one backward."""

    def __init__(self, spec: CallSpec, inputs: Inputs) -> None:
        self.spec, self.inputs, self.L = spec, inputs, len(inputs.M)
        N, B, C, H, _ = inputs.q.shape
        self.lags = spec.network.read_at == "anchor"
        size = lagging_group(N, C) if self.lags else group_size(N)
        self.is_kept = self._is_kept(size)
        size = N if self.is_kept else min(N, size)
        self.groups = [slice(start, min(start + size, N)) for start in range(0, N, size)]
        norm = []
        for x in (inputs.norm_weight, inputs.norm_bias):
            norm.append(None if x is None else x.repeat(size * B, 1).unsqueeze(1))
        self.rows = BatchedNetwork(spec.network, B, H, B * H, *norm, inputs.initial or None)
        self.inside: Inside | None = None

    def _is_kept(self, group: int) -> bool:
        """Whether the inside of the call is worth keeping: a small one, whose time goes to the number of operations.

        On a CPU that is a call of one group, not by tiles; on a GPU any that fits.
        """
        x, (N, _, C, _, D) = self.inputs, self.inputs.q.shape
        if self.lags or (not x.q.is_cuda and (self.spec.inside is not None or group < N)):
            return False
        pairs = 3 * self.L * C * (D if len(x.gates) > 2 else 1)  # x hᵀ, G and their product; G by channel if gates are
        by_token = 12 * sum([w.shape[-1] for w in x.M]) + pairs
        numbers = 2 * (N + 1) * sum([w.numel() for w in x.M]) + x.q.numel() // D * by_token
        if x.q.is_cuda:
            return KEPT_SHARE * numbers * x.q.element_size() <= _memory(x.q.device)
        return numbers <= KEPT

    def room(self) -> Saved:
        """Room for what gradients need: of several groups, as it has to come before all that ends with the call."""
        x, R = self.inputs, self.rows.count
        if len(self.groups) == 1:
            return Saved([], [], [])
        N, n, D = len(x.q), self.groups[0].stop, x.v.shape[-1]
        return Saved([], *[list(y.new_empty(N * R, y.shape[2], D).split(n * R)) for y in (x.k, x.q)])

    def first_state(self) -> State:
        x = self.inputs
        return x.M, x.S, tuple([w.flatten(0, 1) for w in x.anchor]) if self.spec.anchored else None

    def _part(self, x: Tensor, where: slice) -> Tensor:
        """A group's part of what the call has, which is all of it where there is one group."""
        return x if len(self.groups) == 1 else x[where]

    def _rows(self, where: slice) -> BatchedNetwork:
        """The network for the rows of a group: the last one may have fewer."""
        if where.stop - where.start == self.groups[0].stop:
            return self.rows
        X = (where.stop - where.start) * self.rows.count
        weight, bias = (None if x is None else x[:X] for x in (self.rows.weight, self.rows.bias))
        return replace(self.rows, weight=weight, bias=bias)

    def _group(self, where: slice, adjoint: bool = False) -> tuple[Tokens, list[ChunkGates], Adjoint | None]:
        """Tokens of a group by row, what they weigh in every layer, and with `adjoint` the way back to their gates."""
        present = None if self.spec.present is None else self.spec.present[where]
        weigh = end_gates if self.lags else chunk_gates
        layers, back = weigh(tuple([self._part(x, where) for x in self.inputs.gates]), present, adjoint)
        given = (*self.inputs[:3], *(() if self.inputs.threshold is None else (self.inputs.threshold,)))
        return Tokens(*[merge_heads(self._part(x, where)) for x in given]), layers, back

    def _complete(self, where: slice) -> tuple[bool | Tensor, ...]:
        """Which chunks of a group are complete, tensors by row as (R, 1, 1)."""
        H, flags = self.inputs.q.shape[3], self.spec.complete[where]
        return tuple([c.repeat_interleave(H).view(-1, 1, 1) if isinstance(c, Tensor) else c for c in flags])

    def _write(
        self, where: slice, tokens: Tokens, gates: list[ChunkGates], z: Tensor | None = None, collect: bool = False
    ) -> tuple[WriteCache, System | None]:
        """Write a group, by chunks or by tiles; with `z`, what the first time left, or `collect` for the gradients."""
        if self.spec.inside is None:
            return write(self._rows(where), tokens, gates, self.states, self._complete(where), z, collect), None
        system = make_system(tokens.k, gates[0], self.spec.inside)
        return write_tiles(self._rows(where), tokens, gates[0], self.states, system, z), system

    def _read(
        self, tokens: Tokens, gates: list[ChunkGates], written: WriteCache, kept: Tensor | None = None
    ) -> ReadCache:
        """Read a group at every token, or at its anchors; `kept` is z_L where it has been made."""
        if self.lags:
            return read_anchors(self.rows, tokens.q, self.states, kept)
        return read(self.rows, tokens.q, gates, written, self.states, kept)

    def forward(self, saved: Saved | None, keep: bool = False) -> tuple[Tensor, Tensor | None, State]:
        """Write and read all groups: outputs (N, B, C, H, D), norms of surprise, the last state.

        What gradients need is left in `saved`, or with `keep` in the call itself.
        """
        q, state = self.inputs.q, self.first_state()
        N, B, C, H, _ = q.shape
        # What outlives the call comes first: behind and between what does not, it would leave holes that an allocator
        # cannot fill with tensors of the same size. A call of one group leaves little.
        last = [x.new_empty(x.shape) for x in (*state[0], *state[1])] if len(self.groups) > 1 else ()
        # Of one group of several chunks `TokenLayout.restore` makes a copy in the order of the text.
        apart = len(self.groups) > 1 or N == 1
        out = q.new_empty(B, N, C, H, self.inputs.v.shape[-1]).transpose(0, 1) if apart else None
        parts = (3,) if self.spec.surprise == "parts" else ()
        norms = q.new_empty(N, B, C, H, self.L, *parts) if self.spec.surprise else None
        self.states = states = ChunkStates(self.groups[0].stop, state[0], self.rows)
        for group, where in enumerate(self.groups):
            if saved is not None and group > 0:
                state = copied(state)  # the buffers are used again
                saved.starts.append(state)
            states.begin(*state)
            if out is None:
                out = self._forward_group(group, None if keep else saved, keep, norms)
            else:
                out[where] = self._forward_group(group, None if keep else saved, keep, norms)
            state = states.end(where.stop - where.start)
        return out, norms, copied(state, last)

    def _forward_group(self, group: int, saved: Saved | None, keep: bool, norms: Tensor | None) -> Tensor:
        """Write and read a group: its outputs; what is made on the way but the states ends here, if it is not kept."""
        where = self.groups[group]
        rows = self._rows(where)
        tokens, gates, back = self._group(where, adjoint=keep)
        written, system = self._write(where, tokens, gates, collect=keep)
        found = self._read(tokens, gates, written)
        z = found.pre[-1]
        out = split_heads(network_output(rows, tokens.q, z), rows.batch, rows.heads)
        if keep:
            self.inside = Inside(tokens, gates, back, written, system, found)
        elif saved is not None:
            for kept, x in ((saved.written, written.pre[-1]), (saved.read, z)):
                if len(self.groups) == 1:
                    kept.append(x)  # no copy of it
                else:
                    kept[group].copy_(x)
        if norms is None:
            return out
        if self.spec.surprise == "parts":
            present = None if self.spec.present is None else self.spec.present[where]
            here = tuple([x[where] for x in self.inputs.gates])
            if self.lags:  # sizes are of every token
                gates, _ = chunk_gates(here, present)
            given = list(zip(*by_gate(here), strict=True))
            window = self.inputs.gates[1][where] if len(self.inputs.gates) == 2 else None
            sizes = surprise_norms(rows, self.states, written, gates, given, present, window)
        else:
            sizes = momentary_norms(written, tokens.q.shape[1])
        norms[where] = split_heads(sizes, rows.batch, rows.heads)
        return out

    def backward(self, saved: Saved, d_out: Tensor | None, d_state: Sequence[Tensor | None]) -> Inputs:
        """The gradients by `inputs`, group by group from the last."""
        x, L, B = self.inputs, self.L, self.rows.batch
        starts = [self.first_state(), *saved.starts]
        if self.inside is None:
            self.states = ChunkStates(self.groups[0].stop, starts[0][0], self.rows)
        after = [
            (w.new_zeros(w.shape) if d is None else d.clone(memory_format=torch.contiguous_format)).flatten(0, 1)
            for w, d in zip((*x.M, *x.S, *x.anchor), d_state, strict=False)
        ]
        both = [torch.cat(pair, dim=1) for pair in zip(after[:L], after[L : 2 * L], strict=True)]
        carried = StateGrads(both, after[2 * L :] or None, self.rows.heads)
        norm = [x.q.new_empty(0) if w is None else torch.zeros_like(w) for w in (x.norm_weight, x.norm_bias)]
        shared = Parameters(*norm, [torch.zeros_like(w) for w in x.initial])
        tokens_grad = [torch.empty_like(y) for y in (*x[:3], *(() if x.threshold is None else (x.threshold,)))]
        gates_grad = tuple([torch.empty_like(y) for y in x.gates])
        for g in range(len(self.groups) - 1, -1, -1):
            where = self.groups[g]
            again = (saved.written[g], saved.read[g]) if saved.written else (None, None)
            inside = self.inside or self._inside(where, starts[g], *again)
            d = None if d_out is None else d_out[where]
            self._backward_group(where, inside, d, carried, shared, tokens_grad, gates_grad)
        anchor = tuple([w.unflatten(0, (B, -1)) for w in carried.anchor or ()]) if self.spec.anchored else (None,) * L
        weight, bias = (w if w.numel() else None for w in norm)
        dq, dk, dv, *d_threshold = tokens_grad
        by_extra = d_threshold[0] if d_threshold else None
        M, S = tuple(carried.W), tuple(carried.S)
        return Inputs(dq, dk, dv, gates_grad, M, S, anchor, by_extra, weight, bias, tuple(shared.initial))

    def _inside(self, where: slice, start: State, z: Tensor | None, o: Tensor | None) -> Inside:
        """Write and read a group again."""
        self.states.begin(*start)
        tokens, gates, back = self._group(where, adjoint=True)
        written, system = self._write(where, tokens, gates, z, collect=True)
        return Inside(tokens, gates, back, written, system, self._read(tokens, gates, written, o))

    def _backward_group(
        self,
        where: slice,
        inside: Inside,
        d_out: Tensor | None,
        carried: StateGrads,
        shared: Parameters,
        tokens_grad: list[Tensor],
        gates_grad: Weights,
    ) -> None:
        """Lead the gradients of a group back."""
        tokens, gates, back, written, system, found = inside
        assert back is not None, "it was asked for"
        d = torch.zeros_like(found.pre[-1]) if d_out is None else merge_heads(d_out)
        given = self._rows(where), tokens, gates, self.states, written, shared
        if system is None or self.spec.inside is None:
            kind = AnchorBackward if self.lags else ChunkBackward
            by_token, by_gates = kind(*given).run(d, found, self._complete(where), carried)
        else:
            by_token, by_gates = TileBackward(*given).run_tiles(d, found, carried, system, self.spec.inside)
        for whole, part in zip(tokens_grad, by_token, strict=True):
            whole[where] = split_heads(part, self.rows.batch, self.rows.heads)
        for whole, part in zip(gates_grad, back(by_gates), strict=True):
            whole[where] = part


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
        ctx.groups = len(saved.written)
        ctx.save_for_backward(*tensors, *saved.written, *saved.read, *states)
        ctx.set_materialize_grads(False)
        if norms is not None:
            ctx.mark_non_differentiable(norms)
        heads = call.rows.batch, call.rows.heads
        return out, norms, *M, *S, *[x.unflatten(0, heads) for x in anchor or ()]

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        d_out, _, *d_state = grad_outputs
        L, count = ctx.layers, len(ctx.needs_input_grad) - 3
        everything = ctx.saved_tensors  # once: activation checkpointing unpacks them no second time
        tensors, kept = everything[:count], iter(everything[count:])
        inputs = Inputs.of(tensors, L, ctx.gates)
        saved = Saved([], list(islice(kept, ctx.groups)), list(islice(kept, ctx.groups)))
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
        tuple([w.to(dtype) for w in network.initial or ()]) if used else (),
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
    Chunks follow one another; batch, heads and the positions of a chunk run side by side.
    """
    given = (q, k, v, *theta, *eta, *alpha, *state.M, *state.S, *state.anchor)
    if extra is not PLAIN:
        given += tuple(extra.given())
    if can_step(q, valid, given):
        return step(
            q, k, v, theta, eta, alpha, state,
            network=network, chunk_size=chunk_size, return_surprise=return_surprise, extra=extra,
        )  # fmt: skip
    tokens = q, k, v, theta, eta, alpha
    windows = extra.window is not None
    tile = chunk_size if windows else tile_size(network, state, (theta, eta, alpha), chunk_size, q.shape[1])
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
