"""Tables and sets of DNA that the paper is measured on: what their files are called, where they are to be had."""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

PACKED = ".gz"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set and the names that its file may have."""

    column: str
    """The paper's name for it."""
    file: str
    """What it is called where it is to be had."""
    also: tuple[str, ...] = ()
    """Other names, in small letters."""
    source: str

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".txt")
    """What such a file's name ends with."""
    folders: ClassVar[bool] = False
    """Whether it may be a folder with a folder for each class."""

    @property
    def short(self) -> str:
        """Name of its results, which must not be taken for the set itself."""
        return self.column.lower().replace(" ", "-")

    def is_it(self, path: Path) -> bool:
        """Tell whether a path is the set, by its name and kind."""
        if not self.is_named(path):
            return False
        if path.is_dir():
            return self.folders
        return path.name.lower().removesuffix(PACKED).endswith(self.suffixes)

    def is_named(self, path: Path) -> bool:
        """Tell whether a path has the name of the set, up to its first point."""
        return path.name.partition(".")[0].lower() in (self.file.partition(".")[0].lower(), *self.also)


@dataclass(frozen=True, kw_only=True)
class Series(DataSet):
    """A table of numbers over time."""

    rows: int
    channels: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Rows of the training, validation and test part, as `titans forecast` divides a table of that name."""
        month = 30 * 24 * {"etth": 1, "ettm": 4}.get(self.column[:4].lower(), 0)
        if month:
            return 12 * month, 4 * month, 4 * month
        train, test = int(0.7 * self.rows), int(0.2 * self.rows)
        return train, self.rows - train - test, test

    def unlike(self, path: Path) -> str | None:
        """Say how a file differs in size from the paper's table; None where it does not.

        A line of names and a column of dates may be there or not.
        """
        lines, cells = _size(path)
        if lines - self.rows in (0, 1) and cells - self.channels in (0, 1):
            return None
        return (
            f"{self.column}: NOT COMPARABLE with the paper's numbers: {path} has {lines:,} lines of {cells:,} cells, "
            f"where its table has {self.rows:,} rows of {self.channels} channels"
        )

    def windows(self, lookback: int, horizon: int) -> tuple[int, int, int]:
        """Windows of each part; validation and test begin a lookback early."""
        train, validation, test = (rows - horizon + 1 for rows in self.parts)
        return train - lookback, validation, test


@dataclass(frozen=True, kw_only=True)
class Classes(DataSet):
    """A set of GenomicBenchmarks."""

    sequences: int
    """Sequences of the official training set."""
    longest: int
    """Nucleotides of the longest sequence."""
    classes: int = 2

    suffixes: ClassVar[tuple[str, ...]] = (".tsv", ".csv", ".txt", ".fa", ".fasta", ".fna", ".ffn")
    folders: ClassVar[bool] = True


ETT, REST = "github.com/zhouhaoyi/ETDataset", "github.com/thuml/Time-Series-Library"
BENCHMARKS = "github.com/ML-Bioinfo-CEITEC/genomic_benchmarks"
SERIES = (
    Series(column="ETTm1", file="ETTm1.csv", source=ETT, rows=69_680, channels=7),
    Series(column="ETTm2", file="ETTm2.csv", source=ETT, rows=69_680, channels=7),
    Series(column="ETTh1", file="ETTh1.csv", source=ETT, rows=17_420, channels=7),
    Series(column="ETTh2", file="ETTh2.csv", source=ETT, rows=17_420, channels=7),
    Series(column="ECL", file="electricity.csv", also=("ecl",), source=REST, rows=26_304, channels=321),
    Series(column="Traffic", file="traffic.csv", source=REST, rows=17_544, channels=862),
    Series(column="Weather", file="weather.csv", source=REST, rows=52_696, channels=21),
)
"""Tables of table 3, in its order."""
DNA = (
    Classes(
        column="Enhancer Cohn", file="human_enhancers_cohn", source=BENCHMARKS, sequences=20_843, longest=500
    ),
    Classes(
        column="Enhancer Ens", file="human_enhancers_ensembl", source=BENCHMARKS, sequences=123_872, longest=573
    ),
    Classes(
        column="Human Reg", file="human_ensembl_regulatory", source=BENCHMARKS, sequences=231_348, longest=802,
        classes=3,
    ),
    Classes(column="Non-TATA", file="human_nontata_promoters", source=BENCHMARKS, sequences=27_097, longest=251),
    Classes(column="Human OCR", file="human_ocr_ensembl", source=BENCHMARKS, sequences=139_804, longest=593),
)  # fmt: skip
"""Sets of table 4, in its order."""


def find_sets(place: Path, sets: Sequence[DataSet]) -> dict[str, Path]:
    """Find data sets in a folder, however deep, by the paper's names of them.

    Of a folder with the official split the training set is taken, and of several files the one whose name says train.
    ValueError for a folder that holds none, and for a set of which there are two.
    """
    found: dict[str, list[Path]] = {}
    for path in _walk(place, sets):
        column = next(one.column for one in sets if one.is_it(path))
        train = path / "train"
        found.setdefault(column, []).append(train if train.is_dir() else path)
    if not found:
        raise ValueError(f"got --data {place}, which holds none of the sets; expected a folder with {told(sets)}")
    return {one.column: _only(one, found[one.column]) for one in sets if one.column in found}


def told(sets: Sequence[DataSet]) -> str:
    """Say what the files are called and where they are to be had."""
    by_source: dict[str, list[str]] = {}
    for one in sets:
        by_source.setdefault(one.source, []).append(one.file)
    return "; ".join(f"{', '.join(names)} (from {source})" for source, names in by_source.items())


def set_of(path: Path, sets: Sequence[DataSet]) -> DataSet:
    """Find the set that a path is one of, which `find_sets` gave or which is to be there; or a part of it."""
    return next(one for place in (path, path.parent) for one in sets if one.is_named(place))


def _size(path: Path) -> tuple[int, int]:
    """Count the lines of a table and the cells of the last one, empty lines left out."""
    lines, last = 0, b""
    with gzip.open(path, "rb") if path.name.lower().endswith(PACKED) else path.open("rb") as file:
        for line in file:
            if line.strip():
                lines, last = lines + 1, line
    return lines, last.count(b",") + 1 if lines else 0


def _walk(place: Path, sets: Sequence[DataSet]) -> Iterator[Path]:
    """Yield what is a data set, and look into folders that are none."""
    if any(one.is_it(place) for one in sets):
        yield place
    elif place.is_dir():
        for path in sorted(place.iterdir()):
            if not path.name.startswith("."):
                yield from _walk(path, sets)


def _only(one: DataSet, found: list[Path]) -> Path:
    """Choose the file to train on; ValueError where that is not clear."""
    to_train = [path for path in found if "train" in path.name] or found
    if len(to_train) > 1:
        raise ValueError(
            f"got {to_train[0]} and {to_train[1]} for {one.column}; expected one of them: give a folder with no other"
        )
    return to_train[0]
