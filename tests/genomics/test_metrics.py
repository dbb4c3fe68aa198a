"""Scores and the two paired tests, against numbers worked out by hand and against scipy's own."""

import math

import numpy as np
import pytest
from scipy import stats

from titans_lm.genomics.predict import corrected_t, mcnemar, resampling_ratio, scores


def test_mcnemar_by_hand() -> None:
    """Six sequences that one alone got right, all of them the first: 2 / 2⁶."""
    first, second = np.ones(10, bool), np.array([False] * 6 + [True] * 4)
    found = mcnemar(first, second)
    assert (found["first_only"], found["second_only"]) == (6, 0)
    assert found["p"] == pytest.approx(2 / 64)
    assert mcnemar(second, first)["p"] == pytest.approx(2 / 64)


def test_who_never_differs_is_not_told_apart() -> None:
    right = np.array([True, False, True])
    assert mcnemar(right, right)["p"] == 1.0


def test_mcnemar_of_both_kinds() -> None:
    """Nine against three: twice the chance of at most three heads of twelve, Σ C(12, i) / 2¹² = 299 / 4096."""
    first = np.array([True] * 9 + [False] * 3)
    assert mcnemar(first, ~first)["p"] == pytest.approx(2 * 299 / 4096)


def test_the_corrected_t_test_by_hand() -> None:
    """Differences 1, 2, 3 and a ratio of 1/2: t = 2 / √((1/3 + 1/2) · 1)."""
    found = corrected_t([1.0, 2.0, 3.0], 0.5)
    t = 2.0 / math.sqrt(1 / 3 + 1 / 2)
    assert found["difference"] == 2.0
    assert found["p"] == pytest.approx(2 * stats.t.sf(t, 2))
    half = stats.t.ppf(0.975, 2) * math.sqrt(5 / 6)
    assert (found["low"], found["high"]) == pytest.approx((2 - half, 2 + half))


def test_the_ratio_by_hand() -> None:
    """Of 100 sequences in 5 folds 20 are tested; of the other 80 a tenth is held out, which leaves 72."""
    assert resampling_ratio(5, 0.1) == pytest.approx(20 / 72)
    assert resampling_ratio(5, 0.0) == pytest.approx(20 / 80)


def test_without_the_correction_it_is_the_usual_paired_test() -> None:
    differences = [0.3, -0.1, 0.2, 0.4, 0.1]
    usual = stats.ttest_1samp(differences, 0.0)
    assert corrected_t(differences, 0.0)["p"] == pytest.approx(usual.pvalue)
    assert corrected_t(differences, 0.25)["p"] > usual.pvalue, "folds share what they were trained on"
    assert corrected_t([-value for value in differences], 0.25)["p"] == pytest.approx(
        corrected_t(differences, 0.25)["p"]
    )


def test_equal_differences_and_too_few() -> None:
    assert corrected_t([0.0, 0.0], 0.5)["p"] == 1.0
    assert corrected_t([0.5, 0.5], 0.5)["p"] == 0.0
    with pytest.raises(ValueError, match="got 1 differences; expected at least two folds"):
        corrected_t([0.5], 0.5)


def test_scores_by_hand() -> None:
    """Of six 2 + 1 + 0 are right: R = (3 · 6 − Σ p t) / √((36 − Σ p²) (36 − Σ t²)), and F1 of 4/5, 2/5 and 0."""
    found = scores(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 0, 1, 0, 1, 1]), 3)
    assert found["confusion"] == [[2, 0, 0], [1, 1, 0], [0, 2, 0]]
    assert found["accuracy"] == pytest.approx(3 / 6)
    assert found["mcc"] == pytest.approx((3 * 6 - 12) / math.sqrt((36 - 18) * (36 - 12)))
    assert found["f1"] == pytest.approx((4 / 5 + 2 / 5 + 0) / 3)


@pytest.mark.parametrize(
    ("labels", "predicted", "mcc", "f1"),
    [
        ([0, 0, 0, 1, 1], [0, 0, 0, 1, 1], 1.0, 1.0),
        ([0, 0, 0, 1, 1], [1, 1, 1, 0, 0], -1.0, 0.0),
        ([0, 0, 0, 1, 1], [0, 0, 0, 0, 0], 0.0, 0.375),
        ([1, 1], [1, 1], 0.0, 0.5),
        ([0, 0, 2, 2], [0, 0, 2, 2], 1.0, 2 / 3),
    ],
    ids=["right", "wrong", "one class alone is predicted", "and there is no other", "a class that is not there"],
)
def test_edges_of_scores(labels: list[int], predicted: list[int], mcc: float, f1: float) -> None:
    classes = max(labels + predicted + [1]) + 1
    found = scores(np.array(labels), np.array(predicted), classes)
    assert (found["mcc"], found["f1"]) == (pytest.approx(mcc), pytest.approx(f1))
    assert np.array(found["confusion"]).shape == (classes, classes)
