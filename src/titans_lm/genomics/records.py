"""DNA sequences with names and classes: nucleotides as ids, and the files that they are read from.

Read are FASTA, tables, a folder for each class, and intervals cut out of a reference genome; plain or gzip.
"""

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from titans_lm.config import check_choice, nearest
from titans_lm.genomics.settings import Crop, ReadSettings, Unknown

Tokens = NDArray[np.uint8]
LETTERS = "ACGTN"
N, PAD = 4, 5
VOCAB_SIZE = 6
IUPAC = "RYSWKMBDHV"
"""Codes for one of two or three bases: R is A or G, Y is C or T, and so on; N takes their place."""
_OTHER, _CODE = 255, 254
_COMPLEMENT = np.array([3, 2, 1, 0, N, PAD], np.uint8)

FASTA = (".fa", ".fasta", ".fna", ".ffn")
TABLES = {".tsv": "\t", ".txt": "\t", ".csv": ","}
SEQUENCE, LABEL, NAME = ("seq", "sequence"), ("label", "class"), ("name", "id")
"""Names that columns may have, the first that is there is taken."""
INTERVAL = ("id", "region", "start", "end", "strand")
"""Columns of GenomicBenchmarks' tables of intervals."""
MARK = "label="
SPLITS = {"train", "test", "valid", "validation", "val"}
LONGEST = 2**31 - 1
"""Letters that a cell of a table may have; csv stops at 131,072 otherwise."""


_IDS = np.full(256, _OTHER, np.uint8)
for _letter, _number in (*zip(LETTERS, range(5), strict=True), ("U", 3), *((code, _CODE) for code in IUPAC)):
    _IDS[[ord(_letter), ord(_letter.lower())]] = _number


def encode(text: str, name: str, unknown: Unknown = "iupac") -> Tokens:
    """Turn letters into ids: A 0, C 1, G 2, T 3, N 4, in capitals or not; U, which RNA has in place of T, is 3.

    The ten codes for one of several bases (RYSWKMBDHV) become N by default and are an error with unknown="error".
    Everything else (gaps, digits, letters of proteins) is an error, and becomes N with unknown="n". ValueError for
    these, naming the sequence and the position, which counts from 1, and for a sequence of no letters.
    """
    check_choice("unknown", unknown, ("iupac", "error", "n"))
    tokens = _IDS[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]
    if not len(tokens):
        raise ValueError(f"got the sequence {name!r} without a nucleotide in it; expected at least one")
    strange = tokens == _OTHER if unknown == "iupac" else tokens >= _CODE
    if unknown != "n" and strange.any():
        place = int(strange.argmax())
        expected = f"{LETTERS}, U" + (f" or one of {IUPAC}" if unknown == "iupac" else "")
        raise ValueError(
            f"got {text[place]!r} at position {place + 1} of the sequence {name!r}; expected {expected}, or "
            "unknown='n', which reads everything else as N"
        )
    return np.where(tokens >= _CODE, np.uint8(N), tokens)


def decode(tokens: Tokens) -> str:
    """Turn ids back into capital letters; padding is left out."""
    return np.frombuffer(LETTERS.encode(), np.uint8)[tokens[tokens != PAD]].tobytes().decode()


