"""How well classes are predicted: scores, paired tests of two models, and a picture of the confusions."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_lm.genomics.settings import extra
from titans_lm.report.figures import HeatMaps
from titans_lm.report.plots import draw, save_png

Labels = NDArray[np.int64]
Correct = NDArray[np.bool_]


def scores(labels: Labels, predicted: Labels, classes: int) -> dict[str, Any]:
    """Give accuracy, Matthews' correlation, macro F1 and the confusion: row i, column j counts class i taken for j.

    Classes are numbers from 0 to `classes` − 1. The correlation is 0 where it is not defined; F1 is 0 for a class that
    is neither there nor predicted.
    """
    metrics, numbers = extra("sklearn.metrics"), range(classes)
    single = len({*labels.tolist(), *predicted.tolist()}) < 2  # scikit-learn gives 0 there too, and warns
    return {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        "mcc": 0.0 if single else float(metrics.matthews_corrcoef(labels, predicted)),
        "f1": float(metrics.f1_score(labels, predicted, labels=numbers, average="macro", zero_division=0.0)),
        "confusion": metrics.confusion_matrix(labels, predicted, labels=numbers).tolist(),
    }


def mcnemar(first: Correct, second: Correct) -> dict[str, Any]:
    """Test whether two models are right equally often, by the sequences on which they differ (McNemar 1947).

        b, c sequences that the first, the second alone got right;   b ~ Binomial(b + c, 1/2), two-sided, exact

    `first` and `second` (R,) say of R sequences, the same for both, whether the model was right.
    It counts each sequence once, as sequences of one fold each are, and takes the models as they are: it knows nothing
    of how they would have come out on other training data. 1 where they never differ.
    """
    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    p = float(extra("scipy.stats").binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0
    return {"first_only": b, "second_only": c, "p": p}


def resampling_ratio(folds: int, held_out: float) -> float:
    """Give the ratio of sequences tested to sequences trained on, where a share of each training part is held out.

    r = (1/k) / ((1 − 1/k) (1 − h)) = 1 / ((k − 1) (1 − h))
    """
    return 1.0 / ((folds - 1) * (1.0 - held_out))


def corrected_t(differences: Sequence[float], ratio: float) -> dict[str, float]:
    """Test whether a mean over folds differs from 0, by the corrected resampled t-test (Nadeau and Bengio 2003).

        t = d̄ / √((1/k + r) s²),   k − 1 degrees of freedom;   d̄, a two-sided p, and the interval of 95 %

    d̄ and s² are mean and variance of the k differences, r is the ratio of sequences tested to sequences trained on
    (`resampling_ratio`): any two folds were trained on mostly the same sequences, so their differences vary
    together and 1/k alone would promise too much. Where all differences are equal p is 1 if they are 0, else 0.
    """
    count = len(differences)
    if count < 2:
        raise ValueError(f"got {count} differences; expected at least two folds")
    middle = mean(differences)
    spread = math.sqrt((1.0 / count + ratio) * variance(differences))
    student = extra("scipy.stats").t(count - 1)
    half = float(student.ppf(0.975)) * spread
    p = float(2.0 * student.sf(abs(middle) / spread)) if spread else float(middle == 0.0)
    return {"difference": middle, "p": p, "low": middle - half, "high": middle + half}


def write_confusion(path: Path, title: str, classes: Sequence[str], panels: dict[str, Any]) -> Path:
    """Draw confusions, a panel for each model, as shares of each true class in per cent into a PNG file."""
    shares = {
        name: [[100.0 * many / max(sum(row), 1) for many in row] for row in counts] for name, counts in panels.items()
    }
    maps = HeatMaps(
        title=title, x_label="predicted", y_label="class", x_labels=list(classes), y_labels=list(classes), panels=shares
    )
    return save_png(draw(maps), path)


def write_own_confusion(path: Path, found: dict[str, Any], classes: Sequence[str]) -> Path:
    """Draw the confusion of one classifier, by its scores."""
    title = f"{100 * found['accuracy']:.1f} % right"
    return write_confusion(path, title, classes, {"of each class, %": found["confusion"]})
