"""Documents of any length as tokens with the bytes that each stands for, drawn piece by piece, whole or cut."""

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titans_lm.checks import check_at_least, neither
from titans_lm.data.prepared import Split
from titans_lm.data.text import SNIFFED, Document, looks_binary, text_below
from titans_lm.data.tokenizer import BOS, TokenIds, byte_vocabulary, encode_document, is_byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NONE = np.empty(0, np.int64)
BLOCK = 1 << 16
"""Bytes drawn from a file at once, and tokens that are drawn and let go."""
LEAST, MOST = 1 << 16, 1 << 18
"""Characters of a block that a tokenizer of words is given: cut after the first line break from LEAST on."""


class Tokens(NamedTuple):
    """Tokens in a row, and how many bytes of the text each stands for."""

    ids: np.ndarray
    sizes: np.ndarray

    @classmethod
    def uncounted(cls, ids: np.ndarray) -> "Tokens":
        """Ids whose bytes nobody counts."""
        return cls(ids, np.zeros(len(ids), np.int64))


@dataclass(frozen=True)
class Book:
    """A document on disk, by the name it has in results."""

    name: str
    path: Path


def books(sources: Sequence[Path]) -> list[Book]:
    """List the documents of files and folders, in the order given and by name.

    A file that is named is taken whatever it holds; in a folder, files that are empty or no text are left out. Raises
    ValueError for a source that is not there, one without text, and for two documents of one name.
    """
    found: list[Book] = []
    for source in sources:
        if not (source.is_file() or source.is_dir()):
            raise ValueError(f"got the text {str(source)!r}, which {neither(source)}; expected a file or a folder")
        inside = text_below(source)[0] if source.is_dir() else [source]
        kept = [path for path in inside if not source.is_dir() or _is_text(path)]
        if not any(path.stat().st_size for path in kept):
            raise ValueError(f"got no text in {str(source)!r}; expected at least one file that is not empty")
        root = source if source.is_dir() else source.parent
        found += [Book(path.relative_to(root).as_posix(), path) for path in kept]
    for name, count in Counter(book.name for book in found).items():
        if count > 1:
            raise ValueError(f"got two documents named {name!r}; expected every one once, under a name of its own")
    return found


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(SNIFFED)
    return bool(start) and not looks_binary(start)


class Encoder:
    """Text into tokens and their bytes; these always add up to the bytes of the text.

    Bytes are exact where a token is a byte, or a row of bytes as in byte-level BPE. Other tokenizers say which
    characters a token comes from: a token then stands for what lies between the end of those before and its own end,
    so that what a tokenizer drops or merges (spaces, say) counts with the token after it.

    Raises ValueError for a tokenizer that tells neither.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self.tokenizer: Any = tokenizer
        self.of_bytes = tokenizer is None or is_byte_tokenizer(tokenizer)
        begin = BOS if self.of_bytes else first_token(self.tokenizer)
        self.begin = NONE if begin is None else np.array([begin], np.int64)
        self._table = None if self.of_bytes else _byte_level_sizes(self.tokenizer)

    def words(self, text: str) -> Tokens:
        """Encode text by a tokenizer of words."""
        ids = np.array(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int64)
        total = len(text.encode())
        if self._table is not None and len(ids):
            sizes = self._table[ids]
            if (sizes >= 0).all() and sizes.sum() == total:
                return Tokens(ids, sizes)
        return self._by_characters(text)

    def _by_characters(self, text: str) -> Tokens:
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"got a {type(self.tokenizer).__name__}, which does not say where its tokens come from; expected a "
                "fast tokenizer (tokenizer.json)"
            )
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        ends = np.concatenate([[0], np.cumsum(widths)])[[end for _, end in found["offset_mapping"]] or NONE]
        sizes = np.diff(np.maximum.accumulate(ends), prepend=0) if len(ends) else NONE
        return Tokens(np.array(found["input_ids"], np.int64), sizes)

    def tokens(self, book: Book) -> Iterator[Tokens]:
        """Encode a document block by block; every byte of it belongs to one of the tokens.

        Raises ValueError where it is not UTF-8 and the tokenizer needs text.
        """
        with book.path.open("rb") as file:
            blocks = iter(lambda: file.read(BLOCK), b"")
            if self.of_bytes:
                for block in blocks:
                    yield Tokens(np.frombuffer(block, np.uint8).astype(np.int64), np.ones(len(block), np.int64))
                return
            owed, waiting = 0, None
            for text in blocks_of_lines(blocks, book.name):
                found, total = self.words(text), len(text.encode())
                if len(found.ids) == 0:  # nothing but what the tokenizer drops: it counts with the token after it
                    owed += total
                    continue
                if waiting is not None:
                    yield waiting
                found.sizes[0] += owed
                owed, waiting = total - int(found.sizes.sum()) + owed, found
            if waiting is not None:
                waiting.sizes[-1] += owed  # nothing comes after it
                yield waiting


def first_token(tokenizer: Any) -> int | None:
    """The token that stands before a document: <bos>, else <eos>, as after one that ended; None without both."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def _byte_level_sizes(tokenizer: Any) -> np.ndarray:
    """Bytes of every token that is written in the alphabet of byte-level tokenizers, −1 for others."""
    alphabet, vocabulary = set(byte_vocabulary()), tokenizer.get_vocab()
    known = {ident: len(token) for token, ident in vocabulary.items() if alphabet.issuperset(token)}
    sizes = np.full(1 + max(vocabulary.values()), -1, np.int64)
    sizes[list(known)] = list(known.values())
    sizes[list(tokenizer.all_special_ids)] = -1
    return sizes


