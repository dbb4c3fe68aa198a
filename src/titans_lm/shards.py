"""Shards: pieces of a text at whose start local memories begin anew, and which are therefore read side by side.

A row of T tokens is n rows of one shard each. Only the first of them goes on from a state; the others start afresh.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from titans_lm.config import Backend
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory
from titans_lm.ops.state import map_state, select_rows, take_places, take_rows

State = TypeVar("State")

OUTER_PRODUCTS = MemoryNetwork(residual=False, objective="dot")
"""The linear memory of the dot product, whose W is Σ θ kᵀ v."""


class LocalMemories(NamedTuple):
    """What goes on inside a shard: N memories, Σ kᵀ k of its keys, and the number of its tokens that were read."""

    memories: tuple[MemoryState, ...]
    keys: Float[Tensor, "B H D D"] | None
    read: Int[Tensor, " B"]


class Shards(NamedTuple):
    """Where the tokens of a call lie: n shards of `size` places for each row, the first begun `read` tokens before.

    With n = 1 no token lies behind the end of its row's shard, and nothing is laid out. `lead` is `read` as a number,
    where rows stand together. `valid` marks the places that hold a token, None where all do.
    """

    n: int
    size: int
    read: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    lead: int | None
    valid: Bool[Tensor, "_ _"] | None

    @classmethod
    def of(cls, read: Int[Tensor, " B"], tokens: int, size: int, valid: Bool[Tensor, "B T"] | None) -> "Shards":
        """Lay out a call of so many tokens, of which the valid ones come first in every row."""
        lengths = torch.full_like(read, tokens) if valid is None else valid.sum(1)
        if tokens <= 1:  # which ends no shard before its last token
            return cls(1, size, read, lengths, None, valid)
        if torch.compiler.is_compiling():  # nobody knows where rows stand, and how many shards they meet at most
            n, lead = 1 + (tokens + size - 2) // size, None
        else:
            starts = set(read.tolist())
            n = -(-(max(starts) + tokens) // size)
            lead = starts.pop() if len(starts) == 1 else None
        if n == 1:
            return cls(1, size, read, lengths, lead, valid)
        place = torch.arange(n * size, device=read.device)
        there = (place >= read[:, None]) & (place < (read + lengths)[:, None])
        whole = lead == 0 and valid is None and tokens == n * size
        return cls(n, size, read, lengths, lead, None if whole else there.view(-1, size))

    def fold(self, x: Tensor) -> Tensor:
        """Tokens (B, T, …) by shards, (B n, size, …); what stands where no token is means nothing."""
        if self.n == 1:
            return x
        B, T = x.shape[:2]
        if self.lead is not None:
            trail = self.n * self.size - self.lead - T
            if self.lead or trail:
                x = F.pad(x, [0, 0] * (x.dim() - 2) + [self.lead, trail])
        else:
            place = torch.arange(self.n * self.size, device=x.device)
            x = take_places(x, (place - self.read[:, None]).clamp(0, T - 1))
        return x.reshape(B * self.n, self.size, *x.shape[2:])

    def unfold(self, x: Tensor, tokens: int) -> Tensor:
        """By shards (B n, size, …) as tokens again, (B, T, …)."""
        if self.n == 1:
            return x
        x = x.reshape(-1, self.n * self.size, *x.shape[2:])
        if self.lead is not None:
            return x[:, self.lead : self.lead + tokens]
        place = self.read[:, None] + torch.arange(tokens, device=x.device)
        return take_places(x, place.clamp(max=x.shape[1] - 1))

    def start(self, state: State, fresh: Callable[[int], State]) -> State:
        """The states at the start of all shards: the row's own for its first one, made afresh for so many rows."""
        if self.n == 1:
            return state
        made = fresh(len(self.read) * self.n)
        if self.lead == 0:  # the row's own is fresh too
            return made

        def first(mine: Tensor, others: Tensor) -> Tensor:
            later = others.unflatten(0, (-1, self.n))[:, 1:]
            return torch.cat((mine[:, None], later), dim=1).flatten(0, 1)

        return map_state(first, state, made)

    def end(self, state: State, fresh: Callable[[int], State]) -> State:
        """The state after each row's last token; made afresh where that ends a shard."""
        B, filled = len(self.read), self.read + self.lengths
        if self.n > 1:
            last = (filled - 1).clamp(min=0) // self.size
            state = take_rows(state, torch.arange(B, device=last.device) * self.n + last)
        ended = filled % self.size == 0
        # Where it can be looked at without a GPU waiting: no need to copy memories to take none of them.
        if ended.is_cpu and not torch.compiler.is_compiling():
            rows = ended.tolist()
            if all(rows) or not any(rows):
                return fresh(B) if all(rows) else state
        return select_rows(ended, fresh(B), state)


def project(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T H D"],
    P: Float[Tensor, "B H D D"],
    valid: Bool[Tensor, "B T"] | None,
    backend: Backend,
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B H D D"]]:
    """q P_t with P_t = Σ kᵀ k of unit keys up to t, cut to norm 1; and P after the last token.

    Of different keys that are orthogonal P_t is a projection, and q P_t no longer than q. Keys that return or are alike
    make it longer, as many times as they are many, which says nothing about the question.
    """
    one, zero = k.new_ones(k.shape[:3]), k.new_zeros(k.shape[:3])
    state = MemoryState((P,), (torch.zeros_like(P),), (P,), torch.zeros(len(P), dtype=torch.int64, device=P.device))
    q, after = neural_memory(
        q, k, k, one, zero, zero, state, network=OUTER_PRODUCTS, chunk_size=1, valid=valid, backend=backend
    )
    return q / torch.linalg.vector_norm(q, dim=-1, keepdim=True).clamp(min=1.0), after.M[0]
