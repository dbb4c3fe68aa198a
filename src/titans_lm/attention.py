"""Attention in three ranges (all, window, segment), each with a persistent prefix and its keys and values as a value.

Persistent rows come first in every softmax and know no position: their rotated channels are zero (D11, D18). A row of
the batch may hold fewer tokens than others; the masks follow each row's own count.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import BackboneConfig
from titans_lm.layers import Call, Rope, ShortConvolution, last_rows, rotate, valid_tokens
from titans_lm.ops.state import state_dtype

Heads = Float[Tensor, "B _ H D"]


class KeyValues(NamedTuple):
    """Keys and values (B, N, H, D) that later tokens may look back at, and the tails of the convolutions if any."""

    k: Tensor
    v: Tensor
    conv: tuple[Tensor, ...]


def attend(q: Heads, k: Heads, v: Heads, mask: Bool[Tensor, "_ T N"]) -> Heads:
    """softmax(q kᵀ / √D + mask) v on (B, T, H, D) tensors; True in the mask means visible."""
    heads_first = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask.unsqueeze(1)).transpose(1, 2)


class Projections(nn.Module):
    """q, k, v of the tokens (with a short convolution if set), keys and values of the prefix, and the way back."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        E = config.hidden_size
        self.heads, self.rotary = config.num_attention_heads, config.rotary_dim
        self.q_proj = nn.Linear(E, E, bias=False)
        self.k_proj = nn.Linear(E, E, bias=False)
        self.v_proj = nn.Linear(E, E, bias=False)
        self.o_proj = nn.Linear(E, E, bias=False)
        kernel = config.attention_conv_size
        self.convs = nn.ModuleList([ShortConvolution(E, kernel) for _ in range(3)] if kernel > 1 else [])

    def init_kv(self, batch_size: int, length: int) -> KeyValues:
        """Room for `length` keys and values, and empty tails."""
        weight = self.q_proj.weight
        shape = (batch_size, length, self.heads, weight.shape[0] // self.heads)
        k = torch.zeros(shape, dtype=state_dtype(weight.dtype), device=weight.device)
        return KeyValues(k, torch.zeros_like(k), tuple(conv.init_tail(batch_size) for conv in self.convs))

    def split(self, x: Float[Tensor, "_ T E"]) -> Float[Tensor, "_ T H D"]:
        return x.unflatten(-1, (self.heads, -1))

    def tokens(
        self, x: Float[Tensor, "B T E"], tails: tuple[Tensor, ...], rope: Rope, lengths: Int[Tensor, " B"] | None
    ) -> tuple[Heads, Heads, Heads, tuple[Tensor, ...]]:
        """Rotated queries and keys, and values, of the call's tokens."""
        qkv = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if self.convs:
            pairs = [conv(y, tail, lengths) for conv, y, tail in zip(self.convs, qkv, tails, strict=True)]
            qkv, tails = [y for y, _ in pairs], tuple(tail for _, tail in pairs)
        q, k, v = (self.split(y) for y in qkv)
        return rotate(q, rope), rotate(k, rope), v, tails

    def prefix(self, persistent: Float[Tensor, "P E"], batch_size: int) -> tuple[Heads, Heads]:
        """Keys and values of the persistent tokens; the keys are free of position."""
        k, v = self.split(self.k_proj(persistent[None])), self.split(self.v_proj(persistent[None]))
        k = torch.cat([torch.zeros_like(k[..., : self.rotary]), k[..., self.rotary :]], dim=-1)
        return k.expand(batch_size, -1, -1, -1), v.expand(batch_size, -1, -1, -1)

    def merge(self, y: Heads) -> Float[Tensor, "B T E"]:
        return self.o_proj(y.flatten(-2))


def see_prefix(mask: Bool[Tensor, "_ T N"], prefix: int) -> Bool[Tensor, "_ T PN"]:
    """Every token sees every persistent row."""
    return F.pad(mask, [prefix, 0], value=True)


class FullAttention(Projections):
    """Causal attention over everything read so far; its keys and values grow with the text."""

    def init_state(self, batch_size: int) -> KeyValues:
        return self.init_kv(batch_size, 0)

    def forward(
        self, x: Float[Tensor, "B T E"], state: KeyValues, call: Call, persistent: Float[Tensor, "P E"]
    ) -> tuple[Float[Tensor, "B T E"], KeyValues]:
        B, T = x.shape[:2]
        q, k, v, conv = self.tokens(x, state.conv, call.rope, call.lengths)
        seen = torch.arange(T, device=x.device)[None]
        if not call.fresh:
            # Every row's new keys follow its own last one, wherever other rows end.
            seen = call.position[:, None] + seen
            index = seen[..., None, None].expand_as(k)
            k, v = (
                F.pad(old, [0, 0, 0, 0, 0, T]).scatter(1, index, new.to(old.dtype))
                for old, new in ((state.k, k), (state.v, v))
            )
        mask = torch.arange(k.shape[1], device=x.device) <= seen[..., None]
        pk, pv = self.prefix(persistent, B)
        keys, values = torch.cat([pk, k.to(pk.dtype)], dim=1), torch.cat([pv, v.to(pv.dtype)], dim=1)
        y = attend(q, keys, values, see_prefix(mask, pk.shape[1]))
        return self.merge(y), KeyValues(k.to(state.k.dtype), v.to(state.v.dtype), conv)


class WindowAttention(Projections):
    """Causal attention over the last `window` tokens, the token itself included; linear in time and memory."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.window = config.window

    def init_state(self, batch_size: int) -> KeyValues:
        return self.init_kv(batch_size, self.window)

    def forward(
        self, x: Float[Tensor, "B T E"], state: KeyValues, call: Call, persistent: Float[Tensor, "P E"]
    ) -> tuple[Float[Tensor, "B T E"], KeyValues]:
        T, W = x.shape[1], self.window
        q, k, v, conv = self.tokens(x, state.conv, call.rope, call.lengths)
        k, v = (torch.cat([old.to(new.dtype), new], dim=1) for old, new in ((state.k, k), (state.v, v)))
        kept = [last_rows(y, W, call.lengths).to(state.k.dtype) for y in (k, v)]
        first = min(T, W)
        y = self._first(q[:, :first], k[:, : W + first], v[:, : W + first], call, persistent)
        if T > W:
            y = torch.cat([y, self._others(q, k, v, persistent)], dim=1)
        return self.merge(y), KeyValues(*kept, conv)

    def _first(self, q: Heads, k: Heads, v: Heads, call: Call, persistent: Tensor) -> Heads:
        """The first tokens of the call, which look back at what the state kept."""
        B, T, W = q.shape[0], q.shape[1], self.window
        i = torch.arange(T, device=q.device)[:, None]
        c = torch.arange(W + T, device=q.device)  # key c stands c − W tokens after the first query
        mask = ((c > i) & (c <= i + W))[None]
        if call.fresh:
            k, v, mask = k[:, W:], v[:, W:], mask[..., W:]
        else:
            mask = mask & (c >= W - call.position[:, None, None])
        pk, pv = self.prefix(persistent, B)
        return attend(q, torch.cat([pk, k], 1), torch.cat([pv, v], 1), see_prefix(mask, pk.shape[1]))

    def _others(self, q: Heads, k: Heads, v: Heads, persistent: Tensor) -> Heads:
        """Blocks of `window` tokens, each looking at itself and the block before it, all at once."""
        B, T, W = q.shape[0], q.shape[1], self.window
        blocks = -(-T // W) - 1
        pad = [0, 0, 0, 0, 0, (blocks + 1) * W - T]
        q = F.pad(q[:, W:], pad).unflatten(1, (blocks, W)).flatten(0, 1)
        pk, pv = self.prefix(persistent, B * blocks)
        # (B, blocks, H, D, 2W): block b holds keys b·W … (b + 2)·W of what follows the cached window
        keys, values = (F.pad(y[:, W:], pad).unfold(1, 2 * W, W).permute(0, 1, 4, 2, 3).flatten(0, 1) for y in (k, v))
        i = torch.arange(W, device=q.device)[:, None]
        c = torch.arange(2 * W, device=q.device)
        mask = see_prefix(((c > i) & (c <= i + W))[None], pk.shape[1])
        y = attend(q, torch.cat([pk, keys], 1), torch.cat([pv, values], 1), mask)
        return y.unflatten(0, (B, blocks)).flatten(1, 2)[:, : T - W]


class SegmentAttention(Projections):
    """Causal attention inside a segment of `segment_len` tokens, optionally with one recalled row per token.

    A call must lie inside one segment of every row; `phase` says how far into it the rows are, as one number or as
    (B,). Token i sees the persistent rows, recalled rows up to its own, and tokens up to itself: a recalled row is made
    from its token, so a later one would tell the future (MATH §4).
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        self.segment_len = config.segment_len

    def init_state(self, batch_size: int) -> KeyValues:
        return self.init_kv(batch_size, self.segment_len)

    def init_recalled(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of the recalled rows."""
        kv = self.init_kv(batch_size, self.segment_len)
        return kv.k, kv.v

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        state: KeyValues,
        call: Call,
        persistent: Float[Tensor, "P E"],
        phase: int | Int[Tensor, " B"],
        recalled: tuple[Float[Tensor, "B T E"], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KeyValues, tuple[Tensor, Tensor] | None]:
        """Attend; `recalled` are the call's rows and the keys and values of earlier ones in the segment."""
        B, T = x.shape[:2]
        q, k, v, conv = self.tokens(x, state.conv, call.rope, call.lengths)
        token = torch.arange(T, device=x.device)[None]
        slots = token + (phase if isinstance(phase, int) else phase[:, None])
        k, v = self._store(state.k, k, slots, phase, call), self._store(state.v, v, slots, phase, call)
        filled = phase + T if isinstance(phase, int) else self.segment_len
        mask = torch.arange(filled, device=x.device) <= slots[..., None]
        pk, pv = self.prefix(persistent, B)
        keys, values, rows = [pk, k[:, :filled].to(q.dtype)], [pv, v[:, :filled].to(q.dtype)], None
        if recalled is not None:
            h, (old_k, old_v) = recalled
            hk, hv = rotate(self.split(self.k_proj(h)), call.rope), self.split(self.v_proj(h))
            rows = self._store(old_k, hk, slots, phase, call), self._store(old_v, hv, slots, phase, call)
            keys.insert(1, rows[0][:, :filled].to(q.dtype))
            values.insert(1, rows[1][:, :filled].to(q.dtype))
            mask = torch.cat([mask, mask], dim=-1)
        y = attend(q, torch.cat(keys, 1), torch.cat(values, 1), see_prefix(mask, pk.shape[1]))
        return self.merge(y), KeyValues(k, v, conv), rows

    def _store(self, old: Heads, new: Heads, slots: Tensor, phase: int | Tensor, call: Call) -> Heads:
        """Put the call's rows into their slots of the segment; padding leaves its slot as it was."""
        new = new.to(old.dtype)
        T = new.shape[1]
        if isinstance(phase, int) and call.lengths is None:
            return torch.cat([old[:, :phase], new, old[:, phase + T :]], dim=1)
        index = slots
        valid = valid_tokens(call.lengths, T)
        if valid is not None:  # padding goes to one slot too many, which is cut off again
            index = torch.where(valid, slots, self.segment_len)
        index = index[..., None, None].expand_as(new)
        return F.pad(old, [0, 0, 0, 0, 0, 1]).scatter(1, index, new)[:, : self.segment_len]


def segment_pieces(call: Call, length: int, segment_len: int) -> list[tuple[int, int, int | Tensor]]:
    """Cut a call into (start, stop, phase) so that no row crosses the border of a segment inside a piece."""
    if length == 1:  # one token crosses no border: no need to know where the rows are
        return [(0, 1, 0 if call.fresh else call.position % segment_len)]
    phases = [0] if call.fresh else sorted(set((call.position % segment_len).tolist()))
    borders = {i for phase in phases for i in range(segment_len - phase, length, segment_len)}
    cuts = [0, *sorted(borders), length]
    pieces = []
    for start, stop in pairwise(cuts):
        phase = (
            (phases[0] + start) % segment_len if len(phases) == 1 else call.piece(start, stop).position % segment_len
        )
        pieces.append((start, stop, phase))
    return pieces
