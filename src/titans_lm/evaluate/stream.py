"""How a causal language model reads a text piece by piece: by its state, by a cache, or in windows."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from titans_lm.config import check_at_least
from titans_lm.memory import NeuralMemory
from titans_lm.ops.state import take_rows
from titans_lm.retrofit.memory import LayerMemory

State = Any
"""What is known of the tokens before: None at the start."""
PIECE = 2048
"""Tokens that are read at once: enough to keep a processor busy, few enough for long rows of a batch."""
ENDLESS = 1 << 62
"""More tokens than a text has."""
PROBED = 24
"""Tokens on which a cache is tried: whether a text in pieces gives what it gives at once."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What Hugging Face models call their cache: all the same from transformers 5.24 on, and in two ways before."""
CLOSE, CLOSE_HALF = 1e-3, 0.1
"""Largest difference of log-probabilities between the two that counts as rounding: in float32 and above, and below."""


@runtime_checkable
class PieceReader(Protocol):
    """A way through a text: pieces of a length, each with what is known of those before."""

    constant: bool
    """Whether what is known of a text does not grow with it."""

    def piece(self, read: int) -> int:
        """Tell how many tokens to read next, after `read` tokens."""

    def step(self, ids: Tensor, state: State, keep: int | Tensor = 0) -> tuple[Tensor, State]:
        """Read tokens (B, T); return logits, and what is known then.

        The logits are those after each token, after the last `keep` at least, or of the columns `keep`.
        """

    def fork(self, state: State) -> State:
        """Give a state of its own to read on from: the one that is given stays as it is."""
        return state

    def keep_rows(self, state: State, rows: Tensor) -> State:
        """Go on with some of the rows only."""


@dataclass
class StatefulReader(PieceReader):
    """Ours: the state is a value."""

    model: nn.Module
    piece_len: int
    constant: bool = True

    def piece(self, read: int) -> int:
        return self.piece_len

    def step(self, ids: Tensor, state: State, keep: int | Tensor = 0) -> tuple[Tensor, State]:
        logits, output = _read(self.model, ids, keep, state=state, return_state=True, use_cache=False)
        return logits, output.state

    def keep_rows(self, state: State, rows: Tensor) -> State:
        return take_rows(state, rows)


@dataclass
class CacheReader(PieceReader):
    """Hugging Face models that go on from their cache."""

    model: nn.Module
    piece_len: int
    argument: str
    """How the model calls its cache."""
    constant: bool = True

    def piece(self, read: int) -> int:
        return self.piece_len

    def step(self, ids: Tensor, state: State, keep: int | Tensor = 0) -> tuple[Tensor, State]:
        before = {} if state is None else {self.argument: state}
        logits, output = _read(self.model, ids, keep, use_cache=True, **before)
        return logits, getattr(output, self.argument)

    def fork(self, state: State) -> State:
        return copy.deepcopy(state)

    def keep_rows(self, state: State, rows: Tensor) -> State:
        state.reorder_cache(rows)
        return state


@dataclass
class WindowReader(PieceReader):
    """Models that carry nothing: windows of `window` tokens, of which the last `new` are new.

    The first is new as a whole; every later token is predicted from window − new tokens at least.
    """

    model: nn.Module
    window: int
    new: int
    constant: bool = False

    def piece(self, read: int) -> int:
        return self.new if read else self.window

    def step(self, ids: Tensor, state: State, keep: int | Tensor = 0) -> tuple[Tensor, State]:
        seen = ids if state is None else torch.cat([state, ids], dim=1)
        before = seen.shape[1] - ids.shape[1]
        if isinstance(keep, Tensor):
            logits, _ = _read(self.model, seen, keep + before, use_cache=False)
        else:
            logits, _ = _read(self.model, seen, keep, use_cache=False)
            logits = logits[:, -ids.shape[1] :]
        return logits, seen[:, max(seen.shape[1] - (self.window - self.new), 0) :]

    def keep_rows(self, state: State, rows: Tensor) -> State:
        return state.index_select(0, rows)


def _read(model: nn.Module, ids: Tensor, keep: int | Tensor, **given: Any) -> tuple[Tensor, Any]:
    """Call a model; return the logits that are wanted, as far as it can leave out the others, and its output."""
    columns = isinstance(keep, Tensor)
    if (columns or keep) and "logits_to_keep" in inspect.signature(model.forward).parameters:
        given, columns = {**given, "logits_to_keep": keep}, False
    output = model(input_ids=ids, **given)
    return output.logits[:, keep] if columns else output.logits, output


def has_state(model: nn.Module) -> bool:
    """Tell whether a model is one of ours or has a memory of ours: its state is a value that it takes and returns."""
    return hasattr(model, "init_state")


def state_grows(model: nn.Module) -> bool:
    """Tell whether the state of a model that has one grows with the text: keys and values of full attention."""
    config: Any = model.config
    return hasattr(config, "backbone_config") and config.backbone_config().state_grows


def has_neural_memory(model: nn.Module) -> bool:
    """Tell whether a model has a neural memory, which can be frozen."""
    return any(isinstance(module, NeuralMemory | LayerMemory) for module in model.modules())


