"""Attention in three ranges (all, window, segment), each with a persistent prefix and its keys and values as a value.

Persistent rows come first in every softmax and know no position: their rotated channels are zero (D11, D18). A row of
the batch may hold fewer tokens than others; the masks follow each row's own count.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import BackboneConfig
from titans_lm.layers import (
    Affine,
    ForwardContext,
    Linear,
    Streams,
    device_of,
    last_valid,
    length_mask,
    make_short_convs,
    make_streams,
    rotate,
)
from titans_lm.ops.fused import joined_weight
from titans_lm.ops.matmul import linear
from titans_lm.ops.state import state_dtype

Heads = Float[Tensor, "B _ H D"]
Pair = tuple[Tensor, Tensor]
"""Keys, or values, of the prefix and of tokens."""


class KeyValues(NamedTuple):
    """Keys and values (B, N, H, D) that later tokens may look back at, and the tails of the convolutions if any."""

    k: Tensor
    v: Tensor
    conv: tuple[Tensor, ...]


def attend(q: Heads, k: Heads, v: Heads, mask: Shaped[Tensor, "_ T N"] | None, causal: bool = False) -> Heads:
    """softmax(q kᵀ / √D + mask) v on (B, T, H, D) tensors; where it says True or False, True is visible, None all."""
    q, k, v = q.transpose(1, 2), k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    mask = None if mask is None else mask.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


class QKV(NamedTuple):
    """What tokens look with and at: rotated queries; keys and values of the prefix and of themselves; tails."""

    q: Heads
    keys: Pair
    values: Pair
    conv: tuple[Tensor, ...]

    def split(self, sizes: list[int]) -> list["QKV"]:
        """The same for so many tokens after so many; each gradient is put together once, as slices would not do."""
        (pk, k), (pv, v) = self.keys, self.values
        parts = zip(self.q.split(sizes, dim=1), k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True)
        return [QKV(q, (pk, k), (pv, v), self.conv) for q, k, v in parts]


class QKVProjection(nn.Module):
    """q, k, v of the tokens (with a short convolution if set), keys and values of the prefix, and the way back.

    With the memory of its block as `shared` it has neither maps nor convolution of its own and reads the memory's
    streams, each through a scale and an offset by channel; rows that are no tokens have the scale alone (D41).
    """

    slots = 0
    """Tokens whose keys and values a state has room for from the start."""

    def __init__(self, config: BackboneConfig, shared: nn.Module | None = None) -> None:
        super().__init__()
        E = config.hidden_size
        self.heads, self.head_dim, self.rotary = config.num_attention_heads, config.head_dim, config.rotary_dim
        self.shared = None if shared is None else (shared,)  # in a tuple, as a module would become a part of it
        if shared is None:
            self.q_proj = Linear(E, E, bias=False)
            self.k_proj = Linear(E, E, bias=False)
            self.v_proj = Linear(E, E, bias=False)
        self.o_proj = Linear(E, E, bias=False)
        self.convs = nn.ModuleList()
        if shared is None:
            self.convs = make_short_convs(self.q_proj, self.k_proj, config.attention_conv_size, config.induction_init)
        else:
            self.affine = nn.ModuleList(Affine(E) for _ in range(3))

    def init_state(self, batch_size: int) -> KeyValues:
        """Room for keys and values, and empty tails."""
        weight = self.o_proj.weight
        shape = (batch_size, self.slots, self.heads, weight.shape[0] // self.heads)
        k = torch.zeros(shape, dtype=state_dtype(weight.dtype), device=device_of(self.o_proj))
        return KeyValues(k, torch.zeros_like(k), tuple(conv.init_tail(batch_size) for conv in self.convs))

    def split(self, x: Float[Tensor, "*s E"]) -> Float[Tensor, "*s H D"]:
        return x.unflatten(-1, (-1, self.head_dim))

    def project(
        self,
        x: Float[Tensor, "B T E"],
        tails: tuple[Tensor, ...],
        ctx: ForwardContext,
        persistent: Float[Tensor, "P E"],
        streams: Streams | None = None,
        kv: Tensor | None = None,
    ) -> "QKV":
        """Rotated queries of the tokens; keys and values of the prefix and of the tokens.

        Only what comes from a token has a position: keys of the prefix are zero in the rotated channels. `streams` are
        those of x where they are shared, and `kv` is what `join_kv` gives, where the caller has it.
        """
        (B, T, _), P = x.shape, len(persistent)
        if T == 1 and not self.convs and streams is None:
            # prefix and tokens in one product: what costs here is reading the weights
            q, rows = self.q_proj(x), (persistent, x.flatten(0, 1))
            (pk, k), (pv, v) = (proj(torch.cat(rows)).split([P, B]) for proj in (self.k_proj, self.v_proj))
            qk, v = torch.cat([q, k[:, None]], dim=-1), v[:, None]
        else:
            if streams is None:
                made = make_streams(x, (self.q_proj, self.k_proj, self.v_proj), self.convs, tails, ctx.lengths)
                _, _, v, tails, together = made
                qk = torch.cat(made[:2], dim=-1) if together is None else together[..., : 2 * x.shape[-1]]
            else:
                of_q, of_k, of_v = self.affine
                qk, v = torch.cat([of_q(streams.q), of_k(streams.k)], dim=-1), of_v(streams.v)
            pk, pv = self.key_values(persistent, kv)
        pk = F.pad(self.split(pk)[..., self.rotary :], [self.rotary, 0]).expand(B, -1, -1, -1)
        pv = self.split(pv).expand(B, -1, -1, -1)
        q, k = rotate(self.split(qk), ctx.rope).chunk(2, dim=2)
        return QKV(q, (pk, k), (pv, self.split(v)), tails)

    def join_kv(self) -> Tensor | None:
        """W_K and W_V in one matrix; None where they are to be called."""
        owner: Any = self if self.shared is None else self.shared[0]
        return joined_weight(owner.k_proj, owner.v_proj)

    def key_values(self, rows: Float[Tensor, "*s E"], kv: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of rows that are no tokens, persistent or recalled: no convolution has a place for them.

        Nor has an offset: one that all rows of a softmax have in common would change nothing.
        """
        owner: Any = self if self.shared is None else self.shared[0]
        k, v = (owner.k_proj(rows), owner.v_proj(rows)) if kv is None else linear(rows, kv).chunk(2, dim=-1)
        if self.shared is None:
            return k, v
        _, scale_k, scale_v = self.affine
        return scale_k(k, shifted=False), scale_v(v, shifted=False)

    def merge(self, y: Heads) -> Float[Tensor, "B T E"]:
        return self.o_proj(y.flatten(-2))


