"""Tokens onto chunks: where every token of a call stands in the grid of its row's chunks.

Rows may differ in length, may have padding anywhere, and may start inside a chunk. The grid gathers a row's valid
tokens, shifts them by its offset, and so lets chunk borders fall where they would fall for that row alone.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from titans_lm.ops.state import take_places


@dataclass(frozen=True)
class TokenLayout:
    """How (B, T, …) tensors are laid out as (N, B, …, C, …) chunks and taken back.

    Exactly one form is in use: `source` is None when every row has the same shape (tokens are only shifted by `lead`),
    otherwise `source` (B, N·C) names the token at each position and `target` (B, T) the position of each token.
    `present` (B or 1, N·C) marks positions that hold a token, None when all do. `complete` says for every chunk whether
    it ends there: True or False for all rows, or one flag per row. `size` is the positions of one chunk.
    """

    chunks: int
    size: int
    lead: int
    length: int
    source: Int[Tensor, "B G"] | None
    target: Int[Tensor, "B T"] | None
    present: Bool[Tensor, "_ G"] | None
    complete: tuple[bool | Bool[Tensor, " B"], ...]
    offset: Int[Tensor, " B"]
    """Offset of every row after the call."""
    first: Int[Tensor, " B"] | None = None
    """Where the first token of every row stands, with `source`."""

    def place(self, x: Tensor) -> Tensor:
        """Lay (B, T, …) out as (N, B, C, …), zero where no token stands."""
        total = self.chunks * self.size
        if self.source is None:
            trail = total - self.lead - x.shape[1]
            if self.lead or trail:  # F.pad would fill all with zeros first, and copy gradients
                zeros = x.new_zeros(x.shape[0], self.lead + trail, *x.shape[2:])
                x = torch.cat((zeros[:, : self.lead], x, zeros[:, self.lead :]), dim=1)
        else:
            x = take_places(x, self.source)
            x = x * self.present.view(*self.source.shape, *[1] * (x.dim() - 2))  # type: ignore[union-attr]
        return x.unflatten(1, (self.chunks, self.size)).movedim(1, 0)

    def place_windows(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Lay tokens out with the W before each chunk, (N, B, W + C, …), zero where none stands; and the row's last W.

        `before` (B, W, …) are those before the call. A chunk's own tokens follow theirs in the order of the text.
        """
        both, W, C = torch.cat((before, x), dim=1), before.shape[1], self.size
        total = self.chunks * C + W
        if self.source is None:
            last = both[:, both.shape[1] - W :]
            both = F.pad(both, [0, 0] * (x.dim() - 2) + [self.lead, total - self.lead - both.shape[1]])
        else:
            rank = torch.arange(total, device=x.device) - self.first[:, None]  # type: ignore[index]
            count = self.present.sum(1)[:, None]  # type: ignore[union-attr]
            last = self._take(both, count + torch.arange(W, device=x.device), W)
            there = ((rank >= 0) & (rank < W + count)).view(*rank.shape, *[1] * (x.dim() - 2))
            both = self._take(both, rank.clamp(min=0), W) * there
        return both.unfold(1, W + C, C).movedim(-1, 2).movedim(1, 0), last.clone(memory_format=torch.contiguous_format)

    def _take(self, both: Tensor, rank: Tensor, W: int) -> Tensor:
        """Tokens of a row by their rank, among W from before the call and the row's valid ones."""
        place = (self.first[:, None] + rank - W).clamp(0, self.chunks * self.size - 1)  # type: ignore[index]
        return take_places(both, torch.where(rank < W, rank, W + self.source.gather(1, place)))  # type: ignore[union-attr]

    def mask(self) -> Bool[Tensor, "N _ 1 C"] | None:
        """`present` by chunk, shaped to broadcast over (N, B, H, C)."""
        if self.present is None:
            return None
        return self.present.unflatten(1, (self.chunks, self.size)).movedim(1, 0).unsqueeze(2)

    def restore(self, x: Tensor) -> Tensor:
        """Take (N, B, C, …) back to (B, T, …); tokens that were not valid get zero."""
        x = x.movedim(0, 1).flatten(1, 2)
        if self.target is None:
            x = x if x.shape[1] == self.length else x[:, self.lead : self.lead + self.length]
            if self.present is None or self.size > 1:
                return x
            return x * self.present.view(*self.present.shape, *[1] * (x.dim() - 2))  # chunks of one token, some of none
        x = take_places(x, self.target.clamp(min=0))
        return x * (self.target >= 0).view(*self.target.shape, *[1] * (x.dim() - 2))