def reader_for(
    model: nn.Module,
    *,
    piece_len: int = PIECE,
    window: int | None = None,
    window_step: int | None = None,
    max_len: int | None = None,
) -> PieceReader:
    """Choose how a model reads on: by its state or cache where that has a constant size.

    Where it has not, the model reads windows of `window` tokens if these are given, which forget; else it forgets
    nothing, and carries what grows with the text, or reads up to `max_len` tokens at once. A cache is tried first:
    whether pieces give what one call gives.

    ValueError for a window shorter than its step, and one or a `max_len` beyond a model's table of positions.
    """
    check_at_least("piece_len", piece_len, 1)
    new = 0 if window is None else window if window_step is None else window_step
    if window is not None:
        check_at_least("window_step", new, 1)
        if window < new:
            raise ValueError(f"got window={window} and window_step={new}; expected a window at least as long")
    longest = window or max_len or ENDLESS
    if has_state(model):
        grows = state_grows(model)
        forgets = grows and window is not None
        return WindowReader(model, longest, new) if forgets else StatefulReader(model, piece_len, not grows)
    most = learned_positions(model)
    if most is not None and most < longest < ENDLESS:
        raise ValueError(
            f"got a window, reset or max_len of {longest} tokens for a {type(model).__name__}, which has {most} "
            "positions; expected no more"
        )
    argument, constant = _cache(model)
    if argument is not None and (constant or window is None):
        for length in (piece_len, 1) if constant else (piece_len,):
            if cache_is_exact(CacheReader(model, min(length, PROBED // 3), argument)):
                return CacheReader(model, length, argument, constant)
    return WindowReader(model, longest, new)


def learned_positions(model: nn.Module) -> int | None:
    """Tell how far a model's table of learned positions reaches; None where it has none: rotary angles have no end."""
    config: Any = model.config
    if hasattr(config, "rope_parameters") or hasattr(config, "rope_theta"):
        return None
    return getattr(config, "max_position_embeddings", None)


def check_positions(model: nn.Module, tokens: int, expected: str, told: str = "a model that has") -> None:
    """Refuse rows of more tokens than a model has learned positions, whose number goes into `expected`."""
    most = learned_positions(model)
    if most is not None and most < tokens:
        raise ValueError(
            f"got {told} learned {most:,} positions, and rows of {tokens:,} tokens; expected {expected.format(most)}"
        )


@torch.no_grad()
def _cache(model: nn.Module) -> tuple[str | None, bool]:
    """Name the cache of a Hugging Face model, and tell whether it keeps windows or recurrent states alone."""
    output, arguments = model(input_ids=_probe(model, 2), use_cache=True), inspect.signature(model.forward).parameters
    for name in [name for name in CACHE_NAMES if name in arguments] or CACHE_NAMES:
        cache = getattr(output, name, None)
        if cache is not None:
            layers = getattr(cache, "layers", None) or []
            kept = [bool(getattr(layer, "is_sliding", False)) or not hasattr(layer, "keys") for layer in layers]
            return name, bool(kept) and all(kept)
    return None, False


@torch.no_grad()
def cache_is_exact(reader: CacheReader) -> bool:
    """Try whether pieces give what one call gives: some models read one token at a time only, after the first call."""
    ids = _probe(reader.model, PROBED)
    logits, _ = reader.step(ids, None)
    state, parts = None, []
    for piece in ids.split(reader.piece_len, dim=1):
        part, state = reader.step(piece, state)
        parts.append(part)
    whole, cut = (x.double().log_softmax(-1) for x in (logits, torch.cat(parts, dim=1)))
    close = CLOSE if torch.finfo(logits.dtype).bits >= 32 else CLOSE_HALF
    return bool((cut - whole).abs().max() < close)


def _probe(model: nn.Module, count: int) -> Tensor:
    owner: Any = model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(owner.config.vocab_size, (1, count), generator=generator, device="cpu")
    return ids.to(next(model.parameters()).device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Read with a model, without dropout or gradients; gives its device, and puts its mode back after."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


@torch.no_grad()
def logits_at(
    model: nn.Module,
    input_ids: Tensor,
    columns: Tensor,
    *,
    piece_len: int = PIECE,
    on_piece: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Return the logits (B, columns, V) of ascending columns of rows (B, T), read in pieces of `piece_len` tokens.

    The memory needed does not grow with T beyond what the model itself keeps, where it can go on from piece to piece;
    the result is that of one pass. `on_piece` is told the tokens of every piece, and at last of what lies behind the
    last column, which nobody reads.
    """
    check_at_least("piece_len", piece_len, 1)
    length = input_ids.shape[1]
    reader = reader_for(model, piece_len=piece_len) if length > piece_len else WindowReader(model, length, 0)
    last = int(columns[-1]) + 1 if len(columns) else 0
    kept, state, start = [], None, 0
    while start < last:
        piece = input_ids[:, start : start + reader.piece(start)]
        here = columns[(columns >= start) & (columns < start + piece.shape[1])] - start
        logits, state = reader.step(piece, state, here if len(here) else torch.zeros_like(columns[:1]))
        if len(here):
            kept.append(logits)
        start += piece.shape[1]
        on_piece(piece.numel())
    if rest := input_ids[:, start:].numel():
        on_piece(rest)
    return torch.cat(kept, dim=1)
