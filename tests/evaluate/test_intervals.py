"""Intervals over books against hand-made data, where the bootstrap can be counted out."""

from itertools import product

import numpy as np
import pytest

from titans_lm.evaluate.positions import Estimate, SpanScore, difference, difference_in_differences, late_minus_early

NEAR, FAR = (64, 128), (128, 256)


def score(document: str, start: int, near: tuple[float, int], far: tuple[float, int], first: float = 9.0) -> SpanScore:
    """A stretch with bits and bytes of near and of far positions."""
    return SpanScore(document, start, (64, 64, 128), (100, near[1], far[1]), (first, near[0], far[0]))


# Far minus near: a is −0.5 and b +0.5 by its one stretch; c has two that differ by ±3 and make −0.25 together.
SCORES = [
    score("a", 0, (200.0, 100), (300.0, 200)),
    score("b", 0, (100.0, 50), (250.0, 100)),
    score("c", 0, (100.0, 100), (400.0, 100)),
    score("c", 256, (400.0, 100), (50.0, 100)),
]
BOOKS = {"a": (200.0, 100, 300.0, 200), "b": (100.0, 50, 250.0, 100), "c": (500.0, 200, 450.0, 200)}


def moved(one: SpanScore, near: float, far: float) -> SpanScore:
    """The same stretch with so many more bits per byte."""
    first, near_bits, far_bits = one.bits
    bits = (first, near_bits + near * one.bytes[1], far_bits + far * one.bytes[2])
    return SpanScore(one.document, one.start, one.tokens, one.bytes, bits)


def pooled(names: tuple[str, ...]) -> float:
    near_bits, near, far_bits, far = (sum(values) for values in zip(*(BOOKS[name] for name in names), strict=True))
    return far_bits / far - near_bits / near


def test_the_interval_is_that_of_all_draws_of_books() -> None:
    """Of three books there are 27 draws; the least and the greatest have 1/27 each, more than the 2.5 % cut off."""
    found = late_minus_early(SCORES, NEAR, FAR)
    draws = [pooled(names) for names in product("abc", repeat=3)]
    assert found == Estimate(pytest.approx(pooled(("a", "b", "c"))), min(draws), max(draws), 3, 4)
    assert (min(draws), max(draws)) == (-0.5, 0.5), "a book keeps its stretches together: c alone is −0.25"


def test_many_books_against_a_direct_bootstrap() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(-0.02, 0.05, 40)
    scores = [score(f"{i:02}", 0, (200.0, 100), (100 * (2.0 + x), 100)) for i, x in enumerate(values)]
    found = late_minus_early(scores, NEAR, FAR, seed=3)
    means = [rng.choice(values, 40).mean() for _ in range(20_000)]
    assert found is not None
    assert found.value == pytest.approx(values.mean())
    assert [found.low, found.high] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1.5e-3)
    assert late_minus_early(scores, NEAR, FAR, seed=3) == found, "the same seed draws the same books"


def test_the_change_of_a_difference_takes_the_text_out() -> None:
    """Texts differ by whole bits; the second reading is 0.1 worse near and 0.3 worse far in every book."""
    others = [moved(one, near=0.1, far=0.3) for one in SCORES]
    found = difference_in_differences(SCORES, others, NEAR, FAR)
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx([-0.2] * 3)
    backwards = difference_in_differences(others, SCORES, NEAR, FAR)
    assert backwards is not None
    assert backwards.value == pytest.approx(0.2)
    both = difference(SCORES, others)
    total = sum(0.1 * s.bytes[1] + 0.3 * s.bytes[2] for s in SCORES)
    assert both.value == pytest.approx(-total / sum(sum(s.bytes) for s in SCORES))
    assert (both.books, both.stretches) == (3, 4)


def readings(*bits: float) -> list[SpanScore]:
    """Books of 100 bytes, each of so many bits."""
    return [SpanScore(f"{i:02}", 0, (64,), (100,), (one,)) for i, one in enumerate(bits)]


def test_a_difference_is_clear_where_all_books_agree() -> None:
    worse, better = readings(*[300.0] * 12), readings(*[200.0 + i for i in range(12)])
    found = difference(better, worse)
    assert found.value == pytest.approx((205.5 - 300.0) / 100)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high < 0.0
    assert difference(worse, better).low == pytest.approx(-found.high)
    mixed = difference(readings(*[280.0, 320.0] * 6), worse)
    assert mixed.low is not None
    assert mixed.high is not None
    assert mixed.low < 0.0 < mixed.high


def test_seeds_are_averaged_and_count_as_one_reading() -> None:
    other = [moved(one, near=0.0, far=1.0) for one in SCORES]
    found = late_minus_early([*SCORES, *other], NEAR, FAR)
    assert found is not None
    assert found.value == pytest.approx(pooled(("a", "b", "c")) + 0.5)
    assert (found.books, found.stretches) == (3, 4)
    change = difference_in_differences([*SCORES, *other], [*SCORES, *SCORES], NEAR, FAR)
    assert change is not None
    assert [change.value, change.low, change.high] == pytest.approx([0.5] * 3)


def test_stretches_that_end_early_say_nothing() -> None:
    short = SpanScore("d", 0, (64, 64, 126), (100, 100, 100), (0.0, 0.0, 9e9))
    assert late_minus_early([*SCORES, short], NEAR, FAR) == late_minus_early(SCORES, NEAR, FAR)
    assert late_minus_early([short], NEAR, FAR) is None
    assert difference_in_differences([short], [short], NEAR, FAR) is None
    unmarked = SpanScore("d", 0, (63, 64, 128), (100, 100, 100), (0.0, 0.0, 9e9))  # its first token is not predicted
    assert late_minus_early([unmarked], NEAR, FAR) is not None


def test_one_book_has_no_interval() -> None:
    found = late_minus_early(SCORES[2:], NEAR, FAR)
    assert found == Estimate(pytest.approx(-0.25), None, None, 1, 2)


def test_different_texts_are_not_compared() -> None:
    for others in (SCORES[:3], [*SCORES[:3], score("c", 256, (400.0, 100), (50.0, 99))]):
        with pytest.raises(ValueError, match="different stretches"):
            difference_in_differences(SCORES, others, NEAR, FAR)
        with pytest.raises(ValueError, match="different stretches"):
            difference(SCORES, others)
