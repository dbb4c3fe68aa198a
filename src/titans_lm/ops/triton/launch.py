"""Segments of chunks through the kernels: pointers, sizes, scratch memory. Nothing here knows autograd."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titans_lm.ops.chunk_forward import Tokens
from titans_lm.ops.gates import ChunkGates
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.triton import power_of_two
from titans_lm.ops.triton.kernels.decode import deep_step, linear_step
from titans_lm.ops.triton.kernels.deep import deep_forward
from titans_lm.ops.triton.kernels.deep_adjoint import deep_read_adjoint
from titans_lm.ops.triton.kernels.deep_writes import deep_write_adjoint
from titans_lm.ops.triton.kernels.linear import linear_forward, linear_read_adjoint, linear_write_adjoint

COMPILED = {"enable_fp_fusion": True}
"""Products and sums in one operation, which Triton wants to be told."""
ACTIVATIONS = {"gelu": 0, "silu": 1, "relu": 2}


@dataclass(frozen=True)
class Gates:
    """What the tokens of a segment weigh in one layer: G (n, R, C, C), and (n, R, 5, C) of a, f, ends and η_end."""

    G: Tensor
    lines: Tensor

    @classmethod
    def of(cls, g: ChunkGates) -> "Gates":
        lines = (g.a, g.f, g.memory_end, g.surprise_end, g.eta_end.expand_as(g.a))
        return cls(g.G.contiguous(), torch.cat(lines, dim=-1).transpose(2, 3).contiguous())


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


@dataclass
class Shared:
    """Gradients by what all chunks share, added up row by row: LayerNorm (R, D), M_init (R, D_in, D_out)."""

    weight: Tensor
    bias: Tensor
    initial: list[Tensor]


class Outputs(NamedTuple):
    """Of a segment: o, z_L of the keys and of the queries (n, R, C, D), and ‖∇_{W_l} ℓ‖ (n, R, L, C)."""

    o: Tensor
    written: Tensor
    read: Tensor
    sizes: Tensor


class Gradients(NamedTuple):
    """Of a segment: by q, k and v (n, R, C, D), and by the fields of every layer's `ChunkGates`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: list[dict[str, Tensor]]


@dataclass(frozen=True)
class Segment:
    """One segment of a call and everything the kernels are told besides the state.

    The tensors of `network` are in the state's precision: norm (H, D), M_init (H, D_in, D_out). `complete` (n, R) is 1
    where a chunk ends, and `fresh` says that all do and that each takes its gradients at the memory at its start.
    """

    network: MemoryNetwork
    heads: int
    tokens: Tokens
    gates: list[Gates]
    complete: Tensor
    fresh: bool
    precision: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """n, R, H, C, D."""
        n, R, C, D = self.tokens.k.shape
        return n, R, self.heads, C, D

    @property
    def form(self) -> dict[str, Any]:
        """The constants that every kernel is compiled with."""
        network, (C, D) = self.network, self.tokens.k.shape[2:]
        return {
            "NORM": sum(x is not None for x in (network.norm_weight, network.norm_bias)),
            "RESIDUAL": network.residual,
            "DOT": network.objective == "dot",
            "INIT": network.forget_to == "init",
            "PRECISION": self.precision,
            **COMPILED,
            "BC": power_of_two(C),
            "BD": power_of_two(D),
        }

    @property
    def hidden(self) -> dict[str, Any]:
        """The constants of a memory with a hidden layer."""
        return {"ACT": ACTIVATIONS[self.network.activation]}

    @property
    def norm(self) -> list[Tensor]:
        """Weight and bias of the LayerNorm; for what the network lacks, a tensor of which no value is used."""
        return [self.tokens.k if x is None else x for x in (self.network.norm_weight, self.network.norm_bias)]

    def initial(self, like: list[Tensor]) -> list[Tensor]:
        """M_init; where forgetting leads to zero, tensors that no kernel looks at."""
        return list(self.network.initial or like)


def write_and_read(segment: Segment, state: State) -> Outputs:
    """Write and read a segment; `state` becomes the state behind it."""
    n, R, _, C, _ = segment.sizes
    tokens = segment.tokens
    o, written, read = (torch.empty_like(tokens.q) for _ in range(3))
    outputs = Outputs(o, written, read, tokens.q.new_empty(n, R, len(state.W), C))
    _forward(segment, state, outputs, replay=False)
    return outputs


def _forward(segment: Segment, state: State, outputs: Outputs, replay: bool) -> None:
    """Run the forward kernel, to read, or to leave the states of all chunks in `state`."""
    n, R, H, C, D = segment.sizes
    F, deep = state.W[0].shape[-1], len(state.W) == 2
    kernel, hidden, extra = (deep_forward, (F,), segment.hidden) if deep else (linear_forward, (), {})
    anchors = state.W if segment.fresh else state.A
    kernel[(R,)](
        *segment.tokens[:3], *(g.G for g in segment.gates), *(g.lines for g in segment.gates), segment.complete,
        *segment.norm, *segment.initial(state.W), *state.W, *state.S, *anchors, *outputs,
        n, R, H, C, D, *hidden, REPLAY=replay, FRESH=segment.fresh, **segment.form, **extra,
    )  # fmt: skip


