"""Networks over nucleotides, and baselines: a CNN, a bag of words, and linear classifiers of counts by scikit-learn."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.data.batches import IGNORED, Batch
from titans_lm.genomics.records import LETTERS, VOCAB_SIZE, N, Sequences, Tokens, decode, reverse_complement
from titans_lm.genomics.settings import COUNTED, GenomicsFit, Pooling, extra
from titans_lm.layers import RMSNorm
from titans_lm.ops.state import state_dtype

Ids = Int[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
Hidden = Float[Tensor, "B T E"]


class WordEmbedding(nn.Module):
    """Embeddings of all the words that end at a nucleotide, added up: Σ_k E_k[s_{t−k+1} … s_t], k from 2 to size.

    A word that begins before the sequence, or has an N in it, has no embedding. E_k has 4^k rows. All of them are zero
    at the start, so a network begins as it would without them; a long word that is rare leans on the shorter ones in
    it. Words that overlap are how DNABERT reads (Ji et al. 2021); sums over their sizes are fastText's (Bojanowski et
    al. 2017).
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.sizes = range(2, size + 1)
        self.table = nn.Embedding(1 + sum(4**k for k in self.sizes), width, padding_idx=0)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: Ids) -> Hidden:
        numbers = self.numbers(tokens)
        found = F.embedding_bag(numbers.flatten(0, 1), self.table.weight, mode="sum", padding_idx=0)
        return found.view(*tokens.shape, -1)

    def numbers(self, tokens: Ids) -> Int[Tensor, "B T W"]:
        """Give the rows of the table, one for each size of word; 0 is no word."""
        found, first = [], 1
        word, real = tokens, tokens < N
        for size in self.sizes:
            before = F.pad(tokens, (size - 1, 0), value=N)[:, : tokens.shape[1]]
            word, real = word + 4 ** (size - 1) * before, real & (before < N)
            found.append(torch.where(real, first + word, 0))
            first += 4**size
        return torch.stack(found, -1)


