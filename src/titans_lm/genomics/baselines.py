"""Baselines that learn without steps: linear classifiers of counted words, or of the length, by scikit-learn."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from titans_lm.genomics.records import LETTERS, Sequences, Tokens, decode, reverse_complement
from titans_lm.genomics.settings import GenomicsFit, extra

STRENGTHS = {"kmer-lr": (1e-4, 1e-3, 1e-2, 1e-1), "length": (1e-1, 1.0, 1e1, 1e2)}
"""C of logistic regression, the inverse of its penalty: the best on the validation part is taken."""
WAVES = np.geomspace(4.0, 2000.0, 32)
"""Wavelengths, in nucleotides: from those that tell 200 from 201 to those that tell short from long."""


def length_features(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Give sin(2π T / λ) and cos(2π T / λ) for every number of nucleotides T and 32 wavelengths λ: (rows, 64)."""
    turns = 2.0 * np.pi * lengths[:, None] / WAVES
    return np.concatenate([np.sin(turns), np.cos(turns)], 1)


def features(rows: Sequence[Tokens], settings: GenomicsFit) -> Any:
    """Give what a baseline reads of sequences: (rows, F).

    kmer-nb   how often each of the 4^k words, AA…A to TT…T, is there; none that has an N in it; sparse
    kmer-lr   the same, as shares of all words of the sequence
    length    `length_features`
    """
    if settings.baseline == "length":
        return length_features(np.array([len(row) for row in rows], np.int64))
    words = ["".join(word) for word in product(LETTERS[:4], repeat=settings.k)]
    vectorizer = extra("sklearn.feature_extraction.text").CountVectorizer
    vectorizer = vectorizer(analyzer="char", ngram_range=(settings.k, settings.k), vocabulary=words, lowercase=False)
    counts = vectorizer.transform(map(decode, rows)).astype(float)
    return counts if settings.baseline == "kmer-nb" else extra("sklearn.preprocessing").normalize(counts, norm="l1")


class LinearClassifier(nn.Module):
    """The baselines without steps: softmax(f W + b) of `features` f, W (F, K), in float64; fitted by `fit_baseline`."""

    def __init__(self, settings: GenomicsFit, classes: int) -> None:
        super().__init__()
        self.settings = settings
        size = 2 * len(WAVES) if settings.baseline == "length" else 4**settings.k
        self.weight = nn.Parameter(torch.zeros(size, classes, dtype=torch.float64), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(classes, dtype=torch.float64), requires_grad=False)

    def probabilities(self, rows: Sequence[Tokens]) -> NDArray[np.float64]:
        """Give the probability of every class for every sequence, (rows, K)."""
        return self.of_features(features(rows, self.settings))

    def of_features(self, found: Any) -> NDArray[np.float64]:
        logits = found @ self.weight.cpu().numpy() + self.bias.cpu().numpy()
        return torch.from_numpy(logits).softmax(1).numpy()


def fit_baseline(settings: GenomicsFit, train: Sequences, valid: Sequences) -> tuple[LinearClassifier, dict[str, Any]]:
    """Fit the baseline that settings name, and say how its strength was chosen.

    It needs no steps to be chosen among, so in the end it learns from both parts: what it says of the validation part
    is then no measure of it (`fit_part` on the training part has one). Naive Bayes adds 1 to the count of every word.
    Logistic regression takes shares of words, each divided by its standard deviation, or features of the length, and
    the strength of its penalty that is best on the validation part. With `reverse_complement` the other strand of
    every sequence is learned too. ValueError where scikit-learn is not installed.
    """
    chosen = _choose_strength(settings, train, valid) if settings.baseline in STRENGTHS else {}
    labels = np.concatenate([train.with_labels(), valid.with_labels()])
    joined = Sequences(train.names + valid.names, train.tokens + valid.tokens, labels, train.classes)
    return fit_part(settings, joined, chosen), chosen


def fit_part(settings: GenomicsFit, data: Sequences, chosen: dict[str, Any]) -> LinearClassifier:
    """Fit the baseline on one part, with the strength that was chosen."""
    return _fit(settings, *_training_rows(settings, data), chosen.get("strength"))


def _choose_strength(settings: GenomicsFit, train: Sequences, valid: Sequences) -> dict[str, Any]:
    """Choose the strength of the penalty on the validation part, by fits on the training part alone."""
    rows, seen, labels = _training_rows(settings, train), features(valid.tokens, settings), valid.with_labels()
    tried = {}
    for strength in STRENGTHS[settings.baseline or ""]:
        found = _fit(settings, *rows, strength).of_features(seen)
        accuracy, log_loss = (found.argmax(1) == labels).mean(), -np.log(found[range(len(labels)), labels]).mean()
        tried[strength] = float(accuracy), -float(log_loss)
    best = max(tried, key=lambda strength: tried[strength])
    return {"strength": best, "validation_accuracy": tried[best][0]}


def _training_rows(settings: GenomicsFit, data: Sequences) -> tuple[Any, NDArray[np.int64]]:
    """Give features and labels; twice as many where the other strand is learned too, whose length is no other."""
    rows, labels = list(data.tokens), data.with_labels()
    if settings.reverse_complement and settings.baseline != "length":
        rows, labels = rows + [reverse_complement(row) for row in rows], np.concatenate([labels, labels])
    return features(rows, settings), labels


def _fit(settings: GenomicsFit, rows: Any, labels: NDArray[np.int64], strength: float | None) -> LinearClassifier:
    if settings.baseline == "kmer-nb":
        bayes = extra("sklearn.naive_bayes").MultinomialNB(alpha=1.0).fit(rows, labels)
        weight, bias = bayes.feature_log_prob_.T, bayes.class_log_prior_
    else:
        scale = np.ones(rows.shape[1])
        if settings.baseline == "kmer-lr":
            scaler = extra("sklearn.preprocessing").StandardScaler(with_mean=False).fit(rows)
            rows, scale = scaler.transform(rows), scaler.scale_
        found = extra("sklearn.linear_model").LogisticRegression(C=strength, max_iter=5000).fit(rows, labels)
        weight, bias = found.coef_.T / scale[:, None], found.intercept_
        if len(bias) == 1:  # of two classes the second alone has a logit
            weight, bias = np.hstack([np.zeros_like(weight), weight]), np.array([0.0, *bias])
    fitted = LinearClassifier(settings, len(bias))
    fitted.load_state_dict({"weight": torch.from_numpy(weight.copy()), "bias": torch.from_numpy(bias.copy())})
    return fitted
