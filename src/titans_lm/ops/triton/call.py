"""A whole call through the kernels, forward and backward: pointers, sizes, scratch memory. Nothing here knows autograd.

A call is cut into segments of some chunks, as in chunkwise.py: what tokens weigh is computed segment by segment, the
state at the start of each is kept, and the backward pass goes through them from the last. Tokens are laid out in chunks
(N, B, C, H, D), gates (N, B, C, H), weights are (B, H, D_in, D_out). In a segment tokens are (n, R, C, D) for its n
chunks, and weights (R, D_in, D_out).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titans_lm.ops.gates import Adjoint, chunk_gates
from titans_lm.ops.groups import group_size
from titans_lm.ops.layout import merge_heads, split_heads
from titans_lm.ops.triton.kernels import power_of_two
from titans_lm.ops.triton.kernels.deep import deep_forward
from titans_lm.ops.triton.kernels.deep_adjoint import deep_read_adjoint, deep_write_adjoint
from titans_lm.ops.triton.kernels.linear import (
    linear_forward,
    linear_read_adjoint,
    linear_write_adjoint,
)

ACTIVATIONS = {"gelu": 0, "silu": 1, "relu": 2}


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


@dataclass
class State:
    """M, S and the anchor of every layer, (R, D_in, D_out) each, or gradients by them; kernels write in place."""

    W: list[Tensor]
    S: list[Tensor]
    A: list[Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((*self.W, *self.S, *self.A))

    def join_anchor(self) -> None:
        """Where the anchor is the memory itself, so are their gradients: add them, and leave none by the anchor."""
        for memory, anchor in zip(self.W, self.A, strict=True):
            memory += anchor
            anchor.zero_()

    def replayed(self, chunks: int, fresh: bool) -> "State":
        """Room for the state at every chunk's start and at the end, (n + 1, R, D_in, D_out), begun with this one."""

        def room(x: Tensor) -> Tensor:
            states = x.new_empty(chunks + 1, *x.shape)
            states[0] = x
            return states

        W, S = [room(x) for x in self.W], [room(x) for x in self.S]
        return State(W, S, W if fresh else [room(x) for x in self.A])


class Segment(NamedTuple):
    """One segment of a call.

    G (n, R, C, C) and lines (n, R, 5, C) of a, f, both ends and η_end are what tokens weigh in each layer, and `back`
    is the way back to the gates. `complete` (n, R) is 1 where a chunk ends, and `fresh` says that all do and that each
    takes its gradients at the memory at its start.
    """

    tokens: list[Tensor]
    G: list[Tensor]
    lines: list[Tensor]
    complete: Tensor
    fresh: bool
    back: Adjoint | None


