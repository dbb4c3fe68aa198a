"""How a causal language model goes on from one piece of a text to the next: by its state, a cache, or windows."""

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from titans_lm.config import check_at_least
from titans_lm.memory import NeuralMemory
from titans_lm.ops.state import take_rows

State = Any
"""What is known of the tokens before: None at the start."""
TRIED = 24
"""Tokens on which a cache is tried: whether a text in pieces gives what it gives at once."""
CLOSE, CLOSE_HALF = 1e-3, 0.1
"""Largest difference of log-probabilities between the two that counts as rounding: in float32 and above, and below."""


@runtime_checkable
class Reading(Protocol):
    """A way through a text: pieces of a length, each with what is known of those before."""

    constant: bool
    """Whether what is known of a text does not grow with it."""

    def piece(self, read: int) -> int:
        """Tell how many tokens to read next, after `read` tokens."""
        ...

    def step(self, ids: Tensor, state: State, keep: int = 0) -> tuple[Tensor, State]:
        """Read tokens (B, T); return logits after each, or after the last `keep` at least, and what is known then."""
        ...

    def fork(self, state: State) -> State:
        """Give a state of its own to read on from: the one that is given stays as it is."""
        ...

    def keep(self, state: State, rows: Tensor) -> State:
        """Go on with some of the rows only."""
        ...


@dataclass
class ByState:
    """Ours: the state is a value."""

    model: nn.Module
    piece_len: int
    constant: bool = True

    def piece(self, read: int) -> int:
        return self.piece_len

    def step(self, ids: Tensor, state: State, keep: int = 0) -> tuple[Tensor, State]:
        output = self.model(input_ids=ids, state=state, return_state=True, use_cache=False, logits_to_keep=keep)
        return output.logits, output.state

    def fork(self, state: State) -> State:
        return state

    def keep(self, state: State, rows: Tensor) -> State:
        return take_rows(state, rows)


@dataclass
class ByCache:
    """Hugging Face models whose cache has a constant size: recurrent ones and sliding windows."""

    model: nn.Module
    piece_len: int
    argument: str
    """How the model calls its cache."""
    constant: bool = True

    def piece(self, read: int) -> int:
        return self.piece_len

    def step(self, ids: Tensor, state: State, keep: int = 0) -> tuple[Tensor, State]:
        extra = {} if state is None else {self.argument: state}
        output = self.model(input_ids=ids, use_cache=True, **extra, **_kept(self.model, keep))
        return output.logits, getattr(output, self.argument)

    def fork(self, state: State) -> State:
        return copy.deepcopy(state)

    def keep(self, state: State, rows: Tensor) -> State:
        state.reorder_cache(rows)
        return state


@dataclass
class ByWindows:
    """Models without a state of constant size: windows of `window` tokens, of which the last `step` are new.

    The first is new as a whole; every later token is predicted from window − step tokens at least.
    """

    model: nn.Module
    window: int
    new: int
    constant: bool = False

    def piece(self, read: int) -> int:
        return self.new if read else self.window

    def step(self, ids: Tensor, state: State, keep: int = 0) -> tuple[Tensor, State]:
        seen = ids if state is None else torch.cat([state, ids], dim=1)
        logits = self.model(input_ids=seen, use_cache=False, **_kept(self.model, keep)).logits[:, -ids.shape[1] :]
        return logits, seen[:, max(seen.shape[1] - (self.window - self.new), 0) :]

    def fork(self, state: State) -> State:
        return state

    def keep(self, state: State, rows: Tensor) -> State:
        return state.index_select(0, rows)


