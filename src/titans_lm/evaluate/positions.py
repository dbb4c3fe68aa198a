"""Bits of documents of any length by position, at constant memory: sums for every span, and what they say together.

A position is how many tokens of its span come before a token, the first being at 0; positions are gathered between
powers of two. Bytes are counted token by token, so bits per byte of a range of positions is a ratio of two sums.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import nn

from titans_lm.config import check_at_least
from titans_lm.evaluate.bits_per_byte import EDGES, FIRST, read_spans
from titans_lm.evaluate.documents import Span
from titans_lm.evaluate.stream import PieceReader, evaluating


@dataclass(frozen=True)
class SpanScore:
    """What a span cost: sums for every range of positions that it reaches."""

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


def by_position(scores: Sequence[SpanScore]) -> tuple[PositionBits, ...]:
    """Sum spans position by position; ranges without a byte are left out."""
    found = []
    for index in range(max((len(score.tokens) for score in scores), default=0)):
        mine = [score for score in scores if len(score.tokens) > index]
        tokens, size = sum(score.tokens[index] for score in mine), sum(score.bytes[index] for score in mine)
        if size:
            bits = sum(score.bits[index] for score in mine)
            found.append(PositionBits(EDGES[index], EDGES[index + 1], tokens, size, bits))
    return tuple(found)


def overall(scores: Sequence[SpanScore]) -> PositionBits:
    """Sum everything; ValueError where there is nothing to predict."""
    parts = by_position(scores)
    if not parts:
        raise ValueError("got no text to measure on; expected documents with something to predict")
    totals = [sum(sum(getattr(score, name)) for score in scores) for name in ("tokens", "bytes", "bits")]
    return PositionBits(0, parts[-1].stop, *totals)


def score_spans(
    model: nn.Module,
    found: Iterable[Span],
    reader: PieceReader,
    *,
    reset_every: int | None = None,
    batch_size: int = 8,
    on_piece: Callable[[int], None] = lambda _: None,
) -> list[SpanScore]:
    """Predict every token of spans, each from what the model knows of its span before; in their order.

    Spans in which there is nothing to predict have no score: as books of no bytes they would make intervals too wide.
    With `reset_every` it knows nothing older than so many tokens: there it starts anew, from the last token before.
    `batch_size` spans are read side by side; `on_piece` is told how many tokens were predicted after every piece.
    The memory that this takes does not grow with the length of a text, where `reader.constant` says so.
    """
    check_at_least("batch_size", batch_size, 1)
    if reset_every is not None:
        check_at_least("reset_every", reset_every, 1)
    scores, rest = [], iter(found)
    with evaluating(model):
        while group := list(islice(rest, batch_size)):
            sums, read = np.zeros((len(group), 3, len(EDGES) - 1)), np.zeros(len(group), np.int64)
            for piece in read_spans(model, group, reader, reset_every):
                for row, tokens, bits in piece:
                    count = len(bits)
                    ranges = np.searchsorted(EDGES, np.arange(read[row], read[row] + count), side="right") - 1
                    for total, values in zip(sums[row], (np.ones(count), tokens.sizes, bits), strict=True):
                        total += np.bincount(ranges, weights=values, minlength=len(total))
                    read[row] += count
                on_piece(sum(len(bits) for _, _, bits in piece))
            scores += [_score(span, totals) for span, totals in zip(group, sums, strict=True) if totals[0].any()]
    return scores


def _score(span: Span, totals: np.ndarray) -> SpanScore:
    """What a span cost, by its sums (3, ranges) of tokens, bytes and bits."""
    counts, sizes, bits = totals[:, : int(np.count_nonzero(totals[0]))].tolist()
    return SpanScore(span.document, span.start, tuple(map(int, counts)), tuple(map(int, sizes)), tuple(bits))
