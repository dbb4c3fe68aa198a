"""Rows of prepared tokens, by step: every row once before any comes again, in an order that the seed alone decides.

Sample i of a run is row i mod n of epoch ⌊i / n⌋, and step s holds samples s B … (s + 1) B − 1. So the place in the
data is one number, whoever reads: any number of processes or workers gives the same rows, each once.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from titans_lm.data.batches import Batch, check_sizes, padded, shuffled
from titans_lm.data.prepared import Split


class _Rows(ABC):
    """The order of n rows, and batches of them; what a row holds is for `_row` to say."""

    kind: ClassVar[str]

    def __init__(self, split: Split, *, seq_len: int, batch_size: int, seed: int = 0) -> None:
        check_sizes(seq_len, batch_size)
        if not len(split):
            raise ValueError(f"got no documents to train on in {split.folder}; expected a folder with some")
        self.split, self.seq_len, self.batch_size, self.seed = split, seq_len, batch_size, seed
        self.rows = self._count()
        self.fingerprint = f"{split.fingerprint} {self.kind} {seq_len} {batch_size} {seed}"

    @abstractmethod
    def _count(self) -> int:
        """Rows of an epoch."""

    @abstractmethod
    def _row(self, row: int) -> np.ndarray:
        """At most T + 1 tokens."""

    def __call__(self, step: int) -> Batch:
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        places = (divmod(sample, self.rows) for sample in samples)
        rows = [int(shuffled(self.seed, epoch, self.rows)[place]) for epoch, place in places]
        batch = padded([self._row(row) for row in rows], self.seq_len) | {"sample": torch.tensor(rows)}
        if batch["attention_mask"].all():
            del batch["attention_mask"]
        return batch


class PackedRows(_Rows):
    """Rows of T + 1 tokens of all documents laid end to end; each begins with the token that the one before ended with.

        input_ids   (B, T)   tokens, across the borders of documents, which show as <eos> <bos>
        targets     (B, T)   the token after each
        sample      (B,)     which rows of the text these are

    A memory goes on across the borders inside a row. ValueError for fewer than T + 1 tokens.
    """

    kind = "packed"

    def _count(self) -> int:
        if self.split.tokens <= self.seq_len:
            raise ValueError(
                f"got {self.split.tokens:,} tokens to train on; expected at least seq_len + 1 = {self.seq_len + 1:,}: "
                "prepare more text, or give a smaller seq_len"
            )
        return (self.split.tokens - 1) // self.seq_len

    def _row(self, row: int) -> np.ndarray:
        start = row * self.seq_len
        return self.split.take(start, start + self.seq_len + 1)


class DocumentRows(_Rows):
    """Rows that hold one document each, or T tokens of one: no memory hears of another document.

        input_ids        (B, T)   tokens of one document, padded on the right with 0
        targets          (B, T)   the token after each, −100 on padding
        attention_mask   (B, T)   0 on padding; absent where there is none
        sample           (B,)     which rows of the text these are

    Every token but a document's first is predicted once in an epoch.
    """

    kind = "documents"

    def _count(self) -> int:
        pieces = -(-(self.split.lengths - 1) // self.seq_len)
        self.ends = np.cumsum(np.maximum(pieces, 0))
        if not self.ends[-1]:
            raise ValueError("got no document of two tokens or more; expected text to train on")
        return int(self.ends[-1])

    def _row(self, row: int) -> np.ndarray:
        document = int(np.searchsorted(self.ends, row, side="right"))
        piece = row - (int(self.ends[document - 1]) if document else 0)
        return self.split[document][piece * self.seq_len : (piece + 1) * self.seq_len + 1]
