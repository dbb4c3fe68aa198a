"""A long text from this machine's own Python library: its manual's topics, then what its modules say of themselves."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titans_lm.data.tasks.haystack import SENTENCE
from titans_lm.data.tasks.vocabulary import encode_words

LIBRARY = "the manual and the docstrings of this machine's Python library"


def sentences_of(text: str) -> list[str]:
    """Part a text at its sentences; white space becomes one space."""
    return [one for one in SENTENCE.split(" ".join(text.split())) if one]


def library() -> Iterator[str]:
    """Give what the library has to read, a text after another: always in the same order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems pack it apart
        topics = {}
    yield from topics.values()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def long_text(source: Path | None, tokens: int) -> tuple[list[str], list[int]]:
    """Give the sentences of a file (all of it), or so many tokens of the library, and the tokens of each sentence.

    ValueError for a file that is no text or is empty.
    """
    if source is not None:
        found = sentences_of(_read(source))
        if not found:
            raise ValueError(f"got the file {str(source)!r}, which is empty; expected some text")
        return found, [count_tokens(one) for one in found]
    kept: list[str] = []
    counts: list[int] = []
    total = 0
    for text in library():
        for sentence in sentences_of(text):
            kept.append(sentence)
            counts.append(count_tokens(sentence))
            total += counts[-1]
            if total >= tokens:
                return kept, counts
    return kept, counts


def count_tokens(sentence: str) -> int:
    """Count the tokens of a sentence, and one for the space before it."""
    return len(encode_words(sentence)) + 1


def _read(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"got the file {str(source)!r}, which cannot be read ({error}); expected UTF-8 text"
        ) from error
