"""Answers that are written side by side: one step of the model for all of them, a token for each."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from titans_lm.generate import Chooser
from titans_lm.serve.errors import Cancelled
from titans_lm.streaming import Memory, Reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Take = Callable[[int, Callable[[], Memory]], bool]
"""Takes a token and what gives the memory that has it; says whether to write on."""


class Answering:
    """One answer that is being written."""

    def __init__(self, memory: Memory, chooser: Chooser, take: Take, most: int) -> None:
        self.memory, self.chooser, self.take, self.left = memory, chooser, take, most
        self.error: Exception | None = None
        self.done = threading.Event()

    def choose(self, logits: Tensor) -> int:
        """Choose a token from logits (1, V); what goes wrong is this answer's own affair."""
        try:
            return self.chooser(logits)
        except Exception as error:  # noqa: BLE001 - whoever asked gets to hear it
            self.error = error
            return 0

    def put(self, token: int, memory: Callable[[], Memory]) -> bool:
        """Take the next token; whether another one is wanted."""
        self.left -= 1
        try:
            wanted = self.error is None and self.take(token, memory) and self.left > 0
        except Exception as error:  # noqa: BLE001 - whoever asked gets to hear it
            self.error, wanted = error, False
        if not wanted:
            self.done.set()
        return wanted

    def fail(self, error: Exception) -> None:
        """End it without another token."""
        self.error = error
        self.done.set()


class Batcher:
    """Writes for all who ask, in a thread that takes a step of the model at a time.

    States are values with a row for each answer, so answers begin and end between any two steps, whatever they have
    read. Every step gives a token to each of them, up to `most`; who comes then waits, and the first to come is the
    first to be served. An answer alone is computed as `Reader.write` computes it.
    """

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", most: int) -> None:
        self.model, self.tokenizer, self.most = model, tokenizer, most
        self._changed = threading.Condition()
        self._waiting: deque[Answering] = deque()
        self._rows: list[Answering] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def rows(self) -> int:
        """Answers that are being written."""
        return len(self._rows)

    def write(self, memory: Memory, chooser: Chooser, take: Take, most: int) -> None:
        """Write up to `most` tokens after a memory of one row, and return when the last was taken.

        Whatever `take` raises ends the answer and is raised here; Cancelled where the server stops.
        """
        mine = Answering(memory, chooser, take, most)
        with self._changed:
            if self._closed:
                raise Cancelled
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="titans-batch", daemon=True)
                self._thread.start()
            self._waiting.append(mine)
            self._changed.notify()
        mine.done.wait()
        if mine.error is not None:
            raise mine.error

    def close(self) -> None:
        """End all that is being written."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        reader: Reader | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._waiting or self._closed)
                if self._closed:
                    break
                new = [self._waiting.popleft() for _ in range(min(self.most - len(self._rows), len(self._waiting)))]
                self._rows += new
            try:
                if new:
                    before = [] if reader is None else [reader.memory]
                    reader = self._reader(Memory.join([*before, *(one.memory for one in new)]))
                assert reader is not None, "there are rows"
                reader = self._step(reader)
            except Exception as error:  # noqa: BLE001 - the model failed, and all who took part get to hear it
                for one in self._rows:
                    one.fail(error)
                self._rows, reader = [], None
        for one in (*self._rows, *self._waiting):
            one.fail(Cancelled())

    def _step(self, reader: Reader) -> Reader | None:
        """Write a token in every row; the reader of those that go on."""
        tokens = reader.decode(self._choose)
        memory, rows = reader.memory, self._rows
        going = [i for i, one in enumerate(rows) if one.put(tokens[i], partial(memory.row, i))]
        if len(going) == len(rows):
            return reader
        self._rows = [rows[i] for i in going]
        return self._reader(memory.take(going)) if going else None

    def _reader(self, memory: Memory) -> Reader:
        return Reader(self.model, self.tokenizer, memory=memory)

    def _choose(self, logits: Tensor) -> list[int]:
        likeliest = logits.argmax(dim=-1).tolist()
        return [
            token if one.chooser.random is None else one.choose(logits[i : i + 1])
            for i, (one, token) in enumerate(zip(self._rows, likeliest, strict=True))
        ]
