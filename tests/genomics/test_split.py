"""Folds and validation parts: by class, from a seed, and never a copy on the other side."""

import numpy as np
import pytest

from genomics.genomics_cases import letters, sequences
from titans_lm.genomics.batches import folds, overlap_groups
from titans_lm.genomics.batches import held_out as split_off
from titans_lm.genomics.records import Sequences, reverse_complement


def many(counts: tuple[int, ...]) -> Sequences:
    """Different sequences of A and C: a number in binary, long enough that no reverse complement is among them."""
    total = sum(counts)
    tokens = tuple(np.array([(number >> bit) & 1 for bit in range(10)] + [0], np.uint8) for number in range(total))
    labels = np.repeat(np.arange(len(counts)), counts)
    return Sequences(tuple(map(str, range(total))), tokens, labels, tuple("abcdef"[: len(counts)]))


def held_out(data: Sequences, *settings: float) -> tuple[list[int], list[int]]:
    """The places of both parts."""
    place = {name: number for number, name in enumerate(data.names)}
    train, valid = ([place[name] for name in part.names] for part in split_off(data, *settings))
    return train, valid


def test_folds_are_of_one_size_in_all_and_by_class() -> None:
    data = many((23, 31, 7))
    parts = folds(data, 5, 0)
    assert sorted(np.bincount(parts)) == [12, 12, 12, 12, 13]
    for number in range(3):
        sizes = np.bincount(parts[data.labels == number], minlength=5)
        assert sizes.max() - sizes.min() <= 1


def test_the_seed_decides_and_nothing_else() -> None:
    data = many((20, 20))
    assert (folds(data, 5, 3) == folds(data, 5, 3)).all()
    assert (folds(data, 5, 3) != folds(data, 5, 4)).any()
    first, other = (held_out(data, 0.2, seed)[1] for seed in (0, 1))
    assert first == held_out(data, 0.2, 0)[1]
    assert first != other


def test_a_share_of_every_class_is_held_out() -> None:
    data = many((40, 10, 3))
    train, valid = held_out(data, 0.2, 0)
    assert sorted([*train, *valid]) == list(range(53))
    assert np.bincount(data.labels[valid]).tolist() == [8, 2, 1]


def test_copies_stay_on_one_side() -> None:
    rows = letters(30, longest=40)
    other = {"A": "T", "C": "G", "G": "C", "T": "A"}
    turned = [("".join(other[letter] for letter in reversed(text)), label) for text, label in rows]
    data = sequences([*rows, *rows[:10], *turned])
    groups = overlap_groups(data.tokens)
    assert groups[:30].tolist() == list(range(30))
    assert groups[30:].tolist() == [*range(10), *range(30)]
    parts = folds(data, 5, 0)
    assert all(len(set(parts[groups == group])) == 1 for group in range(30))
    _, valid = held_out(data, 0.2, 0)
    assert all(len(set((groups == group)[valid].nonzero()[0])) in (0, (groups == group).sum()) for group in range(30))


def test_what_overlaps_stays_on_one_side() -> None:
    """A genome cut into windows of 40 every 15: each shares 25 nucleotides with the next, and 10 with the one after."""
    rng = np.random.default_rng(0)
    genomes = [rng.integers(0, 4, 100).astype(np.uint8) for _ in range(12)]
    rows = [genome[start : start + 40] for genome in genomes for start in (0, 15, 30)]
    rows[1] = reverse_complement(rows[1])
    whose = np.repeat(np.arange(12), 3)
    tokens, labels = tuple(rows), whose % 2
    data = Sequences(tuple(map(str, range(36))), tokens, labels, ("a", "b"))
    assert len(set(overlap_groups(tokens))) == 36
    assert overlap_groups(tokens, overlap=25).tolist() == whose.tolist()
    assert len(set(overlap_groups(tokens, overlap=26))) == 36
    parts = folds(data, 4, 0, overlap=20)
    assert sorted(np.bincount(parts)) == [9, 9, 9, 9]
    assert all(len(set(parts[whose == number])) == 1 for number in range(12))
    train, valid = held_out(data, 0.25, 0, 20)
    assert not set(whose[train]) & set(whose[valid])
    unknown = tuple(np.where(np.arange(40) % 20 == 10, np.uint8(4), row) for row in rows)
    assert len(set(overlap_groups(unknown, overlap=20))) == 36, "an N is like nothing"


def test_classes_that_are_too_small() -> None:
    with pytest.raises(ValueError, match="got the class 'b' with 4 different sequences for 5 folds"):
        folds(many((9, 4)), 5, 0)
    with pytest.raises(ValueError, match="got the class 'b' with 1 different sequences; expected at least two"):
        held_out(many((9, 1)), 0.1, 0)
    data = many((3, 3))
    doubled = Sequences(data.names, (*data.tokens[:3], *[data.tokens[3]] * 3), data.labels, data.classes)
    with pytest.raises(ValueError, match="got the class 'b' with 1 different sequences"):
        held_out(doubled, 0.1, 0)