def see_prefix(mask: Bool[Tensor, "_ T N"], prefix: int) -> Bool[Tensor, "_ T PN"]:
    """Every token sees every persistent row."""
    return F.pad(mask, [prefix, 0], value=True)


class FullAttention(QKVProjection):
    """Causal attention over everything read so far; its keys and values grow with the text.

    Quadratic in time and linear in memory: no mask is longer than `rows` queries.
    """

    rows = 256

    def forward(
        self, x: Float[Tensor, "B T E"], state: KeyValues, ctx: ForwardContext, persistent: Float[Tensor, "P E"]
    ) -> tuple[Float[Tensor, "B T E"], KeyValues]:
        q, (pk, k), (pv, v), conv = self.project(x, state.conv, ctx, persistent)
        if ctx.is_start:
            # As many queries before the first as there are persistent rows make causal what is to be seen: no mask.
            P = pk.shape[1]
            keys, values = torch.cat([pk, k], dim=1), torch.cat([pv, v], dim=1)
            y = attend(F.pad(q, [0, 0, 0, 0, P, 0]), keys, values, None, causal=True)[:, P:]
            k, v = k.to(state.k.dtype).contiguous(), v.to(state.v.dtype).contiguous()  # not a view of q beside them
        else:
            k, v = self._append(state.k, k, ctx), self._append(state.v, v, ctx)
            keys, values = torch.cat([pk, k.to(pk.dtype)], dim=1), torch.cat([pv, v.to(pv.dtype)], dim=1)
            y = self._look_back(q, keys, values, ctx, pk.shape[1])
        return self.merge(y), KeyValues(k, v, conv)

    @staticmethod
    def _append(old: Heads, new: Heads, ctx: ForwardContext) -> Heads:
        """Every row's new keys follow its own last one, wherever other rows end."""
        new, T = new.to(old.dtype), new.shape[1]
        if ctx.host_positions == (old.shape[1],):
            return torch.cat([old, new], dim=1)
        index = ctx.position[:, None] + torch.arange(T, device=new.device)
        return F.pad(old, [0, 0, 0, 0, 0, T]).scatter(1, index[..., None, None].expand_as(new), new)

    def _look_back(self, q: Heads, keys: Heads, values: Heads, ctx: ForwardContext, prefix: int) -> Heads:
        """Some queries at a time, each block against the keys that it can see."""
        T, most = q.shape[1], keys.shape[1] - prefix
        outputs = []
        for start in range(0, T, self.rows):
            stop = min(start + self.rows, T)
            visible = most if ctx.host_positions is None else min(most, max(ctx.host_positions) + stop)
            mask = None
            if T > 1 or ctx.host_positions != (most - 1,):  # one token at the end of every row sees all there is
                seen = ctx.position[:, None] + torch.arange(start, stop, device=q.device)
                mask = see_prefix(torch.arange(visible, device=q.device) <= seen[..., None], prefix)
            outputs.append(attend(q[:, start:stop], keys[:, : prefix + visible], values[:, : prefix + visible], mask))
        return torch.cat(outputs, dim=1)


