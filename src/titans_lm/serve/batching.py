"""Requests as threads, those of one conversation one after another; and answers that are written side by side."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from starlette.requests import Request
from torch import Tensor

from titans_lm.generate import Chooser
from titans_lm.ops.state import map_state
from titans_lm.serve.schema import Cancelled, ClientError
from titans_lm.streaming import Memory, Reader
from titans_lm.streaming.memory import TOLD

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Work = Callable[[Callable[[str], None], threading.Event], Any]
"""Computes an answer in a thread: gets where to put pieces of text, and what says that nobody waits any more."""
LOOK = 0.25
"""Seconds between two looks at whether a client is still there."""


class Runner:
    """Runs work in threads, and tells it when its client has gone.

    Work that has begun keeps its conversation to itself until it has ended, whether or not anybody still waits.
    """

    def __init__(self, threads: int, most: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="titans")
        self.most = most
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One for each name in use: those who hold it, or wait for it, keep it here."""
        self._tasks: dict[asyncio.Task[None], Job] = {}

    @property
    def active(self) -> int:
        """Requests that are computed or wait."""
        return len(self._tasks)

    async def run(self, name: str | None, work: Work, request: Request) -> Any:
        """Do the work and return what it returns; ClientError 429 where too many wait already."""
        async with aclosing(self.stream(name, work, request)) as items:
            async for item in items:
                if not isinstance(item, str):
                    return item
        raise Cancelled

    async def stream(self, name: str | None, work: Work, request: Request) -> AsyncGenerator[Any, None]:
        """Pieces of text as they come, then what the work returns; now and then a look at whether anybody waits."""
        clock = asyncio.get_running_loop().time
        with self._started(name, work) as queue:
            look = clock() + LOOK
            while True:
                item = None
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(look):
                        item = await queue.get()
                if clock() >= look:
                    look = clock() + LOOK
                    if await request.is_disconnected():
                        raise Cancelled
                if isinstance(item, Exception):
                    raise item
                if item is not None:
                    yield item
                    if not isinstance(item, str):
                        return

    @contextmanager
    def _started(self, name: str | None, work: Work) -> Iterator["asyncio.Queue[Any]"]:
        if self.active >= self.most:
            raise ClientError(429, f"{self.active} requests wait already; come back later", code="busy")
        job = Job(work, asyncio.get_running_loop())
        task = job.loop.create_task(self._do(name, job))
        self._tasks[task] = job
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        try:
            yield job.queue
        finally:
            job.cancel.set()
            if job.future is None or job.future.cancel():  # it waits its turn, for nobody
                task.cancel()

    async def _do(self, name: str | None, job: "Job") -> None:
        try:
            async with nullcontext() if name is None else self._locks.setdefault(name, asyncio.Lock()):
                job.future = self.pool.submit(job.work, job.emit, job.cancel)
                job.queue.put_nowait(await asyncio.wrap_future(job.future))
        except Exception as error:  # noqa: BLE001 - whatever fails in a thread is what its request gets to hear
            job.queue.put_nowait(error)

    def stop(self) -> None:
        """Ask all that is running to leave off, which it does at its next token."""
        for job in list(self._tasks.values()):
            job.cancel.set()

    async def close(self) -> None:
        """Ask all that is running to leave off, and wait until it has."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pool.shutdown(wait=True)


class Job:
    """Work of one request, and how its thread and its request talk to each other."""

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self.work, self.loop = work, loop
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancel = threading.Event()
        self.future: Future[Any] | None = None
        """Once it is its turn among those of its name; a thread may have to become free yet."""

    def emit(self, text: str) -> None:
        """Pass on a piece of text from the thread."""
        self.loop.call_soon_threadsafe(self.queue.put_nowait, text)


Take = Callable[[int, Callable[[], Memory]], bool]
"""Takes a token and what gives the memory that has it; says whether to write on."""
IDLE = 2
"""Steps that a batch is computed with all of its seats empty, as it were, before the empty ones are given up: that
copies the states of all others."""


class Answering:
    """One answer that is being written."""

    def __init__(self, memory: Memory, chooser: Chooser, take: Take, most: int) -> None:
        self.memory, self.chooser, self.take, self.left = memory, chooser, take, most
        self.ended: Future[None] = Future()
        """Done when no more tokens come; what went wrong is this answer's own affair, and raised where it is asked."""
        self.left_seat = False
        """Whether its row of the batch may be another's: its memory has been taken, or nobody wants it."""

    def choose(self, logits: Tensor) -> int:
        """Choose a token from logits (1, V)."""
        try:
            return self.chooser(logits)
        except Exception as error:  # noqa: BLE001 - whoever asked gets to hear it
            self.ended.set_exception(error)
            return 0

    def put(self, token: int, memory: Callable[[], Memory]) -> bool:
        """Take the next token; whether another one is wanted."""
        self.left -= 1
        try:
            wanted = self.take(token, memory) and self.left > 0
        except Exception as error:  # noqa: BLE001 - whoever asked gets to hear it
            self.ended.set_exception(error)
            return False
        if not wanted:
            self.ended.set_result(None)
        return wanted


