"""How well classes were told: accuracy, Matthews' correlation and F1, from counts alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def confusion(labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> Counts:
    """Count, in row i and column j of (K, K), sequences of class i that were taken for class j.

    `labels` and `predicted` (R,) are the classes of R sequences, numbers from 0 to K − 1; `classes` is K.
    """
    return np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def accuracy(counts: Counts) -> float:
    """Share of sequences whose class was told (top-1)."""
    return float(np.trace(counts) / counts.sum())


def matthews(counts: Counts) -> float:
    """Matthews' correlation coefficient for any number of classes (Gorodkin 2004), 0 where it is not defined.

        R = (c s − Σ_k p_k t_k) / √((s² − Σ_k p_k²) (s² − Σ_k t_k²))

    s sequences, c of them right, t_k of class k, p_k taken for it.
    """
    true, told, s = counts.sum(1).astype(float), counts.sum(0).astype(float), float(counts.sum())
    spread = (s * s - told @ told) * (s * s - true @ true)
    return float((np.trace(counts) * s - true @ told) / np.sqrt(spread)) if spread > 0.0 else 0.0


def macro_f1(counts: Counts) -> float:
    """Mean over classes of F1 = 2 right / (of the class + taken for it); 0 for a class of which there is neither."""
    both = counts.sum(0) + counts.sum(1)
    return float(np.mean(np.divide(2.0 * np.diag(counts), both, out=np.zeros(len(counts)), where=both > 0)))


def scores(counts: Counts) -> dict[str, Any]:
    """Give all three, with the counts."""
    found = {"accuracy": accuracy(counts), "mcc": matthews(counts), "f1": macro_f1(counts)}
    return {**found, "confusion": counts.tolist()}
