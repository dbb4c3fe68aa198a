"""What a step of reading leaves besides the state, and what it would have left had it ended earlier."""

from typing import Any, NamedTuple

import numpy as np

from titans_lm.hf.history import Call, Places
from titans_lm.streaming.memory import Source


class Told(NamedTuple):
    """Whether rows stand inside a document after a step, and what they have read.

    A step of `marks` reads the end of a document, the start of the next, or both. One that reads sources has their
    hashes before it, `hashed`.
    """

    open: tuple[bool, ...]
    sources: tuple[tuple[Source, ...], ...]
    marks: bool = False
    hashed: tuple[Any, ...] | None = None

    def until(self, call: Call, count: Places, before: "Told") -> "Told":
        """The same where rows read only their first tokens of the step."""
        opened, sources = [], []
        for row, (n, whole) in enumerate(zip(count, call.count, strict=True)):
            done = self if n == whole else before if n == 0 else self._cut(row, call.inputs[row], n)
            opened.append(done.open[row])
            sources.append(done.sources[row])
        return self._replace(open=tuple(opened), sources=tuple(sources))

    def _cut(self, row: int, tokens: np.ndarray, count: int) -> "Told":
        """The same where a row, of which alone this speaks, stops inside of the step."""
        if self.marks:  # between an end and a start
            return self._replace(open=tuple(False for _ in self.open))
        if self.hashed is None:
            return self
        *earlier, last = self.sources[row]
        digest = self.hashed[row].copy()
        digest.update(tokens[:count].astype("<u4").tobytes())
        read = last.tokens - len(tokens) + count
        cut = Source(last.name, read, None, digest.hexdigest())
        return self._replace(sources=tuple((*earlier, cut) for _ in self.sources))