class WindowAttention(QKVProjection):
    """Causal attention over the last `window` tokens, the token itself included; linear in time and memory."""

    def __init__(self, config: BackboneConfig, shared: nn.Module | None = None) -> None:
        super().__init__(config, shared)
        self.slots = config.window

    def forward(
        self,
        x: Float[Tensor, "B T E"],
        state: KeyValues,
        ctx: ForwardContext,
        persistent: Float[Tensor, "P E"],
        streams: Streams | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KeyValues]:
        T, W = x.shape[1], self.slots
        q, (pk, k), (pv, v), conv = self.project(x, state.conv, ctx, persistent, streams)
        if T == 1 and ctx.lengths is None:
            y, k, v = self._step(q, (pk, k), (pv, v), state, ctx)
            return self.merge(y), KeyValues(k, v, conv)
        k, v = (torch.cat([old.to(new.dtype), new], dim=1) for old, new in ((state.k, k), (state.v, v)))
        kept = [last_valid(y, W, ctx.lengths).to(state.k.dtype) for y in (k, v)]
        first = min(T, W)
        y = self._first(q[:, :first], (pk, k[:, : W + first]), (pv, v[:, : W + first]), ctx)
        if T > W:
            y = torch.cat([y, self._others(q, (pk, k), (pv, v))], dim=1)
        return self.merge(y), KeyValues(*kept, conv)

    @staticmethod
    def _look(q: Heads, keys: Pair, values: Pair, mask: Bool[Tensor, "_ T N"] | None) -> Heads:
        """Attend to the prefix and to what the mask shows of tokens."""
        prefix = keys[0].shape[1]
        k, v = (torch.cat([pre, x.to(pre.dtype)], dim=1) for pre, x in (keys, values))
        return attend(q, k, v, None if mask is None else see_prefix(mask, prefix))

    def _step(
        self, q: Heads, keys: Pair, values: Pair, state: KeyValues, ctx: ForwardContext
    ) -> tuple[Heads, Heads, Heads]:
        """One token: the window moves on by one and is all that the token sees."""
        W = self.slots
        (pk, k), (pv, v) = keys, values
        k, v = (torch.cat([old[:, 1:], new.to(old.dtype)], dim=1) for old, new in ((state.k, k), (state.v, v)))
        start, mask = 0, None
        known = (0,) if ctx.is_start else ctx.host_positions
        if known is not None and len(known) == 1:
            start = W - min(W, 1 + known[0])
        else:
            c = torch.arange(W, device=q.device)
            mask = (c >= W - 1 - ctx.position[:, None])[:, None]
        return self._look(q, (pk, k[:, start:]), (pv, v[:, start:]), mask), k, v

    def _first(self, q: Heads, keys: Pair, values: Pair, ctx: ForwardContext) -> Heads:
        """The first tokens of the call, which look back at what the state kept."""
        T, W = q.shape[1], self.slots
        (pk, k), (pv, v) = keys, values
        i = torch.arange(T, device=q.device)[:, None]
        c = torch.arange(W + T, device=q.device)  # key c stands c − W tokens after the first query
        mask = ((c > i) & (c <= i + W))[None]
        if ctx.is_start:
            k, v, mask = k[:, W:], v[:, W:], mask[..., W:]
        else:
            mask = mask & (c >= W - ctx.position[:, None, None])
        return self._look(q, (pk, k), (pv, v), mask)

    def _others(self, q: Heads, keys: Pair, values: Pair) -> Heads:
        """Blocks of `window` tokens, each looking at itself and the block before it, all at once."""
        B, T, W = q.shape[0], q.shape[1], self.slots
        (pk, k), (pv, v) = keys, values
        blocks = -(-T // W) - 1
        pad = [0, 0, 0, 0, 0, (blocks + 1) * W - T]
        q = F.pad(q[:, W:], pad).unflatten(1, (blocks, W)).flatten(0, 1)
        pk, pv = (y[:1].expand(B * blocks, -1, -1, -1) for y in (pk, pv))
        # (B, blocks, H, D, 2W): block b holds keys b·W … (b + 2)·W of what follows the cached window
        k, v = (F.pad(y[:, W:], pad).unfold(1, 2 * W, W).permute(0, 1, 4, 2, 3).flatten(0, 1) for y in (k, v))
        i = torch.arange(W, device=q.device)[:, None]
        c = torch.arange(2 * W, device=q.device)
        y = self._look(q, (pk, k), (pv, v), ((c > i) & (c <= i + W))[None])
        return y.unflatten(0, (B, blocks)).flatten(1, 2)[:, : T - W]


class SegmentCall(NamedTuple):
    """What the segments of a call have in common: W_K and W_V in one matrix, masks by length and by filled slots."""

    kv: Tensor | None
    masks: dict[tuple[int, int], Tensor]


class SegmentAttention(QKVProjection):
    """Causal attention inside a segment of `segment_len` tokens, optionally with one recalled row per token.

    A call must lie inside one segment of every row; `phase` says how far into it the rows are, as one number or as
    (B,). Token i sees the persistent rows, recalled rows up to its own, and tokens up to itself: a recalled row is made
    from its token, so a later one would tell the future (D8).
    """

    def __init__(self, config: BackboneConfig, shared: nn.Module | None = None) -> None:
        super().__init__(config, shared)
        self.slots = config.segment_len

    def init_recalled(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of the recalled rows."""
        kv = self.init_state(batch_size)
        return kv.k, kv.v

    def prepare(self, tokens: int) -> SegmentCall:
        """What a call of so many tokens needs, however it is cut."""
        return SegmentCall(None if tokens == 1 else self.join_kv(), {})

    def forward(
        self,
        qkv: QKV,
        state: KeyValues,
        ctx: ForwardContext,
        phase: int | Int[Tensor, " B"],
        recalled: tuple[Float[Tensor, "B T E"], tuple[Tensor, Tensor]] | None = None,
        call: SegmentCall | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KeyValues, tuple[Tensor, Tensor] | None]:
        """Attend; `recalled` are the call's rows and the keys and values of earlier ones in the segment."""
        q, (pk, k), (pv, v), conv = qkv
        T = q.shape[1]
        call = self.prepare(T) if call is None else call
        uniform = isinstance(phase, int) and ctx.lengths is None
        filled = phase + T if isinstance(phase, int) else self.slots
        slots = None
        if not uniform:
            slots = torch.arange(T, device=q.device)[None] + (phase if isinstance(phase, int) else phase[:, None])
        k, v = self._store(state.k, k, slots, phase, ctx), self._store(state.v, v, slots, phase, ctx)
        see_k, see_v, rows = [pk, k], [pv, v], None
        if recalled is not None:
            h, (old_k, old_v) = recalled
            hk, hv = self.key_values(h, call.kv)
            hk = rotate(self.split(hk), ctx.rope)
            rows = self._store(old_k, hk, slots, phase, ctx), self._store(old_v, self.split(hv), slots, phase, ctx)
            see_k.insert(1, rows[0])
            see_v.insert(1, rows[1])
        mask = None
        if slots is not None:
            mask = self._visible(slots, filled, len(see_k) - 1, pk.shape[1])
        elif T > 1:
            mask = call.masks.get((T, filled))
            if mask is None:
                slots = torch.arange(filled - T, filled, device=q.device)[None]
                seen = self._visible(slots, filled, len(see_k) - 1, pk.shape[1])
                mask = seen.to(q.dtype).log_()  # 0 for what is seen, −∞ for the rest
                call.masks[T, filled] = mask
        y = attend(q, _filled(see_k, filled, q.dtype), _filled(see_v, filled, q.dtype), mask)
        return self.merge(y), KeyValues(k, v, conv), rows

    @staticmethod
    def _visible(slots: Int[Tensor, "_ T"], filled: int, kinds: int, prefix: int) -> Bool[Tensor, "_ T N"]:
        """What tokens at these slots see: the prefix, and of each kind of row those up to their own."""
        mask = torch.arange(filled, device=slots.device) <= slots[..., None]
        return see_prefix(torch.cat([mask] * kinds, dim=-1), prefix)

    def _store(self, old: Heads, new: Heads, slots: Tensor | None, phase: int | Tensor, ctx: ForwardContext) -> Heads:
        """Put the call's rows into their slots of the segment; padding leaves its slot as it was."""
        new = new.to(old.dtype)
        T = new.shape[1]
        if isinstance(phase, int) and ctx.lengths is None:
            if self.slots == T:  # a view of the call's tokens, which `compact` makes an end of
                return new
            return torch.cat([old[:, :phase], new, old[:, phase + T :]], dim=1)
        assert slots is not None, "only a uniform call has no need of them"
        valid = length_mask(ctx.lengths, T)
        if valid is None:
            return old.scatter(1, slots[..., None, None].expand_as(new), new)
        # Padding goes to one slot too many, which is cut off again.
        index = torch.where(valid, slots, self.slots)[..., None, None].expand_as(new)
        return F.pad(old, [0, 0, 0, 0, 0, 1]).scatter(1, index, new)[:, : self.slots]


def _filled(parts: list[Heads], filled: int, dtype: torch.dtype) -> Heads:
    """The prefix, and of each other part the slots that are filled, one after another."""
    found = parts[:1]
    for y in parts[1:]:
        found.append((y if y.shape[1] == filled else y[:, :filled]).to(dtype))
    return torch.cat(found, dim=1)


def compact(kv: KeyValues) -> KeyValues:
    """The same in tensors of their own: a view of what a call has made would keep all of it alive in the state."""
    return kv._replace(k=own_storage(kv.k), v=own_storage(kv.v))


def own_storage(x: Tensor) -> Tensor:
    """x, or a copy of it where it is a part of something larger; inside a graph nobody can know, and it is copied."""
    if torch.compiler.is_compiling():
        return x.clone()
    return x if x.numel() * x.element_size() == x.untyped_storage().nbytes() else x.clone()


def segment_slices(
    ctx: ForwardContext, length: int, segment_len: int
) -> list[tuple[ForwardContext, int | Int[Tensor, " B"]]]:
    """Cut a call so that no row crosses the border of a segment inside a slice; with each how far into it rows are."""
    places = (0,) if ctx.is_start else ctx.host_positions
    if places is None and length > 1:
        places = ctx.position.tolist()
    phases = None if places is None else sorted({place % segment_len for place in places})
    if length == 1:  # one token crosses no border: no need to know where the rows are
        return [(ctx, phases[0] if phases is not None and len(phases) == 1 else ctx.position % segment_len)]
    assert phases is not None, "they have been looked at"
    cuts = {i for phase in phases for i in range(segment_len - phase, length, segment_len)}
    found: list[tuple[ForwardContext, int | Tensor]] = []
    for start, stop in pairwise([0, *sorted(cuts), length]):
        here = ctx.slice(start, stop)
        found.append((here, (phases[0] + start) % segment_len if len(phases) == 1 else here.position % segment_len))
    return found
