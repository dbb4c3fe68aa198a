"""What the length of a sequence alone says of its class: features, and a baseline that reads nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titans_lm.genomics.needed import needed
from titans_lm.genomics.nucleotides import Tokens
from titans_lm.genomics.records import Sequences

WAVES = np.geomspace(4.0, 2000.0, 32)
"""Wavelengths, in nucleotides: from those that tell 200 from 201 to those that tell short from long."""
FEATURES = 2 * len(WAVES)
STRENGTHS = (1e-1, 1.0, 1e1, 1e2)
"""C of logistic regression on lengths, the inverse of its penalty: the best on the validation part is taken."""


def length_features(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Give sin(2π T / λ) and cos(2π T / λ) for every number of nucleotides T and 32 wavelengths λ: (rows, 64)."""
    turns = 2.0 * np.pi * lengths[:, None] / WAVES
    return np.concatenate([np.sin(turns), np.cos(turns)], 1)


def lengths_of(rows: Sequence[Tokens]) -> NDArray[np.int64]:
    """Count the nucleotides of every sequence."""
    return np.array([len(row) for row in rows], np.int64)


@dataclass(frozen=True)
class LengthClassifier:
    """A linear classifier of `length_features`: softmax over classes of f(T) W + b; no nucleotide is read.

    A saved one needs no scikit-learn to predict.
    """

    weight: NDArray[np.float64]
    """W (64, K)."""
    bias: NDArray[np.float64]
    """b (K,)."""

    def probabilities(self, rows: Sequence[Tokens]) -> NDArray[np.float64]:
        """Give the probability of every class for every sequence, (rows, K)."""
        return softmax(length_features(lengths_of(rows)) @ self.weight + self.bias)


def fit_lengths(data: Sequences, strength: float) -> LengthClassifier:
    """Fit logistic regression on the lengths of sequences; ValueError where scikit-learn is not installed."""
    logistic = needed("sklearn.linear_model").LogisticRegression
    found = logistic(C=strength, max_iter=5000).fit(length_features(lengths_of(data.tokens)), data.with_labels())
    return LengthClassifier(*weights_of_all(found.coef_.T, found.intercept_))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn logits into probabilities, row by row."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def weights_of_all(
    weight: NDArray[np.float64], bias: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Write scikit-learn's weights with a logit for every class: of two classes the second alone has one there."""
    if weight.shape[1] > 1:
        return weight, bias
    return np.hstack([np.zeros_like(weight), weight]), np.concatenate([np.zeros(1), bias])
