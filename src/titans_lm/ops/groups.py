"""A call laid out in chunks, group after group of them, forward and backward.

Only the state at the start of each group is kept for the gradients, and z_L of keys and queries (of a wide memory also
the parts of what was read); the backward pass makes the rest of a group again. How a group is written and read depends
on the memory: chunk by chunk (chunk_forward.py), by tiles (tiles.py), at its anchors (anchor.py), or as a wide memory
(wide.py).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.anchor import LARGEST_GROUP, AnchorBackward, end_gates, read_anchors
from titans_lm.ops.chunk_backward import ChunkBackward, Parameters, StateGrads
from titans_lm.ops.chunk_forward import (
    BatchedNetwork,
    ChunkStates,
    ReadCache,
    Tokens,
    Weights,
    WriteCache,
    read,
    write,
)
from titans_lm.ops.gates import Adjoint, ChunkGates, by_gate, chunk_gates
from titans_lm.ops.layout import merge_heads, split_heads
from titans_lm.ops.network import MemoryNetwork, fast_output
from titans_lm.ops.polynomial import Narrow
from titans_lm.ops.surprise import momentary_norms, surprise_norms
from titans_lm.ops.tiles import System, TileBackward, make_system, write_tiles
from titans_lm.ops.wide import WideBackward, is_wide, read_wide, transposed, write_wide

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


State = tuple[Weights, Weights, Weights | None]
"""M and S, (B, H, D_in, D_out), and the anchor by rows, (R, D_in, D_out); an anchor of None is M itself."""


def copied(state: State, into: Sequence[Tensor] = (), order: torch.memory_format = torch.contiguous_format) -> State:
    """Copies of a state's tensors, in the given ones as far as they go; `order` is that of new ones in memory."""
    given, parts = iter(into), []
    for part in state:
        copies = []
        for x in part or ():
            buffer = next(given, None)
            copies.append(x.clone(memory_format=order) if buffer is None else buffer.copy_(x))
        parts.append(None if part is None else tuple(copies))
    M, S, anchor = parts
    return M, S, anchor


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass besides its inputs.

    `starts` is the state before every group but the first. `written` and `read` are z_L of the keys at the anchor and
    of the queries, (n R, C, D) for each group: the size of k and of o, and with them the last layer's products are not
    made again. Of a wide memory `parts` are the two of what is read, (n R, C, 2 D) (wide.py). All three are empty where
    the call keeps its inside.
    """

    starts: list[State]
    written: list[Tensor]
    read: list[Tensor]
    parts: list[Tensor]


class Inside(NamedTuple):
    """What a group makes on its way that its gradients need."""

    tokens: Tokens
    gates: list[ChunkGates]
    back: Adjoint | None
    written: WriteCache
    system: System | None
    found: ReadCache


class Inputs(NamedTuple):
    """Everything a gradient may reach.

    `tokens` are q, k and v laid out in chunks, (N, B, C, H, D), k and v of windows with those before each chunk, and
    thresholds (N, B, C, H, 1) if there are any; so are the gates (ops/gates.py). Weights are (B, H, D_{l−1}, D_l),
    `anchor` is empty where the first chunk takes its gradients at M, and `initial` is (H, D_{l−1}, D_l) or empty. With
    `roots`, √a (H, P), queries and keys are those that every group makes polynomials of.
    """

    tokens: Weights
    gates: Weights
    M: Weights
    S: Weights
    anchor: Weights
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    roots: Tensor | None
    initial: Weights

    def flat(self) -> list[Tensor | None]:
        """All tensors in a row, as autograd wants them."""
        return [x for part in self for x in (part if isinstance(part, tuple) else (part,))]

    @classmethod
    def of(cls, flat: Sequence[Tensor | None], counts: Sequence[int | None]) -> "Inputs":
        """Undo `flat`, by the tensors of each part; None for one that is a tensor or None itself."""
        rest = iter(flat)
        return cls(*[next(rest) if n is None else tuple(islice(rest, n)) for n in counts])


@dataclass(frozen=True)
class CallSpec:
    """What a call is besides the tensors of `Inputs`; the tensors of `network` are to be taken from there."""

    network: MemoryNetwork
    present: Tensor | None
    complete: tuple[bool | Tensor, ...]
    surprise: SurpriseSizes
    inside: int | None = None
    """Tokens of a chunk where what is laid out are tiles of them; None where it is the chunks."""


class ChunkedCall:
    """A call laid out in chunks, group after group of them: forward, and from the last one backward."""

    def __init__(self, spec: CallSpec, inputs: Inputs) -> None:
        self.spec, self.inputs, self.L = spec, inputs, len(inputs.M)
        self.q, self.k, self.v = inputs.tokens[:3]
        N, B, C, H, _ = self.q.shape
        self.lags = spec.network.read_at == "anchor"
        self.wide = spec.inside is None and is_wide(spec.network, inputs.M, by_channel=len(inputs.gates) > 2)
        size = lagging_group(N, C) if self.lags else group_size(N)
        self.is_kept = self._is_kept(size)
        size = N if self.is_kept else min(N, size)
        self.groups = [slice(start, min(start + size, N)) for start in range(0, N, size)]
        norm = []
        for x in (inputs.norm_weight, inputs.norm_bias):
            norm.append(None if x is None else x.repeat(size * B, 1).unsqueeze(1))
        self.roots = None if inputs.roots is None else inputs.roots.unsqueeze(1)
        initial = transposed(inputs.initial) if self.wide else inputs.initial
        self.rows = BatchedNetwork(spec.network, B, H, B * H, *norm, initial or None, self.wide)
        self.inside: Inside | None = None

    def _is_kept(self, group: int) -> bool:
        """Whether the inside of the call is worth keeping: a small one, whose time goes to the number of operations.

        On a CPU that is a call of one group, not by tiles; on a GPU any that fits.
        """
        x, q, (N, _, C, _, _), D = self.inputs, self.q, self.q.shape, self.inputs.M[0].shape[2]
        if self.lags or (not q.is_cuda and (self.spec.inside is not None or group < N)):
            return False
        pairs = 3 * self.L * C * (D if len(x.gates) > 2 else 1)  # x hᵀ, G and their product; G by channel if gates are
        by_token = 12 * sum([w.shape[-1] for w in x.M]) + pairs
        by_token += (2 if self.wide else 8) * max(0, D - self.v.shape[-1])  # keys that are wider, and weighted copies
        numbers = 2 * (N + 1) * sum([w.numel() for w in x.M]) + q.numel() // q.shape[-1] * by_token
        if q.is_cuda:
            return KEPT_SHARE * numbers * q.element_size() <= _memory(q.device)
        return numbers <= KEPT

    def room(self) -> Saved:
        """Room for what gradients need: of several groups, as it has to come before all that ends with the call."""
        if len(self.groups) == 1:
            return Saved([], [], [], [])
        N, n, R, D = len(self.q), self.groups[0].stop, self.rows.count, self.v.shape[-1]
        written, read, parts = (
            list(y.new_empty(N * R, y.shape[2], width).split(n * R)) if width else []
            for y, width in ((self.k, D), (self.q, D), (self.q, 2 * D * self.wide))
        )
        return Saved([], written, read, parts)

    def first_state(self) -> State:
        x = self.inputs
        return x.M, x.S, tuple([w.flatten(0, 1) for w in x.anchor]) if x.anchor else None

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
        tokens = Tokens(*[merge_heads(self._part(x, where)) for x in self.inputs.tokens])
        if self.roots is not None:  # a group at a time, polynomials are never all there, nor in another order
            narrow = Narrow(tokens.q, tokens.k, self.roots)
            q, k = narrow.monomials()
            tokens = tokens._replace(q=q, k=k, narrow=narrow)
        return tokens, layers, back

    def _complete(self, where: slice) -> tuple[bool | Tensor, ...]:
        """Which chunks of a group are complete, tensors by row as (R, 1, 1)."""
        H = self.rows.heads
        return tuple(
            [c.repeat_interleave(H).view(-1, 1, 1) if isinstance(c, Tensor) else c for c in self.spec.complete[where]]
        )

    def _write(
        self, where: slice, tokens: Tokens, gates: list[ChunkGates], z: Tensor | None = None, collect: bool = False
    ) -> tuple[WriteCache, System | None]:
        """Write a group, by chunks or by tiles; with `z`, what the first time left, or `collect` for the gradients."""
        rows = self._rows(where)
        if self.spec.inside is None:
            given = self.states, self._complete(where), z, collect
            return write_wide(rows, tokens, gates[0], *given) if self.wide else write(rows, tokens, gates, *given), None
        system = make_system(tokens.k, gates[0], self.spec.inside)
        return write_tiles(rows, tokens, gates[0], self.states, system, z), system

    def _read(
        self,
        tokens: Tokens,
        gates: list[ChunkGates],
        written: WriteCache,
        kept: Tensor | None = None,
        parts: Tensor | None = None,
    ) -> ReadCache:
        """Read a group at every token, or at its anchors; `kept` is z_L where it has been made, of a wide memory by two
        `parts`."""
        if self.lags:
            return read_anchors(self.rows, tokens.q, self.states, kept)
        if self.wide:
            return read_wide(self.rows, tokens.q, gates[0], written, self.states, kept, parts, tokens.narrow)
        return read(self.rows, tokens.q, gates, written, self.states, kept)

    def forward(self, saved: Saved | None, keep: bool = False) -> tuple[Tensor, Tensor | None, State]:
        """Write and read all groups: outputs (N, B, C, H, D), norms of surprise, the last state.

        What gradients need is left in `saved`, or with `keep` in the call itself.
        """
        q, state = self.q, self.first_state()
        N, B, C, H, _ = q.shape
        # What outlives the call comes first: behind and between what does not, it would leave holes that an allocator
        # cannot fill with tensors of the same size. A call of one group leaves little.
        last = [x.new_empty(x.shape) for x in (*state[0], *state[1])] if len(self.groups) > 1 else ()
        # Of one group of several chunks `TokenLayout.restore` makes a copy in the order of the text.
        apart = len(self.groups) > 1 or N == 1
        out = q.new_empty(B, N, C, H, self.v.shape[-1]).transpose(0, 1) if apart else None
        parts = (3,) if self.spec.surprise == "parts" else ()
        norms = q.new_empty(N, B, C, H, self.L, *parts) if self.spec.surprise else None
        self.states = states = ChunkStates(self.groups[0].stop, state[0], self.rows)
        for group, where in enumerate(self.groups):
            if saved is not None and group > 0:
                state = copied(state, order=torch.preserve_format)  # the buffers are used again
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
        out = fast_output(tokens.q, z, rows.network, rows.weight, rows.bias)
        out = split_heads(out, rows.batch, rows.heads)
        if keep:
            self.inside = Inside(tokens, gates, back, written, system, found)
        elif saved is not None:
            parts = [(saved.parts, found.both[0])] if self.wide else []
            for kept, x in ((saved.written, written.pre[-1]), (saved.read, z), *parts):
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
            for w, d in zip((*x.M, *x.S, *x.M), d_state, strict=False)
        ]
        after = [w.mT for w in after] if self.wide else after
        both = [torch.cat(pair, dim=1) for pair in zip(after[:L], after[L : 2 * L], strict=True)]
        carried = StateGrads(both, after[2 * L :] or None, self.rows.heads, self.wide)
        weight, bias, roots = (
            self.q.new_empty(0) if w is None else torch.zeros_like(w) for w in (x.norm_weight, x.norm_bias, self.roots)
        )
        shared = Parameters(weight, bias, [torch.zeros_like(w) for w in self.rows.decay_target or ()], roots)
        tokens_grad, gates_grad = (tuple(map(torch.empty_like, part)) for part in (x.tokens, x.gates))
        for g in range(len(self.groups) - 1, -1, -1):
            where = self.groups[g]
            inside = self.inside or self._inside(where, starts[g], *[several[g] for several in saved[1:] if several])
            d = None if d_out is None else d_out[where]
            self._backward_group(where, inside, d, carried, shared, tokens_grad, gates_grad)
        by_anchor = carried.anchor if x.anchor and carried.anchor else ()
        anchor = tuple([(w.mT if self.wide else w).unflatten(0, (B, -1)) for w in by_anchor])
        if self.roots is not None:
            roots = roots.squeeze(1)
        norm = (w if w.numel() else None for w in (weight, bias, roots))
        state = tuple(carried.W), tuple(carried.S), anchor or (None,) * len(x.anchor)
        return Inputs(tokens_grad, gates_grad, *state, *norm, tuple(shared.initial))

    def _inside(self, where: slice, start: State, z: Tensor | None = None, *read: Tensor) -> Inside:
        """Write and read a group again, with what was kept of it."""
        self.states.begin(*start)
        tokens, gates, back = self._group(where, adjoint=True)
        written, system = self._write(where, tokens, gates, z, collect=True)
        return Inside(tokens, gates, back, written, system, self._read(tokens, gates, written, *read))

    def _backward_group(
        self,
        where: slice,
        inside: Inside,
        d_out: Tensor | None,
        carried: StateGrads,
        shared: Parameters,
        tokens_grad: Weights,
        gates_grad: Weights,
    ) -> None:
        """Lead the gradients of a group back."""
        tokens, gates, back, written, system, found = inside
        assert back is not None, "it was asked for"
        d = torch.zeros_like(found.pre[-1]) if d_out is None else merge_heads(d_out)
        given = self._rows(where), tokens, gates, self.states, written, shared
        if system is None or self.spec.inside is None:
            kind = AnchorBackward if self.lags else WideBackward if self.wide else ChunkBackward
            by_token, by_gates = kind(*given).run(d, found, self._complete(where), carried)
        else:
            by_token, by_gates = TileBackward(*given).run_tiles(d, found, carried, system, self.spec.inside)
        for whole, part in zip(tokens_grad, by_token, strict=True):
            whole[where] = split_heads(part, self.rows.batch, self.rows.heads)
        for whole, part in zip(gates_grad, back(by_gates), strict=True):
            whole[where] = part
