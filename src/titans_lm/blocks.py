"""The blocks: one class per figure of the paper, TNT, and the same stack without memory as the honest ablation.

Every block is pre-norm with a SwiGLU MLP, x + mix(norm(x)) then x + mlp(norm(x)); they differ in `mix` alone. All have
P persistent tokens (P, E): learned rows, independent of the data (eq. 19).
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.attention import (
    FullAttention,
    KeyValues,
    QKVProjection,
    SegmentAttention,
    WindowAttention,
    compact,
    own_storage,
    segment_slices,
)
from titans_lm.config import BackboneConfig
from titans_lm.layers import ForwardContext, Linear, RMSNorm, SwiGLU, check_precision, weights_at_hand
from titans_lm.memory import LayerState, NeuralMemory
from titans_lm.ops.fused import gated_linear
from titans_lm.ops.state import repeat_rows, select_rows
from titans_lm.tnt import TNTMemory

Hidden = Float[Tensor, "B T E"]


class MACState(NamedTuple):
    """What a MAC block carries: besides the memory, the memory as it stood when the segment began (for eq. 21).

    `query_conv` are the last inputs of the query's convolution on s, with `shared_qkv` of all three.
    """

    memory: LayerState
    at_segment_start: tuple[Tensor, ...]
    query_conv: tuple[Tensor, ...]
    attention: KeyValues
    recalled: tuple[Tensor, Tensor]


class HybridState(NamedTuple):
    """What a MAG or MAL block carries."""

    memory: LayerState
    attention: KeyValues


class Block(nn.Module, ABC):
    """What all blocks share; the config is that of a stack of this block alone."""

    beside = False
    """Whether attention reads the same tokens as the memory, which then has a norm of its own for the embeddings."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_width)
        self.embedding_norm: RMSNorm | None = None
        # A parameter that nothing reads would get no gradient, which DistributedDataParallel refuses.
        unread = config.architecture == "tnt" or (config.architecture == "lmm" and not config.num_persistent)
        persistent = None if unread else nn.Parameter(torch.empty(config.num_persistent, config.hidden_size))
        self.register_parameter("persistent", persistent)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Persistent tokens join the normalised tokens, so they start at the same scale."""
        if self.persistent is not None:
            nn.init.normal_(self.persistent)

    def read_embeddings(self) -> None:
        """Let its memory read RMSNorm(x; a) + RMSNorm(x₀; b) in place of RMSNorm(x), x₀ being the embeddings (D56).

        a starts at 0.1, b at 1: at first nearly what a block reads that no other stands before. Attention beside the
        memory goes on to read RMSNorm(x).
        """
        self.embedding_norm = RMSNorm(self.config.hidden_size, self.config.norm_eps)
        if self.beside:
            self.memory_norm = RMSNorm(self.config.hidden_size, self.config.norm_eps)
        norm = self.memory_norm if self.beside else self.mixer_norm
        norm.start = 0.1
        norm.reset_parameters()

    @abstractmethod
    def init_state(self, batch_size: int, frozen: bool = False) -> Any:
        """The state at the start of a document, of a memory that writes nothing with `frozen`."""

    @abstractmethod
    def mix(self, x: Hidden, state: Any, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, Any]:
        """Mix tokens over time: x normalised, `stream` as they came."""

    def forward(self, x: Hidden, state: Any, ctx: ForwardContext) -> tuple[Hidden, Any]:
        """One block; a state of None is that of the start of a document.

        It is made here, from this block's own parameters, so that a block whose parameters are spread over processes
        gathers them once for both.
        """
        if x.dtype != (weights := self.mlp.gate_proj.weight.dtype):  # a call of every block would show
            check_precision(x, weights)
        state = self.init_state(x.shape[0], ctx.frozen) if state is None else state
        mixed = self.mixer_norm(x)
        if self.embedding_norm is not None and not self.beside:
            mixed = mixed + self.embedding_norm(ctx.embeddings)
        y, state = self.mix(mixed, state, ctx, x)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state

    def memory_start(self, memory: NeuralMemory, batch_size: int, frozen: bool) -> LayerState:
        """The memory at the start of a document, after it has read the persistent tokens: M(x̃), x̃ = [P | x] (D16)."""
        if self.persistent is None or not self.config.memory_begins_persistent:
            return memory.init_state(batch_size)
        _, state = memory(self.persistent[None], frozen=frozen, caching=False)  # segments are of the document
        return repeat_rows(state, batch_size)


class LMMBlock(Block):
    """The memory alone mixes tokens.

    x̃ = [P | x],   o = M(x̃)
    """

    kind: type[NeuralMemory] = NeuralMemory

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.memory = self.kind(config)

    def init_state(self, batch_size: int, frozen: bool = False) -> LayerState:
        return self.memory_start(self.memory, batch_size, frozen)

    def mix(self, x: Hidden, state: LayerState, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, LayerState]:
        return self.memory(x, state, ctx.lengths, ctx.diagnostics, ctx.frozen)


class TNTBlock(LMMBlock):
    """A global memory and local ones that start anew in every shard; the memories alone mix tokens (`tnt.py`).

    It has no persistent tokens: shards and chunks begin with the document, each with an M_init of its own.
    """

    kind = TNTMemory


class MACBlock(Block):
    """Memory as a context: attention sees what the memory recalls, then the memory writes what attention made of it.

        h_t = M*_{t−1}(s_t W_Q)             recall with the memory after the previous segment     (eq. 21)
        y_t = Attn([P | h_t | s_t])         causal in tokens and in recalled rows                 (eq. 22–23)
        M_t = M_{t−1}(z_t)                  write what attention made of it                       (eq. 24)
        o_t = y_t ⊗ M*_t(z_t)               gate by a second recall, after the write              (eq. 25)

    z_t = y_t + s_t is attention's output with its residual; without `memory_reads_residual` z_t = y_t (D36).
    t counts segments of `segment_len` tokens. The gate of token i comes from the memory written up to i: the whole
    segment's M_t would tell the future. The segment's own rows of y are written (D7), one row is recalled per token
    (D8), and ⊗ is one of D9.

    With `shared_qkv` W_Q, W_K, W_V and their convolutions are one set of weights on two inputs (D41): on s_t for
    attention and, its queries, for eq. 21; on z_t for what is written and asked in eq. 24 and 25. Keys and values of
    P and h_t come from the same W_K and W_V.

    Behind another block the memory's s_t, in eq. 21 and in z_t, holds the embeddings too (D56); attention's does not.
    """

    beside = True

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.memory = NeuralMemory(config)
        self.attention = SegmentAttention(config, self.memory if config.shared_qkv else None)
        self.gate = Gate(config)

    def init_state(self, batch_size: int, frozen: bool = False) -> MACState:
        memory = self.memory.init_state(batch_size)
        tails = memory.conv if self.config.shared_qkv else self.memory.init_tails(batch_size)
        attention = self.attention.init_state(batch_size)
        return MACState(memory, memory.memory.M, tails, attention, self.attention.init_recalled(batch_size))

    def forward(self, x: Hidden, state: MACState | None, ctx: ForwardContext) -> tuple[Hidden, MACState]:
        with weights_at_hand(self.memory):  # whose parts are called one by one
            return super().forward(x, state, ctx)

    def mix(self, x: Hidden, state: MACState, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, MACState]:
        # What needs no memory is made for all segments at once, before them or after them.
        surprise = False if ctx.diagnostics is None else ctx.diagnostics.surprise
        prepared, call = self.memory.prepare(x.shape[1], surprise), self.attention.prepare(x.shape[1])
        streams = None
        if self.config.shared_qkv:
            streams = self.memory.streams(x, state.query_conv, ctx.lengths, prepared.maps)
        s = x if self.embedding_norm is None else self.memory_norm(stream) + self.embedding_norm(ctx.embeddings)
        q, gate, tails = self.memory.project_query(s, state.query_conv, ctx.lengths, streams)
        qkv = self.attention.project(x, state.attention.conv, ctx, self.persistent, streams, call.kv)
        slices = segment_slices(ctx, x.shape[1], self.config.segment_len)
        cut, ys, os, norms = [segment.rope.cos.shape[1] for segment, _ in slices], [], [], []
        tokens = zip(q.split(cut, dim=1), gate.split(cut, dim=1), qkv.split(cut), s.split(cut, dim=1), strict=True)
        for (segment, phase), (q_t, gate_t, qkv_t, s_t) in zip(slices, tokens, strict=True):
            h = self.memory.retrieve(state.at_segment_start, q_t, gate_t, prepared)  # eq. 21
            seen = h, state.recalled
            y, attention, recalled = self.attention(qkv_t, state.attention, segment, phase, seen, call)  # 22, 23
            z = self._read(y, s_t)
            given = z, state.memory, segment.lengths, surprise, ctx.frozen, None, prepared
            o, memory, norm = self.memory.write(*given)  # eq. 24
            at_start = self._segment_start(state, memory, segment, phase, y.shape[1])
            state = MACState(memory, at_start, tails, attention, recalled)
            ys.append(y)
            os.append(o)
            norms.append(norm)
        if surprise and ctx.diagnostics is not None:
            ctx.diagnostics.surprise_norms.append(torch.cat(norms, dim=1))
        y, o = concat_segments(ys), concat_segments(os)
        m = self.memory.project_output(o, self.memory.gate_proj(self._read(y, s)))
        if x.shape[1] > 1:
            k, v = state.recalled
            state = state._replace(attention=compact(state.attention), recalled=(own_storage(k), own_storage(v)))
        return self.gate(y, m), state  # eq. 25

    def _read(self, y: Hidden, s: Hidden) -> Hidden:
        """z: what the memory reads of tokens s and of what attention made of them (D36)."""
        return y + s if self.config.memory_reads_residual else y

    def _segment_start(
        self, state: MACState, memory: LayerState, ctx: ForwardContext, phase: int | Tensor, length: int
    ) -> tuple[Tensor, ...]:
        """The memory that the next token recalls from: a new one where the call has ended a segment."""
        if isinstance(phase, int) and ctx.lengths is None:
            ended = phase + length == self.config.segment_len
            return memory.memory.M if ended else state.at_segment_start
        counted = length if ctx.lengths is None else ctx.lengths
        ended = phase + counted == self.config.segment_len
        # Where it can be looked at without a GPU waiting:
        if isinstance(ended, Tensor) and ended.is_cpu and not torch.compiler.is_compiling():
            rows = ended.tolist()
            if all(rows) or not any(rows):  # no need to copy a memory to take all of it
                return memory.memory.M if rows[0] else state.at_segment_start
        return select_rows(ended, memory.memory.M, state.at_segment_start)


def concat_segments(outputs: list[Tensor]) -> Tensor:
    """The outputs of a call's segments, one after another; a single one as it is."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class Gate(nn.Module):
    """y ⊗ m of attention's y and the memory's m (eq. 25 and 28; D9), ŷ and m̂ being their RMSNorms with learned weights.

    "mutual":  (ŷ ∘ σ(m̂) + m̂ ∘ σ(ŷ)) W_O
    "memory":  (ŷ ∘ σ(m̂)) W_O
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        E, self.gating = config.hidden_size, config.gating
        # What attention makes at first is noise of the memory's own size, and hides what the memory recalls (D9).
        self.attention_norm = RMSNorm(E, config.norm_eps, start=0.3 if self.gating == "mutual" else 1.0)
        self.memory_norm = RMSNorm(E, config.norm_eps)
        self.o_proj = Linear(E, E, bias=False)

    def forward(self, y: Hidden, m: Hidden) -> Hidden:
        return gated_linear(self.gating, self.o_proj, y, m, self.attention_norm, self.memory_norm)


class HybridBlock(Block):
    """A memory and sliding-window attention."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.memory = NeuralMemory(config)
        self.attention = WindowAttention(config, self.memory if config.shared_qkv else None)

    def init_state(self, batch_size: int, frozen: bool = False) -> HybridState:
        return HybridState(self.memory_start(self.memory, batch_size, frozen), self.attention.init_state(batch_size))