class Encoder(nn.Module):
    """Nucleotides in, hidden states out: x_t = e_t + words_t, words of up to word_size nucleotides; dropout, backbone.

    All of it is causal, so the same weights predict the next nucleotide and classify the sequence. Padding stands on
    the right: nothing that is real comes after it, and the backbone is told where it begins.
    """

    def __init__(self, config: BackboneConfig, word_size: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.word_size = word_size
        self.embedding = nn.Embedding(VOCAB_SIZE, config.hidden_size)
        self.words = WordEmbedding(word_size, config.hidden_size) if word_size > 1 else None
        self.dropout = nn.Dropout(dropout)
        self.backbone = Backbone(config)
        self.backbone.init_weights(self.embedding)

    def forward(self, tokens: Ids, valid: Mask) -> Hidden:
        x = self.embedding(tokens)
        if self.words is not None:
            x = x + self.words(tokens)
        return self.backbone(self.dropout(x), valid=valid)[0]


class SequenceClassifier(nn.Module):
    """The class of a sequence from the hidden states of its nucleotides.

    mean     p = Σ_t m_t h_t / Σ_t m_t      m_t is 1 where there is a nucleotide and 0 on padding
    last     p = h_T                        T the last nucleotide
    logits   W p + b                        + U f(T) with see_length, f `length_features`, U zero at the start
    """

    def __init__(self, settings: GenomicsFit, classes: int) -> None:
        super().__init__()
        self.pooling: Pooling = settings.pooling
        self.encoder = Encoder(settings.model, settings.word_size, settings.embed_dropout)
        self.dropout = nn.Dropout(settings.embed_dropout)
        self.head = nn.Linear(settings.model.hidden_size, classes)
        self.encoder.backbone.init_weights(self.head)
        self.length = None
        if settings.see_length:
            self.length = nn.Linear(2 * len(WAVES), classes, bias=False)
            nn.init.zeros_(self.length.weight)

    def forward(self, tokens: Ids, valid: Mask) -> Float[Tensor, "B K"]:
        logits = self.head(self.dropout(pooled(self.encoder(tokens, valid), valid, self.pooling)))
        if self.length is None:
            return logits
        waves = torch.from_numpy(length_features(valid.sum(1).cpu().numpy()))
        return logits + self.length(waves.to(logits))


def pooled(x: Hidden, valid: Mask, pooling: Pooling) -> Float[Tensor, "B E"]:
    """Make one vector of the hidden states of each sequence, padding left out."""
    if pooling == "mean":
        return (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    return x[torch.arange(len(x), device=x.device), valid.sum(1) - 1]


class ConvolutionalClassifier(nn.Module):
    """The CNN baseline: convolutions over one-hot nucleotides, each followed by a norm, a ReLU and max pooling.

        x^{l+1} = maxpool_4 ReLU norm (W^l ∗ x^l)     then the largest value of each channel, W p + b

    An N is a column of zeros. Padding is set to zero after every convolution, and no value after a ReLU is smaller: the
    largest of a window is that of its real places. The norm is over the channels of a place.
    """

    def __init__(self, settings: GenomicsFit, classes: int) -> None:
        super().__init__()
        width, kernel = settings.cnn_channels, settings.cnn_kernel
        widths = [N, *[width] * settings.cnn_layers]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, after, kernel, padding=kernel // 2) for before, after in pairwise(widths)
        )
        self.norms = nn.ModuleList(RMSNorm(width, 1e-6) for _ in self.convolutions)
        self.dropout = nn.Dropout(settings.embed_dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Ids, valid: Mask) -> Float[Tensor, "B K"]:
        x = (F.one_hot(tokens, VOCAB_SIZE)[..., :N] * valid[..., None]).transpose(1, 2).to(self.head.weight.dtype)
        lengths = valid.sum(1)
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            if number:
                x, lengths = F.max_pool1d(x, 4, ceil_mode=True), -(-lengths // 4)
            real = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
            x = F.relu(norm(convolution(x).transpose(1, 2)).transpose(1, 2)) * real[:, None]
        return self.head(self.dropout(x.amax(2)))


class BagOfWords(nn.Module):
    """The baseline without an order: words and nucleotides, embedded, normed, and their mean.

        p = Σ_t m_t RMSNorm(e_t + words_t) / Σ_t m_t     logits W p + b

    What a backbone reads and nothing of what it does with it; fastText's classifier (Joulin et al. 2017) with a norm.
    """

    def __init__(self, settings: GenomicsFit, classes: int) -> None:
        super().__init__()
        width = settings.model.hidden_size
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.words = WordEmbedding(settings.word_size, width)
        self.norm = RMSNorm(width, 1e-6)
        self.dropout = nn.Dropout(settings.embed_dropout)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Ids, valid: Mask) -> Float[Tensor, "B K"]:
        x = self.norm(self.embedding(tokens) + self.words(tokens))
        return self.head(self.dropout(pooled(x, valid, "mean")))


class NucleotideModel(nn.Module):
    """What nucleotide comes next, by the encoder that a classifier then starts from: logits of A, C, G and T."""

    def __init__(self, config: BackboneConfig, word_size: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(config, word_size, dropout)
        self.head = nn.Linear(config.hidden_size, N)
        self.encoder.backbone.init_weights(self.head)

    def forward(self, tokens: Ids, valid: Mask) -> Float[Tensor, "B T K"]:
        return self.head(self.encoder(tokens, valid))


def make_network(settings: GenomicsFit, classes: int) -> nn.Module:
    """Build the network or the linear classifier that settings describe, with fresh weights."""
    made = {"cnn": ConvolutionalClassifier, "words": BagOfWords, **dict.fromkeys(COUNTED, LinearClassifier)}
    return made.get(settings.baseline or "", SequenceClassifier)(settings, classes)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(state_dtype(logits.dtype))  # at least float32


def class_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """−log p(class), the mean over sequences, in nats; and the share that is right."""
    logits = _precise(model(batch["tokens"], batch["valid"]))
    right = (logits.argmax(1) == batch["labels"]).float().mean()
    return F.cross_entropy(logits, batch["labels"]), {"accuracy": right}


def nucleotide_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """−log p(next nucleotide), the mean over those that follow, in nats; and in bits."""
    logits = _precise(model(batch["tokens"], batch["valid"]))
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
    return loss, {"bits_per_token": loss.detach() / torch.log(torch.tensor(2.0))}


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
