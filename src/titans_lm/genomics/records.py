"""Sequences with names and classes, from FASTA, from tables, and from a folder for each class."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_lm.config import nearest
from titans_lm.genomics.fasta import (
    FASTA,
    Interval,
    cut_out,
    fasta_records,
    lines_of,
    read_intervals,
    suffix_of,
    table_rows,
)
from titans_lm.genomics.nucleotides import Tokens, encode
from titans_lm.genomics.settings import Crop, ReadSettings

TABLES = {".tsv": "\t", ".txt": "\t", ".csv": ","}
SEQUENCE, LABEL, NAME = ("seq", "sequence"), ("label", "class"), ("name", "id")
"""Names that columns may have, the first that is there is taken."""
MARK = "label="
SPLITS = {"train", "test", "valid", "validation", "val"}


@dataclass(frozen=True)
class Sequences:
    """Sequences as ids, with a name each and, where they have one, the number of their class."""

    names: tuple[str, ...]
    tokens: tuple[Tokens, ...]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    """Names of the classes in sorted order: 0 is the first."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, places: Sequence[int] | NDArray[np.int64]) -> "Sequences":
        """Give some of them, in that order."""
        labels = None if self.labels is None else self.labels[np.asarray(places, np.int64)]
        return Sequences(
            tuple(self.names[i] for i in places), tuple(self.tokens[i] for i in places), labels, self.classes
        )

    def cropped(self, max_length: int, crop: Crop) -> "Sequences":
        """Cut those that are longer: the center is kept, or the start, or the end; 0 cuts nothing."""
        kept = tuple(cropped(tokens, max_length, crop) for tokens in self.tokens)
        return Sequences(self.names, kept, self.labels, self.classes)

    def longer_than(self, max_length: int) -> int:
        """Count those that are longer; none is longer than 0, which sets no limit."""
        return sum(len(tokens) > max_length > 0 for tokens in self.tokens)

    def counts(self) -> dict[str, int]:
        """Count the sequences of each class."""
        if self.labels is None:
            return {}
        return {name: int((self.labels == number).sum()) for number, name in enumerate(self.classes)}

    def with_labels(self) -> NDArray[np.int64]:
        """Give the classes; ValueError where there are none, or fewer than two."""
        if self.labels is None:
            raise ValueError(
                f"got {len(self)} sequences without classes; expected a table with a column {' or '.join(LABEL)}, a "
                f"folder for each class, or FASTA whose headers say {MARK}CLASS"
            )
        if len(self.classes) < 2:
            raise ValueError(f"got the single class {self.classes[0]!r}; expected at least two to tell apart")
        return self.labels


