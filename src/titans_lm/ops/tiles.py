"""Small chunks of a linear memory, many at once: the errors of a whole tile solve one triangular system.

A tile is a number of chunks. An error of a linear memory is linear in the memory that it is taken at, and what a token
of the tile has added to that one is linear in its own error. So with m(t) the last position before the chunk of t, and
a₋, f₋, G₋ the weights of `ChunkGates` at m(t) instead of t (docs/derivation.md, section 14),

    (I + L) E = (a₋ ∘ K) M_0 + (f₋ ∘ K) S_0 + ((1 − a₋) ∘ K) M_init [+ K] − V        L = 2 (K Kᵀ) ∘ G₋

and with Δ = 2 E everything else is as in chunk_forward.py, the tile in place of the chunk. Its size changes no result.
Backward so are the reads and the updates of the state; what is a tile's own is the system. With Ē from both and B̄ the
gradient by its right side,

    B̄ = (I + L)⁻ᵀ Ē        L̄ = −B̄ Eᵀ
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titans_lm.ops.chunk_backward import ChunkBackward, StateGrads
from titans_lm.ops.chunk_forward import (
    NOTHING,
    BatchedNetwork,
    ChunkStates,
    ReadCache,
    Tokens,
    WriteCache,
    advance,
    by_chunk,
    chunk_ends,
    heads_first,
    inner_residual,
    rows_first,
    scale_pair,
    similarity,
)
from titans_lm.ops.gates import ChunkGates, have_channels
from titans_lm.ops.matmul import add_bmm_, bmm, bmm_into
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.state import MemoryState
from titans_lm.ops.wide import is_wide

FEWEST_CHUNKS = 3
"""Chunks of a tile from which it is faster than its chunks one after another (D37)."""
FEWEST_WIDE = 8
"""The same on a CPU where those would go by wide.py, of 4, 8 and 16 that were measured."""


def largest_tile(width: int, by_channel: bool, gpu: bool = False) -> int:
    """Tokens of a tile, at most, as measured (D37).

    The fewer tiles, the fewer passes over the state, D numbers for each of a token's; but every pair of a tile's tokens
    counts, and with channel-wise gates so does every channel of it. On a GPU the number of operations counts first.
    """
    if by_channel:
        return 8
    return 32 if width <= 64 and not gpu else 64


def tile_size(
    network: MemoryNetwork, state: MemoryState, gates: Sequence[tuple[Tensor, ...]], chunk_size: int, length: int
) -> int:
    """Tokens of a tile of a call, whole chunks; one chunk where tiles cannot do it, or are not faster."""
    plain = network.objective in ("l2", "dot") and network.read_at == "token"
    if len(state.M) > 1 or network.norm_weight is not None or not plain:
        return chunk_size
    M, by_channel = state.M[0], have_channels(gates)
    most = largest_tile(min(M.shape[2:]), by_channel, M.is_cuda)  # with wider keys pairs and passes over M cost more
    wide = is_wide(network, state.M, by_channel) and not M.is_cuda
    if (FEWEST_WIDE if wide else FEWEST_CHUNKS) * chunk_size > most:
        return chunk_size
    return max(1, min(most, length) // chunk_size) * chunk_size


class Piece(NamedTuple):
    """Tokens of a call that run by one method: by tiles, or in the chunk that they are the end or the beginning of."""

    tokens: slice
    valid: Tensor | None
    tiled: bool


def pieces(state: MemoryState, length: int, chunk_size: int, valid: Tensor | None) -> list[Piece]:
    """Cut a call where its first chunk ends and its last one begins, so that tiles meet whole chunks and no anchor.

    The first chunk is a piece of its own where the call starts inside it, or at an anchor that is not the memory.
    """
    anchored = any(a is not w for a, w in zip(state.anchor, state.M, strict=True))
    starts = {0} if chunk_size == 1 else set(state.offset.tolist())
    if valid is None and len(starts) == 1:
        start = starts.pop()
        head = min(length, chunk_size - start) if start or anchored else 0
        tail = max(0, (start + length) % chunk_size) if head < length else 0
        borders = [0, head, length - tail, length]
        found = [Piece(slice(*borders[i : i + 2]), None, i == 1) for i in range(3)]
        return [piece for piece in found if piece.tokens.start < piece.tokens.stop]
    if valid is None:
        valid = torch.ones(len(state.offset), length, dtype=torch.bool, device=state.offset.device)
    if chunk_size == 1 and not anchored:
        return [Piece(slice(None), valid, True)]
    place = state.offset[:, None] + valid.cumsum(1) - 1
    first = valid & (place < chunk_size) & ((state.offset[:, None] > 0) | anchored)
    end = state.offset + valid.sum(1)
    last = valid & (place >= (end - end % chunk_size)[:, None]) & ~first
    masks = first, valid & ~first & ~last, last
    return [Piece(slice(None), mask, i == 1) for i, mask in enumerate(masks) if i == 1 or bool(mask.any())]


class System(NamedTuple):
    """What a tile's errors solve, as far as no state is needed, for all tiles of a group.

    similar is K Kᵀ, (n R, C, C), None with channel-wise gates; G is G₋; before is [a₋ ∘ K | f₋ ∘ K], (n R, C, 2 D);
    inverse is 2 (I + L)⁻¹, which takes the right side to Δ.
    """

    similar: Tensor | None
    G: Tensor
    before: Tensor
    inverse: Tensor


def chunk_starts(x: Tensor, chunk: int, first: float) -> Tensor:
    """The rows of (…, C, K) at m(t) in place of t: `first` in the tile's first chunk."""
    found = torch.full_like(x, first)
    found.unflatten(-2, (-1, chunk))[..., 1:, :, :] = x.unflatten(-2, (-1, chunk))[..., :-1, -1:, :]
    return found


