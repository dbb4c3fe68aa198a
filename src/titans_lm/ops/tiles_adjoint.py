"""A group of tiles, backward: the gradients of `tiles.py` by hand (docs/derivation.md, section 14).

The reads go back as those of chunks do, and so do the updates of the state; what is a tile's own is the system that
its errors solve. With Ē from both and B̄ the gradient by its right side,

    B̄ = (I + L)⁻ᵀ Ē        L̄ = −B̄ Eᵀ
"""

import torch
from torch import Tensor

from titans_lm.ops.chunk_backward import ChunkBackward, StateGrads, similarity_backward
from titans_lm.ops.chunk_forward import ReadCache, by_chunk
from titans_lm.ops.matmul import add_bmm_, bmm, bmm_into
from titans_lm.ops.tiles import System, chunk_starts


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
        d_other, d_G = similarity_backward(d_weighted, system.similar, k, k, system.G, dk)
        dk += d_other
        for name, d in (
            ("a", (d_kept * k).sum_to_size(g.a.shape)),
            ("f", (d_past * k).sum_to_size(g.f.shape)),
            ("G", d_G),
        ):
            ends = grads[name].unflatten(-2, (-1, chunk))[..., :-1, -1, :]
            ends += d.unflatten(-2, (-1, chunk))[..., 1:, :, :].sum(-2)
