"""Documents from a file, a folder, or this machine's own Python library; and the part of them that is held out."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from titans_lm.checks import neither

STDLIB, HUB = "stdlib", "hf:"
"""Sources that are no path: the word for Python's library, and what the name of a data set on the hub begins with."""
STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SNIFFED = 8192
"""Bytes at the start of a file in which a zero byte says: not text."""
BLOCK = 1 << 22
"""Bytes that are read at a time."""
HELD_OUT = 0.05
"""Share of the documents that is held out, where nothing else is asked for."""
INDEX, STARTED = "tokens.json", "preparing.json"
"""The index of a prepared folder, and what stands in its place until the folder is finished."""
OF_RUNS = "settings.json", "environment.json"
"""Files that runs have from the start."""


@dataclass(frozen=True)
class Document:
    """A text by name: its path below the folder it was read from, and its bytes."""

    name: str
    data: bytes

    def text(self, source: str | Path) -> str:
        """Decode it; ValueError where it is not UTF-8, with its path (`source` is what it was read from) and place."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            path = Path(source) / self.name if Path(source).is_dir() else source
            raise ValueError(
                f"got {path}, which is not UTF-8 at byte {error.start:,} ({error.reason}); expected text in UTF-8"
            ) from error


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents to test on, with what was left out and how they were split."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: tuple[str, ...]
    """Files that were not read, each with the reason."""
    split: str
    """How the two parts were divided, in words."""

    def describe(self) -> dict[str, str | int]:
        """Count what there is."""
        return {
            "train_documents": len(self.train),
            "train_bytes": sum(len(document.data) for document in self.train),
            "held_out_documents": len(self.held_out),
            "held_out_bytes": sum(len(document.data) for document in self.held_out),
            "skipped_files": len(self.skipped),
            "split": self.split,
        }


def blocks(path: Path) -> Iterator[bytes]:
    """Read a file that need not fit into memory."""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def load_corpus(source: str | Path, *, held_out: float = HELD_OUT, valid: str | Path | None = None) -> Corpus:
    """Read documents and hold a part of them out, or read the held-out part from a place of its own.

    `source` is a file, a folder, or the word "stdlib": the source of the Python library of the running interpreter.
    """
    if valid is not None:
        check_apart(source, valid)
    documents, skipped = read_documents(source)
    if valid is not None:
        held, more = read_documents(valid)
        return Corpus(tuple(documents), tuple(held), (*skipped, *more), f"held out: {valid}")
    train, held, split = split_documents(documents, held_out)
    return Corpus(tuple(train), tuple(held), tuple(skipped), split)


def read_documents(source: str | Path) -> tuple[list[Document], list[str]]:
    """Read every text of a source in the order of their names, and say which files were skipped and why.

    A file that is named is read whatever it holds. In a folder, files that are empty, hold a zero byte near their start
    or cannot be opened are skipped, as are names that start with a dot. ValueError where nothing is left to read.
    """
    path, files, documents, skipped = Path(source), list[Path](), list[Document](), list[str]()
    if str(source) == STDLIB:
        path, files = stdlib_files()
    elif str(source) and path.is_dir():  # to Path no name is the working directory
        files, skipped = text_below(path)
    elif not path.is_file():
        raise ValueError(f"got {str(source)!r}, which {neither(path)}; expected a file, a folder or the word stdlib")
    elif data := path.read_bytes():
        documents.append(Document(path.name, data))
    for file in files:
        found = read_file(file, file.relative_to(path).as_posix())
        documents.append(found) if isinstance(found, Document) else skipped.append(found)
    if not documents:
        reason = f" ({len(skipped)} files skipped, the first: {skipped[0]})" if skipped else ""
        raise ValueError(f"got no text in {str(source)!r}{reason}; expected at least one file that is not empty")
    return documents, skipped


def split_documents(
    documents: Sequence[Document], held_out: float = HELD_OUT
) -> tuple[list[Document], list[Document], str]:
    """Hold out whole documents, chosen by a hash of their names; of a single document, hold out the end.

    The choice depends on nothing but the names, so the same files give the same split everywhere, and a file added
    later moves no other. With two documents or more, each part gets at least one. The held-out part comes in the order
    of the hash, so that its first few documents are a fair sample of it.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"got held_out={held_out}; expected a share of the text between 0 and 1, say 0.05")
    if len(documents) == 1:
        return split_position(documents[0], held_out)
    chances = {document.name: chance(document.name) for document in documents}
    ranked = sorted(documents, key=lambda document: (chances[document.name], document.name))
    count = sum(chances[document.name] < held_out for document in documents)
    held = ranked[: min(max(count, 1), len(documents) - 1)]
    chosen = {document.name for document in held}
    train = [document for document in documents if document.name not in chosen]
    return train, held, f"{len(held)} of {len(documents)} documents held out, by a hash of their names"