class MAGBlock(HybridBlock):
    """Memory as a gate: sliding-window attention and memory side by side, multiplied.

    x̃ = [P | x],   y = SWA(x̃)                                                                (eq. 26–27)
    o = y ⊗ M(x̃)                                                                             (eq. 28)

    With `shared_qkv` both branches read one q, k, v of x̃, made once by the memory's maps and convolutions (D41).
    Behind another block the memory's x̃ holds the embeddings too (D56).
    """

    beside = True

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.gate = Gate(config)

    def mix(self, x: Hidden, state: HybridState, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, HybridState]:
        streams = self.memory.streams(x, state.memory.conv, ctx.lengths) if self.config.shared_qkv else None
        y, attention = self.attention(x, state.attention, ctx, self.persistent, streams)
        s = x if self.embedding_norm is None else self.memory_norm(stream) + self.embedding_norm(ctx.embeddings)
        m, memory = self.memory(s, state.memory, ctx.lengths, ctx.diagnostics, ctx.frozen, streams)
        return self.gate(y, m), HybridState(memory, attention)


class MALBlock(HybridBlock):
    """Memory as a layer: the memory compresses, then sliding-window attention looks at what it made.

    x̃ = [P | x],   y = M(x̃)                                                                  (eq. 29–30)
    o = SWA(y)                                                                               (eq. 31)

    Both are layers with a residual of their own (D19), so attention reads norm(s + y) and the block adds y + o, where s
    is the residual stream that x is the norm of.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.between = RMSNorm(config.hidden_size, config.norm_eps)

    def mix(self, x: Hidden, state: HybridState, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, HybridState]:
        y, memory = self.memory(x, state.memory, ctx.lengths, ctx.diagnostics, ctx.frozen)
        o, attention = self.attention(self.between(stream + y), state.attention, ctx, self.persistent)
        return y + o, HybridState(memory, attention)


class AttentionBlock(Block):
    """No memory: full causal attention over everything read so far."""

    kind: type[QKVProjection] = FullAttention

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.attention = self.kind(config)

    def init_state(self, batch_size: int, frozen: bool = False) -> KeyValues:
        return self.attention.init_state(batch_size)

    def mix(self, x: Hidden, state: KeyValues, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, KeyValues]:
        return self.attention(x, state, ctx, self.persistent)


class SlidingBlock(AttentionBlock):
    """No memory: what is left of MAG and MAL, sliding-window attention."""

    kind = WindowAttention


class SegmentBlock(AttentionBlock):
    """No memory: what is left of MAC, attention inside segments."""

    kind = SegmentAttention

    def mix(self, x: Hidden, state: KeyValues, ctx: ForwardContext, stream: Hidden) -> tuple[Hidden, KeyValues]:
        call, outputs = self.attention.prepare(x.shape[1]), []
        qkv = self.attention.project(x, state.conv, ctx, self.persistent, kv=call.kv)
        slices = segment_slices(ctx, x.shape[1], self.config.segment_len)
        for (segment, phase), qkv_t in zip(
            slices, qkv.split([segment.rope.cos.shape[1] for segment, _ in slices]), strict=True
        ):
            o, state, _ = self.attention(qkv_t, state, segment, phase, call=call)
            outputs.append(o)
        return concat_segments(outputs), compact(state) if x.shape[1] > 1 else state


BLOCKS: dict[str, type[Block]] = {
    "lmm": LMMBlock,
    "mac": MACBlock,
    "mag": MAGBlock,
    "mal": MALBlock,
    "tnt": TNTBlock,
    "attention": AttentionBlock,
    "sliding": SlidingBlock,
    "segment": SegmentBlock,
}
