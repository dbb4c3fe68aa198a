"""What results were made with: the wall time of their runs, and the commits of the sources."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titans_lm.train.device import commit
from titans_lm.train.run import COMMITS, UNKNOWN, commits_of, seconds_of

WALL = "wall_seconds"
KEPT = (WALL, COMMITS)
"""Entries of a run's result that say so."""


class Clock:
    """Times a run from here on, and what it had trained before it was stopped; `run` is its folder."""

    def __init__(self, run: Path) -> None:
        self.run, self.before = run, seconds_of(run)
        self.commit, self.began = commit(), time.monotonic()

    def read(self) -> dict[str, Any]:
        """Tell the seconds, training and testing together, and the commits from the first to that of now."""
        seconds = self.before + time.monotonic() - self.began
        return {WALL: seconds, COMMITS: once([*commits_of(self.run), self.commit, commit()])}


def spent(result: dict[str, Any]) -> dict[str, Any]:
    """Take out of a run's result what it was made with; results of before this was kept have none of it."""
    return {name: result[name] for name in KEPT if name in result}


def spent_on(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum the wall seconds of runs, and name their commits where they are others than that of now.

    A run of which no wall time was kept counts with the seconds of its training; its commit is "unknown".
    """
    parts = list(parts)
    commits = once(name for part in parts for name in part.get(COMMITS, [UNKNOWN]))
    told = {WALL: sum(part.get(WALL, part.get("seconds", 0.0)) for part in parts)}
    return told if commits == [commit()] else {**told, COMMITS: commits}


def once(names: Iterable[str]) -> list[str]:
    """Leave every name out that was there before."""
    return list(dict.fromkeys(names))