def make_system(k: Tensor, g: ChunkGates, chunk: int) -> System:
    """The system of tiles of chunks of `chunk` tokens."""
    G, C = chunk_starts(g.G, chunk, 0.0), k.shape[1]
    a, f = chunk_starts(g.a, chunk, 1.0), chunk_starts(g.f, chunk, 0.0)
    similar, weighted = similarity(k, k, G)
    twice = torch.eye(C, dtype=k.dtype, device=k.device).mul_(2.0).expand_as(weighted)
    inverse = torch.linalg.solve_triangular(2.0 * weighted, twice, upper=False, unitriangular=True)
    return System(similar, G, scale_pair(k, a, f), inverse)


def write_tiles(
    rows: BatchedNetwork, tokens: Tokens, g: ChunkGates, states: ChunkStates, system: System, kept: Tensor | None = None
) -> WriteCache:
    """Write all tiles of a group, one after another: Δ of every token, and the states between.

    A second time, for the gradients of writing, `kept` is Δ of the first (n R, C, D), which then is not made again.
    """
    k, R = tokens.k, rows.count
    scaled = scale_pair(k, g.memory_end, g.surprise_end)
    right = inner_residual(rows, tokens) if kept is None else None
    if right is not None and rows.decay_target is not None:
        forgotten = heads_first(k - system.before[..., : k.shape[2]], rows)
        right += rows_first(bmm(forgotten, rows.decay_target[0]), rows, k.shape[1])
    delta = torch.empty_like(tokens.v) if kept is None else kept
    ends, scaled_t, deltas = chunk_ends(rows, [g]), by_chunk([scaled], R, True), by_chunk([delta], R)
    inverse, before = by_chunk([system.inverse, system.before], R)
    misses = () if right is None else right.split(R)
    for i, end in enumerate(ends):
        if misses:
            bmm_into(inverse[i], add_bmm_(misses[i], before[i], states.at[0][i]), deltas[0][i])
        if kept is None or i < len(ends) - 1:  # no gradient needs what the last tile leaves
            advance(rows, states, i, end, scaled_t, deltas)
    return WriteCache([k], [scaled], [delta], [delta], [], NOTHING, NOTHING, NOTHING)


class TileBackward(ChunkBackward):
    """The gradients of a group whose chunks were written by tiles."""

    def run_tiles(
        self, d_out: Tensor, found: ReadCache, carried: StateGrads, system: System, chunk: int
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        dq = self._reads(d_out, found)
        right = self._tiles(found, carried, system)
        self._system(right, system, chunk)
        dk = self.d_inputs[0]
        return [dq, dk + right if self.rows.network.residual else dk, -right], self.gate_grads

    def _tiles(self, found: ReadCache, carried: StateGrads, system: System) -> Tensor:
        """Last tile first through states and errors; returns B̄ of all."""
        self._prepare(found)
        right = torch.empty_like(self.tokens.v)
        R, both = self.rows.count, carried.both[0]
        inverse_t, before_t = by_chunk([system.inverse, system.before], R, True)
        for i, right_i in reversed(list(enumerate(right.split(R)))):
            self._advance(0, i, carried)
            bmm_into(inverse_t[i], self.d_delta[0][i], right_i)
            add_bmm_(both, self.both_t[0][i], self.d_read_at[0][i])
            add_bmm_(both, before_t[i], right_i)
        self._ends()
        return right

    def _system(self, right: Tensor, system: System, chunk: int) -> None:
        """Through the right side and L, all tiles at once; adds to k̄, ā, f̄, Ḡ and the gradient by M_init."""
        k, g, grads, dk = self.tokens.k, self.gates[0], self.gate_grads[0], self.d_inputs[0]
        d_kept, d_past = bmm(right, self.states.both[0][: len(k)].mT).chunk(2, dim=-1)
        if self.rows.decay_target is not None:
            forgotten = k - system.before[..., : k.shape[-1]]
            dk += self._through_init(0, self.rows.decay_target[0], right, d_kept, forgotten)
        dk.addcmul_(d_kept, chunk_starts(g.a, chunk, 1.0)).addcmul_(d_past, chunk_starts(g.f, chunk, 0.0))
        d_weighted = bmm(right, self.written.deltas[0].mT).neg_()
        d_other, d_G = self._similar(d_weighted, system.similar, k, k, system.G, dk)
        dk += d_other
        for name, d in (
            ("a", (d_kept * k).sum_to_size(g.a.shape)),
            ("f", (d_past * k).sum_to_size(g.f.shape)),
            ("G", d_G),
        ):
            ends = grads[name].unflatten(-2, (-1, chunk))[..., :-1, -1, :]
            ends += d.unflatten(-2, (-1, chunk))[..., 1:, :, :].sum(-2)
