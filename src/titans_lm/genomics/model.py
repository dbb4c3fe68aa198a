"""Networks: the backbone with masked pooling, a CNN and a bag of words as baselines, the backbone over nucleotides."""

from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.data.batches import IGNORED, Batch
from titans_lm.genomics.baselines import WAVES, LinearClassifier, length_features
from titans_lm.genomics.records import VOCAB_SIZE, N
from titans_lm.genomics.settings import COUNTED, GenomicsFit, Pooling
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