def merge_heads(x: Tensor) -> Tensor:
    """(n, B, C, H, D) as (n R, C, D), contiguous."""
    return x.transpose(2, 3).flatten(0, 2).contiguous()


def split_heads(x: Tensor, batch: int, heads: int) -> Tensor:
    """(n R, C, …) as (n, B, C, H, …)."""
    return x.unflatten(0, (-1, batch, heads)).transpose(2, 3)


def make_layout(
    offset: Int[Tensor, " B"],
    length: int,
    chunk_size: int,
    valid: Bool[Tensor, "B T"] | None,
    windows: bool = False,
) -> TokenLayout:
    """Choose the grid for a call of `length` tokens that starts `offset` tokens into each row's chunk.

    For `windows` a row's tokens stand one behind another, without padding in between.
    """
    if (length == 1 or chunk_size == 1) and not windows:
        return _steps(offset, length, chunk_size, valid)
    if valid is None:
        starts = offset.tolist()
        if len(set(starts)) == 1:
            return uniform(offset, starts[0], length, chunk_size)
        valid = torch.ones(len(starts), length, dtype=torch.bool, device=offset.device)
    return ragged(offset, length, chunk_size, valid)


def _steps(offset: Tensor, length: int, chunk_size: int, valid: Tensor | None) -> TokenLayout:
    """Every token is a chunk of the grid on its own: one token cannot cross a border, whatever the offsets are."""
    complete = []
    for t in range(length):
        counted = 1 if valid is None else valid[:, t].to(offset.dtype)
        filled = offset + counted
        done = filled == chunk_size
        complete.append(True if chunk_size == 1 and valid is None else done)
        offset = torch.where(done, 0, filled)
    return TokenLayout(length, 1, 0, length, None, None, valid, tuple(complete), offset)


def uniform(offset: Tensor, start: int, length: int, chunk_size: int) -> TokenLayout:
    """All rows stand at the same place and all tokens are real."""
    filled = start + length
    chunks, ends = -(-filled // chunk_size), filled % chunk_size
    if filled <= chunk_size:  # the call ends inside the chunk it starts in: no need to lay out the rest of it
        done = filled == chunk_size
        return TokenLayout(1, length, 0, length, None, None, None, (done,), torch.full_like(offset, ends))
    present = None
    if start or ends:
        place = torch.arange(chunks * chunk_size, device=offset.device)
        present = ((place >= start) & (place < filled)).unsqueeze(0)
    complete = (*[True] * (chunks - 1), ends == 0)
    end = offset if ends == start else torch.full_like(offset, ends)
    return TokenLayout(chunks, chunk_size, start, length, None, None, present, complete, end)


def ragged(offset: Tensor, length: int, chunk_size: int, valid: Tensor, whole: bool = False) -> TokenLayout:
    """Rows of different length, with padding anywhere or different offsets; `whole` chunks whatever is in them."""
    count = valid.sum(1)
    filled = offset + count
    inside = not whole and int(filled.max()) <= chunk_size  # all end in their first chunk: the rest need not be there
    first, size = (torch.zeros_like(offset), max(1, int(count.max()))) if inside else (offset, chunk_size)
    chunks = 1 if inside else max(1, -(-int(filled.max()) // chunk_size))
    place = torch.arange(chunks * size, device=offset.device)
    rank = place - first[:, None]  # which of the row's valid tokens stands at a position
    present = (rank >= 0) & (rank < count[:, None])
    order = torch.argsort(~valid, dim=1, stable=True)  # valid tokens first, in their order
    source = order.gather(1, rank.clamp(0, length - 1))
    target = torch.where(valid, first[:, None] + valid.cumsum(1) - 1, -1)
    last = (filled == chunk_size)[:, None] if inside else present.unflatten(1, (chunks, size))[..., -1]
    return TokenLayout(
        chunks, size, 0, length, source, target, present, tuple(last.unbind(1)), filled % chunk_size, first
    )
