"""Shards as they are written: a file under another name that grows, and then all of it at once."""

import os
import tempfile
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO
from pathlib import Path

import numpy as np

from titans_lm.data.prepared import Shard
from titans_lm.data.tokenizer import TokenIds
from titans_lm.train.files import hidden, publish, write_atomically


class ShardWriter:
    """The shards of one split: whole documents, a new file after `shard_tokens` tokens.

    `closed` are those that are finished, and `position` is where the source stood when the last of them was: documents
    before it need not be read again. An OSError names the file and says that finished shards are kept.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, closed: list[Shard], position: int
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.closed, self.position = closed, position
        self._begin()

    def _begin(self) -> None:
        self.file, self.digest = None, blake2b(digest_size=16)
        self.tokens, self.documents = 0, list[tuple[int, int]]()

    @property
    def name(self) -> str:
        return f"{self.split}-{len(self.closed):05d}.bin"

    def add(self, tokens: TokenIds, text_bytes: int, position: int) -> bool:
        """Write a document, the one before `position` of the source; whether that has closed a shard."""
        data = np.ascontiguousarray(tokens, self.dtype).tobytes()
        try:
            if self.file is None:
                self.file = tempfile.NamedTemporaryFile(prefix=hidden(), dir=self.folder, delete=False)  # noqa: SIM115
            self.file.write(data)
        except OSError as error:
            raise self._failed(error) from error
        self.digest.update(data)
        self.tokens += len(tokens)
        self.documents.append((self.tokens, text_bytes))
        return self.tokens >= self.shard_tokens and self.close(position)

    def close(self, position: int) -> bool:
        """Finish the shard, if one was begun; documents before `position` are done."""
        self.position = position
        if self.file is None:
            return False
        path = self.folder / self.name
        documents = np.array(self.documents, np.int64).reshape(-1, 2)
        ends = BytesIO()
        np.save(ends, documents)
        try:
            write_atomically(path.with_suffix(".npy"), ends.getvalue())
            publish(self.file, path)
        except OSError as error:
            raise self._failed(error) from error
        self.closed.append(
            Shard(
                path.name, self.tokens, len(documents), int(documents[:, 1].sum()), self.digest.hexdigest(),
                blake2b(ends.getvalue(), digest_size=16).hexdigest(),
            )
        )  # fmt: skip
        self._begin()
        return True

    def discard(self) -> None:
        """Remove what is not finished."""
        if self.file is not None:
            with suppress(OSError):  # on a full disk what is still in the buffer cannot be written
                self.file.close()
            Path(self.file.name).unlink(missing_ok=True)
            self._begin()

    def _failed(self, error: OSError) -> OSError:
        self.discard()
        why = error.strerror or os.strerror(error.errno or 0)
        told = f"{why}; finished shards are kept: free space, and run the same command again"
        return OSError(error.errno, told, str(self.folder / self.name))
