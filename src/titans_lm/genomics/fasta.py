"""FASTA files, plain or gzip, record by record; and intervals cut out of a reference genome."""

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from titans_lm.genomics.nucleotides import Tokens, encode, reverse_complement
from titans_lm.genomics.settings import Unknown

FASTA = (".fa", ".fasta", ".fna", ".ffn")
LONGEST = 2**31 - 1
"""Letters that a cell of a table may have; csv stops at 131,072 otherwise."""
COLUMNS = ("id", "region", "start", "end", "strand")
"""Columns of GenomicBenchmarks' tables of intervals."""


class Interval(NamedTuple):
    """Positions start … end − 1 of a chromosome, counted from 0; strand − is read from the other side."""

    name: str
    region: str
    start: int
    end: int
    strand: str


def suffix_of(path: Path) -> str:
    """Give the ending of a file's name in small letters, what says that it is compressed left out."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def open_text(path: Path) -> TextIOWrapper:
    """Open a text file for reading, without its byte-order mark; one whose name ends in .gz is decompressed."""
    if path.name.lower().endswith(".gz"):
        return TextIOWrapper(cast(IO[bytes], gzip.open(path, "rb")), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def lines_of(path: Path) -> Iterator[str]:
    """Read the lines of a text file, plain or gzip; ValueError for one that is neither."""
    try:
        with open_text(path) as file:
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
    header, parts, found = None, [], False
    for number, line in enumerate(lines_of(path), start=1):
        line = line.strip()
        if line.startswith(">"):
            if header is not None:
                yield header, "".join(parts)
            header, parts, found = line[1:].strip(), [], True
        elif line and not line.startswith(";"):
            if header is None:
                raise ValueError(
                    f"got {line[:20]!r} in line {number} of {path}; expected a header, which begins with >"
                )
            parts.append(line)
    if not found:
        raise ValueError(f"got {path}, which holds no sequence; expected FASTA with at least one record")
    yield header or "", "".join(parts)


def table_rows(path: Path, separator: str) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Read the names of a table's columns, and then its rows; ValueError, naming the line, where there is no table."""
    csv.field_size_limit(LONGEST)
    rows = csv.DictReader(lines_of(path), delimiter=separator)

    def checked() -> Iterator[Any]:
        try:
            yield list(rows.fieldnames or ())
            yield from rows
        except csv.Error as error:
            raise ValueError(
                f"got line {rows.reader.line_num} of {path}, which is no row of a table: {error}; expected columns "
                f"parted by {separator!r}"
            ) from error

    read = checked()
    return next(read), read


def read_intervals(path: Path) -> list[Interval]:
    """Read GenomicBenchmarks' table of intervals (id, region, start, end, strand; comma separated).

    ValueError, naming the line, for columns that are missing and for places that are no interval.
    """
    head, rows = table_rows(path, ",")
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        raise ValueError(
            f"got {path} with the columns {', '.join(head or ['none'])}; expected those of intervals, "
            f"{', '.join(COLUMNS)}"
        )
    found = []
    for number, row in enumerate(rows, start=2):
        start, end = (int(row[name]) if (row[name] or "").isdigit() else -1 for name in ("start", "end"))
        if not 0 <= start < end or row["strand"] not in ("+", "-"):
            raise ValueError(
                f"got start {row['start']!r}, end {row['end']!r}, strand {row['strand']!r} in line {number} of {path}; "
                "expected 0 ≤ start < end and + or -"
            )
        found.append(Interval(row["id"], row["region"], start, end, row["strand"]))
    return found


def cut_out(intervals: Sequence[Interval], reference: Path, unknown: Unknown) -> list[Tokens]:
    """Cut intervals out of a reference genome in FASTA, one chromosome in memory at a time.

    A chromosome is known by the first word of its header. ValueError for a region that the reference lacks, and for an
    interval that ends behind the end of its chromosome.
    """
    wanted: dict[str, list[int]] = {}
    for place, interval in enumerate(intervals):
        wanted.setdefault(interval.region, []).append(place)
    found: dict[int, Tokens] = {}
    for header, letters in fasta_records(reference):
        region = header.split(maxsplit=1)[0] if header else ""
        for place in wanted.pop(region, []):
            interval = intervals[place]
            if interval.end > len(letters):
                raise ValueError(
                    f"got the interval {interval.name!r} up to {interval.end} of {region}, which has {len(letters)} "
                    f"nucleotides in {reference}; expected the reference that the intervals were made for"
                )
            tokens = encode(letters[interval.start : interval.end], interval.name, unknown)
            found[place] = reverse_complement(tokens) if interval.strand == "-" else tokens
    if wanted:
        raise ValueError(
            f"got intervals on {sorted(wanted)[0]!r}, which {reference} does not hold; expected a reference with all "
            f"chromosomes ({len(wanted)} are missing)"
        )
    return [found[place] for place in range(len(intervals))]