def split_position(document: Document, held_out: float) -> tuple[list[Document], list[Document], str]:
    """Cut one document near its end, after a line where there is one close by."""
    data = document.data
    if len(data) < 2:
        raise ValueError(f"got {len(data)} byte in {document.name!r}; expected at least 2, to train on and to test on")
    cut = min(max(round(len(data) * (1.0 - held_out)), 1), len(data) - 1)
    line = data.find(b"\n", cut, cut + 1024) + 1
    cut = line if 0 < line < len(data) else cut
    for _ in range(3):  # at the start of a character
        cut -= cut > 1 and data[cut] & 0xC0 == 0x80
    parts = Document(document.name, data[:cut]), Document(f"{document.name}[{cut}:]", data[cut:])
    return [parts[0]], [parts[1]], f"one document: bytes 0 to {cut} to train on, the rest held out"


def chance(name: str) -> float:
    """Map a name to a number in [0, 1) that looks random and never changes."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") / 2**64


def stdlib_files() -> tuple[Path, list[Path]]:
    """Find the folder of the running interpreter's Python library, and the source files below it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return folder, [path for path in files_below(folder, STDLIB_LEFT_OUT) if path.suffix == ".py"]


def read_file(path: Path, name: str) -> Document | str:
    """Read a file as a document of that name, or say why it is skipped: empty, no text, or not to be opened."""
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED)
            if looks_binary(start):
                return f"{name}: not text (it holds a zero byte)"
            data = start + file.read()
    except OSError as error:
        return f"{name}: {error.strerror}"
    return Document(name, data) if data else f"{name}: empty"


def text_below(folder: Path) -> tuple[list[Path], list[str]]:
    """List the files below a folder, and say which folders are left out, since this package made them.

    A run that is kept beside its text would else be trained on its own log, and its data change while it trains.
    """
    if _is_made(folder):
        raise ValueError(
            f"got {str(folder)!r}, a run or a folder of tokens that titans made; expected text, in files or a folder"
        )
    made: list[Path] = []
    files = files_below(folder, made=made)
    return files, [f"{path.relative_to(folder).as_posix()}: a folder that titans made" for path in sorted(made)]


def files_below(folder: Path, left_out: frozenset[str] = frozenset(), made: list[Path] | None = None) -> list[Path]:
    """List the regular files below a folder in the order of their names; those that start with a dot are left out.

    Links to folders are not followed, so the walk ends, nor those to files of the folder itself, which would be read
    twice: to train on and to measure by. Folders that cannot be opened are listed as they are, and
    whoever opens them hears why. With a list for them, runs and folders of tokens are added to that and not entered.
    """
    shut: list[OSError] = []
    found = []
    for root, folders, files in os.walk(folder, onerror=shut.append):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        if made is not None:
            mine = {name for name in folders if _is_made(Path(root, name))}
            made += [Path(root, name) for name in folders if name in mine]
            folders[:] = [name for name in folders if name not in mine]
        found += [Path(root, name) for name in files if not name.startswith(".")]
    top = folder.resolve()
    twice = {path for path in found if path.is_symlink() and path.resolve().is_relative_to(top)}
    found = [path for path in found if path.is_file() and path not in twice] + [Path(error.filename) for error in shut]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_made(folder: Path) -> bool:
    """Tell a run, and a folder of tokens, by the files that lie in them from the start."""
    return any(all((folder / name).is_file() for name in names) for names in ((INDEX,), (STARTED,), OF_RUNS))


def overlap(source: str | Path, text: str | Path) -> bool:
    """Tell whether two sources are the same, or one is a folder with the other in it; a name of the hub is no path.

    Of the Python library only its source files count, and of a folder only what is read of it.
    """
    names = str(source), str(text)
    if names[0] == names[1] or any(name.startswith(HUB) for name in names):
        return names[0] == names[1]
    if STDLIB in names:
        other = Path(names[1 - names.index(STDLIB)]).resolve()
        folder, files = stdlib_files()
        folder = folder.resolve()
        if folder not in (other, *other.parents):  # nothing of it, or all that is no hidden folder's
            inside = other in folder.parents
            return inside and not any(part.startswith(".") for part in folder.relative_to(other).parts)
        return any(other == file or other in file.parents for file in map(Path.resolve, files))
    one, other = Path(source).resolve(), Path(text).resolve()
    return one == other or one in other.parents or other in one.parents


def check_apart(source: str | Path, valid: str | Path) -> None:
    """Refuse a validation text that is trained on; ValueError where one is the other, or in it."""
    if overlap(source, valid):
        raise ValueError(
            f"got the data {str(source)!r} and the validation text {str(valid)!r}, one in the other; expected a text "
            "that is not trained on, or none, and a share of the data is held out"
        )


def looks_binary(data: bytes) -> bool:
    """Tell by its start whether something is no text."""
    return b"\0" in data[:SNIFFED]
