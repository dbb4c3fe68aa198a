"""A file as a model reads it: its tokens, what each of them says, and pieces of text that can be shown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.checks import check_readable
from titans_lm.data.tokenizer import encode_bytes, is_byte_tokenizer
from titans_lm.evaluate.documents import blocks_of_lines
from titans_lm.streaming.reader import document_marks, opening_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def characters(data: bytes) -> Iterator[tuple[str, slice]]:
    r"""Walk over the characters of a text with the bytes each stands for; bytes that make none are shown as \xNN."""
    start = 0
    for character in data.decode("utf-8", "surrogateescape"):
        stop = start + len(character.encode("utf-8", "surrogateescape"))
        odd = 0xDC80 <= ord(character) <= 0xDCFF or not (character.isprintable() or character in "\n\t")
        yield ("".join(f"\\x{byte:02x}" for byte in data[start:stop]) if odd else character), slice(start, stop)
        start = stop


@dataclass(frozen=True)
class TokenText:
    """A text of T tokens, as P pieces that can be shown.

    A piece is a token, or several that make one character together: the bytes of an é. The first `marks` pieces are
    what stands before the text itself, such as <bos>.
    """

    name: str
    ids: np.ndarray
    """(T,) token ids."""
    says: tuple[str, ...]
    r"""(T,) what each token says; a byte that is no character by itself as \xNN."""
    pieces: tuple[str, ...]
    """(P,) what is shown."""
    starts: np.ndarray
    """(P + 1,) the first token of each piece, and T."""
    marks: int = 0

    def pieces_within(self, tokens: int) -> int:
        """How many pieces the first tokens make; one at least."""
        return max(int(np.searchsorted(self.starts, tokens, side="right")) - 1, 1)


def by_piece(values: np.ndarray, starts: np.ndarray, *, total: bool = False) -> np.ndarray:
    """The mean, or the total, of the tokens of each piece: (T, …) as (P, …)."""
    sums = np.add.reduceat(values[: starts[-1]].astype(np.float64), starts[:-1], axis=0)
    return sums if total else sums / np.diff(starts).reshape(-1, *[1] * (values.ndim - 1))


def read_file(path: Path, tokenizer: "PreTrainedTokenizerBase", *, after_open_document: bool = False) -> TokenText:
    """Read a file as a document of its own: the tokens and the marks that `titans read` would read.

    Raises ValueError for a file that is not there or empty, and for one that is not UTF-8 and not read by bytes.
    """
    check_readable(path)
    data = path.read_bytes()
    if not data:
        raise ValueError(f"got the file {str(path)!r}, which is empty; expected some text")
    before = opening_marks(document_marks(tokenizer), after_open=after_open_document)
    return token_text(str(path), data, tokenizer, before)


def token_text(name: str, data: bytes, tokenizer: "PreTrainedTokenizerBase", before: Sequence[int] = ()) -> TokenText:
    """Turn a text into tokens and pieces, after some marks by their ids."""
    ids, says, pieces, starts = (_of_bytes if is_byte_tokenizer(tokenizer) else _of_words)(name, data, tokenizer)
    owner: Any = tokenizer
    names = [str(owner.convert_ids_to_tokens(mark)) for mark in before]
    return TokenText(
        name,
        np.array([*before, *ids], dtype=np.int64),
        (*names, *says),
        (*names, *pieces),
        np.array([*range(len(before)), *(len(before) + start for start in starts), len(before) + len(ids)]),
        len(before),
    )


Parts = tuple[Sequence[int], list[str], list[str], list[int]]
"""Ids and what they say; pieces and the token that each starts at."""


def _of_bytes(name: str, data: bytes, tokenizer: Any) -> Parts:
    shown = list(characters(data))
    table = ["".join(text for text, _ in characters(bytes([byte]))) for byte in range(256)]
    return (
        encode_bytes(data).tolist(),
        [table[byte] for byte in data],
        [c for c, _ in shown],
        [p.start for _, p in shown],
    )


def _of_words(name: str, data: bytes, tokenizer: Any) -> Parts:
    """Pieces of the text itself where the tokenizer says which characters a token stands for."""
    ids: list[int] = []
    says: list[str] = []
    pieces: list[str] = []
    starts: list[int] = []
    left = ""  # characters that no token stands for, such as spaces between words: they go to the next
    for text in blocks_of_lines(iter([data]), name):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        if not tokenizer.is_fast:
            alone = [tokenizer.decode([token]) for token in found.input_ids]
            starts += range(len(ids), len(ids) + len(alone))
            ids, says, pieces = [*ids, *found.input_ids], [*says, *alone], [*pieces, *alone]
            continue
        end = 0
        for token, (start, stop) in zip(found.input_ids, found.offset_mapping, strict=True):
            if stop > end or not pieces:  # otherwise more of a character that is shown already
                starts.append(len(ids))
                pieces.append(left + text[end:stop])
                left, end = "", stop
            ids.append(token)
            says.append(text[start:stop])
        left += text[end:]
    if pieces:
        pieces[-1] += left
    return ids, says, [_plain(piece) for piece in pieces], starts


def _plain(piece: str) -> str:
    return "".join(shown for shown, _ in characters(piece.encode("utf-8", "surrogateescape")))
