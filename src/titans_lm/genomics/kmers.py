"""Baselines without steps: words of k nucleotides, counted, and the length alone, by scikit-learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_lm.genomics import lengths
from titans_lm.genomics.lengths import LengthClassifier, fit_lengths, softmax, weights_of_all
from titans_lm.genomics.needed import needed
from titans_lm.genomics.nucleotides import N, Tokens, reverse_complement
from titans_lm.genomics.records import Sequences
from titans_lm.genomics.settings import GenomicsFit

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
"""C of logistic regression, the inverse of its penalty: the best on the validation part is taken."""


@dataclass(frozen=True)
class WordClassifier:
    """A linear classifier of words: softmax over classes of Σ_w c_w W_wk + b_k, c_w how often word w is in a sequence.

    Both baselines are of this form, so a saved one needs no scikit-learn to predict. With `shares`, c_w is divided by
    the number of words in the sequence.
    """

    k: int
    weight: NDArray[np.float64]
    """W (4^k, K)."""
    bias: NDArray[np.float64]
    """b (K,)."""
    shares: bool

    def probabilities(self, rows: Sequence[Tokens]) -> NDArray[np.float64]:
        """Give the probability of every class for every sequence, (rows, K)."""
        return softmax(np.stack([self._logits(row) for row in rows]))

    def _logits(self, row: Tokens) -> NDArray[np.float64]:
        words = words_of(row, self.k)
        total = self.weight[words].sum(0)
        return (total / max(len(words), 1) if self.shares else total) + self.bias


def words_of(row: Tokens, k: int) -> NDArray[np.int64]:
    """Number every word of k nucleotides in a sequence, overlapping ones too: AA…A is 0, TT…T is 4^k − 1.

    Words with an N in them are left out, so there may be none.
    """
    if len(row) < k:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(row.astype(np.int64), k)
    return windows[(windows < N).all(1)] @ (4 ** np.arange(k - 1, -1, -1, dtype=np.int64))


def fit_counted(
    settings: GenomicsFit, train: Sequences, valid: Sequences
) -> tuple[WordClassifier | LengthClassifier, dict[str, Any]]:
    """Fit the baseline that settings name, and say how its strength was chosen.

    It needs no steps to be chosen among, so in the end it learns from both parts: what it says of the validation part
    is then no measure of it (`fit_part` on the training part has one). Naive Bayes adds 1 to the count of every word.
    Logistic regression takes shares of words, each divided by its standard deviation, or features of the length, and
    the strength of its penalty that is best on the validation part. With `reverse_complement` the other strand of
    every sequence is learned too. ValueError where scikit-learn is not installed.
    """
    told = {} if settings.baseline == "kmer-nb" else _strongest(settings, train, valid)
    return fit_part(settings, _joined(train, valid), told), told


def fit_part(settings: GenomicsFit, data: Sequences, told: dict[str, Any]) -> WordClassifier | LengthClassifier:
    """Fit the baseline on one part, with the strength that `fit_counted` has told."""
    if settings.baseline == "kmer-nb":
        return _naive_bayes(settings, data)
    if settings.baseline == "length":
        return fit_lengths(data, told["strength"])
    return _logistic(settings, data, told["strength"])


def _strongest(settings: GenomicsFit, train: Sequences, valid: Sequences) -> dict[str, Any]:
    """Choose the strength of the penalty on the validation part, by fits on the training part alone."""
    tried = {}
    labels = valid.with_labels()
    for strength in lengths.STRENGTHS if settings.baseline == "length" else STRENGTHS:
        found = fit_part(settings, train, {"strength": strength}).probabilities(valid.tokens)
        tried[strength] = (
            float((found.argmax(1) == labels).mean()),
            -float(-np.log(found[range(len(labels)), labels]).mean()),
        )
    best = max(tried, key=lambda strength: tried[strength])
    return {"strength": best, "validation_accuracy": tried[best][0]}


def _joined(first: Sequences, second: Sequences) -> Sequences:
    labels = np.concatenate([first.with_labels(), second.with_labels()])
    return Sequences(first.names + second.names, first.tokens + second.tokens, labels, first.classes)


def _naive_bayes(settings: GenomicsFit, data: Sequences) -> WordClassifier:
    counts, labels = _table(data, settings, shares=False)
    found = needed("sklearn.naive_bayes").MultinomialNB(alpha=1.0).fit(counts, labels)
    return WordClassifier(settings.k, found.feature_log_prob_.T.copy(), found.class_log_prior_.copy(), shares=False)


def _logistic(settings: GenomicsFit, data: Sequences, strength: float) -> WordClassifier:
    table, labels = _table(data, settings, shares=True)
    scale = needed("sklearn.preprocessing").StandardScaler(with_mean=False).fit(table)
    logistic = needed("sklearn.linear_model").LogisticRegression
    found = logistic(C=strength, max_iter=5000).fit(scale.transform(table), labels)
    weight, bias = weights_of_all(found.coef_.T / scale.scale_[:, None], found.intercept_)
    return WordClassifier(settings.k, weight, bias, shares=True)


def _table(data: Sequences, settings: GenomicsFit, *, shares: bool) -> tuple[Any, NDArray[np.int64]]:
    """Count words: a sparse matrix (sequences, 4^k), with a row for the other strand where it is learned too."""
    rows, labels = list(data.tokens), data.with_labels()
    if settings.reverse_complement:
        rows, labels = rows + [reverse_complement(row) for row in rows], np.concatenate([labels, labels])
    found = [np.unique(words_of(row, settings.k), return_counts=True) for row in rows]
    values = np.concatenate([many / many.sum() if shares else many for _, many in found])
    ends = np.concatenate([[0], np.cumsum([len(words) for words, _ in found])])
    table = needed("scipy.sparse").csr_matrix(
        (values.astype(float), np.concatenate([w for w, _ in found]), ends), (len(rows), 4**settings.k)
    )
    return table, labels
