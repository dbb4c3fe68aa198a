"""Token folders: text that `titans prepare` has turned into tokens once, read from the disk as it is needed.

    tokens.json           what there is: tokeniser, splits, and the size and BLAKE2b sum of every shard
    tokenizer/            the tokeniser, as Hugging Face saves it
    train-00000.bin       token ids one after another, uint16 or uint32, little-endian; whole documents only
    train-00000.npy       for each of its documents where it ends in the shard, and its bytes of text: int64 (n, 2)

A document is <bos> text <eos>, as far as the tokeniser has these tokens.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.data.text import HELD_OUT, INDEX, STARTED
from titans_lm.data.tokenizer import TokenIds, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "titans-lm tokens 1"
PARTS = {"tokenizer", "dtype", "splits"}
TOKENIZER = "tokenizer"
TRAIN, VALID = "train", "valid"
ENDS, BYTES = 0, 1
"""Columns of a shard's .npy file."""


@dataclass(frozen=True)
class Shard:
    """A file of tokens as the index knows it."""

    file: str
    tokens: int
    documents: int
    bytes: int
    """Bytes of text that its tokens stand for."""
    sum: str
    """BLAKE2b of the .bin file."""
    ends_sum: str
    """BLAKE2b of the .npy file."""


def is_token_folder(path: str | Path) -> bool:
    """Whether a path is a folder that `titans prepare` has finished; ValueError for one that it has only begun.

    What such a folder holds so far, its tokenizer too, would be taken for text.
    """
    if (Path(path) / INDEX).is_file():
        return True
    if (Path(path) / STARTED).is_file():
        raise ValueError(f"got {path}, which titans prepare has not finished; give that command again")
    return False


