"""Bits of documents of any length by position, at constant memory: sums for every stretch, and what they say together.

A position is how many tokens of its stretch come before a token, the first being at 0; positions are gathered between
powers of two. Bytes are counted token by token, so bits per byte of a range of positions is a ratio of two sums.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import check_at_least
from titans_lm.data.batches import IGNORED
from titans_lm.evaluate.carried import Reading
from titans_lm.evaluate.texts import Stretch, Tokens
from titans_lm.train.bits_per_byte import LN2

FIRST = 64
"""Where the first range of positions ends; each later one ends at twice the position."""
EDGES = (0, *(FIRST << i for i in range(40)))


@dataclass(frozen=True)
class StretchScore:
    """What a stretch cost: sums for every range of positions that it reaches."""

    document: str
    start: int
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]
    bits: tuple[float, ...]

    def between(self, start: int, stop: int) -> tuple[float, int, int]:
        """Sum bits, bytes and tokens at positions start … stop − 1; ValueError where these are no borders of ranges."""
        if start not in EDGES or stop not in EDGES or start >= stop:
            raise ValueError(f"got positions {start} to {stop}; expected 0, {FIRST}, {2 * FIRST} and so on, rising")
        inside = slice(EDGES.index(start), EDGES.index(stop))
        return sum(self.bits[inside]), sum(self.bytes[inside]), sum(self.tokens[inside])


@dataclass(frozen=True)
class PositionBits:
    """Bits per byte and per token at positions start … stop − 1."""

    start: int
    stop: int
    tokens: int
    bytes: int
    bits: float

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes

    @property
    def bits_per_token(self) -> float:
        return self.bits / self.tokens


def by_position(scores: Sequence[StretchScore]) -> tuple[PositionBits, ...]:
    """Sum stretches position by position; ranges without a byte are left out."""
    found = []
    for index in range(max((len(score.tokens) for score in scores), default=0)):
        mine = [score for score in scores if len(score.tokens) > index]
        tokens, size = sum(score.tokens[index] for score in mine), sum(score.bytes[index] for score in mine)
        if size:
            bits = sum(score.bits[index] for score in mine)
            found.append(PositionBits(EDGES[index], EDGES[index + 1], tokens, size, bits))
    return tuple(found)


def overall(scores: Sequence[StretchScore]) -> PositionBits:
    """Sum everything; ValueError where there is nothing to predict."""
    parts = by_position(scores)
    if not parts:
        raise ValueError("got no text to measure on; expected documents with something to predict")
    totals = [sum(getattr(part, name) for part in parts) for name in ("tokens", "bytes", "bits")]
    return PositionBits(0, parts[-1].stop, *totals)


class _Sums:
    """Sums of one stretch while it is read."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch, self.last = stretch, stretch.begin
        self.totals = np.zeros((3, len(EDGES) - 1))

    def add(self, read: int, tokens: Tokens, bits: np.ndarray) -> None:
        """Add tokens from position `read` on."""
        count = len(tokens.ids)
        ranges = np.searchsorted(EDGES, np.arange(read, read + count), side="right") - 1
        for row, values in zip(self.totals, (np.ones(count), tokens.sizes, bits), strict=True):
            row += np.bincount(ranges, weights=values, minlength=len(row))
        self.last = tokens.ids[-1:]

    def score(self) -> StretchScore:
        reached = int(np.count_nonzero(self.totals[0]))
        counts, sizes, bits = self.totals[:, :reached].tolist()
        return StretchScore(
            self.stretch.document, self.stretch.start, tuple(map(int, counts)), tuple(map(int, sizes)), tuple(bits)
        )


@torch.no_grad()
def score_stretches(
    model: nn.Module,
    found: Iterable[Stretch],
    reading: Reading,
    *,
    reset_every: int | None = None,
    batch_size: int = 8,
    on_piece: Callable[[int], None] | None = None,
) -> list[StretchScore]:
    """Predict every token of stretches, each from what the model knows of its stretch before; in their order.

    With `reset_every` it knows nothing older than so many tokens: there it starts anew, from the last token before.
    `batch_size` stretches are read side by side; `on_piece` is told how many tokens were predicted after every piece.
    The memory that this takes does not grow with the length of a text, where `reading.constant` says so.
    """
    check_at_least("batch_size", batch_size, 1)
    if reset_every is not None:
        check_at_least("reset_every", reset_every, 1)
    was_training, scores, rows = model.training, [], iter(found)
    model.eval()
    try:
        while group := list(islice(rows, batch_size)):
            sums = [_Sums(stretch) for stretch in group]
            for count in _read(model, sums, reading, reset_every):
                if on_piece is not None:
                    on_piece(count)
            scores += [each.score() for each in sums]
    finally:
        model.train(was_training)
    return scores


def _read(model: nn.Module, rows: list[_Sums], reading: Reading, reset_every: int | None) -> Iterator[int]:
    """Read stretches side by side to the end of the longest; rows that end are let go."""
    device, state, read, since = next(model.parameters()).device, None, 0, 0
    while rows:
        if since == reset_every:
            state, since = None, 0
        size = reading.piece(since) if reset_every is None else min(reading.piece(since), reset_every - since)
        drawn = [row.stretch.take(size) for row in rows]
        alive = [index for index, tokens in enumerate(drawn) if len(tokens.ids)]
        if len(alive) < len(rows):
            rows, drawn = [rows[i] for i in alive], [drawn[i] for i in alive]
            if state is not None and rows:
                state = reading.keep(state, torch.tensor(alive, device=device))
            if not rows:
                return
        inputs, targets = _batch([row.last for row in rows], drawn)
        logits, state = reading.step(inputs.to(device), state)
        bits = bits_of(logits, targets.to(device))
        for row, tokens, values in zip(rows, drawn, bits, strict=True):
            row.add(read, tokens, values[: len(tokens.ids)])
        read, since = read + size, since + size
        yield sum(len(tokens.ids) for tokens in drawn)


def _batch(before: list[np.ndarray], drawn: list[Tokens]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T). Padding stands at the right of rows that end here: a causal model's answers before
    it do not depend on it."""
    shape = (len(drawn), max(len(tokens.ids) for tokens in drawn))
    inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED)
    for row, (last, tokens) in enumerate(zip(before, drawn, strict=True)):
        count = len(tokens.ids)
        inputs[row, :count], targets[row, :count] = np.concatenate([last, tokens.ids[:-1]]), tokens.ids
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def bits_of(logits: Tensor, targets: Tensor) -> np.ndarray:
    """Bits (B, T) that targets (B, T) cost, by the logits (B, T, V) before each."""
    wide: Any = logits if logits.dtype == torch.float64 else logits.float()
    nats = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return (nats.view(targets.shape).double() / LN2).cpu().numpy()
