"""Bits of documents of any length by position, at constant memory, and how sure differences of them are."""

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


Range = tuple[int, int]
"""Positions start … stop − 1."""
RESAMPLES = 4000
"""Resamples of the documents behind an interval."""


def bounds(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int) -> tuple[float, float]:
    """Bound a statistic of sums (…, documents) with 95 % confidence: documents are drawn anew, with replacement."""
    count = sums.shape[-1]
    draws = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(statistic(sums[..., draws].sum(-1)), [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Estimate:
    """A difference of bits per byte, with the bounds that hold it with 95 % confidence over books like these.

    A single book says nothing about others: no bounds.
    """

    value: float
    low: float | None
    high: float | None
    books: int
    stretches: int


def complete(scores: Sequence[SpanScore], far: Range) -> list[SpanScore]:
    """Keep stretches that reach the end of a range: only these say how its positions differ from earlier ones.

    One token may be missing: the first of a text is not predicted where no mark begins it.
    """
    return [score for score in scores if sum(score.tokens) >= far[1] - 1]


def late_minus_early(scores: Sequence[SpanScore], near: Range, far: Range, *, seed: int = 0) -> Estimate | None:
    """Bits per byte at far positions minus those at near ones, of stretches that reach the end of the far ones.

    Below 0 where a model predicts better the more it has read, or where the text there is easier:
    `difference_in_differences` removes the text. Several seeds of a model may be given together. None where no stretch
    is long enough.
    """
    return _estimate([(1.0, complete(scores, far))], (near, far), seed)


def difference_in_differences(
    scores: Sequence[SpanScore], others: Sequence[SpanScore], near: Range, far: Range, *, seed: int = 0
) -> Estimate | None:
    """The difference of two readings of the same tokens, far minus near: what is left when the text is taken out.

    Below 0 where the first gains on the second with position. ValueError where they did not read the same stretches.
    """
    kept = complete(scores, far), complete(others, far)
    _check_same(*kept)
    return _estimate([(1.0, kept[0]), (-1.0, kept[1])], (near, far), seed)


def difference(scores: Sequence[SpanScore], others: Sequence[SpanScore], *, seed: int = 0) -> Estimate | None:
    """Bits per byte of one reading minus those of another of the same tokens, all positions together."""
    _check_same(scores, others)
    return _estimate([(1.0, scores), (-1.0, others)], ((0, int(EDGES[-1])),), seed)


def _places(scores: Sequence[SpanScore]) -> list[tuple[str, int, tuple[int, ...]]]:
    return sorted({(score.document, score.start, score.bytes) for score in scores})


def _check_same(scores: Sequence[SpanScore], others: Sequence[SpanScore]) -> None:
    if _places(scores) != _places(others) or len(scores) != len(others):
        raise ValueError("got readings of different stretches; expected the same ones of the same documents")


def _estimate(parts: list[tuple[float, Sequence[SpanScore]]], ranges: Sequence[Range], seed: int) -> Estimate | None:
    """Bits per byte in the last of one or two ranges, minus those in the first of two; readings by their signs."""
    scores = parts[0][1]
    if not scores:
        return None
    names = sorted({score.document for score in scores})
    # bits and bytes by reading, range and book; a reading's bytes are those of its own tokens, which are the same
    sums = np.zeros((2, len(parts), len(ranges), len(names)))
    for reading, (_, mine) in enumerate(parts):
        for score in mine:
            for place, positions in enumerate(ranges):
                bits, size, _ = score.between(*positions)
                sums[:, reading, place, names.index(score.document)] += bits, size
    signs = np.array([sign for sign, _ in parts])

    def statistic(total: np.ndarray) -> np.ndarray:
        first, *then = np.moveaxis(total[0] / total[1], 1, 0)
        return np.tensordot(signs, then[0] - first if then else first, axes=1)

    low, high = bounds(sums, statistic, seed) if len(names) > 1 else (None, None)
    return Estimate(float(statistic(sums.sum(-1))), low, high, len(names), len(_places(scores)))
