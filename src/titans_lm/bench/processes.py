"""The processes that cases run in: one for each on a CPU and for a peer, one for all of ours on a GPU.

python -m titans_lm.bench.processes < request.json
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from titans_lm.bench.measure import measure, serve
from titans_lm.bench.registry import Case, subjects
from titans_lm.bench.settings import ALLOCATORS

OURS = (sys.executable, "-m", "titans_lm.bench.processes")
PIECE = 65_536
Row = dict[str, Any]


def ask(request: dict[str, Any], case: Case, timeout: float, threads: int) -> Row:
    """Send a request to a worker of its own, and read its answer."""
    peer = [str(case.python), "-P", str(Path(__file__).with_name("peer_side.py"))]
    ours = case.python is None
    with Worker(threads, OURS if ours else peer, allocator=case.allocator, ours=ours) as worker:
        return worker.ask(request, timeout)


class Worker:
    """One process for many cases, one after another: it starts with the first, and anew after one that failed.

    An error on a GPU leaves nothing there that can be relied on, so whatever goes wrong is the process's last case.
    Its environment is this one's, with an allocator and no other, and so many threads.
    """

    def __init__(
        self, threads: int, command: Sequence[str] = OURS, *, allocator: str = "default", ours: bool = True
    ) -> None:
        self.command = command
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        self.environment |= ALLOCATORS[allocator] | {"OMP_NUM_THREADS": str(threads)}
        if ours:  # a bare checkout works too
            paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: BinaryIO | None = None
        self.unread = b""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, request: dict[str, Any], timeout: float) -> Row:
        """Send a request and read its answer; a worker that dies or takes too long is an error row."""
        deadline = time.monotonic() + timeout
        before = 0 if self.errors is None else os.fstat(self.errors.fileno()).st_size  # earlier cases are no reason
        process, errors = self._started()
        try:
            with suppress(BrokenPipeError):  # it is dead: the end of its output tells
                cast("BinaryIO", process.stdin).write(json.dumps(request).encode() + b"\n")
            row = self._row(cast("BinaryIO", process.stdout), deadline)
            if row is None:
                code = process.wait(max(0.0, deadline - time.monotonic()))
                errors.seek(before)
                told = errors.read().decode(errors="replace").strip().splitlines()
                row = {"error": f"the worker ended with code {code}: {told[-1] if told else 'no message'}"}
        except (TimeoutError, subprocess.TimeoutExpired):
            row = {"error": f"stopped after {timeout:.0f} seconds"}
        except BaseException:  # ctrl-c in the middle of a case: the next answer would be this one's
            self.end()
            raise
        if "error" in row:
            self.end()
        return row

    def end(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.errors):
                if stream is not None:
                    stream.close()
        self.process, self.errors, self.unread = None, None, b""

    def _started(self) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        if self.process is None or self.errors is None:
            # no pipe, which would be full one day, as nobody reads it; it lives as long as the process
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115
            # a group of its own: its helpers, such as compilers, end with it, and ctrl-c reaches it through `end` only
            self.process = subprocess.Popen(
                self.command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        return self.process, self.errors

    def _row(self, output: BinaryIO, deadline: float) -> Row | None:
        """Read lines until one is a row; None where the output ends, TimeoutError at the deadline."""
        while True:
            line, found, self.unread = self.unread.partition(b"\n")
            if not found:
                if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError
                part = os.read(output.fileno(), PIECE)
                if not part:
                    return None
                self.unread = line + part
            elif line.startswith(b"{"):
                return json.loads(line)


def work(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure what a request names. Everything heavy is imported before the memory is looked at."""
    subject = subjects()[request["kind"]]
    subject.load(request["case"])
    return measure(request, subject.build, device) if subject.timed else subject.build(request, device)


if __name__ == "__main__":
    serve(work)