class Batcher:
    """Writes for all who ask, in a thread that takes a step of the model at a time.

    States are values with a row for each answer, so answers begin and end between any two steps, whatever they have
    read. Every step gives a token to each of them, up to `most`; who comes then waits, and the first to come is the
    first to be served. An answer alone is computed as `Reader.write` computes it.

    A row is a seat. Who has ended leaves it empty, and the next to come is written into it: moving the rows together
    would copy the states of all others, which takes as long as some steps.
    """

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", most: int) -> None:
        self.model, self.tokenizer, self.most = model, tokenizer, most
        self._changed = threading.Condition()
        self._waiting: deque[Answering] = deque()
        self._seats: list[Answering] = []
        self._idle = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def rows(self) -> int:
        """Answers that are being written."""
        return len(self._active())

    def _active(self) -> list[int]:
        return [i for i, one in enumerate(self._seats) if not one.ended.done()]

    @contextmanager
    def write(self, memory: Memory, chooser: Chooser, take: Take, most: int) -> Iterator[None]:
        """Write up to `most` tokens after a memory of one row; inside the block, memories that `take` got can be asked
        for.

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
        try:
            mine.ended.result()
            yield
        finally:
            mine.left_seat = True

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
                self._changed.wait_for(lambda: self.rows or self._waiting or self._closed)
                if self._closed:
                    break
                room = self.most - self.rows
                new = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
            try:
                if new:
                    reader = self._seat(reader, new)
                assert reader is not None, "there are rows"
                reader = self._step(reader)
            except Exception as error:  # noqa: BLE001 - the model failed, and all who took part get to hear it
                _fail({*self._seats, *new}, error)
                self._seats, reader = [], None
        _fail([*self._seats, *self._waiting], Cancelled())

    def _seat(self, reader: Reader | None, new: list[Answering]) -> Reader:
        """Give everybody who comes an empty row, or one more."""
        if reader is None:
            self._seats, self._idle = new, 0
            return self._reader(Memory.join([one.memory for one in new]))
        memory, more = reader.memory, list(new)
        for i, one in enumerate(self._seats):
            if one.left_seat and more:
                self._seats[i] = more.pop(0)
                memory = replaced(memory, i, self._seats[i].memory)
        self._seats += more
        return self._reader(Memory.join([memory, *(one.memory for one in more)]))

    def _step(self, reader: Reader) -> Reader | None:
        """Write a token in every row; the reader of those that go on."""
        tokens, active = reader.decode(self._choose), self._active()
        memory = reader.memory
        going = [i for i in active if self._seats[i].put(tokens[i], partial(memory.row, i))]
        if not going:
            self._seats = []
            return None
        empty = len(self._seats) - len(going)
        self._idle = self._idle + empty if empty else 0
        if self._idle <= IDLE * len(self._seats):
            return reader
        self._seats, self._idle = [self._seats[i] for i in going], 0
        return self._reader(memory.take(going))

    def _reader(self, memory: Memory) -> Reader:
        return Reader(self.model, self.tokenizer, memory=memory)

    def _choose(self, logits: Tensor) -> list[int]:
        tokens = logits.argmax(dim=-1).tolist()
        for i in self._active():
            if self._seats[i].chooser.random is not None:
                tokens[i] = self._seats[i].choose(logits[i : i + 1])
        return tokens


def _fail(answers: Iterable[Answering], error: Exception) -> None:
    """End those that are still being written."""
    for one in answers:
        if not one.ended.done():
            one.ended.set_exception(error)


def replaced(memory: Memory, index: int, new: Memory) -> Memory:
    """The memory with another row in the place of one, which is written over: nobody may want it any more.

    All other rows are the same tensors as before. Where two tensors of a state are one (a memory at the border of a
    chunk and its anchor), or a row is not its own, they are parted first.
    """
    seen = set[int]()

    def put(old: Tensor, row: Tensor) -> Tensor:
        if not old.is_contiguous() or old.data_ptr() in seen:
            old = old.clone(memory_format=torch.contiguous_format)
        seen.add(old.data_ptr())
        old[index : index + 1] = row
        return old

    pending = memory.pending.clone()
    pending[index] = new.pending[0]
    told = {}
    for name in TOLD:
        values = getattr(memory, name)
        told[name] = (*values[:index], *getattr(new, name), *values[index + 1 :])
    return replace(memory, state=map_state(put, memory.state, new.state), pending=pending, **told)
