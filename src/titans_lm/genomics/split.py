"""Parts of labelled sequences: folds and a validation part, by class, from a seed; copies stay together."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from titans_lm.genomics.nucleotides import N, Tokens, reverse_complement
from titans_lm.genomics.records import Sequences

Places = NDArray[np.int64]


def copies(tokens: Sequence[Tokens], *cut: Sequence[Tokens], overlap: int = 0) -> Places:
    """Number the sequences so that equal ones, and those that equal another's reverse complement, have one number.

    `cut` are the same sequences as models read them: those that are copies in any form, or copies of copies, have one
    number. A model is tested on what it was trained on where a sequence and its copy are on two sides of a split. With
    `overlap` so have those that share a stretch of so many nucleotides, none of them N, on either strand.
    """
    before = list(range(len(tokens)))

    def first(place: int) -> int:
        while before[place] != place:
            before[place] = before[before[place]]
            place = before[place]
        return place

    # What is cut out of sequences shares no stretch that the sequences do not.
    for form, shared in ((tokens, overlap), *((form, 0) for form in cut)):
        known: dict[bytes, int] = {}
        for place, ids in enumerate(form):
            for stretch in _stretches(ids, shared):
                other = known.setdefault(stretch, place)
                low, high = sorted((first(other), first(place)))
                before[high] = low
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(first(place), len(numbers)) for place in before], np.int64)


def _stretches(ids: Tokens, overlap: int) -> Iterator[bytes]:
    """Give what makes two sequences one: the whole, and all stretches; each as the lesser of its strands."""
    this, other = ids.tobytes(), reverse_complement(ids).tobytes()
    yield min(this, other)
    if overlap:
        count, unknown = len(ids), bytes([N])
        for start in range(count - overlap + 1):
            stretch = min(this[start : start + overlap], other[count - overlap - start : count - start])
            if unknown not in stretch:
                yield stretch


def folds(data: Sequences, count: int, seed: int, *cut: Sequence[Tokens], overlap: int = 0) -> Places:
    """Deal sequences into `count` folds, class by class in an order that the seed draws; copies go together.

    Copies are those of `copies`, with the forms that models read the sequences in, and with what overlaps. Without
    copies, sizes of folds differ by one at most, and so do those of each class. ValueError for a class with fewer
    sequences (copies count once) than there are folds.
    """
    rng = np.random.default_rng([seed, 0])
    groups = copies(data.tokens, *cut, overlap=overlap)
    fold = np.zeros(len(data), np.int64)
    dealt = 0
    for name, members in _by_class(data, groups):
        if len(members) < count:
            raise ValueError(
                f"got the class {name!r} with {len(members)} different sequences for {count} folds; expected at least "
                "one for each fold"
            )
        fold[rng.permutation(members)] = (dealt + np.arange(len(members))) % count
        dealt += len(members)
    return fold[groups]


def held_out(data: Sequences, share: float, seed: int, overlap: int = 0) -> tuple[Places, Places]:
    """Part sequences into those to train on and a share to choose by, class by class; copies go together.

    Each class gives `share` of its sequences, rounded, and one at least. ValueError for a class with a single one.
    """
    rng = np.random.default_rng([seed, 1])
    groups = copies(data.tokens, overlap=overlap)
    chosen = np.zeros(len(data), bool)
    for name, members in _by_class(data, groups):
        if len(members) < 2:
            raise ValueError(
                f"got the class {name!r} with {len(members)} different sequences; expected at least two, one to train "
                "on and one to choose by"
            )
        many = min(max(round(len(members) * share), 1), len(members) - 1)
        chosen[rng.permutation(members)[:many]] = True
    inside = chosen[groups]
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def _by_class(data: Sequences, groups: Places) -> list[tuple[str, Places]]:
    """List the groups of every class; one whose copies are of several classes counts for that of its first."""
    numbers, first = np.unique(groups, return_index=True)
    label = data.with_labels()[first]
    return [(name, numbers[label == number]) for number, name in enumerate(data.classes)]