def cropped(tokens: Tokens, max_length: int, crop: Crop) -> Tokens:
    """Keep `max_length` nucleotides of a longer sequence; of an odd rest the end loses one more."""
    extra = len(tokens) - max_length
    if not max_length or extra <= 0:
        return tokens
    start = {"start": 0, "center": extra // 2, "end": extra}[crop]
    return tokens[start : start + max_length]


def read_sequences(path: Path, settings: ReadSettings) -> Sequences:
    """Read sequences from FASTA, a table, or a folder with a folder for each class; .gz of all of these too.

    FASTA names its sequences by the first word of a header; `label=CLASS` in it gives the class. A table has a first
    row with names: seq or sequence, and if there are classes label or class; .csv is separated by commas, .tsv and .txt
    by tabs. In a folder every class has a folder, with a sequence in each .txt file, many in each FASTA file, or
    intervals in .csv files, cut out of `reference`; classes are numbered in the sorted order of their names. Classes
    are texts: the label 1 is the class "1".

    ValueError for files that hold nothing, lack a column or a class, or hold what is no nucleotide.
    """
    if not path.exists():
        raise ValueError(f"got {str(path)!r}, which does not exist; expected a FASTA file, a table or a folder")
    if path.is_dir():
        return _folder(path, settings)
    suffix = suffix_of(path)
    if suffix in FASTA:
        return _with_classes(_fasta(path, settings), path)
    if suffix in TABLES:
        return _with_classes(_table(path, settings), path)
    known = ", ".join([*FASTA, *TABLES])
    raise ValueError(
        f"got {path.name!r}, which is no kind of file that is read here; expected one of {known}, or .gz of it"
    )


Row = tuple[str, Tokens, str | None]


def _with_classes(rows: Iterator[Row], path: Path) -> Sequences:
    """Number the classes of rows in sorted order; ValueError where some have one and some have none."""
    names, tokens, labels = [], [], []
    for name, ids, label in rows:
        names.append(name)
        tokens.append(ids)
        labels.append(label)
    if not tokens:
        raise ValueError(f"got {path}, which holds no sequence; expected at least one")
    without = [name for name, label in zip(names, labels, strict=True) if not label]
    if len(without) == len(names):
        return Sequences(tuple(names), tuple(tokens), None, ())
    if without:
        raise ValueError(
            f"got the sequence {without[0]!r} in {path} without a class; expected one for each, or for none"
        )
    return _numbered(names, tokens, [label or "" for label in labels])


def _numbered(names: list[str], tokens: list[Tokens], labels: list[str]) -> Sequences:
    classes = sorted(set(labels))
    number = {name: place for place, name in enumerate(classes)}
    return Sequences(
        tuple(names), tuple(tokens), np.array([number[label] for label in labels], np.int64), tuple(classes)
    )


def _fasta(path: Path, settings: ReadSettings) -> Iterator[Row]:
    for number, (header, letters) in enumerate(fasta_records(path), start=1):
        words = header.split()
        label = next((word.removeprefix(MARK) for word in words[1:] if word.startswith(MARK)), None)
        name = words[0] if words else str(number)
        yield name, encode(letters, name, settings.unknown), label


def _table(path: Path, settings: ReadSettings) -> Iterator[Row]:
    head, rows = table_rows(path, TABLES[suffix_of(path)])
    if not head:
        raise ValueError(f"got {path}, which is empty; expected a row with the names of columns, then sequences")
    if "region" in head and "start" in head and "end" in head:
        raise ValueError(f"got intervals in {path}; expected sequences, or the folder of its class with a reference")
    sequence = _column(path, head, settings.sequence_column, SEQUENCE)
    label = _column(path, head, settings.label_column, LABEL, needed=False)
    named = next((name for name in NAME if name in head), None)
    for number, row in enumerate(rows, start=2):
        if None in row or any(row[name] is None for name in head):
            raise ValueError(
                f"got line {number} of {path} with more or fewer than {len(head)} columns; expected as many"
            )
        name = row[named] if named else f"line {number}"
        yield name, encode(row[sequence].strip(), name, settings.unknown), row[label].strip() if label else None


def _column(path: Path, head: list[str], asked: str | None, usual: tuple[str, ...], needed: bool = True) -> Any:
    """Find the column that was asked for, or one of the usual names."""
    if asked is not None:
        if asked not in head:
            raise ValueError(f"got the column {asked!r}, which {path} does not have; {nearest(asked, head)}")
        return asked
    found = next((name for name in usual if name in head), None)
    if found is None and needed:
        raise ValueError(
            f"got {path} with the columns {', '.join(head)}; expected one named {' or '.join(usual)}, or the name of "
            "another: --read.sequence-column NAME"
        )
    return found


def _folder(path: Path, settings: ReadSettings) -> Sequences:
    """Read a folder for each class, or as GenomicBenchmarks' repository has it, a table of intervals for each."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    folders = [entry for entry in entries if entry.is_dir()]
    places = folders or [entry for entry in entries if suffix_of(entry) in (*FASTA, ".csv")]
    if not places:
        raise ValueError(f"got the folder {path}, which holds no folder of a class; expected at least two")
    if folders and {folder.name for folder in folders} <= SPLITS:
        raise ValueError(
            f"got the folder {path}, whose folders {', '.join(folder.name for folder in folders)} are splits and no "
            f"classes; expected one of these, such as {folders[-1]}"
        )
    names: list[str] = []
    tokens: list[Tokens | Interval] = []
    labels: list[str] = []
    for place in places:
        label = place.name if place.is_dir() else place.name.partition(".")[0]
        found = list(_class(place, settings))
        if not found:
            raise ValueError(
                f"got the class {label!r} without a sequence in {place}; expected at least one, or no folder"
            )
        names += [f"{label}/{name}" for name, _ in found]
        tokens += [ids for _, ids in found]
        labels += [label] * len(found)
    return _numbered(names, _cut_out(tokens, settings), labels)


def _cut_out(found: list[Tokens | Interval], settings: ReadSettings) -> list[Tokens]:
    """Put sequences in the place of intervals, those of all classes in one reading of the reference."""
    intervals = [one for one in found if isinstance(one, Interval)]
    if not intervals or settings.reference is None:
        return [one for one in found if not isinstance(one, Interval)]
    cut = iter(cut_out(intervals, settings.reference, settings.unknown))
    return [next(cut) if isinstance(one, Interval) else one for one in found]


def _class(place: Path, settings: ReadSettings) -> Iterator[tuple[str, Tokens | Interval]]:
    """Read all sequences of a class; files are taken in the order of their names, numbers by their size."""
    files = [place] if place.is_file() else [file for file in place.iterdir() if not file.name.startswith(".")]
    for file in sorted(files, key=_by_number):
        suffix = suffix_of(file)
        if suffix == ".txt":
            name = file.name.removesuffix(".gz").removesuffix(".txt")
            yield (
                name,
                encode("".join(line.strip() for line in lines_of(file)), f"{place.name}/{name}", settings.unknown),
            )
        elif suffix in FASTA:
            yield from ((name, ids) for name, ids, _ in _fasta(file, settings))
        elif suffix == ".csv":
            yield from _intervals(file, settings)
        else:
            raise ValueError(
                f"got {file}, which is no kind of file that is read here; expected .txt, {', '.join(FASTA)} or .csv"
            )


def _by_number(file: Path) -> tuple[int, str]:
    stem = file.name.partition(".")[0]
    return (int(stem) if stem.isdigit() else -1, file.name)


def _intervals(file: Path, settings: ReadSettings) -> Iterator[tuple[str, Interval]]:
    if settings.reference is None:
        raise ValueError(
            f"got intervals in {file} and no reference to cut them out of; expected the genome as FASTA, such as "
            "--read.reference GRCh38.fa.gz"
        )
    for interval in read_intervals(file):
        yield interval.name, interval
