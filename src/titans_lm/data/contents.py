"""What files and folders hold, as a sum: a path may hold something else when a command is given again."""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from titans_lm.data.prepared import INDEX, is_token_folder, tokenizer_fingerprint
from titans_lm.data.tasks.haystack import BYTES, WORDS
from titans_lm.data.text import blocks, files_below, read_documents
from titans_lm.data.tokenizer import read_tokenizer


def text_sum(source: str | Path) -> str:
    """Sum up a text as it is read to train or to test on: names and bytes of its documents.

    Of a folder of titans prepare it is the sum of its index, which has the sums of all of its files: a file that was
    changed behind the index's back is found where its sums are checked (`verify_data`). ValueError where there is no
    text.
    """
    if is_token_folder(source):
        return files_sum(Path(source) / INDEX)
    path = Path(source)
    files = [file.stat() for file in ([path] if path.is_file() else files_below(path) if path.is_dir() else [])]
    return _text_sum(source, tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in files))


@lru_cache(maxsize=64)
def _text_sum(source: str | Path, _: tuple[tuple[int, ...], ...]) -> str:
    """Sum up a text that is no folder of tokens, once for files that were not written to in between."""
    digest = blake2b(digest_size=8)
    for document in read_documents(source)[0]:
        digest.update(f"{document.name}\0{len(document.data)}\0".encode("utf-8", "surrogateescape") + document.data)
    return digest.hexdigest()


def files_sum(path: Path) -> str:
    """Sum up a file, or all files below a folder, whatever they hold; those that start with a dot are left out.

    ValueError where there is nothing.
    """
    if not path.exists():
        raise ValueError(f"got {str(path)!r}, which does not exist; expected a file or a folder")
    digest = blake2b(digest_size=8)
    for file in files_below(path) if path.is_dir() else [path]:
        name = file.relative_to(path).as_posix() if file != path else file.name
        digest.update(f"{name}\0{file.stat().st_size}\0".encode("utf-8", "surrogateescape"))
        for block in blocks(file):
            digest.update(block)
    return digest.hexdigest()


def contents_of(tasks: Iterable[Any]) -> dict[str, str]:
    """Sum up the texts, questions and tokenizers that tasks draw from, by their paths."""
    tasks = list(tasks)
    texts = {path for task in tasks for name in ("books", "source") if (path := getattr(task, name, None)) is not None}
    folders = {name for task in tasks if (name := getattr(task, "tokenizer", None)) is not None} - {BYTES, WORDS}
    return {str(path): text_sum(path) for path in sorted(texts)} | {
        name: tokenizer_fingerprint(read_tokenizer(name)) for name in sorted(folders)
    }


def check_contents(folder: Path, what: str, before: dict[str, str] | None, now: dict[str, str]) -> None:
    """Compare what paths held when something in a folder was begun with what they hold now, as far as it was noted.

    ValueError for paths that held something else.
    """
    other = [path for path, found in now.items() if (before or {}).get(path, found) != found]
    if other:
        raise ValueError(
            f"{folder} holds {what} that was begun when {', '.join(other)} held something else; give another --out, or "
            "bring back what it was begun with"
        )
