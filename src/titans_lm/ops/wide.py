"""A linear memory whose keys are wider than its values: gates scale what it gives and is given, and no keys.

Polynomial keys have many times the channels of values (polynomial.py). Where a gate has one value per token, it may as
well stand on the narrow side of a product (docs/derivation.md, section 16):

    (a ∘ x) W = a ∘ (x W)        (k ∘ ω)ᵀ δ = kᵀ (ω ∘ δ)

so that one product x [W | S] serves both halves, and no weighted copy of a key is made. All else is as in
chunk_forward.py and chunk_backward.py. Many small chunks go by tiles before (tiles.py), whose keys are weighted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titans_lm.ops.chunk_backward import ChunkBackward, StateGrads
from titans_lm.ops.chunk_forward import (
    BatchedNetwork,
    ChunkStates,
    LastError,
    ReadCache,
    Tokens,
    WriteCache,
    advance,
    by_chunk,
    chunk_ends,
    heads_first,
    rows_first,
    scale_pair,
    similarity,
)
from titans_lm.ops.gates import ChunkGates
from titans_lm.ops.matmul import add_bmm_, bmm, bmm_into
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.polynomial import Narrow, lead_monomials_back

LEAST_RATIO = 4
"""Channels of keys for each of values from which a memory is wide: outputs are then kept in two parts."""


def is_wide(network: MemoryNetwork, M: Sequence[Tensor], by_channel: bool) -> bool:
    """Whether a memory is wide: one layer (B, H, D_in, D_out), read at tokens, gates of one value per token."""
    if by_channel or len(M) > 1 or network.read_at != "token":
        return False
    return M[0].shape[2] >= LEAST_RATIO * M[0].shape[3]


def transposed(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same weights, in memory by columns, as the states of a wide memory are."""
    return tuple([w.mT.contiguous().mT for w in weights])


def write_wide(
    rows: BatchedNetwork,
    tokens: Tokens,
    g: ChunkGates,
    states: ChunkStates,
    complete: tuple[bool | Tensor, ...],
    kept: Tensor | None = None,
    collect: bool = False,
) -> WriteCache:
    """`write`, with [ω ∘ δ | σ ∘ δ] for what it calls scaled."""
    k, R, n = tokens.k, rows.count, len(complete)
    z = torch.empty_like(tokens.v) if kept is None else kept
    delta, scaled = torch.empty_like(z), z.new_empty(*z.shape[:2], 2 * z.shape[2])
    last = LastError(rows, tokens, collect=collect or kept is not None)
    ends, scaled_t = chunk_ends(rows, [g]), by_chunk([scaled], R, True)
    weights, twice = torch.stack((g.memory_end, g.surprise_end), dim=2), scaled.unflatten(-1, (2, -1))
    k_at, z_at, delta_at, one, weights_at, twice_at = by_chunk([k, z, delta, delta.unsqueeze(2), weights, twice], R)
    for i in range(n):
        if kept is None:
            bmm_into(k_at[i], states.anchors[i][0], z_at[i])
        last.into(delta_at[i], i, z_at[i])
        torch.mul(one[i], weights_at[i], out=twice_at[i])
        if kept is None or i < n - 1:  # no gradient needs what the last chunk leaves
            advance(rows, states, i, ends[i], scaled_t, [k_at])
            states.close(i, complete[i])
    return WriteCache([k], [scaled], [z], [delta], [], *last.norm())


def read_wide(
    rows: BatchedNetwork,
    q: Tensor,
    g: ChunkGates,
    written: WriteCache,
    states: ChunkStates,
    kept: Tensor | None = None,
    parts: Tensor | None = None,
    narrow: Narrow | None = None,
) -> ReadCache:
    """`read`: z = q W_init + a ∘ (q (W − W_init)) + f ∘ (q S) − ((q kᵀ) ∘ G) Δ, with [q (W − W_init) | q S] for `both`.

    A second time `kept` is z and `parts` those two, which then are not made again. Products of polynomial keys are
    powers of what they were made of, `narrow`, D products in place of C(D + p, p).
    """
    if narrow is None:
        raw, weighted = similarity(q, written.inputs[0], g.G)
    else:
        raw = narrow.similarity()
        weighted = raw * g.G
    if kept is not None and parts is not None:
        return ReadCache([q], [parts], [raw], [weighted], [kept])
    parts = bmm(q, states.both[0][: len(q)])
    of_memory, of_surprise = parts.chunk(2, dim=-1)
    if rows.decay_target is None:
        z = of_memory * g.a
    else:
        initial = rows_first(bmm(heads_first(q, rows), rows.decay_target[0]), rows, q.shape[1])
        z = torch.lerp(initial, of_memory, g.a)
        of_memory -= initial
    add_bmm_(z.addcmul_(of_surprise, g.f), weighted, written.deltas[0], alpha=-1)
    return ReadCache([q], [parts], [raw], [weighted], [z])


