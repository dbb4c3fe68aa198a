"""Attention over the first tokens and a window, beside a memory of all tokens that have left the window.

    y_t = softmax(q_t · k_i) v_i      i among the first s tokens and the last W        (sinks and window)
    m_t = M(q_t)                      M has been written tokens s … t − W              (`LayerMemory`)
    o_t = y_t + m_t                   then the base's own o_proj

A token is in the window or in the memory, never in both. Beyond the base's positions sinks move up (D55). The base's
own code makes q, k and v; `attend` is what transformers calls an attention implementation, and takes the place of
softmax over everything.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from titans_lm.checks import check_at_least, check_switch
from titans_lm.ops import MemoryState
from titans_lm.ops.state import detach_state, map_state, take_places
from titans_lm.retrofit.memory import LayerMemory
from titans_lm.retrofit.rotary import Rotation

IMPLEMENTATION = "titans_retrofit"
"""The name of `attend` among transformers' attention implementations."""
FEWEST, MOST = 64, 1024
"""Queries that attend at once; how many changes no result."""

Heads = Float[Tensor, "B _ _ D"]
"""Tokens of heads, (B, T, H, D): queries have more heads than keys and values where these are shared."""
Place = int | Int[Tensor, "B 1"]
"""Which token of its text the first slot of a row holds; negative where that slot is padding."""


class Reach(NamedTuple):
    """How far attention sees, and whether the memory speaks of what lies beyond; no window means all tokens."""

    window: int | None
    sinks: int = 0
    memory: bool = True


def check_reach(reach: Any) -> None:
    """Refuse what a call cannot be told to see."""
    if reach is None:
        return
    if not isinstance(reach, Reach):
        raise ValueError(f"got reach={reach!r}; expected titans_lm.retrofit.Reach(window, sinks, memory)")
    if reach.window is not None:
        check_at_least("reach.window", reach.window, 1)
    check_at_least("reach.sinks", reach.sinks, 0)
    check_switch("reach.memory", reach.memory)


FULL = Reach(None, 0, False)
"""All tokens and no memory: the base, but for a LoRA that is on."""


class LayerState(NamedTuple):
    """What a layer keeps of the tokens that it has read; its size is constant once the window is full.

    k, v and notes are of the last slots, at most W; a token's notes are the gates that it will be written with, and its
    own key, where the memory has keys of its own, or its rotary angles, where the memory sees keys before rotary.
    `position` (B,) counts the tokens that rows have read, None where every slot was one.
    """

    sink_k: Heads
    sink_v: Heads
    k: Heads
    v: Heads
    notes: Float[Tensor, "B T X"]
    position: Int[Tensor, " B"] | None
    memory: MemoryState | None

    @classmethod
    def start(cls, tokens: "Tokens", layer: "Layer", *, whole: bool) -> "LayerState":
        """Nothing read yet: no slots, or all slots of a window, so that the shapes never change."""
        window, sinks, _ = layer.reach
        if whole and window is None:
            raise ValueError("got a state of constant size of the base as it was; expected a reach with a window")
        B, size, first = len(tokens.q), window if whole and window else 0, sinks if whole else 0
        k, v, notes = (x.new_zeros(B, size, *x.shape[2:]) for x in (tokens.k, tokens.v, tokens.notes))
        sink_k, sink_v = (x.new_zeros(B, first, *x.shape[2:]) for x in (k, v))
        position = torch.zeros(B, dtype=torch.int64, device=k.device) if whole else None
        return cls(sink_k, sink_v, k, v, notes, position, layer.memory.init_state(B) if layer.memory else None)


class Call(NamedTuple):
    """What `attend` needs besides q, k and v; a hook of the attention module puts it among the arguments."""

    hidden: Float[Tensor, "B T E"]
    angles: tuple[Tensor, Tensor] | None
    reach: Reach
    cache: Any
    """The layer's part of a `RetrofitCache`, or None."""


class Layer(NamedTuple):
    """How a layer reads: its reach, softmax's scale and dropout, its memory, and the base's rotation, if it has one."""

    reach: Reach
    scaling: float
    dropout: float
    memory: LayerMemory | None
    rotation: Rotation | None

    @property
    def turned_back(self) -> Rotation | None:
        """The rotation, where the memory sees queries and keys before it."""
        return self.rotation if self.memory is not None and self.memory.before_rotary else None


