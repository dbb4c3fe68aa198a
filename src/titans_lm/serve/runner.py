"""Requests as threads: some side by side, those of one conversation one after another."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request

from titans_lm.serve.errors import Cancelled, ClientError

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
            if not job.begun:  # it waits its turn, for nobody
                task.cancel()

    async def _do(self, name: str | None, job: "Job") -> None:
        try:
            async with nullcontext() if name is None else self._locks.setdefault(name, asyncio.Lock()):
                job.begun = True
                job.queue.put_nowait(await job.loop.run_in_executor(self.pool, job.work, job.emit, job.cancel))
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
        self.cancel, self.begun = threading.Event(), False

    def emit(self, text: str) -> None:
        """Pass on a piece of text from the thread."""
        self.loop.call_soon_threadsafe(self.queue.put_nowait, text)
