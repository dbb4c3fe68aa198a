"""Labelled sequences in parts, folds or a validation part by class with copies together; and padded batches of them.

A batch is a pure function of the seed and the step.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from titans_lm.data.batches import IGNORED, Batch, fingerprint, shuffled
from titans_lm.genomics.records import PAD, N, Sequences, Tokens, reverse_complement
from titans_lm.genomics.settings import extra

Places = NDArray[np.int64]


def overlap_groups(tokens: Sequence[Tokens], *cropped: Sequence[Tokens], overlap: int = 0) -> Places:
    """Number the groups of sequences that belong on one side of a split, from 0 in the order of their first members.

    Sequences are of one group where they are equal, or each other's reverse complement, whole or as they are `cropped`
    for a model; with `overlap` also where they share so many nucleotides in a row, none of them N, on either strand.
    Groups are the connected components of that.
    """
    edges: set[tuple[int, int]] = set()
    for rows, shared in ((tokens, overlap), *((rows, 0) for rows in cropped)):
        first: dict[bytes, int] = {}
        edges |= {(first.setdefault(key, place), place) for place, row in enumerate(rows) for key in _keys(row, shared)}
    ends = np.array(list(edges), np.int64).reshape(-1, 2).T
    shape = (len(tokens), len(tokens))
    graph = extra("scipy.sparse").coo_matrix((np.ones(len(edges), np.int8), tuple(ends)), shape)
    return extra("scipy.sparse.csgraph").connected_components(graph, directed=False)[1].astype(np.int64)


def _keys(row: Tokens, overlap: int) -> Iterator[bytes]:
    """Give the whole sequence, and all its stretches of `overlap` nucleotides; each as the lesser of its strands."""
    this, other = row.tobytes(), reverse_complement(row).tobytes()
    yield min(this, other)
    for start in range(len(row) - overlap + 1 if overlap else 0):
        stretch = min(this[start : start + overlap], other[len(row) - overlap - start : len(row) - start])
        if N not in stretch:
            yield stretch


def folds(data: Sequences, count: int, seed: int, *cropped: Sequence[Tokens], overlap: int = 0) -> Places:
    """Deal `overlap_groups` into `count` folds, class by class in an order that the seed draws.

    Where every group is one sequence, sizes of folds differ by one at most, and so do those of each class. ValueError
    for a class with fewer groups than there are folds.
    """
    rng = np.random.default_rng([seed, 0])
    groups = overlap_groups(data.tokens, *cropped, overlap=overlap)
    fold = np.zeros(len(data), np.int64)
    dealt = 0
    for members in _by_class(data, groups, count, f" for {count} folds; expected at least one for each fold"):
        fold[rng.permutation(members)] = (dealt + np.arange(len(members))) % count
        dealt += len(members)
    return fold[groups]


def held_out(data: Sequences, share: float, seed: int, overlap: int = 0) -> tuple[Sequences, Sequences]:
    """Part sequences into those to train on and a validation part, class by class; `overlap_groups` stay together.

    Each class gives `share` of its groups, rounded, and one at least. ValueError for a class with a single one.
    """
    rng = np.random.default_rng([seed, 1])
    groups = overlap_groups(data.tokens, overlap=overlap)
    chosen = np.zeros(len(data), bool)
    for members in _by_class(data, groups, 2, "; expected at least two, one to train on and one to choose by"):
        many = min(max(round(len(members) * share), 1), len(members) - 1)
        chosen[rng.permutation(members)[:many]] = True
    inside = chosen[groups]
    return data.take(np.flatnonzero(~inside)), data.take(np.flatnonzero(inside))


def _by_class(data: Sequences, groups: Places, least: int, expected: str) -> Iterator[Places]:
    """Give the groups of every class; one whose members are of several classes counts for that of its first."""
    numbers, first = np.unique(groups, return_index=True)
    label = data.with_labels()[first]
    for number, name in enumerate(data.classes):
        members = numbers[label == number]
        if len(members) < least:
            raise ValueError(f"got the class {name!r} with {len(members)} different sequences{expected}")
        yield members


def padded(rows: Sequence[Tokens]) -> Batch:
    """Lay sequences of any lengths side by side.

    tokens   (B, T)   ids, T the longest of them, padded on the right
    valid    (B, T)   whether there is a nucleotide
    """
    tokens = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=PAD).long()
    return {"tokens": tokens, "valid": tokens != PAD}


def with_targets(rows: Sequence[Tokens]) -> Batch:
    """Lay sequences side by side, with the nucleotide after each: `targets` (B, T), −100 where it is an N or none."""
    batch = padded(rows)
    following = torch.full_like(batch["tokens"], PAD)
    following[:, :-1] = batch["tokens"][:, 1:]
    return {**batch, "targets": following.masked_fill(following >= N, IGNORED)}


def pieces(rows: Sequence[Tokens], max_length: int) -> list[Tokens]:
    """Cut sequences into pieces of at most so many nucleotides; a piece that predicts nothing is left out."""
    cut = [row[start : start + max_length] for row in rows for start in range(0, len(row), max_length)]
    return [piece for piece in cut if bool((piece[1:] < N).any())]


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