class WideBackward(ChunkBackward):
    """The gradients of a group of a wide memory; by what polynomial keys were made of, if the group has made them."""

    def run(
        self, d_out: Tensor, found: ReadCache, complete: tuple[bool | Tensor, ...], carried: StateGrads
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        by_token, by_gates = super().run(d_out, found, complete, carried)
        if (narrow := self.tokens.narrow) is not None:
            for i, x in enumerate((narrow.q, narrow.k)):
                d, by_root = lead_monomials_back(narrow.by_head(by_token[i]), narrow.by_head(x), narrow.roots)
                self.shared.roots += by_root.sum_to_size(narrow.roots.shape)
                by_token[i] = self.d_narrow[i] + d.flatten(0, 1)
        return by_token, by_gates

    def _similar(
        self, d_weighted: Tensor, raw: Tensor | None, x: Tensor, h: Tensor, G: Tensor, dx: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Through the powers of what keys were made of; the gradient by the keys then begins in `_added`."""
        narrow = self.tokens.narrow
        if narrow is None or raw is None:
            return super()._similar(d_weighted, raw, x, h, G, dx)
        d_G = d_weighted * raw
        *self.d_narrow, d_roots = narrow.lead_similarity_back(d_weighted.mul_(G))
        self.shared.roots += d_roots
        return torch.empty_like(h), d_G

    def _reads(self, d_out: Tensor, found: ReadCache) -> Tensor:
        rows, g, x, parts = self.rows, self.gates[0], found.inputs[0], found.both[0]
        dz = self._output(d_out, found.pre[0])
        self.d_parts = scale_pair(dz, g.a, g.f)
        dx = bmm(self.d_parts, self.states.both[0][: len(x)].mT)
        if rows.decay_target is not None:
            by_head = heads_first(dz - self.d_parts[..., : dz.shape[-1]], rows)
            add_bmm_(self.shared.initial[0].mT, by_head.mT, heads_first(x, rows))
            dx += rows_first(bmm(by_head, rows.decay_target[0].mT), rows, dz.shape[1])
        d_a, d_f = (parts.unflatten(-1, (2, -1)) * dz.unsqueeze(2)).sum(-1, keepdim=True).unbind(2)
        self.gate_grads[0] |= {"a": d_a, "f": d_f}
        self._similarity(0, dz, dx, found)
        return dx  # a residual needs keys as wide as values

    def _prepare(self, found: ReadCache) -> None:
        """The chunks' shares of the gradient by the state are [a ∘ z̄ | f ∘ z̄]ᵀ x."""
        self.d_read, self.paired = found.inputs, self.written.deltas
        super()._prepare(found._replace(both=[self.d_parts]))
        self.k_at = by_chunk(self.written.inputs, self.rows.count)[0]

    def _added(self, layer: int, i: int, both: Tensor) -> None:
        """Through −kᵀ (ω ∘ δ) and −kᵀ (σ ∘ δ) to k̄ and δ̄."""
        d_memory, d_surprise = bmm_into(self.k_at[i], both.mT, self.d_scaled_at[0][i]).chunk(2, dim=-1)
        memory_end, surprise_end = self.weighs[0]
        self.d_delta[0][i].addcmul_(d_memory, memory_end[i], value=-1).addcmul_(d_surprise, surprise_end[i], value=-1)
        if self.tokens.narrow is None:
            add_bmm_(self.d_h[0][i], self.scaled[0][i], both, alpha=-1)
        else:
            torch.baddbmm(self.d_h[0][i], self.scaled[0][i], both, beta=0, alpha=-1, out=self.d_h[0][i])

    def _errors(self, i: int, d_anchor: list[Tensor]) -> None:
        """Through the errors of chunk i, of one layer, to k̄ and to the gradient by the anchor."""
        self._last_error(i, self.d_delta[0][i])
        d_z = self.d_z[0][i]
        add_bmm_(d_anchor[0], d_z.mT, self.k_at[i])
        add_bmm_(self.d_h[0][i], d_z, self.states.anchors[i][0].mT)
