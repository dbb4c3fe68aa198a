"""What `generate()` calls a cache: the stack's state, of constant size, and a way back to any of the last tokens."""

import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from titans_lm.backbone import BackboneState, frozen_memory, is_frozen
from titans_lm.config import check_at_least
from titans_lm.hf.naming import CACHE, rename_cache
from titans_lm.ops.state import detach_state, map_state, repeat_rows, state_bytes, state_tensors, take_rows
from titans_lm.ops.validate import check_tensors, form

KEEP = 256
"""How many tokens can be taken back where somebody asks for it without saying how many."""

Places = tuple[int, ...]
"""Tokens that every row has read; a cache counts its slots as one row."""


class Call(NamedTuple):
    """One call: where its rows stood, how many tokens each read, what these were, what else is told of it, and
    whether the memory was frozen."""

    start: Places
    count: Places
    inputs: Any
    told: Any = None
    frozen: bool = False

    @property
    def end(self) -> Places:
        return tuple(a + b for a, b in zip(self.start, self.count, strict=True))

    def until(self, target: Places) -> Places:
        """How many of its tokens stand before a place."""
        return tuple(min(n, max(0, t - s)) for s, n, t in zip(self.start, self.count, target, strict=True))


class History:
    """The calls of the last `keep` tokens at least, and the states before some of them.

    A state is a value, so nothing is copied to keep one. One is dropped where the next older is at most twice as far
    back as the next younger: at most about 2 log₂(keep) of them are left, and to take back r tokens at most r are read
    again, or the beginning of the one call that is cut.
    """

    def __init__(self, keep: int) -> None:
        check_at_least("keep", keep, 0)
        self.keep = keep
        self.calls: deque[Call] = deque()
        self.states: list[tuple[Places, Any]] = []

    def clear(self) -> None:
        """Keep nothing of what was."""
        self.calls, self.states = deque(), []

    def add(self, call: Call, before: Any) -> None:
        """Keep a call and the state before it; drop what lies further back than anybody may go."""
        while self.calls and self.calls[-1].start >= call.start:  # a call that was broken off
            self._drop_last()
        if self.calls and self.calls[-1].end != call.start:  # something was read that was not told
            self.clear()
        self.calls.append(call)
        self.states.append((call.start, before))
        ages = [max(e - s for e, s in zip(call.end, start, strict=True)) for start, _ in self.states]
        for place in range(len(ages) - 3, -1, -1):
            if ages[place] <= 2 * ages[place + 2]:
                del self.states[place + 1], ages[place + 1]
        while len(self.states) > 1 and self._stands_before(1, tuple(e - self.keep for e in call.end)):
            del self.states[0]
        while self.calls[0].start != self.states[0][0]:
            self.calls.popleft()

    def back(self, target: Places, now: Places) -> tuple[Places, Any, list[tuple[Call, Places]]] | None:
        """Forget what came after a place: a state, where it stands, and the calls to read again, each to how far.

        None where the place is no longer kept.
        """
        far = any(t < n - self.keep for t, n in zip(target, now, strict=True))
        if far or not self.calls or any(t > e for t, e in zip(target, self.calls[-1].end, strict=True)):
            return None
        place = len(self.states) - 1
        while place >= 0 and not self._stands_before(place, target):
            place -= 1
        if place < 0:
            return None
        start, state = self.states[place]
        again = [(call, call.until(target)) for call in self.calls if call.start >= start]
        while self.calls and self.calls[-1].start >= start:
            self._drop_last()
        return start, state, [(call, count) for call, count in again if any(count)]

    def map(self, fn: Any) -> None:
        """Apply a function to all tensors of states and inputs: other rows, another device."""
        self.states = [(start, map_state(fn, state)) for start, state in self.states]
        self.calls = deque(call._replace(inputs=map_state(fn, call.inputs)) for call in self.calls)

    def _stands_before(self, place: int, target: Places) -> bool:
        return all(s <= t for s, t in zip(self.states[place][0], target, strict=True))

    def _drop_last(self) -> None:
        call = self.calls.pop()
        if self.states and self.states[-1][0] == call.start:
            self.states.pop()


