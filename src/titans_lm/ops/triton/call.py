"""A whole call as two operators of torch: forward and backward, each opaque to compilers and known to autograd.

A call is cut into segments of some chunks, as in chunkwise.py: what tokens weigh is computed segment by segment, the
state at the start of each is kept, and the backward pass goes through them from the last. Tokens are laid out in chunks
(N, B, C, H, D), gates (N, B, C, H), weights are (B, H, D_in, D_out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titans_lm.ops.chunk_forward import Tokens
from titans_lm.ops.gates import Adjoint, ChunkGates, chunk_gates
from titans_lm.ops.groups import group_size
from titans_lm.ops.layout import merge_heads, split_heads
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.triton.launch import Gates, Segment, Shared, State, lead_back, write_and_read


class Inputs(NamedTuple):
    """Everything a gradient may reach; an empty `anchor` is M itself, an empty `initial` is zero."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Sequence[Tensor]
    eta: Sequence[Tensor]
    alpha: Sequence[Tensor]
    M: Sequence[Tensor]
    S: Sequence[Tensor]
    anchor: Sequence[Tensor]
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    initial: Sequence[Tensor]


class Options(NamedTuple):
    """What a call is besides.

    `present` (N, B or 1, 1, C) marks positions that hold a token, None where all do. `complete` (N, B) says where a
    chunk ends, and `ends` for every chunk whether it is known to end for all rows. `keep` says that a backward pass may
    follow: without it only what the caller asked for outlives a segment.
    """

    present: Tensor | None
    complete: Tensor
    ends: Sequence[bool]
    activation: str
    residual: bool
    objective: str
    precision: str
    keep: bool


@dataclass(frozen=True)
class Call:
    """Segments of a call, and each as the kernels want it."""

    inputs: Inputs
    options: Options

    @property
    def network(self) -> MemoryNetwork:
        x, o = self.inputs, self.options
        norm = (None if y is None else y.contiguous() for y in (x.norm_weight, x.norm_bias))
        return MemoryNetwork(
            o.activation, o.residual, *norm,
            objective=o.objective,
            forget_to="init" if x.initial else "zero",
            initial=tuple(w.contiguous() for w in x.initial) or None,
        )  # fmt: skip

    def segments(self) -> list[slice]:
        N = len(self.inputs.q)
        size = group_size(N)
        return [slice(start, min(start + size, N)) for start in range(0, N, size)]

    def fresh(self, where: slice) -> bool:
        """Whether all chunks of a segment take their gradients at the memory at their own start, and end."""
        before = self.options.ends[where.start - 1] if where.start else not self.inputs.anchor
        return before and all(self.options.ends[where])

    def first_state(self) -> State:
        """Copies by row, since kernels write in place."""
        x = self.inputs
        M, S, A = (
            [w.flatten(0, 1).clone(memory_format=torch.contiguous_format) for w in p] for p in (x.M, x.S, x.anchor)
        )
        return State(M, S, A or [w.clone() for w in M])

    def room(self) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Empty tensors for what `forward` gives: o, written, read, sizes, the last state, the states between."""
        x, L = self.inputs, len(self.inputs.M)
        N, B, C, H, D = x.q.shape
        o = x.q.new_empty(B, N, C, H, D).transpose(0, 1)
        chunks = N if self.options.keep else 0
        written, read = (x.q.new_empty(chunks, B * H, C, D) for _ in range(2))
        state = [w.new_empty(w.shape) for w in (*x.M, *x.S, *x.M)]
        later = self.segments()[1:] if self.options.keep else []
        parts = state[: 2 * L] if all(map(self.fresh, later)) else state
        kept = [w.new_empty(len(later), B * H, *w.shape[2:]) for w in parts] if later else []
        last = state[: 2 * L] if self.options.ends[-1] else state
        return o, written, read, x.q.new_empty(N, B, C, H, L), last, kept

    def segment(self, where: slice, adjoint: bool = False) -> tuple[Segment, Adjoint | None]:
        x, o = self.inputs, self.options
        present = None if o.present is None else o.present[where]
        gates = torch.stack([g[where] for gate in (x.theta, x.eta, x.alpha) for g in gate], dim=-1)
        layers, back = chunk_gates((gates,), present, adjoint)
        heads, rows = x.q.shape[3], x.q.shape[1] * x.q.shape[3]
        tokens = Tokens(*(merge_heads(y[where]).unflatten(0, (-1, rows)) for y in (x.q, x.k, x.v)))
        complete = o.complete[where].to(torch.int32).repeat_interleave(heads, dim=1)
        gates = [Gates.of(ChunkGates(*[y.unflatten(0, (-1, rows)) for y in g])) for g in layers]
        return Segment(self.network, heads, tokens, gates, complete, self.fresh(where), o.precision), back


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Write and read all segments.

    Returns o (N, B, C, H, D), z_L of the keys and of the queries (N, R, C, D), the size of the momentary surprise
    (N, B, C, H, L), the last state, and those between segments, one tensor for each part: M and S, and the anchor
    where a segment has another than M.
    """
    x = call.inputs
    B, H = x.q.shape[1], x.q.shape[3]
    o, written, read, sizes, _, kept = call.room()
    state, fresh = call.first_state(), True
    for i, where in enumerate(call.segments()):
        was_fresh, fresh = fresh, call.fresh(where)
        if was_fresh and not fresh and where.start > 0:  # nobody has followed the anchor so far
            for anchor, memory in zip(state.A, state.W, strict=True):
                anchor.copy_(memory)
        for room, part in zip(kept if i > 0 else (), state, strict=False):
            room[i - 1] = part
        segment, _ = call.segment(where)
        got = write_and_read(segment, state)
        o[where], sizes[where] = (split_heads(y.flatten(0, 1), B, H) for y in (got.o, got.sizes.transpose(2, 3)))
        if call.options.keep:
            written[where], read[where] = got.written, got.read
    after = [*state.W, *state.S, *(() if call.options.ends[-1] else state.A)]
    return o, written, read, sizes, [w.unflatten(0, (B, H)) for w in after], kept


