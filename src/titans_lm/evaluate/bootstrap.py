"""How far a number moves when the books behind it are drawn anew."""

from collections.abc import Callable

import numpy as np

RESAMPLES = 4000
"""Resamples of the documents behind an interval."""


def bounds(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int) -> tuple[float, float]:
    """Bound a statistic of sums (…, documents) with 95 % confidence: documents are drawn anew, with replacement."""
    count = sums.shape[-1]
    draws = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(statistic(sums[..., draws].sum(-1)), [0.025, 0.975])
    return float(low), float(high)
