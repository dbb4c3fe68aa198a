"""Tokens of a text, a file, a pipe or an iterator, drawn a few at a time; nothing that was drawn is kept."""

import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from titans_lm.checks import check_at_least, check_readable
from titans_lm.data.tokenizer import encode_bytes, is_byte_tokenizer
from titans_lm.evaluate.documents import BLOCK, Tokens, TokenSource, blocks_of_lines
from titans_lm.streaming.memory import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenStream:
    """The tokens of one source, which is text, a path, a binary file or pipe, or an iterable of token ids.

    A byte tokenizer (or none) gives each byte as its own token. Tokenizers of words are given blocks of lines, cut at
    places that depend on the text alone; their tokens are those of the whole text but for words across such a cut.
    """

    def __init__(
        self,
        source: "str | bytes | Path | IO[bytes] | Iterable[Any]",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        name: str | None = None,
    ) -> None:
        source = bytes(source) if isinstance(source, bytearray | memoryview) else source
        self.name = name or _name_of(source)
        self.tokens, self.bytes = 0, 0
        self.exhausted = self.broken_off = False
        self.of_text = isinstance(source, str | bytes | Path) or hasattr(source, "read")
        self._bytes_sha, self._tokens_sha = hashlib.sha256(), hashlib.sha256()
        self._file: IO[bytes] | None = None
        self._source = TokenSource(Tokens.uncounted(ids) for ids in self._open(source, tokenizer))

    def _open(self, source: Any, tokenizer: "PreTrainedTokenizerBase | None") -> Iterator[np.ndarray]:
        if not self.of_text:
            most = BLOCK if hasattr(source, "__len__") else 1  # what comes while it is read is not waited for
            try:
                return _ids(iter(source), self.name, most)
            except TypeError as error:
                raise ValueError(
                    f"got a source of type {type(source).__name__}; expected text, a Path, a file or pipe opened in "
                    "binary mode, or token ids one after another"
                ) from error
        if isinstance(source, Path):
            check_readable(source)
            self._file = source.open("rb")
            source = self._file
        blocks = self._blocks(source)
        if tokenizer is None or is_byte_tokenizer(tokenizer):
            return (encode_bytes(block).astype(np.int64) for block in blocks)
        return _words(blocks, tokenizer, self.name)

    def _blocks(self, source: Any) -> Iterator[bytes]:
        """The bytes of the source, hashed on their way."""
        data = source.encode("utf-8", "surrogateescape") if isinstance(source, str) else source
        file = io.BytesIO(data) if isinstance(data, bytes) else data
        draw = getattr(file, "read1", None) or file.read  # a pipe gives what is there, and does not wait for more
        for block in iter(lambda: draw(BLOCK), b""):
            if not isinstance(block, bytes):
                raise ValueError(f"got {self.name!r}, opened as text; expected it opened in binary mode ('rb')")
            self._bytes_sha.update(block)
            self.bytes += len(block)
            yield block

    def take(self, count: int) -> np.ndarray:
        """Draw up to `count` tokens; fewer only where the source ends."""
        check_at_least("count", count, 1)
        drawn = self._source.take(count).ids
        if len(drawn) < count:
            self.exhausted = True
            self.close()
        self._tokens_sha.update(drawn.astype("<u4").tobytes())
        self.tokens += len(drawn)
        return drawn

    def skip(self, before: Source) -> None:
        """Go to where an earlier reading of this source ended; ValueError where it is not the same any more."""
        missing = before.tokens
        while missing > 0:
            drawn = len(self.take(min(missing, BLOCK)))
            if drawn == 0:
                raise ValueError(
                    f"got {self.name!r} with {self.tokens:,} tokens, of which {before.tokens:,} had been read; "
                    "expected the source that the memory was reading"
                )
            missing -= drawn
        if self._tokens_sha.hexdigest() != before.tokens_sha256:
            raise ValueError(
                f"got {self.name!r}, whose first {before.tokens:,} tokens are not those that the memory has read; "
                "expected the same source"
            )

    def stands_at(self, source: Source) -> bool:
        """Whether this is where an earlier reading of this source ended."""
        here = self.name, self.tokens, self._tokens_sha.hexdigest()
        return here == (source.name, source.tokens, source.tokens_sha256)

    def tokens_hashed(self) -> Any:
        """The hash of all tokens so far, to be gone on with."""
        return self._tokens_sha.copy()

    def record(self) -> Source:
        """How far the source has been read, and its hashes."""
        known = self.of_text and self.exhausted
        return Source(
            self.name,
            self.tokens,
            self.bytes if known else None,
            self._tokens_sha.hexdigest(),
            self._bytes_sha.hexdigest() if known else None,
            self.exhausted,
        )

    def close(self) -> None:
        """Close the file that the stream has opened itself."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _name_of(source: Any) -> str:
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, str | bytes):
        return "text"
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "stream" if hasattr(source, "read") else "tokens"


def _ids(source: Iterator[Any], name: str, most: int) -> Iterator[np.ndarray]:
    """Token ids in arrays of `most`; what is no whole number is refused."""
    held: list[int] = []
    for value in source:
        number = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"got {value!r} among the tokens of {name!r}; expected whole numbers from 0 on")
        held.append(number)
        if len(held) == most:
            yield np.array(held, dtype=np.int64)
            held = []
    if held:
        yield np.array(held, dtype=np.int64)


def _words(blocks: Iterator[bytes], tokenizer: "PreTrainedTokenizerBase", name: str) -> Iterator[np.ndarray]:
    """Tokens of blocks of lines; special tokens only where the text spells them and the tokenizer reads them so."""
    for text in blocks_of_lines(blocks, name):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if ids:
            yield np.array(ids, dtype=np.int64)