class TitansCacheLayer(CacheLayerMixin):
    """One layer in the eyes of transformers, holding the state of the whole stack and the slots it has read."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False
    state: "BackboneState | None" = None
    seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("a Titans cache holds the state of a memory, not keys and values; it fills itself in forward")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("a Titans cache is written by the model's forward, not by update()")

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_seq_length(self, *_: Any) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def store(self, state: Any, slots: int) -> None:
        """Keep the state after so many more slots."""
        self.state, self.seen = state, self.seen + slots

    def crop(self, *_: Any) -> None:
        raise ValueError("a layer cannot be cropped alone, since its tokens are read again by all: crop the cache")


class _Reader:
    """The model that a cache was read by, which the cache does not keep alive; copies of the cache are of the same."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def __deepcopy__(self, _: Any) -> "_Reader":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In a file there is no model."""
        return _Reader, ()


class CroppableCache(Cache):
    """A cache of states that can go back to one of the last `keep` tokens, once it records what is read (D51).

    It records from the start with `keep` > 0, and from where `activate_past_recording()` is called, as transformers'
    assisted decoding does. What it comes to by `crop` has the bits that the same calls would have left, the last one
    ending there.
    """

    layers: list[Any]

    def __init__(self, layers: list[Any], keep: int = 0) -> None:
        super().__init__(layers=layers)
        self.history = History(keep)
        self._reader = _Reader()

    @abstractmethod
    def read_again(self, model: Any, call: Call, count: int) -> None:
        """Read the first tokens of a call after the state that is there."""

    def record(self, model: nn.Module, tokens: int, inputs: Any, told: Any = None) -> None:
        """Note a call that is about to be stored, if anybody may go back to before it; inputs are nested tensors."""
        if self.history.keep and tokens:
            self._reader = _Reader(model)
            call = Call((self.get_seq_length(),), (tokens,), detach_state(inputs), told, is_frozen(model))
            self.history.add(call, tuple(layer.state for layer in self.layers))

    def cuts(self, tokens: int) -> list[int]:
        """Divide a call where it begins further back than anybody may go, so that its beginning is not kept."""
        keep = self.history.keep
        return [tokens - keep, keep] if 0 < keep < tokens else [tokens]

    def activate_past_recording(self) -> None:
        """Record from here on, so that tokens that are read later can be taken back."""
        self.history.keep = self.history.keep or KEEP

    @property
    def is_croppable(self) -> bool:
        return self.history.keep > 0

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens where the number is 0 or negative, as transformers does; keep the first so many otherwise.

        Raises ValueError for a token that was never read and for one that is no longer kept.
        """
        tokens, seen, keep = tokens_to_remove, self.get_seq_length(), self.history.keep
        target = seen + tokens if tokens <= 0 else tokens
        if not 0 <= target <= seen:
            raise ValueError(
                f"got crop({tokens}) of a cache that has read {seen} tokens; expected -{seen} to 0, tokens to take "
                f"back, or 1 to {seen}, tokens to keep"
            )
        if target == seen:
            return
        model = self._reader()
        if self.history.calls and model is None:
            raise ValueError(f"got crop({tokens}) of a cache whose model is gone; expected the model to be kept")
        found = self.history.back((target,), (seen,))
        if found is None:
            limit = f"can take back {keep} tokens, of those that it has recorded" if keep else "records nothing"
            raise ValueError(
                f"got crop({tokens}) of a cache that {limit}: token {target} of {seen} is no longer kept; expected "
                f"a {type(self).__name__} with keep={seen - target} or more, or a copy of the cache made there"
            )
        (start,), states, again = found
        for layer, state in zip(self.layers, states, strict=True):
            layer.state, layer.seen = state, start
        for call, (count,) in again:
            with frozen_memory(model, call.frozen):
                self.read_again(model, call, count)

    def reset(self) -> None:
        super().reset()
        self.history.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: take_rows(x, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: repeat_rows(x, repeats))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.state = map_state(fn, layer.state)
        self.history.map(fn)

    def state_bytes(self) -> int:
        """Bytes that the cache holds, without those that it keeps to go back."""
        return sum(state_bytes(layer.state) for layer in self.layers)


class TitansCache(CroppableCache):
    """The state of a Titans model between calls, in the form that `generate()` passes around.

    `state` is the `BackboneState`, detached from the graph; `get_seq_length()` counts the token slots read, padding
    included. Copy it (`copy.deepcopy`) to ask several questions of one memory. With `keep`, so many tokens can be taken
    back by `crop`.
    """

    def __init__(self, state: BackboneState | None = None, seen: int = 0, *, keep: int = 0) -> None:
        super().__init__([TitansCacheLayer()], keep)
        if state is not None:
            self.store(state, seen)

    @property
    def state(self) -> BackboneState | None:
        return self.layers[0].state

    @property
    def position(self) -> Tensor | None:
        return None if self.state is None else self.state.position

    def store(self, state: BackboneState, tokens: int) -> None:
        """Keep the state after `tokens` more token slots."""
        followed = any(x.requires_grad for x in state_tensors(state))  # seldom while decoding: nothing to cut off
        self.layers[0].store(detach_state(state) if followed else state, tokens)

    def read_again(self, model: Any, call: Call, count: int) -> None:
        x, valid = (None if part is None else part[:, :count].contiguous() for part in call.inputs)
        self.record(model, count, (x, valid))
        self.store(model(x, self.state, valid)[1], count)


def prepare_call(inputs: Any, kwargs: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Refuse what a call of `generate` with these arguments and settings cannot mean, and give its arguments.

    A draft gets a mask of all tokens: no padding is to be guessed from its target's text, which may have that id.
    """
    kwargs = rename_cache(kwargs)
    if kwargs.get("return_state"):  # some releases would read it in as a cache
        raise ValueError(
            "got return_state in generate(), whose outputs have none; expected return_dict_in_generate=True, whose "
            "past_key_values holds the state"
        )
    prompt, embeds = kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("inputs_embeds")
    mask, cache = kwargs.get("attention_mask"), kwargs.get(CACHE)
    check_tensors(prompt=prompt, attention_mask=mask, inputs_embeds=embeds)
    if prompt is not None and prompt.dim() != 2:
        raise ValueError(f"got a prompt {form(prompt)}; expected ids (B, T): prompt[None] of a single row")
    if prompt is not None and prompt.shape[1] == 0 and embeds is None:
        raise ValueError("got a prompt without a token; expected one at least, such as that which begins a text")
    _check_prompt(prompt, mask, cache, embeds)
    _check_drafts(prompt, kwargs, settings)
    if settings.is_assistant and mask is None and prompt is not None:
        return {**kwargs, "attention_mask": torch.ones_like(prompt)}
    return kwargs