def backward(
    call: Call, written: Tensor, read: Tensor, kept: Sequence[Tensor], d_o: Tensor, d_after: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients by all inputs that are there, in their order."""
    x, L = call.inputs, len(call.inputs.M)
    _, B, _, H, D = x.q.shape
    d = _led_from(d_after, L)
    starts = [call.first_state()]
    for i in range(len(kept[0]) if kept else 0):
        parts = [part[i] for part in kept]
        starts.append(State(parts[:L], parts[L : 2 * L], parts[2 * L :] or parts[:L]))
    norm = (x.q.new_zeros(B * H, D) for _ in range(2))
    shared = Shared(*norm, [torch.zeros_like(w) for w in d.W] if x.initial else [])
    tokens_grad = [torch.empty_like(y) for y in (x.q, x.k, x.v)]
    gates_grad = [torch.empty_like(y) for gate in (x.theta, x.eta, x.alpha) for y in gate]
    for where, start in zip(reversed(call.segments()), reversed(starts), strict=True):
        if call.fresh(where):
            d.join_anchor()
        segment, back = call.segment(where, adjoint=True)
        assert back is not None, "it was asked for"
        d_out = merge_heads(d_o[where]).view_as(segment.tokens.q)
        got = lead_back(segment, start, written[where], read[where], d_out, d, shared)
        for whole, part in zip(tokens_grad, (got.q, got.k, got.v), strict=True):
            whole[where] = split_heads(part.flatten(0, 1), B, H)
        for whole, part in zip(gates_grad, back(got.gates)[0].unbind(-1), strict=True):
            whole[where] = part
    if not x.anchor:
        d.join_anchor()
    states = [*d.W, *d.S, *(d.A if x.anchor else ())]
    weight, bias = (y.view(B, H, D).sum(0) for y in (shared.weight, shared.bias))
    return [
        *tokens_grad, *gates_grad, *(w.unflatten(0, (B, H)) for w in states),
        *(() if x.norm_weight is None else (weight,)), *(() if x.norm_bias is None else (bias,)),
        *(w.unflatten(0, (B, H)).sum(0) for w in shared.initial),
    ]  # fmt: skip


def _led_from(d_after: Sequence[Tensor], L: int) -> State:
    parts = [w.flatten(0, 1).clone(memory_format=torch.contiguous_format) for w in d_after]
    return State(parts[:L], parts[L : 2 * L], parts[2 * L :] or [torch.zeros_like(w) for w in parts[:L]])