def by_row(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies (R, D_in, D_out) of weights (B, H, D_in, D_out), since kernels write in place."""
    return [w.flatten(0, 1).clone(memory_format=torch.contiguous_format) for w in weights]


@dataclass(frozen=True)
class KernelCall:
    """Segments of a call, and each through the kernels."""

    inputs: Inputs
    options: Options

    @cached_property
    def shared(self) -> list[Tensor]:
        """LayerNorm (H, D) and M_init (H, D_in, D_out); for what is lacking, tensors of which no value is used."""
        x = self.inputs
        norm = [x.q if w is None else w.contiguous() for w in (x.norm_weight, x.norm_bias)]
        return [*norm, *([w.contiguous() for w in x.initial] or x.M)]

    @cached_property
    def hidden(self) -> tuple[int, ...]:
        """The hidden channels of a memory of two layers."""
        return tuple([w.shape[-1] for w in self.inputs.M[:-1]])

    @cached_property
    def form(self) -> dict[str, Any]:
        """What every kernel is compiled with; Triton wants to be told to do products and sums in one operation."""
        x, o = self.inputs, self.options
        norm, (C, _, D) = (x.norm_weight, x.norm_bias), x.q.shape[2:]
        form = {
            "NORM": sum(w is not None for w in norm), "RESIDUAL": o.residual, "DOT": o.objective == "dot",
            "INIT": bool(x.initial), "BD": power_of_two(D), "enable_fp_fusion": True, "PRECISION": o.precision,
            "BC": power_of_two(C),
        }  # fmt: skip
        return form | ({"ACT": ACTIVATIONS[o.activation]} if self.hidden else {})

    def segments(self) -> list[slice]:
        N = len(self.inputs.q)
        size = group_size(N)
        return [slice(start, min(start + size, N)) for start in range(0, N, size)]

    def fresh(self, where: slice) -> bool:
        """Whether all chunks of a segment take their gradients at the memory at their own start, and end."""
        before = self.options.ends[where.start - 1] if where.start else not self.inputs.anchor
        return before and all(self.options.ends[where])

    def first_state(self) -> State:
        M, S, A = (by_row(x) for x in (self.inputs.M, self.inputs.S, self.inputs.anchor))
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

    def segment(self, where: slice, adjoint: bool = False) -> Segment:
        x, o = self.inputs, self.options
        present = None if o.present is None else o.present[where]
        gates = torch.stack([g[where] for gate in (x.theta, x.eta, x.alpha) for g in gate], dim=-1)
        layers, back = chunk_gates((gates,), present, adjoint)
        by_chunk = -1, x.q.shape[1] * x.q.shape[3]
        tokens = [merge_heads(y[where]).unflatten(0, by_chunk) for y in (x.q, x.k, x.v)]
        complete = o.complete[where].to(torch.int32).repeat_interleave(x.q.shape[3], dim=1)
        G, lines = [g.G.unflatten(0, by_chunk).contiguous() for g in layers], []
        for g in layers:
            columns = torch.cat((g.a, g.f, g.memory_end, g.surprise_end, g.eta_end.expand_as(g.a)), dim=-1)
            lines.append(columns.unflatten(0, by_chunk).transpose(2, 3).contiguous())
        return Segment(tokens, G, lines, complete, self.fresh(where), back)

    def write(self, segment: Segment, state: State, outputs: Sequence[Tensor], replay: bool = False) -> None:
        """Write and read a segment, of which `state` becomes the state behind it.

        Outputs are o, z_L of the keys and of the queries (n, R, C, D), and ‖∇_{W_l} ℓ‖ (n, R, L, C). A replay reads
        nothing and leaves the states of all chunks.
        """
        (n, R, C, D), H = segment.tokens[0].shape, self.inputs.q.shape[3]
        anchors = state.W if segment.fresh else state.A
        (deep_forward if self.hidden else linear_forward)[(R,)](
            *segment.tokens, *segment.G, *segment.lines, segment.complete, *self.shared,
            *state.W, *state.S, *anchors, *outputs,
            n, R, H, C, D, *self.hidden, REPLAY=replay, FRESH=segment.fresh, **self.form,
        )  # fmt: skip

    def lead_back(
        self, segment: Segment, start: State, written: Tensor, read: Tensor, d_o: Tensor, d: State, shared: list[Tensor]
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """The gradients of a segment from its state at the `start`, by tokens and by every layer's `ChunkGates`.

        `d` and `shared`, which are those by the LayerNorm (R, D) and M_init (R, D_in, D_out), are led back in place.
        """
        q, L = segment.tokens[0], len(start.W)
        (n, R, C, D), H = q.shape, self.inputs.q.shape[3]
        states = start.replayed(n, segment.fresh)
        self.write(segment, states, (q, written, read, q), replay=True)
        d_q, d_k, d_v, d_delta, d_z = (torch.empty_like(q) for _ in range(5))
        d_hidden = [q.new_empty(n, R, C, F) for F in self.hidden * 4]
        d_G, d_norm = [torch.empty_like(g) for g in segment.G], [q.new_empty(n, R, D) for _ in range(2)]
        d_af, d_lines = ([q.new_empty(n, R, 2, C) for _ in range(L)] for _ in range(2))
        d_ends = [q.new_empty(n, R, 3) for _ in range(L)]
        deep = bool(self.hidden)
        reads, writes = (deep_read_adjoint, deep_write_adjoint) if deep else (linear_read_adjoint, linear_write_adjoint)
        reads[(R, n)](
            d_o, *segment.tokens, *segment.G, *segment.lines, *self.shared,
            *states.W, *states.S, *(states.A if deep else ()), written, read,
            d_q, d_k, d_delta, d_z, *d_hidden, *d_G, *d_af, *d_norm, R, H, C, D, *self.hidden, **self.form,
        )  # fmt: skip
        (weight, bias, *initial) = shared
        for whole, part in zip((weight, bias), d_norm, strict=True):
            whole += part.sum(0)
        writes[(R,)](
            *segment.tokens, *segment.lines, segment.complete, *self.shared, *states, written, d_delta, d_z, *d_hidden,
            *d, *(initial or d.W), d_k, d_v, *d_lines, *d_ends, weight, bias,
            n, R, H, C, D, *self.hidden, FRESH=segment.fresh, **self.form,
        )  # fmt: skip
        by_gates = [gate_gradients(*parts) for parts in zip(d_G, d_af, d_lines, d_ends, strict=True)]
        return [d_q, d_k, d_v], by_gates


def gate_gradients(d_G: Tensor, d_af: Tensor, d_lines: Tensor, d_ends: Tensor) -> dict[str, Tensor]:
    """Gradients by the fields of `ChunkGates`; a and f are also what W and S weigh at the end of a chunk."""
    d_af[..., -1] += d_ends[..., :2]
    a, f, memory_end, surprise_end = (x.unsqueeze(-1) for x in (*d_af.unbind(2), *d_lines.unbind(2)))
    eta_end = d_ends[..., 2, None, None]
    return {
        "a": a, "f": f, "G": d_G, "eta_end": eta_end, "surprise_end": surprise_end, "memory_end": memory_end,
    }  # fmt: skip


def forward(call: KernelCall) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Write and read all segments.

    Returns o (N, B, C, H, D), z_L of the keys and of the queries (N, R, C, D), the size of the momentary surprise
    (N, B, C, H, L), the last state, and those between segments, one tensor for each part: M and S, and the anchor
    where a segment has another than M.
    """
    _, B, C, H, _ = call.inputs.q.shape
    o, written, read, sizes, _, kept = call.room()
    state, fresh = call.first_state(), True
    for i, where in enumerate(call.segments()):
        segment = call.segment(where)
        was_fresh, fresh = fresh, segment.fresh
        if was_fresh and not fresh and where.start > 0:  # nobody has followed the anchor so far
            for anchor, memory in zip(state.A, state.W, strict=True):
                anchor.copy_(memory)
        for room, part in zip(kept if i > 0 else (), state, strict=False):
            room[i - 1] = part
        q = segment.tokens[0]
        *tokens, norms = *(torch.empty_like(q) for _ in range(3)), q.new_empty(len(q), B * H, len(state.W), C)
        call.write(segment, state, (*tokens, norms))
        o[where], sizes[where] = (split_heads(y.flatten(0, 1), B, H) for y in (tokens[0], norms.transpose(2, 3)))
        if call.options.keep:
            written[where], read[where] = tokens[1:]
    after = [*state.W, *state.S, *(() if call.options.ends[-1] else state.A)]
    return o, written, read, sizes, [w.unflatten(0, (B, H)) for w in after], kept


def backward(
    call: KernelCall, written: Tensor, read: Tensor, kept: Sequence[Tensor], d_o: Tensor, d_after: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients by all inputs that are there, in their order."""
    x, L = call.inputs, len(call.inputs.M)
    _, B, _, H, D = x.q.shape
    parts = by_row(d_after)
    d = State(parts[:L], parts[L : 2 * L], parts[2 * L :] or [torch.zeros_like(w) for w in parts[:L]])
    starts = [call.first_state()]
    for parts in map(list, zip(*kept, strict=True)):
        starts.append(State(parts[:L], parts[L : 2 * L], parts[2 * L :] or parts[:L]))
    shared = [x.q.new_zeros(B * H, D) for _ in range(2)]
    shared += [torch.zeros_like(w) for w in (d.W if x.initial else ())]
    tokens_grad = [torch.empty_like(y) for y in (x.q, x.k, x.v)]
    gates_grad = [torch.empty_like(y) for gate in (x.theta, x.eta, x.alpha) for y in gate]
    for where, start in zip(reversed(call.segments()), reversed(starts), strict=True):
        segment = call.segment(where, adjoint=True)
        assert segment.back is not None, "it was asked for"
        if segment.fresh:
            d.join_anchor()
        d_out = merge_heads(d_o[where]).view_as(segment.tokens[0])
        by_token, by_gates = call.lead_back(segment, start, written[where], read[where], d_out, d, shared)
        for whole, part in zip(tokens_grad, by_token, strict=True):
            whole[where] = split_heads(part.flatten(0, 1), B, H)
        for whole, part in zip(gates_grad, segment.back(by_gates)[0].unbind(-1), strict=True):
            whole[where] = part
    if not x.anchor:
        d.join_anchor()
    states = [*d.W, *d.S, *(d.A if x.anchor else ())]
    weight, bias, *initial = [w.unflatten(0, (B, H)).sum(0) for w in shared]
    return [
        *tokens_grad, *gates_grad, *(w.unflatten(0, (B, H)) for w in states),
        *(() if x.norm_weight is None else (weight,)), *(() if x.norm_bias is None else (bias,)), *initial,
    ]  # fmt: skip