class TokenSource:
    """Tokens, up to `most`, drawn a few at a time; nothing that was drawn is kept."""

    def __init__(self, blocks: Iterable[Tokens], most: int | None = None) -> None:
        self._blocks, self._left, self._missing = iter(blocks), Tokens(NONE, NONE), most

    def take(self, count: int) -> Tokens:
        """Draw up to `count` tokens; fewer only where they end."""
        if self._missing is not None:
            count = min(count, self._missing)
            self._missing -= count
        parts = [Tokens(NONE, NONE)]
        while count > 0:
            if len(self._left.ids) == 0:
                block = next(self._blocks, None)
                if block is None:
                    break
                self._left = block
            parts.append(Tokens(self._left.ids[:count], self._left.sizes[:count]))
            self._left = Tokens(self._left.ids[count:], self._left.sizes[count:])
            count -= len(parts[-1].ids)
        return Tokens(*map(np.concatenate, zip(*parts, strict=True)))


def blocks_of_lines(blocks: Iterator[bytes], name: str) -> Iterator[str]:
    """Cut a text into what a tokenizer of words is given at once; ValueError where it is not UTF-8."""
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    while True:
        block = next(blocks, None)
        try:
            text += decoder.decode(block or b"", final=block is None)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"got {name!r}, which is not UTF-8 ({error.reason}); expected UTF-8, as the model reads no bytes"
            ) from error
        while len(text) >= MOST or (block is None and text):
            cut = text.find("\n", LEAST) + 1
            cut = min(cut or MOST, MOST, len(text))
            yield text[:cut]
            text = text[cut:]
        if block is None:
            return


@dataclass
class Span:
    """A document, or a piece of one that is read as if it were one: from nothing.

    `begin` is the token before the first that is predicted.
    """

    document: str
    start: int
    """Tokens of the document before it."""
    begin: np.ndarray
    source: TokenSource = field(repr=False)
    """The tokens to be predicted."""

    @classmethod
    def of(cls, ids: TokenIds) -> "Span":
        """Token ids, of which the first begins the text; nobody counts their bytes."""
        return cls("", 0, ids[:1], TokenSource([Tokens.uncounted(ids[1:])]))


def spans(
    found: Iterable[Book],
    encoder: Encoder,
    *,
    length: int | None = None,
    max_tokens: int | None = None,
    skip_tokens: int = 0,
) -> Iterator[Span]:
    """Give documents whole, or cut into spans of `length` tokens; `max_tokens` of each, after `skip_tokens`.

    Each begins after the token that begins a document, so all of its tokens are predicted; where the tokenizer has no
    such token, its first is not, and its bytes do not count. Of what is given only the span at hand is kept.
    """
    for name, value in (("length", length), ("max_tokens", max_tokens)):
        if value is not None:
            check_at_least(name, value, 1)
    check_at_least("skip_tokens", skip_tokens, 0)
    for book in found:
        source = TokenSource(encoder.tokens(book), None if max_tokens is None else skip_tokens + max_tokens)
        for start in range(0, skip_tokens, BLOCK):
            source.take(min(BLOCK, skip_tokens - start))
        if length is None:
            begin = encoder.begin if len(encoder.begin) else source.take(1).ids
            yield Span(book.name, skip_tokens, begin, source)
            continue
        start = skip_tokens
        while len((tokens := source.take(length)).ids):
            begin, rest = encoder.begin, tokens
            if not len(begin):
                begin, rest = tokens.ids[:1], Tokens(tokens.ids[1:], tokens.sizes[1:])
            yield Span(book.name, start, begin, TokenSource([rest]))
            start += len(tokens.ids)


def held_out_bytes(documents: Iterable[Document], max_bytes: int) -> tuple[list[TokenIds], int]:
    """Take whole documents in the given order as tokens until `max_bytes` are used up; the last is cut there."""
    taken, used = [], 0
    for document in documents:
        if used < max_bytes:
            taken.append(encode_document(document.data[: max_bytes - used], eos=False))
            used += len(taken[-1]) - 1
    return taken, used


def held_out_tokens(split: Split, tokenizer: "PreTrainedTokenizerBase", max_bytes: int) -> tuple[list[TokenIds], int]:
    """The same from prepared documents; the last is cut after a token that ends a character."""
    taken, used = [], 0
    begin: Any = first_token(tokenizer)  # a tokenizer of prepared documents has one
    marks = int(tokenizer.bos_token_id is not None), int(tokenizer.eos_token_id is not None)
    for index in range(len(split)):
        tokens, size, room = split[index], split.bytes_of(index), max_bytes - used
        tokens, full = tokens[marks[0] : len(tokens) - marks[1]], size >= room
        if size > room:
            tokens, size = _cut(tokens, size, room, tokenizer)
        taken.append(np.concatenate([[begin], tokens]))
        used += size
        if full:
            break
    return taken, used


def _cut(tokens: TokenIds, size: int, room: int, tokenizer: "PreTrainedTokenizerBase") -> tuple[TokenIds, int]:
    """About as much of a text of `size` bytes as there is room for, and its bytes; no character is torn.

    Of a tokenizer that does not give a text back as it was, bytes are as many as those it gives back have a share in.
    """
    if not len(tokens):  # nothing but what the tokenizer drops
        return tokens, room
    for stop in range(max(round(len(tokens) * room / size), 1), len(tokens) + 1):
        kept = tokens[:stop]
        if is_byte_tokenizer(tokenizer):
            return kept, stop
        text = _decoded(kept, tokenizer)
        if not text.endswith("\ufffd"):
            break
    part, whole = (len(given.encode("utf-8", "replace")) for given in (text, _decoded(tokens, tokenizer)))
    return kept, part if whole == size else round(size * part / max(whole, 1))


def _decoded(tokens: TokenIds, tokenizer: "PreTrainedTokenizerBase") -> str:
    return str(tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))
