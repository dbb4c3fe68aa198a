"""Documents one after another from wherever they are, in an order that does not change, without holding them all."""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from titans_lm.checks import load_library, neither, one_line
from titans_lm.data.text import HUB, STDLIB, Document, read_file, stdlib_files, text_below
from titans_lm.prepare.settings import PrepareSettings

JSONL, PARQUET = (".jsonl", ".jsonl.gz"), (".parquet",)


class Refused(ValueError):
    """What a source holds will not do: mended, it is another one, so what came out of it so far is of no use."""


@dataclass
class Source:
    """Documents by iteration, each time the same ones.

    `identity` changes where the source does: preparing goes on only where it has not. `single` says that there is one
    document and no more. `skipped` lists what the last pass could not take, each with the reason.
    """

    identity: str
    single: bool
    documents: Callable[["Source"], Iterator[Document]]
    skipped: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Document]:
        self.skipped = []
        return self.documents(self)


def open_source(name: str, settings: PrepareSettings) -> Source:
    """Find out what a source is; ValueError where it is nothing of the kind."""
    if name.startswith(HUB):
        return _hub(name.removeprefix(HUB), settings)
    if name == STDLIB:
        return _files(*stdlib_files(), [], settings)
    path = Path(name)
    if path.is_file():
        return _files(path.parent, [path], [], settings)
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _saved(path, settings)
    if name and path.is_dir():  # to Path no name is the working directory
        return _files(path, *text_below(path), settings)
    raise ValueError(
        f"got the source {name!r}, which {neither(path)}; expected a file, a folder, hf:NAME for a data set on the "
        "hub, or the word stdlib"
    )


def _files(folder: Path, files: list[Path], made: list[str], settings: PrepareSettings) -> Source:
    """Files in the order of their names: tables and JSON lines give a document a row, others are documents."""
    if not files:
        raise ValueError(f"got no files in {folder}; expected text, .jsonl or .parquet")
    marks = [(path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    single = len(files) == 1 and not files[0].name.lower().endswith((*JSONL, *PARQUET))

    def documents(source: Source) -> Iterator[Document]:
        source.skipped += made
        for path in files:
            name = path.relative_to(folder).as_posix()
            if path.name.lower().endswith(JSONL):
                yield from _rows(_json_lines(path), name, settings.column, source)
            elif path.name.lower().endswith(PARQUET):
                yield from _rows(_parquet(path, settings.column), name, settings.column, source)
            else:
                found = read_file(path, name)
                if isinstance(found, Document) and not settings.of_bytes and (where := _not_utf8(found.data)):
                    if single:
                        raise Refused(f"got {path}, {where}; expected text in UTF-8, or --tokenizer bytes")
                    found = f"{name}: {where}"
                if isinstance(found, Document):
                    yield found
                else:
                    source.skipped.append(found)

    return Source(_identity(marks), single, documents)


def _not_utf8(data: bytes) -> str:
    """Where bytes are no UTF-8, which tokenizers of text read as U+FFFD; empty where they are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start:,}"
    return ""


def _identity(told: Any) -> str:
    return blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def _rows(rows: Iterable[Any], name: str, column: str, source: Source) -> Iterator[Document]:
    """Documents of rows; a row without the column is an error, one without text is skipped."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or column not in row:
            keys = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise Refused(f"row {number + 1} of {name} has no {column!r} but {keys}; name the text with --column")
        text = row[column]
        if isinstance(text, str) and text:
            # a lone surrogate, which JSON can name, has no UTF-8
            yield Document(f"{name}#{number}", text.encode("utf-8", "replace"))
        else:
            source.skipped.append(f"{name}#{number}: {'empty' if text in ('', None) else type(text).__name__}")


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Refused(f"line {number} of {path} is not JSON: {error}; mend or remove it") from error


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Refused(f"{path} cannot be unpacked: {error}; get it again, or remove it") from error


def _parquet(path: Path, column: str) -> Iterator[Any]:
    parquet = _needed("pyarrow.parquet", "a .parquet file")
    from pyarrow import ArrowException

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise Refused(f"{path} has no column {column!r} but {names}; name the text with --column")
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise Refused(f"{path} cannot be read as parquet: {error}") from error


def _needed(module: str, what: str) -> Any:
    """Import a module of the `train` extra; ValueError that says how to get it."""
    return load_library(module, f"{what} needs", "pip install 'titans-lm[train]'")


def _hub(name: str, settings: PrepareSettings) -> Source:
    """A data set on the hub, streamed: nothing of it is kept but its tokens."""
    datasets = _needed("datasets", f"the data set {name!r}")
    if not name:
        raise ValueError("got hf: without a name; expected hf:OWNER/NAME")

    def documents(source: Source) -> Iterator[Document]:
        try:
            rows = datasets.load_dataset(name, settings.subset, split=settings.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"the data set {name!r} cannot be opened: {one_line(error)}") from error
        try:
            yield from _rows(rows, name, settings.column, source)
        except Refused:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the data set {name!r} cannot be read: {one_line(error)}; the same command goes on from what is kept"
            ) from error

    return Source(_identity(["hub", name, settings.subset, settings.split, settings.column]), False, documents)


def _saved(path: Path, settings: PrepareSettings) -> Source:
    """A data set that `save_to_disk` has written, one split or several."""
    datasets = _needed("datasets", f"the data set in {path}")
    try:
        found = datasets.load_from_disk(os.fspath(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"the data set in {path} cannot be opened: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if settings.split not in found:
            raise ValueError(f"{path} has no split {settings.split!r} but {sorted(found)}; name one with --split")
        found = found[settings.split]
    told = ["saved", path.name, settings.split, settings.column, found._fingerprint]
    return Source(_identity(told), False, lambda source: _rows(found, path.name, settings.column, source))