def file_sum(path: Path) -> str:
    """BLAKE2b of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


MOST_OPEN = 100
"""Shards that are held open at once, with two files each: systems have limits of a few hundred."""


class Split(Sequence[TokenIds]):
    """The documents of one part of a token folder, and the text as one stretch of tokens; nothing is held in memory.

    `split[i]` is document i. `take(start, stop)` are tokens of all documents laid end to end.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self.folder, self.shards, self.dtype = folder, list(shards), dtype
        self.tokens, self.bytes = (sum(getattr(shard, name) for shard in shards) for name in ("tokens", "bytes"))
        self._first_token = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._first_document = np.cumsum([0, *(shard.documents for shard in shards)])
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return int(self._first_document[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Open files stay behind where a split goes to another process."""
        return {**self.__dict__, "_open": {}}

    def _shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a shard, and its documents' ends and bytes, mapped into memory."""
        if number not in self._open:
            shard = self.shards[number]
            path = self.folder / shard.file
            try:
                tokens = np.memmap(path, self.dtype, "r", shape=(shard.tokens,))
                documents = np.load(path.with_suffix(".npy"), mmap_mode="r")
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} cannot be read: {error}; prepare the folder anew") from error
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[number] = tokens, documents
        return self._open[number]

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a document, and its number there."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"got document {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._first_document, index) - 1
        return number, index - int(self._first_document[number])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, place = self._place(index)
        tokens, documents = self._shard(number)
        start = int(documents[place - 1, ENDS]) if place else 0
        return tokens[start : int(documents[place, ENDS])]

    def bytes_of(self, index: int) -> int:
        """Bytes of text that a document's tokens stand for."""
        number, place = self._place(index)
        return int(self._shard(number)[1][place, BYTES])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every document, int64 (n,)."""
        found = [np.diff(self._shard(number)[1][:, ENDS], prepend=0) for number in range(len(self.shards))]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def take(self, start: int, stop: int) -> TokenIds:
        """Tokens start … stop of all documents laid end to end, a copy."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"got tokens {start} to {stop} of {self.tokens}")
        parts = [np.zeros(0, self.dtype)]
        number = bisect_right(self._first_token, start) - 1
        while start < stop:
            begin, end = int(self._first_token[number]), int(self._first_token[number + 1])
            parts.append(self._shard(number)[0][start - begin : min(stop, end) - begin])
            start, number = min(stop, end), number + 1
        return np.concatenate(parts)

    @property
    def fingerprint(self) -> str:
        """A name for exactly these tokens, from the sums of the shards."""
        sums = "".join(shard.sum + shard.ends_sum for shard in self.shards)
        return blake2b(sums.encode(), digest_size=16).hexdigest()


def check_split(folder: "TokenFolder", valid: Any, held_out: float) -> None:
    """Refuse another split of a prepared folder than was decided when it was made."""
    own = folder.index.get("asked", {}).get("held_out")
    if valid is not None or held_out not in (HELD_OUT, own):
        told = f"held_out={held_out:g}" if valid is None else f"valid={valid!r}"
        raise ValueError(
            f"got {told} with a prepared folder, which has held its part out already; give it to titans prepare"
        )


def prepared_from(path: str | Path) -> list[str]:
    """The texts that a prepared folder was made from, as they were named then; none for what is no such folder."""
    if not is_token_folder(path):
        return []
    asked = read_index(Path(path) / INDEX).get("asked", {})
    return [asked[name] for name in ("source", "valid") if asked.get(name) is not None]


class TokenFolder:
    """A folder that `titans prepare` has made; ValueError, naming the file, where something is amiss.

    With `verify` every shard is read once and compared with its sum; its size is always looked at.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        self.index = read_index(self.path / INDEX)
        self.tokenizer_fingerprint: str = self.index["tokenizer"]["fingerprint"]
        self.vocab_size: int = self.index["tokenizer"]["vocab_size"]
        dtype = np.dtype(self.index["dtype"])
        shards = {name: [Shard(**shard) for shard in self.index["splits"].get(name, [])] for name in (TRAIN, VALID)}
        for shard in (shard for part in shards.values() for shard in part):
            self._check(shard, dtype, verify)
        self.train, self.valid = (Split(self.path, shards[name], dtype) for name in (TRAIN, VALID))

    def _check(self, shard: Shard, dtype: np.dtype, verify: bool) -> None:
        path = self.path / shard.file
        for file, expected in ((path, shard.sum), (path.with_suffix(".npy"), shard.ends_sum)):
            if not file.is_file():
                raise ValueError(f"{file} is missing; prepare the folder anew, or bring the file back")
            if file == path and file.stat().st_size != shard.tokens * dtype.itemsize:
                raise ValueError(
                    f"{file} has {file.stat().st_size:,} bytes; expected {shard.tokens * dtype.itemsize:,}: it was cut "
                    "off or changed; prepare the folder anew, or bring the file back"
                )
            if verify and file_sum(file) != expected:
                raise ValueError(
                    f"{file} was changed or damaged (its sum is not what was written); prepare the folder anew, or "
                    "bring the file back"
                )

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokeniser that made the tokens; ValueError where it is not the one that the index names."""
        return folder_tokenizer(self.path, self.index)

    def describe(self) -> dict[str, Any]:
        """Count what there is."""
        counts = {
            f"{name}_{what}": value
            for name, split in (("train", self.train), ("held_out", self.valid))
            for what, value in (("documents", len(split)), ("bytes", split.bytes), ("tokens", split.tokens))
        }
        return {
            **counts,
            "tokenizer": self.index["tokenizer"]["name"],
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }


def read_index(path: Path) -> dict[str, Any]:
    """Read a tokens.json; ValueError where it is none."""
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; expected a folder made by titans prepare") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT or not index.keys() >= PARTS:
        raise ValueError(f"{path} is of another kind; expected format {FORMAT!r}, as titans prepare writes it")
    return index


def folder_tokenizer(folder: Path, index: dict[str, Any]) -> "PreTrainedTokenizerBase":
    """Load the tokeniser of a token folder; ValueError where it is not the one that the index names."""
    path = folder / TOKENIZER
    if not path.is_dir():  # else its name is asked of the hub
        raise ValueError(f"{path} is missing; prepare the folder anew, or bring it back")
    tokenizer = read_tokenizer(path)
    found, expected = tokenizer_fingerprint(tokenizer), index["tokenizer"]["fingerprint"]
    if found != expected:
        raise ValueError(
            f"{path} holds another tokeniser ({found}) than the one that made the tokens ({expected}); bring that one "
            "back, or prepare the folder anew"
        )
    return tokenizer


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A name for what a tokeniser does: BLAKE2b of its rules, its vocabulary and its <bos> and <eos>."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # without how many threads or how much padding it was asked for last
    rules = json.loads(backend.to_str()) if backend is not None else {"class": type(tokenizer).__name__}
    rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation", "version")}
    told = [rules, sorted(tokenizer.get_vocab().items()), tokenizer.bos_token_id, tokenizer.eos_token_id]
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()