class Tokens(NamedTuple):
    """The tokens of one call, real ones at the left of their rows."""

    q: Heads
    k: Heads
    v: Heads
    notes: Float[Tensor, "B T X"]
    hidden: Float[Tensor, "B T E"]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    retrofit: Call | None = None,
    **_: Any,
) -> tuple[Heads, None]:
    """Attend and remember; q, k and v are (B, H, T, D) after norms and rotary."""
    if retrofit is None:
        raise ValueError(f"got the attention implementation {IMPLEMENTATION!r} by name; expected a model of add_memory")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"got a mask of shape {tuple(attention_mask.shape)}; expected (B, T), ones for real tokens")
    own, reach = module.__dict__, retrofit.reach
    memory = getattr(module, "memory", None) if reach.memory else None
    if sliding_window is not None and (reach.window is None or sliding_window < reach.window):
        if memory is not None and reach.window is not None:
            raise ValueError(f"got a reach of {reach.window} for a layer whose own window has {sliding_window} tokens")
        reach = Reach(sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = Layer(reach, scale, dropout, memory, own["rotation"])
    tokens = tokens_of(query, key, value, retrofit, layer)
    order = lengths = None
    if attention_mask is not None:
        order, lengths = torch.argsort(~attention_mask, dim=1, stable=True), attention_mask.sum(1)
        tokens = Tokens(*(take_places(x, order) for x in tokens))
    cache = retrofit.cache
    state, seen, whole = (None, 0, False) if cache is None else (cache.state, cache.seen, cache.whole)
    if state is None:
        state = LayerState.start(tokens, layer, whole=whole)
    else:
        _check_goes_on(state, seen, layer)
        if state.k.device != query.device:  # layers may lie on several devices, where a state lies on one
            state = map_state(lambda x: x.to(query.device), state)
    o, state = read(tokens, state, seen, lengths, layer)
    if cache is not None:
        cache.store(detach_state(state) if torch.is_grad_enabled() else state, query.shape[2])
    if "watch" in own:
        own["watch"](module, query, key, value, retrofit, scale, o)
    return (o if order is None else take_places(o, torch.argsort(order, dim=1))), None


def tokens_of(query: Tensor, key: Tensor, value: Tensor, call: Call, layer: Layer) -> Tokens:
    """The tokens of a call of `attend`, with what is kept of them for this layer's memory."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    notes = call.hidden[..., :0] if layer.memory is None else layer.memory.notes(call.hidden)
    if layer.turned_back is not None:
        assert call.angles is not None, "find_rotations has seen them"
        notes = torch.cat((notes, *(x.expand(len(notes), -1, -1) for x in call.angles)), -1)
    return Tokens(q, k, v, notes, call.hidden)


PACKED = "got packed rows or a mask of another form; expected one text per row and a mask (B, T)"


def padding_mask(attention_mask: Tensor | None = None, q_length: int = 0, **settings: Any) -> Tensor | None:
    """Make the mask that `attend` takes: which slots of this call are real (B, T), None where all are."""
    if not settings.get("allow_is_causal_skip", True) and not torch.compiler.is_compiling():  # which always says so
        raise ValueError(PACKED)
    if attention_mask is None:
        return None
    mask = attention_mask[:, attention_mask.shape[1] - q_length :].bool()
    return None if bool(mask.all()) else mask


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)


def read(
    tokens: Tokens, state: LayerState, seen: int, lengths: Int[Tensor, " B"] | None, layer: Layer
) -> tuple[Heads, LayerState]:
    """Read the next tokens of every row after `seen` slots: the answers (B, T, H, D), and what is known after them.

    Slots are counted over those that the state keeps and those of the call. `lengths` are the real tokens of a row.
    """
    T, (window, sinks, _) = tokens.q.shape[1], layer.reach
    kept, position = state.k.shape[1], state.position
    window = kept + T if window is None else window
    if position is None and lengths is not None:
        position = torch.full_like(lengths, seen)
    elif position is not None and lengths is None:
        lengths = torch.full_like(position, T)
    place = seen - kept if position is None else (position - kept)[:, None]
    stop = None if lengths is None else (kept + lengths)[:, None]
    pairs = (state.k, tokens.k), (state.v, tokens.v), (state.notes, tokens.notes)
    k, v, notes = (torch.cat((old.to(new.dtype), new), 1) for old, new in pairs)  # a file has float32
    sink_k, sink_v = (_first(old, x, place, sinks, stop) for old, x in ((state.sink_k, k), (state.sink_v, v)))
    o, memory = windowed(tokens.q, k, v, sink_k, sink_v, window, place, layer), state.memory
    fallen = _fallen(T, kept, window, sinks, place, lengths, o.device)
    if layer.memory is not None and memory is not None and fallen is not None:
        begin, left, valid = fallen
        readers, written = Tokens(*(x[:, begin:] for x in tokens)), notes[:, left]
        q, k_left, v_left = _asked_and_told(layer.memory, layer.turned_back, readers, written, k, v, left)
        gates = written[..., : layer.memory.num_gates]
        m, memory = layer.memory(q, k_left, v_left, gates, readers.hidden, memory, valid)
        if valid is not None:  # nothing has left the window yet, or nobody asks
            m = m.masked_fill(~valid[:, :, None, None], 0.0)
        o = torch.cat((o[:, :begin], o[:, begin:] + m.to(o.dtype)), 1)
    size = min(window, kept + T)
    if position is None or lengths is None:
        last = [x[:, kept + T - size :].clone() for x in (k, v, notes)]
    else:
        slots = (kept + lengths - size)[:, None] + torch.arange(size, device=position.device)
        last, position = [take_places(x, slots.clamp(min=0)) for x in (k, v, notes)], position + lengths
    return o, LayerState(sink_k.clone(), sink_v.clone(), *last, position, memory)


def _asked_and_told(
    memory: LayerMemory, rotation: Rotation | None, readers: Tokens, written: Tensor, k: Heads, v: Heads, left: slice
) -> tuple[Heads, Heads, Heads]:
    """What the memory is asked by the readers, and the keys and values of the tokens that leave the window."""
    if memory.key_proj is not None:  # whoever leaves, the token after is in the window
        return memory.own_keys(readers.notes), memory.own_keys(written), v[:, left.start + 1 : left.stop + 1]
    q, k, v = readers.q, k[:, left], v[:, left]
    if rotation is not None:
        q, k = (rotation.back(x, notes[..., memory.num_gates :]) for x, notes in ((q, readers.notes), (k, written)))
    return q, k, v


def windowed(
    q: Heads, k: Heads, v: Heads, sink_k: Heads, sink_v: Heads, window: int, place: Place, layer: Layer
) -> Heads:
    """Attention of the last slots over `window` slots each and over sinks, as far as these are older than that.

    By blocks of queries, so that neither a mask nor a product grows with T². In a block sinks stand still (D55).
    """
    (T, S), device = (q.shape[1], k.shape[1]), q.device
    starts = set(range(S - T, S, min(max(FEWEST, window // 2), MOST)))
    m = torch.arange(sink_k.shape[1], device=device)
    moving = layer.rotation if len(m) else None
    if moving is not None and T > 1:
        places = [place] if isinstance(place, int) else place.flatten().tolist()
        starts |= moving.cuts(places, S - T, S)
    parts = []
    for a, b in pairwise((*sorted(starts), S)):
        low = max(0, a - window + 1)
        first_k = sink_k if moving is None else moving.moved_up(sink_k, moving.steps_at(a + place))
        i, j = torch.arange(a, b, device=device)[:, None], torch.arange(low, b, device=device)
        near = (j <= i) & (j > i - window)
        first = m <= i - window + (place if isinstance(place, int) else place[:, :, None])
        if isinstance(place, Tensor):  # a mask for every row
            near, first = (near & (j + place[:, :, None] >= 0))[:, None], first[:, None]
        sides = (first_k, k[:, low:b]), (sink_v, v[:, low:b])
        keys, values = (torch.cat(side, 1).transpose(1, 2) for side in sides)
        part = F.scaled_dot_product_attention(
            q[:, a - S + T : b - S + T].transpose(1, 2), keys, values, torch.cat((first, near), -1), layer.dropout,
            scale=layer.scaling, enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, 1)


def _check_goes_on(state: LayerState, seen: int, layer: Layer) -> None:
    """Refuse to go on with a reach that the state was not made with: tokens would be forgotten or read twice."""
    window, sinks, _ = layer.reach
    kept, first = state.k.shape[1], state.sink_k.shape[1]
    same = kept in (min(window, seen), window) and first in (min(sinks, seen), sinks) if window else kept == seen
    if not same or (state.memory is None) != (layer.memory is None):
        raise ValueError(
            f"got {layer.reach} for a text that was begun with another reach, of which {kept} slots and {first} sinks "
            "are kept; expected the same from its first token on"
        )


def _fallen(
    T: int, kept: int, window: int, sinks: int, place: Place, lengths: Tensor | None, device: torch.device
) -> tuple[int, slice, Tensor | None] | None:
    """Find the first query that a token leaves the window for, the slots of all that leave, and which to write."""
    begin = max(0, window - kept + (max(0, sinks - place) if isinstance(place, int) else 0))
    if begin >= T:
        return None
    left = slice(kept + begin - window, kept + T - window)
    if isinstance(place, int):
        return begin, left, None
    valid = torch.arange(left.start, left.stop, device=device) + place >= sinks
    if lengths is not None:
        valid = valid & (torch.arange(begin, T, device=device) < lengths[:, None])
    return begin, left, None if valid.is_cpu and bool(valid.all()) else valid


def _first(old: Tensor, x: Tensor, place: Place, count: int, stop: Int[Tensor, "B 1"] | None) -> Tensor:
    """The first tokens of every row, so far: from those found before and the slots of now, which end at `stop`."""
    old = old.to(x.dtype)
    if isinstance(place, int) or stop is None:
        return torch.cat((old[:, :place], x[:, : max(0, count - place)]), 1)
    slots, ones = torch.arange(count, device=x.device) - place, (1,) * (x.dim() - 2)
    now = take_places(x, slots.clamp(0, x.shape[1] - 1)).masked_fill((slots >= stop).view(*slots.shape, *ones), 0.0)
    before = F.pad(old, (0, 0) * (old.dim() - 2) + (0, count - old.shape[1]))
    return torch.where((slots >= 0).view(*slots.shape, *ones), now, before)