def _check_prompt(prompt: Tensor | None, mask: Tensor | None, cache: Any, embeds: Tensor | None) -> None:
    """Refuse a mask of other tokens, and a prompt of which a cache has read everything, which would be read again.

    A mask that is longer than the prompt says that this is what comes after the cache. Embeddings are, to
    transformers, those of the whole text: it leaves out as many of them as the cache has read.
    """
    if embeds is not None and isinstance(cache, CroppableCache):
        seen, there = cache.get_seq_length(), embeds.shape[1]
        if seen and (there <= seen or (mask is not None and mask.shape[1] > there)):
            raise ValueError(
                f"got inputs_embeds of {there} tokens and a cache that has read {seen}; expected embeddings of the "
                "whole text, with what the cache has read, or new tokens as ids"
            )
    if prompt is None or not (cache is None or isinstance(cache, CroppableCache)):
        return  # a cache of another kind is refused where it is read
    (B, T), seen = prompt.shape, 0 if cache is None else cache.get_seq_length()
    if mask is not None and embeds is None and tuple(mask.shape) not in ((B, T), (B, seen + T)):
        more = f", or ({B}, {seen + T}) with the {seen} tokens that the cache has read" if seen else ""
        raise ValueError(f"got attention_mask {form(mask)} for a prompt ({B}, {T}); expected ({B}, {T}){more}")
    whole = mask is None or mask.shape[1] == T
    if whole and 0 < T <= seen:
        raise ValueError(
            f"got a prompt of {T} tokens and a cache that has read {seen}; expected the cache to lack at "
            "least the last one: crop(-1) of a cache with keep=1, or only new tokens with the mask of all"
        )