def reverse_complement(tokens: Tokens) -> Tokens:
    """Read the other strand: the order reversed, A for T, C for G, N and padding as they are."""
    return _COMPLEMENT[tokens[::-1]]


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
        """Cut those longer than that, 0 none, to the center (of an odd rest the end loses one more), start or end."""
        if not self.longer_than(max_length):
            return self

        def cut(tokens: Tokens) -> Tokens:
            extra = max(len(tokens) - max_length, 0)
            start = {"start": 0, "center": extra // 2, "end": extra}[crop]
            return tokens[start : start + max_length]

        return replace(self, tokens=tuple(map(cut, self.tokens)))

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


class Interval(NamedTuple):
    """Positions start … end − 1 of a chromosome, counted from 0; strand − is read from the other side."""

    name: str
    region: str
    start: int
    end: int
    strand: str


Record = tuple[str, str | Interval, str | None]
"""Name, letters or where they stand in the reference, and class."""


def read_sequences(path: Path, settings: ReadSettings) -> Sequences:
    """Read sequences from FASTA, a table, or a folder with a folder for each class; .gz of all of these too.

    A header of FASTA gives a name, and a class as `label=CLASS`. In a folder every class has a folder or a file, with a
    sequence in each .txt file, many in each FASTA file, or intervals in .csv files, cut out of `reference`. Classes are
    texts, numbered in sorted order. ValueError for files that hold nothing, lack a column or a class, or hold what is
    no nucleotide.
    """
    if not path.exists():
        raise ValueError(f"got {str(path)!r}, which does not exist; expected a FASTA file, a table or a folder")
    if path.is_dir():
        records = _folder(path, settings.reference)
    elif suffix_of(path) in FASTA:
        records = _fasta(path)
    elif suffix_of(path) in TABLES:
        records = _table(path, settings)
    else:
        raise ValueError(
            f"got {path.name!r}, which is no kind of file that is read here; expected one of "
            f"{', '.join([*FASTA, *TABLES])}, or .gz of it"
        )
    read = [
        (name, encode(found, name, settings.unknown) if isinstance(found, str) else found, label)
        for name, found, label in records
    ]
    if not read:
        raise ValueError(f"got {path}, which holds no sequence; expected at least one")
    names, found, labels = zip(*read, strict=True)
    without = [name for name, label in zip(names, labels, strict=True) if not label]
    if without and len(without) < len(names):
        raise ValueError(
            f"got the sequence {without[0]!r} in {path} without a class; expected one for each, or for none"
        )
    tokens = cut_out(found, settings)
    if without:
        return Sequences(names, tokens, None, ())
    classes, numbers = np.unique(labels, return_inverse=True)
    return Sequences(names, tokens, numbers.astype(np.int64), tuple(classes.tolist()))


def _plain(path: Path) -> Path:
    """Give a file's name as it would be if the file were not compressed."""
    return Path(path.name[: -len(".gz")] if path.name.lower().endswith(".gz") else path.name)


def suffix_of(path: Path) -> str:
    """Give the ending of a file's name in small letters, what says that it is compressed left out."""
    return _plain(path).suffix.lower()


def _lines(path: Path) -> Iterator[str]:
    """Read the lines of a text file, plain or gzip, without a byte-order mark; ValueError for one that is neither."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"got {path}, which is no whole gzip file ({error}); expected one, or no .gz in its name"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"got {path}, which is not text; expected letters of nucleotides (.gz where compressed)"
        ) from error


def fasta_records(path: Path) -> Iterator[tuple[str, str]]:
    """Read (header without ">", sequence) record by record; lines of a sequence are joined.

    ValueError for letters before the first header, and for a file without a record.
    """
    header, parts = None, []
    for number, line in enumerate(_lines(path), start=1):
        line = line.strip()
        if line.startswith(">"):
            if header is not None:
                yield header, "".join(parts)
            header, parts = line[1:].strip(), []
        elif line and not line.startswith(";"):
            if header is None:
                raise ValueError(
                    f"got {line[:20]!r} in line {number} of {path}; expected a header, which begins with >"
                )
            parts.append(line)
    if header is None:
        raise ValueError(f"got {path}, which holds no sequence; expected FASTA with at least one record")
    yield header, "".join(parts)


def _fasta(path: Path) -> Iterator[Record]:
    for number, (header, letters) in enumerate(fasta_records(path), start=1):
        words = header.split()
        label = next((word.removeprefix(MARK) for word in words[1:] if word.startswith(MARK)), None)
        yield words[0] if words else str(number), letters, label


def _rows(path: Path, separator: str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Read the names of a table's columns, and its rows by line; ValueError, naming the line, where it is no table."""
    csv.field_size_limit(LONGEST)
    rows = csv.DictReader(_lines(path), delimiter=separator)
    try:
        return list(rows.fieldnames or ()), [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise ValueError(
            f"got line {rows.reader.line_num} of {path}, which is no row of a table: {error}; expected columns "
            f"parted by {separator!r}"
        ) from error


def _table(path: Path, settings: ReadSettings) -> Iterator[Record]:
    head, rows = _rows(path, TABLES[suffix_of(path)])
    if not head:
        raise ValueError(f"got {path}, which is empty; expected a row with the names of columns, then sequences")
    if {"region", "start", "end"} <= set(head):
        raise ValueError(f"got intervals in {path}; expected sequences, or the folder of its class with a reference")
    sequence = _column(path, head, settings.sequence_column, SEQUENCE)
    label = _column(path, head, settings.label_column, LABEL)
    if sequence is None:
        raise ValueError(
            f"got {path} with the columns {', '.join(head)}; expected one named {' or '.join(SEQUENCE)}, or the name "
            "of another: --read.sequence-column NAME"
        )
    named = _column(path, head, None, NAME)
    for number, row in rows:
        if None in row or None in row.values():
            raise ValueError(
                f"got line {number} of {path} with more or fewer than {len(head)} columns; expected as many"
            )
        yield row[named] if named else f"line {number}", row[sequence].strip(), row[label].strip() if label else None


def _column(path: Path, head: list[str], asked: str | None, usual: tuple[str, ...]) -> str | None:
    """Find the column that was asked for, or one of the usual names."""
    if asked is None:
        return next((name for name in usual if name in head), None)
    if asked not in head:
        raise ValueError(f"got the column {asked!r}, which {path} does not have; {nearest(asked, head)}")
    return asked


def _folder(path: Path, reference: Path | None) -> Iterator[Record]:
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
    for place in places:
        label = place.name if place.is_dir() else _plain(place).stem
        files = [place] if place.is_file() else [file for file in place.iterdir() if not file.name.startswith(".")]
        found = [record for file in sorted(files, key=_by_number) for record in _file(file, reference)]
        if not found:
            raise ValueError(
                f"got the class {label!r} without a sequence in {place}; expected at least one, or no folder"
            )
        yield from ((f"{label}/{name}", letters, label) for name, letters, _ in found)


def _by_number(file: Path) -> tuple[int, str]:
    """Order files by their names, numbers by their size."""
    stem = file.name.partition(".")[0]
    return (int(stem) if stem.isdigit() else -1, file.name)


def _file(file: Path, reference: Path | None) -> Iterable[Record]:
    """Read the sequences of one file of a class."""
    suffix = suffix_of(file)
    if suffix in FASTA:
        return _fasta(file)
    if suffix == ".csv":
        return _intervals(file, reference)
    if suffix == ".txt":
        return [(_plain(file).stem, "".join(line.strip() for line in _lines(file)), None)]
    raise ValueError(
        f"got {file}, which is no kind of file that is read here; expected .txt, {', '.join(FASTA)} or .csv"
    )


def _intervals(path: Path, reference: Path | None) -> Iterator[Record]:
    """Read GenomicBenchmarks' table of intervals; ValueError, naming the line, for places that are no interval."""
    if reference is None:
        raise ValueError(
            f"got intervals in {path} and no reference to cut them out of; expected the genome as FASTA, such as "
            "--read.reference GRCh38.fa.gz"
        )
    head, rows = _rows(path, ",")
    if not set(INTERVAL) <= set(head):
        raise ValueError(
            f"got {path} with the columns {', '.join(head or ['none'])}; expected those of intervals, "
            f"{', '.join(INTERVAL)}"
        )
    for number, row in rows:
        start, end = (int(row[name]) if (row[name] or "").isdigit() else -1 for name in ("start", "end"))
        if not 0 <= start < end or row["strand"] not in ("+", "-"):
            raise ValueError(
                f"got start {row['start']!r}, end {row['end']!r}, strand {row['strand']!r} in line {number} of {path}; "
                "expected 0 ≤ start < end and + or -"
            )
        yield row["id"], Interval(row["id"], row["region"], start, end, row["strand"]), None


def cut_out(found: Sequence[Tokens | Interval], settings: ReadSettings) -> tuple[Tokens, ...]:
    """Put nucleotides of the reference in the place of intervals, in one reading, a chromosome in memory at a time.

    A chromosome is known by the first word of its header. ValueError for a region that the reference lacks, and for an
    interval that ends behind the end of its chromosome.
    """
    tokens = list(found)
    wanted: dict[str, list[tuple[int, Interval]]] = {}
    for place, one in enumerate(found):
        if isinstance(one, Interval):
            wanted.setdefault(one.region, []).append((place, one))
    reference = settings.reference
    for header, letters in fasta_records(reference) if wanted and reference is not None else ():
        region = header.split(maxsplit=1)[0] if header else ""
        for place, (name, _, start, end, strand) in wanted.pop(region, []):
            if end > len(letters):
                raise ValueError(
                    f"got the interval {name!r} up to {end} of {region}, which has {len(letters)} nucleotides in "
                    f"{reference}; expected the reference that the intervals were made for"
                )
            cut = encode(letters[start:end], name, settings.unknown)
            tokens[place] = reverse_complement(cut) if strand == "-" else cut
    if wanted:
        raise ValueError(
            f"got intervals on {sorted(wanted)[0]!r}, which {reference} does not hold; expected a reference with all "
            f"chromosomes ({len(wanted)} are missing)"
        )
    return tuple(cast(list[Tokens], tokens))
