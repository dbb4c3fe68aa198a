"""Batches of sequences: padded on the right to the longest, a pure function of the seed and the step."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from titans_lm.data.batches import IGNORED, Batch, fingerprint, shuffled
from titans_lm.genomics.records import PAD, N, Tokens, reverse_complement


def padded(rows: Sequence[Tokens]) -> Batch:
    """Lay sequences of any lengths side by side.

    tokens   (B, T)   ids, T the longest of them, padded on the right
    valid    (B, T)   whether there is a nucleotide
    """
    tokens = np.full((len(rows), max(map(len, rows))), PAD, np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return {"tokens": torch.from_numpy(tokens), "valid": torch.from_numpy(tokens != PAD)}


def with_targets(rows: Sequence[Tokens]) -> Batch:
    """Lay sequences side by side, with the nucleotide after each: `targets` (B, T), −100 where it is an N or none."""
    batch = padded(rows)
    following = torch.full_like(batch["tokens"], PAD)
    following[:, :-1] = batch["tokens"][:, 1:]
    return {**batch, "targets": following.masked_fill(following >= N, IGNORED)}


def pieces(rows: Sequence[Tokens], max_length: int) -> list[Tokens]:
    """Cut sequences into pieces of at most so many nucleotides; a rest of one, which predicts nothing, is left out."""
    cut = [row[start : start + max_length] for row in rows for start in range(0, len(row), max_length)]
    return [piece for piece in cut if len(piece) > 1]


class SequenceBatches:
    """Sequences in an order that is drawn anew each epoch, with `strands` each perhaps from its other strand.

    With them come their classes, `labels` (B,); without labels the `targets` of `with_targets`.
    """

    def __init__(
        self,
        rows: Sequence[Tokens],
        labels: NDArray[np.int64] | None = None,
        *,
        batch_size: int,
        seed: int = 0,
        strands: bool = False,
    ) -> None:
        self.rows, self.labels, self.batch_size, self.seed, self.strands = rows, labels, batch_size, seed, strands
        known = [] if labels is None else [labels.astype(np.uint16)]
        kind = "nucleotides" if labels is None else "classes"
        self.fingerprint = fingerprint(
            [*rows, *known], kind=kind, batch_size=batch_size, seed=seed, strands=int(strands)
        )

    def __call__(self, step: int) -> Batch:
        count, first = len(self.rows), step * self.batch_size
        entries = range(first, first + self.batch_size)
        places = [int(shuffled(self.seed, entry // count, count)[entry % count]) for entry in entries]
        rows = [self.rows[place] for place in places]
        if self.strands:
            turned = np.random.default_rng([self.seed, step, 1]).random(len(rows)) < 0.5
            rows = [reverse_complement(row) if turn else row for row, turn in zip(rows, turned, strict=True)]
        if self.labels is None:
            return with_targets(rows)
        return {**padded(rows), "labels": torch.from_numpy(self.labels[places])}
