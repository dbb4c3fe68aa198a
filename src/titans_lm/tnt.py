"""TNT: a global memory of long chunks, and local memories of short ones that start anew in every shard of the text.

With V the global memory and W⁽ⁱ⁾ the local ones, all of the same q, k and v, each with gates and an M_init of its own:

    V_t, W_t = written as ever, with chunks of C_G and C_i tokens; W = M_init at the start of a shard
    P_t      = Σ k_τᵀ k_τ over the tokens of the shard up to t
    o_t      = V_a(q_t) + Σ_i W_t⁽ⁱ⁾(q̃_t)        V_a: at the start of t's global chunk, q̃_t = q_t P_t cut to norm 1

Only writing is sequential, and only inside a shard for small chunks: shards are rows of one call. A chunk of the global
memory is one product however long it is, as nothing that it writes is read inside it.

Source: TNT (arXiv 2511.07343); what it leaves open is in D54.
"""

import dataclasses
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from titans_lm.config import MemoryConfig, SurpriseSizes
from titans_lm.memory import LayerState, NeuralMemory, Prepared
from titans_lm.memory_rule import Hidden, MemoryRule
from titans_lm.ops import MemoryState
from titans_lm.ops.polynomial import polynomial
from titans_lm.ops.state import map_state
from titans_lm.shards import LocalMemories, Shards, project


class LocalMemory(MemoryRule):
    """A memory that starts anew in every shard."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.add_parts()
        self.reset_parameters()

    def forward(
        self,
        x: Hidden,
        k: Float[Tensor, "B T H D"],
        tokens: tuple[Tensor, Tensor, Tensor],
        state: MemoryState,
        shards: Shards,
        surprise: SurpriseSizes,
        frozen: bool,
    ) -> tuple[Float[Tensor, "B T H D"], MemoryState, list[Tensor]]:
        """Write and answer `tokens`, q, k and v by shards; x and k are the same tokens, of which its gates are made."""
        gates, extra = map_state(shards.fold, (self.gates(x, k, frozen), self.per_token(x, k)))
        memory = shards.start(state, self.initial_memory)
        o, memory, *norms = self.op(surprise)(*tokens, *gates, memory, valid=shards.valid, extra=extra)
        unfolded = [shards.unfold(y, x.shape[1]) for y in (o, *norms)]
        return unfolded[0], shards.end(memory, self.initial_memory), unfolded[1:]


class TNTMemory(NeuralMemory):
    """`NeuralMemory` as the global memory, and local ones beside it; their answers are added.

        memory = TNTMemory(hidden_size=64, tnt_global_chunk=256, tnt_local_chunks=(8,), tnt_shard=512)
        y, state = memory(x)                            x, y (B, T, 64)

    Sizes of surprise are those of all its memories together. What is frozen (D31) still sums up keys, which is no
    knowledge of values, and local memories lose past surprise.
    """

    read_at = "anchor"

    def __init__(self, config: MemoryConfig | None = None, **settings: Any) -> None:
        """Set it up as a `NeuralMemory`; ValueError also for settings that its memories do not have."""
        super().__init__(config, **settings)
        c = self.config
        self.local = nn.ModuleList(
            LocalMemory(dataclasses.replace(c, chunk_size=chunk)) for chunk in c.tnt_local_chunks
        )

    def add_parts(self) -> None:
        """Make the global memory's, whose chunk is another."""
        self.config.check_tnt_goes_with()
        if self.config.memory_caching is not None:  # in a stack it may be that of other blocks
            raise ValueError(
                f"got memory_caching={self.config.memory_caching!r} with tnt; expected None, or another layer"
            )
        self.config = dataclasses.replace(self.config, chunk_size=self.config.tnt_global_chunk)
        super().add_parts()

    def init_state(self, batch_size: int) -> LayerState:
        """The state before the first token, at the start of a shard."""
        state = super().init_state(batch_size)
        memories = tuple([rule.initial_memory(batch_size) for rule in self.local])
        keys = self._no_keys(batch_size) if self.config.tnt_projection else None
        return state._replace(local=LocalMemories(memories, keys, torch.zeros_like(state.memory.offset)))

    def _no_keys(self, batch_size: int) -> Float[Tensor, "B H D D"]:
        """Σ kᵀ k of none."""
        weight, c = self.initial_weights[-1], self.config
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return weight.new_zeros(batch_size, c.num_attention_heads, c.head_dim, c.head_dim, dtype=dtype)

    def _has_form_of(self, state: LayerState) -> bool:
        local = state.local
        if local is None or state.cached is not None or len(local.memories) != len(self.local):
            return False
        return (local.keys is not None) == self.config.tnt_projection

    def learn(
        self,
        x: Hidden,
        tokens: tuple[Tensor, Tensor, Tensor],
        state: LayerState,
        valid: Bool[Tensor, "B T"] | None,
        surprise: SurpriseSizes,
        frozen: bool,
        prepared: Prepared,
    ) -> tuple[Float[Tensor, "B T H D"], LayerState, Tensor | None]:
        o, state, norms = super().learn(x, tokens, state, valid, surprise, frozen, prepared)
        (_, key, _), local = tokens, state.local
        assert local is not None, "made by init_state"
        shards = Shards.of(local.read, x.shape[1], self.config.tnt_shard, valid)
        (q, k, v), keys = map_state(shards.fold, tokens), local.keys
        if keys is not None:
            begun = shards.start(keys, self._no_keys)
            q, keys = project(q, k, begun, shards.valid, self.config.memory_backend)
            keys = shards.end(keys, self._no_keys)
        if (shares := self.coefficients) is not None:
            q, k = polynomial(q, shares), polynomial(k, shares)
        memories, sizes = [], [] if norms is None else [norms]
        for rule, memory in zip(self.local, local.memories, strict=True):
            answer, memory, found = rule(x, key, (q, k, v), memory, shards, surprise, frozen)
            o = o + answer
            memories.append(memory)
            sizes += found
        open_shard = (shards.read + shards.lengths) % shards.size
        after = state._replace(local=LocalMemories(tuple(memories), keys, open_shard))
        return o, after, torch.stack(sizes).square().sum(0).sqrt() if sizes else None
