"""Whether one model is better than another on the same sequences: two paired tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, variance

import numpy as np
from numpy.typing import NDArray

from titans_lm.genomics.needed import needed

Right = NDArray[np.bool_]


@dataclass(frozen=True)
class McNemar:
    """Sequences that one of two models alone got right, and how likely so uneven a split is by chance."""

    first_only: int
    second_only: int
    p: float
    """Two-sided, exact."""


def mcnemar(first: Right, second: Right) -> McNemar:
    """Test whether two models are right equally often, by the sequences on which they differ (McNemar 1947).

        b, c sequences that the first, the second alone got right;   b ~ Binomial(b + c, 1/2)

    `first` and `second` (R,) say of R sequences, the same for both, whether the model was right.
    It counts each sequence once, as sequences of one fold each are, and takes the models as they are: it knows nothing
    of how they would have come out on other training data. 1 where they never differ.
    """
    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    return McNemar(b, c, float(needed("scipy.stats").binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0)


@dataclass(frozen=True)
class FoldTest:
    """Differences of accuracy by fold: their mean, how likely so large a one is by chance, and its interval of 95 %."""

    difference: float
    p: float
    """Two-sided."""
    low: float
    high: float


def share_tested(folds: int, held_out: float) -> float:
    """Give the ratio of sequences tested to sequences trained on, where a share of each training part is held out.

    r = (1/k) / ((1 − 1/k) (1 − h)) = 1 / ((k − 1) (1 − h))
    """
    return 1.0 / ((folds - 1) * (1.0 - held_out))


def corrected_t(differences: Sequence[float], share_tested: float) -> FoldTest:
    """Test whether a mean over folds differs from 0, by the corrected resampled t-test (Nadeau and Bengio 2003).

        t = d̄ / √((1/k + r) s²),   k − 1 degrees of freedom

    d̄ and s² are mean and variance of the k differences, r is the ratio of sequences tested to sequences trained on
    (`share_tested`): any two folds were trained on mostly the same sequences, so their differences vary
    together and 1/k alone would promise too much. Where all differences are equal p is 1 if they are 0, else 0.
    """
    count = len(differences)
    if count < 2:
        raise ValueError(f"got {count} differences; expected at least two folds")
    middle = mean(differences)
    spread = math.sqrt((1.0 / count + share_tested) * variance(differences))
    student = needed("scipy.stats").t(count - 1)
    half = float(student.ppf(0.975)) * spread
    if spread == 0.0:
        return FoldTest(middle, 1.0 if middle == 0.0 else 0.0, middle, middle)
    return FoldTest(middle, float(2.0 * student.sf(abs(middle) / spread)), middle - half, middle + half)
