"""Memory caching: a memory that also answers from what it was at the ends of earlier segments.

A text is cut into segments of L tokens. M⁽ⁱ⁾ is the memory at the end of segment i, M_t the one that is written, and
c_i the mean key of a segment, of the open one up to t. Writing does not change; reading is a sum over memories:

    y_t = M_t(q_t) + Σ_i M⁽ⁱ⁾(q_t)                                 residual
    y_t = γ_0 M_t(q_t) + Σ_i γ_i M⁽ⁱ⁾(q_t)                         grm (gated residual memory)
    γ   = softmax of ⟨u_t, c_i⟩ over the open segment, b added, and the cached ones; u_t = x_t W_U
    the same over the open segment and the k cached ones with the largest ⟨u_t, c_i⟩      ssc (sparse selection)

Source: Memory Caching (arXiv 2602.24281). Its eq. 16 has the sum for the mean, and it has no b (D52). What is cached
is a value of constant size in the state: N slots, of the last N segments, or of Fenwick segments, whose lengths are the
powers of two that the number of segments is made of (37 → 32, 4, 1).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from titans_lm.config import MemoryConfig
from titans_lm.ops import MemoryNetwork, MemoryState, read
from titans_lm.ops.state import PerToken, map_state, select_rows


class CachedMemories(NamedTuple):
    """Memories at the ends of earlier segments, in N slots, and what tells them apart.

    `M` holds L tensors (B, N, H, D_{l−1}, D_l), `keys` the sums of the keys of their segments (B, N, H, D), `tokens`
    how many keys those are, 0 for an empty slot (B, N). `open_keys` (B, H, D) is the sum of the open segment, `read`
    (B,) counts all tokens.
    """

    M: tuple[Float[Tensor, "B N H _ _"], ...]
    keys: Float[Tensor, "B N H D"]
    tokens: Int[Tensor, "B N"]
    open_keys: Float[Tensor, "B H D"]
    read: Int[Tensor, " B"]

    @classmethod
    def empty(cls, M: tuple[Float[Tensor, "B H _ _"], ...], slots: int) -> "CachedMemories":
        """Nothing cached yet, for memories like these."""
        (B, H, *_), D = M[0].shape, M[-1].shape[-1]
        keys = M[0].new_zeros(B, slots, H, D)
        tokens = torch.zeros(B, slots, dtype=torch.int64, device=keys.device)
        return cls(
            tuple(m.new_zeros(B, slots, *m.shape[1:]) for m in M), keys, tokens, keys[:, 0].clone(),
            tokens.new_zeros(B),
        )  # fmt: skip


class Recall(NamedTuple):
    """How cached memories are read: the network, the settings, and b, the logit that the open segment has besides."""

    network: MemoryNetwork
    config: MemoryConfig
    open_logit: Float[Tensor, " H"] | float


def pieces(read_before: list[int], lengths: list[int], segment: int) -> list[tuple[int, list[bool]]]:
    """Where a call is cut, so that no row has the end of a segment inside a piece.

    Gives the end of each piece, in order, and which rows have the end of a segment there. Rows have read so many tokens
    before the call, and read so many of its tokens.
    """
    ends: dict[int, set[int]] = {}
    for row, (before, length) in enumerate(zip(read_before, lengths, strict=True)):
        for end in range(segment - before % segment, length + 1, segment):
            ends.setdefault(end, set()).add(row)
    rows = range(len(lengths))
    cut = [(end, [row in ending for row in rows]) for end, ending in sorted(ends.items())]
    longest = max(1, *lengths)  # a call of nothing but padding is a piece too
    return cut if longest in ends else [*cut, (longest, [False] * len(lengths))]


def cache_segment(
    cached: CachedMemories, M: tuple[Float[Tensor, "B H _ _"], ...], ends: Bool[Tensor, " B"], config: MemoryConfig
) -> CachedMemories:
    """Put the memories of the rows whose segment ends here into a slot, and open the next segment.

    The last N segments go round through the slots. A Fenwick segment is the one that has ended and all those of smaller
    powers of two before it, so that its slot is the power of two in the number of segments; the largest is the last's.
    """
    N = cached.tokens.shape[1]
    done = cached.read // config.caching_segment  # segments that have ended, the present one included
    places = torch.arange(N, device=done.device)
    keys, tokens = cached.open_keys, torch.full_like(done, config.caching_segment)
    if config.caching_lengths == "fenwick":
        powers = 2**places
        level = (done[:, None] % (2 * powers) == powers).long().argmax(1)
        level = torch.where(done % 2 ** (N - 1) == 0, N - 1, level)
        joined = (places < level[:, None]) & (cached.tokens > 0)  # they become part of the new one
        if_last = (places == level[:, None]) & (level[:, None] == N - 1)  # the largest grows for good
        joined = joined | (if_last & (cached.tokens > 0))
        keys = keys + (cached.keys * joined[..., None, None]).sum(1)
        tokens = tokens + (cached.tokens * joined).sum(1)
    else:
        level, joined = (done - 1) % N, torch.zeros_like(cached.tokens, dtype=torch.bool)
    into = places == level[:, None]
    new = CachedMemories(
        tuple(torch.where(into[..., None, None, None], m[:, None], kept) for m, kept in zip(M, cached.M, strict=True)),
        torch.where(into[..., None, None], keys[:, None], cached.keys),
        torch.where(into, tokens[:, None], cached.tokens * ~joined),
        torch.zeros_like(cached.open_keys),
        cached.read,
    )
    return select_rows(ends, new, cached)


def handicaps(u: Float[Tensor, "B T H D"], cached: CachedMemories, config: MemoryConfig) -> Float[Tensor, "B T H N"]:
    """What scores of earlier segments are lowered by where the best are chosen, so that of equal ones the last is.

    Rounding would choose else where a text repeats itself, and choose otherwise where it is cut otherwise: a step of
    age is 64 ε of the largest score that there can be, ‖u‖.
    """
    age = torch.arange(cached.tokens.shape[1], device=u.device).expand_as(cached.tokens)
    if config.caching_lengths == "equal":
        age = (cached.read[:, None] // config.caching_segment - 1 - age) % age.shape[1]
    return age[:, None, None] * (64.0 * torch.finfo(u.dtype).eps * torch.linalg.vector_norm(u, dim=-1, keepdim=True))


def mixed(
    o: Float[Tensor, "B T H D"],
    q: Float[Tensor, "B T H F"],
    k: Float[Tensor, "B T H D"],
    u: Float[Tensor, "B T H D"],
    cached: CachedMemories,
    recall: Recall,
    valid: Bool[Tensor, "B T"] | None,
) -> tuple[Float[Tensor, "B T H D"], CachedMemories]:
    """Join what the open memory answered, o, with the answers of the cached ones, inside one segment of each row."""
    B, T = q.shape[:2]
    keys = k if valid is None else k.masked_fill(~valid[..., None, None], 0.0)
    sums = cached.open_keys[:, None] + keys.cumsum(1)
    before = cached.read
    length = torch.full_like(before, T) if valid is None else valid.sum(1)
    after = cached._replace(open_keys=sums[:, -1], read=before + length)
    filled = cached.tokens > 0
    if not bool(filled.any()):
        return o, after
    N, config = filled.shape[1], recall.config
    weights = tuple(m.flatten(0, 1) for m in cached.M)
    network, (queries,) = recall.network.make_keys(q)  # once, and not for every slot
    answers = read(weights, queries.repeat_interleave(N, dim=0), network).view(B, N, *o.shape[1:])
    if config.memory_caching == "residual":
        return o + (answers * filled[:, :, None, None, None]).sum(1), after
    count = before[:, None] % config.caching_segment + torch.arange(1, T + 1, device=q.device)
    open_mean = sums / count[..., None, None]
    means = cached.keys / cached.tokens.clamp(min=1)[..., None, None]
    scores = torch.einsum("bthd,bnhd->bthn", u, means)
    scores = scores.masked_fill(~filled[:, None, None], -torch.inf)
    if config.memory_caching == "ssc" and config.caching_top < N:
        best = (scores - handicaps(u.detach(), cached, config)).topk(config.caching_top, dim=-1).indices
        scores = torch.full_like(scores, -torch.inf).scatter(-1, best, scores.gather(-1, best))
    open_score = (u * open_mean).sum(-1) + recall.open_logit
    gamma = torch.cat([open_score.unsqueeze(-1), scores], dim=-1).softmax(-1)
    return gamma[..., :1] * o + torch.einsum("bthn,bnthd->bthd", gamma[..., 1:], answers), after


def write_in_segments(
    write: Callable[..., tuple],
    tokens: tuple,
    extra: PerToken,
    keys: tuple[Float[Tensor, "B T H D"], Float[Tensor, "B T H D"]],
    states: tuple[MemoryState, CachedMemories],
    start: MemoryState | None,
    recall: Recall,
    valid: Bool[Tensor, "B T"] | None,
) -> tuple[Float[Tensor, "B T H D"], MemoryState, CachedMemories, list[Tensor]]:
    """Write q, k, v with their gates piece by piece, and read from the open memory and the cached ones.

    `write` is the op with all that is the same for every piece. `keys` are k and u, by which segments are told apart.
    Where segments start independently, `start` is the state that each starts from.
    """
    (B, T), (memory, cached) = keys[0].shape[:2], states
    lengths = [T] * B if valid is None else valid.sum(1).tolist()
    outputs, norms, begin = [], [], 0
    for end, ending in pieces(cached.read.tolist(), lengths, recall.config.caching_segment):
        given = tokens, extra, keys, valid
        (q, *rest), more, (k, u), seen = map_state(lambda x: x[:, begin:end], given)  # noqa: B023
        o, memory, *norm = write(q, *rest, memory, valid=seen, extra=more)
        o, cached = mixed(o, q, k, u, cached, recall, seen)
        outputs.append(o)
        norms += norm
        if any(ending):
            ends = torch.tensor(ending, device=o.device)
            cached = cache_segment(cached, memory.M, ends, recall.config)
            memory = memory if start is None else select_rows(ends, start, memory)
        begin = end
    if begin < T:  # padding of all rows
        outputs.append(outputs[0].new_zeros(B, T - begin, *outputs[0].shape[2:]))
        norms += [n.new_zeros(B, T - begin, *n.shape[2:]) for n in norms[:1]]
    return torch.cat(outputs, 1), memory, cached, [torch.cat(norms, 1)] if norms else []
