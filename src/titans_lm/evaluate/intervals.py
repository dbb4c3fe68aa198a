"""How sure differences of bits per byte are: resampled over books, of which each keeps its spans together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from titans_lm.evaluate.positions import SpanScore

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
    return _estimate([(1.0, complete(scores, far))], near, far, seed)


def difference_in_differences(
    scores: Sequence[SpanScore], others: Sequence[SpanScore], near: Range, far: Range, *, seed: int = 0
) -> Estimate | None:
    """The difference of two readings of the same tokens, far minus near: what is left when the text is taken out.

    Below 0 where the first gains on the second with position. ValueError where they did not read the same stretches.
    """
    kept = complete(scores, far), complete(others, far)
    _check_same(*kept)
    return _estimate([(1.0, kept[0]), (-1.0, kept[1])], near, far, seed)


def difference(scores: Sequence[SpanScore], others: Sequence[SpanScore], *, seed: int = 0) -> Estimate:
    """Bits per byte of one reading minus those of another of the same tokens, all positions together."""
    _check_same(scores, others)
    names = sorted({score.document for score in scores})
    bits, sizes = np.zeros(len(names)), np.zeros(len(names))
    for sign, part in ((1.0, scores), (-1.0, others)):
        for score in part:
            book = names.index(score.document)
            bits[book] += sign * sum(score.bits)
            sizes[book] += sum(score.bytes) if sign > 0 else 0
    return _bounded(np.array([bits, sizes]), lambda sums: sums[0] / sums[1], len(_places(scores)), seed)


def _places(scores: Sequence[SpanScore]) -> list[tuple[str, int, tuple[int, ...]]]:
    return sorted({(score.document, score.start, score.bytes) for score in scores})


def _check_same(scores: Sequence[SpanScore], others: Sequence[SpanScore]) -> None:
    if _places(scores) != _places(others) or len(scores) != len(others):
        raise ValueError("got readings of different stretches; expected the same ones of the same documents")


def _estimate(parts: "list[tuple[float, list[SpanScore]]]", near: Range, far: Range, seed: int) -> Estimate | None:
    scores = parts[0][1]
    if not scores:
        return None
    names = sorted({score.document for score in scores})
    # bits and bytes by reading, range and book; a reading's bytes are those of its own tokens, which are the same
    sums = np.zeros((2, len(parts), 2, len(names)))
    for reading, (_, mine) in enumerate(parts):
        for score in mine:
            for place, positions in enumerate((near, far)):
                bits, size, _ = score.between(*positions)
                sums[:, reading, place, names.index(score.document)] += bits, size
    signs = np.array([sign for sign, _ in parts])

    def statistic(total: np.ndarray) -> np.ndarray:
        bits_per_byte = total[0] / total[1]
        return np.tensordot(signs, bits_per_byte[:, 1] - bits_per_byte[:, 0], axes=1)

    return _bounded(sums, statistic, len(_places(scores)), seed)


def _bounded(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], stretches: int, seed: int) -> Estimate:
    """Take a statistic of sums (…, books) over all books, and its spread over books drawn anew with replacement."""
    books = sums.shape[-1]
    value = float(statistic(sums.sum(-1)))
    if books < 2:
        return Estimate(value, None, None, books, stretches)
    return Estimate(value, *bounds(sums, statistic, seed), books, stretches)