def lead_back(
    segment: Segment, start: State, written: Tensor, read: Tensor, d_o: Tensor, d: State, shared: Shared
) -> Gradients:
    """The gradients of a segment from its state at the `start`; `d` and `shared` are led back in place."""
    n, R, H, C, D = segment.sizes
    F, deep, q = start.W[0].shape[-1], len(start.W) == 2, segment.tokens.q
    states = start.replayed(n, segment.fresh)
    _forward(segment, states, Outputs(q, written, read, q), replay=True)
    given = [*segment.norm, *segment.initial(start.W)]
    lines, gates = [g.lines for g in segment.gates], [g.G for g in segment.gates]
    d_q, d_k, d_v, d_delta, d_z = (torch.empty_like(q) for _ in range(5))
    d_hidden = [q.new_empty(n, R, C, F) for _ in range(4 if deep else 0)]
    d_G, d_norm = [torch.empty_like(g) for g in gates], [q.new_empty(n, R, D) for _ in range(2)]
    d_af, d_lines = ([q.new_empty(n, R, 2, C) for _ in gates] for _ in range(2))
    d_ends = [q.new_empty(n, R, 3) for _ in gates]
    reads, writes = (deep_read_adjoint, deep_write_adjoint) if deep else (linear_read_adjoint, linear_write_adjoint)
    hidden, form = ((F,) if deep else ()), {**segment.form, **(segment.hidden if deep else {})}
    reads[(R, n)](
        d_o, *segment.tokens[:3], *gates, *lines, *given, *states.W, *states.S, *(states.A if deep else ()),
        written, read, d_q, d_k, d_delta, d_z, *d_hidden, *d_G, *d_af, *d_norm, R, H, C, D, *hidden, **form,
    )  # fmt: skip
    for whole, part in zip((shared.weight, shared.bias), d_norm, strict=True):
        whole += part.sum(0)
    writes[(R,)](
        *segment.tokens[:3], *lines, segment.complete, *given, *states, written, d_delta, d_z, *d_hidden,
        *d, *(shared.initial or d.W), d_k, d_v, *d_lines, *d_ends, shared.weight, shared.bias,
        n, R, H, C, D, *hidden, FRESH=segment.fresh, **form,
    )  # fmt: skip
    by_gates = [gate_gradients(*parts) for parts in zip(d_G, d_af, d_lines, d_ends, strict=True)]
    return Gradients(d_q, d_k, d_v, by_gates)


def gate_gradients(d_G: Tensor, d_af: Tensor, d_lines: Tensor, d_ends: Tensor) -> dict[str, Tensor]:
    """Gradients by the fields of `ChunkGates`; a and f are also what W and S weigh at the end of a chunk."""
    d_af[..., -1] += d_ends[..., :2]
    a, f, memory_end, surprise_end = (x.unsqueeze(-1) for x in (*d_af.unbind(2), *d_lines.unbind(2)))
    eta_end = d_ends[..., 2, None, None]
    return {
        "a": a, "f": f, "G": d_G, "eta_end": eta_end, "surprise_end": surprise_end, "memory_end": memory_end,
    }  # fmt: skip


def step_rows(
    network: MemoryNetwork,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Sequence[Tensor],
    M: Sequence[Tensor],
    S: Sequence[Tensor],
    anchor: Sequence[Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One token (B, H, D): o, surprise (B, H, L), and new tensors M and S; gates are θ, η, α in (B, H, 3)."""
    B, H, D = q.shape
    norm = [q if x is None else x.contiguous() for x in (network.norm_weight, network.norm_bias)]
    state = [w.contiguous() for w in (*M, *S, *anchor)]
    initial = [w.contiguous() for w in network.initial or M]
    o, sizes = q.new_empty(B, H, D), q.new_empty(B, H, len(M))
    after = [torch.empty_like(w) for w in state[: 2 * len(M)]]
    tensors = (x.contiguous() for x in (q, k, v, *gates))
    form = {
        "NORM": sum(x is not None for x in (network.norm_weight, network.norm_bias)),
        "RESIDUAL": network.residual,
        "DOT": network.objective == "dot",
        "INIT": network.forget_to == "init",
        "BD": power_of_two(D),
        **COMPILED,
    }
    deep = len(M) == 2
    kernel, hidden = (deep_step, (M[0].shape[-1],)) if deep else (linear_step, ())
    extra = {"ACT": ACTIVATIONS[network.activation]} if deep else {}
    kernel[(B * H,)](*tensors, *norm, *initial, *state, o, *after, sizes, H, D, *hidden, **form, **extra)
    return o, sizes, after
