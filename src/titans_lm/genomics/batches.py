"""Batches of sequences: padded on the right to the longest, a pure function of the seed and the step."""

from collections.abc import Sequence

import numpy as np
import torch

from titans_lm.data.batches import IGNORED, Batch, fingerprint, shuffled
from titans_lm.genomics.nucleotides import PAD, N, Tokens, reverse_complement
from titans_lm.genomics.records import Sequences


def padded(rows: Sequence[Tokens]) -> Batch:
    """Lay sequences of any lengths side by side.

    tokens   (B, T)   ids, T the longest of them, padded on the right
    valid    (B, T)   whether there is a nucleotide
    """
    lengths = np.array([len(row) for row in rows])
    tokens = np.full((len(rows), lengths.max()), PAD, np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return {
        "tokens": torch.from_numpy(tokens),
        "valid": torch.from_numpy(np.arange(tokens.shape[1]) < lengths[:, None]),
    }


class _Drawn:
    """Sequences in an order that is drawn anew each time around, each perhaps from its other strand."""

    def __init__(self, rows: Sequence[Tokens], batch_size: int, seed: int, strands: bool) -> None:
        self.rows, self.batch_size, self.seed, self.strands = rows, batch_size, seed, strands

    def draw(self, step: int) -> tuple[list[Tokens], list[int]]:
        """Give the sequences of a step, and which they are."""
        count, places = len(self.rows), []
        for entry in range(step * self.batch_size, (step + 1) * self.batch_size):
            places.append(int(shuffled(self.seed, entry // count, count)[entry % count]))
        rows = [self.rows[place] for place in places]
        if self.strands:
            turned = np.random.default_rng([self.seed, step, 1]).random(len(rows)) < 0.5
            rows = [reverse_complement(row) if turn else row for row, turn in zip(rows, turned, strict=True)]
        return rows, places


class ClassBatches(_Drawn):
    """Sequences with their classes, `labels` (B,): each is read once before any is read again."""

    def __init__(self, data: Sequences, *, batch_size: int, seed: int = 0, strands: bool = False) -> None:
        super().__init__(data.tokens, batch_size, seed, strands)
        self.labels = data.with_labels()
        settings = {"kind": "classes", "batch_size": batch_size, "seed": seed, "strands": int(strands)}
        self.fingerprint = fingerprint([*data.tokens, self.labels.astype(np.uint16)], **settings)

    def __call__(self, step: int) -> Batch:
        rows, places = self.draw(step)
        return {**padded(rows), "labels": torch.from_numpy(self.labels[places])}


class NucleotideBatches(_Drawn):
    """Sequences with the nucleotide that follows each: `targets` (B, T), −100 where it is an N or there is none."""

    def __init__(self, rows: Sequence[Tokens], *, batch_size: int, seed: int = 0, strands: bool = False) -> None:
        super().__init__(rows, batch_size, seed, strands)
        settings = {"kind": "nucleotides", "batch_size": batch_size, "seed": seed, "strands": int(strands)}
        self.fingerprint = fingerprint(rows, **settings)

    def __call__(self, step: int) -> Batch:
        return with_targets(self.draw(step)[0])


def with_targets(rows: Sequence[Tokens]) -> Batch:
    """Lay sequences side by side, each token with the one after it as its target."""
    batch = padded(rows)
    following = torch.full_like(batch["tokens"], PAD)
    following[:, :-1] = batch["tokens"][:, 1:]
    return {**batch, "targets": following.masked_fill(following >= N, IGNORED)}


def pieces(rows: Sequence[Tokens], max_length: int) -> list[Tokens]:
    """Cut sequences into pieces of at most so many nucleotides; a rest of one, which predicts nothing, is left out."""
    cut = [row[start : start + max_length] for row in rows for start in range(0, len(row), max_length)]
    return [piece for piece in cut if len(piece) > 1]
