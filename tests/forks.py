"""Processes forked from one that has loaded the libraries: loading them is most of the time of a short one."""

import multiprocessing
import multiprocessing.forkserver
import os
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
        multiprocessing.forkserver.ensure_running()
    return context


def say_into(log: str | Path) -> None:
    """Send what this process says on standard error to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)


def titans_command(arguments: list[str], log: str) -> None:
    """Be the command `titans`, in a process of `forks()`."""
    from titans_lm.cli import main

    say_into(log)
    raise SystemExit(main(arguments))