def _kept(model: nn.Module, keep: int) -> dict[str, int]:
    """Ask for the logits that are wanted, of models that can leave out the others."""
    return {"logits_to_keep": keep} if keep and "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def choose_reading(model: nn.Module, *, piece_len: int, window: int, window_step: int) -> Reading:
    """Choose how a model reads on: by its state where that has a constant size, else in windows.

    ValueError for a window that is not as long as its step, or longer than a table of positions.
    """
    check_at_least("piece_len", piece_len, 1)
    check_at_least("window_step", window_step, 1)
    if window < window_step:
        raise ValueError(f"got window={window} and window_step={window_step}; expected a window at least as long")
    if hasattr(model, "init_state"):
        config: Any = model.config
        grows = config.backbone_config().state_grows  # keys and values of the whole text
        return ByWindows(model, window, window_step) if grows else ByState(model, piece_len)
    _check_positions(model, window)
    argument = _constant_cache(model)
    for length in (piece_len, 1):
        if argument is not None and goes_on(ByCache(model, min(length, TRIED // 3), argument)):
            return ByCache(model, length, argument)
    return ByWindows(model, window, window_step)


def choose_whole_reading(model: nn.Module, *, piece_len: int, max_len: int) -> Reading:
    """Choose how a model reads on and forgets nothing: as above where its state has a constant size, else up to
    `max_len` tokens with a state that grows with them."""
    reading = choose_reading(model, piece_len=piece_len, window=max_len, window_step=max_len)
    if reading.constant:
        return reading
    if hasattr(model, "init_state"):
        return ByState(model, piece_len, constant=False)
    growing = ByCache(model, piece_len, "past_key_values", constant=False)
    tried = ByCache(model, min(piece_len, TRIED // 3), growing.argument)
    return growing if _has_cache(model, growing.argument) and goes_on(tried) else ByWindows(model, max_len, 0)


@torch.no_grad()
def _has_cache(model: nn.Module, argument: str) -> bool:
    output = model(input_ids=_ids(model, 2), use_cache=True)
    return getattr(output, argument, None) is not None


def learned_positions(model: nn.Module) -> int | None:
    """Tell how far a model's table of learned positions reaches; None where it has none: rotary angles have no end."""
    owner: Any = model
    if hasattr(owner.config, "rope_parameters") or hasattr(owner.config, "rope_theta"):
        return None
    return getattr(owner.config, "max_position_embeddings", None)


def _check_positions(model: nn.Module, window: int) -> None:
    """Refuse windows that a table of learned positions does not reach."""
    most = learned_positions(model)
    if most is not None and window > most:
        raise ValueError(
            f"got a window or reset of {window} tokens for a {type(model).__name__}, which has {most} positions; "
            "expected no more"
        )


def remembers(model: nn.Module) -> bool:
    """Tell whether a model has a neural memory, which can be held still."""
    return any(isinstance(module, NeuralMemory) for module in model.modules())


def _ids(model: nn.Module, count: int) -> Tensor:
    owner: Any = model
    generator = torch.Generator().manual_seed(0)
    return torch.randint(owner.config.vocab_size, (1, count), generator=generator).to(next(model.parameters()).device)


@torch.no_grad()
def _constant_cache(model: nn.Module) -> str | None:
    """Name the cache of a Hugging Face model whose size is constant; None where it has none such."""
    output = model(input_ids=_ids(model, 2), use_cache=True)
    for name in ("past_key_values", "cache_params"):
        cache = getattr(output, name, None)
        layers = getattr(cache, "layers", None)
        if layers and all(map(_is_constant, layers)):
            return name
    return None


def _is_constant(layer: Any) -> bool:
    """Tell whether a layer of a cache keeps a window or a recurrent state, and no keys of everything."""
    return bool(getattr(layer, "is_sliding", False)) or not hasattr(layer, "keys")


@torch.no_grad()
def goes_on(reading: ByCache) -> bool:
    """Try whether pieces give what one call gives: some models read one token at a time only, after the first call."""
    ids = _ids(reading.model, TRIED)
    logits, _ = ByCache(reading.model, TRIED, reading.argument).step(ids, None)
    state, parts, length = None, [], reading.piece_len
    for start in range(0, TRIED, length):
        part, state = reading.step(ids[:, start : start + length], state)
        parts.append(part)
    whole, cut = (x.double().log_softmax(-1) for x in (logits, torch.cat(parts, dim=1)))
    close = CLOSE if torch.finfo(logits.dtype).bits >= 32 else CLOSE_HALF
    return bool((cut - whole).abs().max() < close)
