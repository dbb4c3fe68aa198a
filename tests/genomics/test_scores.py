"""Scores against scikit-learn's, and at their edges."""

import numpy as np
import pytest

from titans_lm.genomics.scores import accuracy, confusion, macro_f1, matthews, scores


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_they_are_scikit_learns(classes: int) -> None:
    from sklearn import metrics

    rng = np.random.default_rng(classes)
    labels, told = rng.integers(0, classes, 50), rng.integers(0, classes, 50)
    counts = confusion(labels, told, classes)
    assert (counts == metrics.confusion_matrix(labels, told)).all()
    assert accuracy(counts) == pytest.approx(metrics.accuracy_score(labels, told))
    assert matthews(counts) == pytest.approx(metrics.matthews_corrcoef(labels, told))
    assert macro_f1(counts) == pytest.approx(metrics.f1_score(labels, told, average="macro"))


def test_edges() -> None:
    assert matthews(np.array([[3, 0], [0, 5]])) == pytest.approx(1.0)
    assert matthews(np.array([[0, 3], [5, 0]])) == pytest.approx(-1.0)
    assert matthews(np.array([[3, 0], [5, 0]])) == 0.0, "not defined where one class alone is told"
    assert macro_f1(np.array([[4, 0, 0], [0, 0, 0], [0, 0, 4]])) == pytest.approx(2 / 3)
    found = scores(np.array([[1, 1], [0, 2]]))
    assert found["confusion"] == [[1, 1], [0, 2]]
    assert found["accuracy"] == 0.75
