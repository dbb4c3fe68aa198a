"""Processes forked from one that has loaded the libraries: loading them is most of the time of a short one."""

import multiprocessing
import multiprocessing.forkserver
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli_cases import environment


@cache
def forks() -> Any:
    """A server of processes that have loaded what `train/several.py` needs, which is all that is slow to load."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.several"])
    source = environment()["PYTHONPATH"]
    variables = {
        "PYTHONPATH": f"{source}:{Path(__file__).parent}",
        "TITANS_TYPECHECK": "0",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in list(os.environ):  # what glibc is told it reads when a process starts
            if name.startswith(("MALLOC_", "GLIBC_")):
                patch.delenv(name)
        multiprocessing.forkserver.ensure_running()
    return context


def say_into(log: str | Path, stream: int = 2) -> None:
    """Send what this process says on standard error, or on another stream, to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)


def titans_command(arguments: list[str], out: Path, log: Path, variables: dict[str, str]) -> None:
    """Be the command `titans`, in a process of `forks()`."""
    from titans_lm.cli import main

    say_into(out, 1)
    say_into(log)
    os.environ.update(variables)
    raise SystemExit(main(arguments))


def run_here(code: str, said: Path) -> None:
    """Be a script, in a process of `forks()`."""
    say_into(said, 1)
    say_into(said.with_suffix(".log"))
    exec(code, {"__name__": "script"})


def said_by(code: str, said: Path) -> str:
    """What a script prints that ends well: torch is loaded, and nothing has been computed with it."""
    process = forks().Process(target=run_here, args=(code, said))
    process.start()
    process.join(120.0)
    assert process.exitcode == 0, said.with_suffix(".log").read_text()
    return said.read_text()


@dataclass
class Command:
    """A command `titans` that runs in a process of its own, and the files that it writes its streams to."""

    process: Any
    out: Path
    log: Path

    def ended(self, seconds: float = 120.0) -> int:
        """Its exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "it goes on"
        return self.process.exitcode


def start_titans(streams: Path, *arguments: object, **variables: str) -> Command:
    """Start it as a user does, except for what libraries take to load; `streams` begins the names of its two files."""
    out, log = streams.with_name(f"{streams.name}.out"), streams.with_name(f"{streams.name}.log")
    given = [str(argument) for argument in arguments]
    for left in (out, log):  # of a process before
        left.unlink(missing_ok=True)
    process = forks().Process(target=titans_command, args=(given, out, log, variables))
    process.start()
    return Command(process, out, log)