def _check_drafts(prompt: Any, kwargs: dict[str, Any], settings: Any) -> None:
    """Refuse to draft tokens beside a cache that has read some, or beside embeddings.

    transformers' first step of a drafted text gives the whole prompt, which would be read after what was read of it;
    and it drafts from the ids of a prompt whose embeddings are read. Drafts by the model's own first layers are refused
    too: transformers makes the model shorter for them, and leaves it so where a draft fails.
    """
    if kwargs.get("assistant_early_exit", getattr(settings, "assistant_early_exit", None)):
        raise ValueError(
            "got assistant_early_exit; expected none: the first layers' state is not the model's. Draft with "
            "assistant_model or prompt_lookup_num_tokens"
        )
    looked_up = kwargs.get("prompt_lookup_num_tokens", getattr(settings, "prompt_lookup_num_tokens", None))
    cache, drafted = kwargs.get(CACHE), kwargs.get("assistant_model") is not None
    if kwargs.get("inputs_embeds") is not None and (drafted or (looked_up and isinstance(prompt, Tensor))):
        raise ValueError(
            "got tokens to draft and inputs_embeds; expected one of them: drafts come from ids, which are not what is "
            "read here"
        )
    if (looked_up or drafted) and cache is not None and cache.get_seq_length():
        raise ValueError(
            f"got tokens to draft and a cache that has read {cache.get_seq_length()}; expected one of them: without "
            "past_key_values the whole prompt is read, and with them no assistant_model or prompt_lookup_num_tokens"
        )


def check_rows(mask: Any, cache: Any) -> None:
    """Refuse rows of a call of `generate` that have nothing to go on from, or have read what their mask leaves out.

    `mask` (B, seen + T) is of the whole text. A row that ended before others of its batch has read the padding behind
    it. Tokens of a state that a cache began from were no slots, and are no columns.
    """
    seen, read = (cache.get_seq_length(), cache.position) if isinstance(cache, CroppableCache) else (0, None)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] <= seen:
        return
    real = mask.to(device="cpu") != 0
    empty = (~real[:, seen:].any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"got nothing but padding in row {empty[0]}, beside what a cache may have read; expected a token in every "
            "row, from which the next is predicted"
        )
    if seen and read is not None and len(read) == len(real) and not bool((read > seen).any()):
        over = (real[:, :seen].sum(1) < read.to(device="cpu")).nonzero().flatten().tolist()
        if over:
            raise ValueError(
                f"got past_key_values whose row {over[0]} has read {int(read[over[0]])} tokens, some of which the mask "
                "leaves out: it ended before other rows, and has read the padding behind it; expected rows that end "
                "together, each row alone, or the whole text without past_key_values"
            )


def begin_cache(generation_config: Any, model_kwargs: dict[str, Any], make: Callable[[], CroppableCache]) -> None:
    """Begin a cache for `generate`, where none is given; ValueError for one that is not to be used."""
    given = model_kwargs.get(CACHE) is not None
    if given and generation_config.use_cache is False:
        raise ValueError("got past_key_values and use_cache=False; expected one of them")
    if given or generation_config.use_cache is False:
        return
    cache = model_kwargs[CACHE] = make()
    if generation_config.is_assistant:  # of what it drafts, only a part is accepted
        cache.activate_past_recording()


def last_real(ids: Any, mask: Any) -> Tensor | None:
    """The last real token of each row (B, 1) of a prompt that has padding on the right; None for any other."""
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor)) or ids.dim() != 2 or bool(mask[:, -1].all()):
        return None
    places = torch.arange(ids.shape[1], device=mask.device)
    last = ((mask[:, -ids.shape[1] :] != 0) * places).amax(1, keepdim=True)
    return ids.repeat_interleave(len(last) // len(ids), dim=0).gather(1, last.to(ids.device))
