"""The record that every experiment writes: its settings, and what it was made with: wall seconds, machine, commits."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titans_lm.report.section import FORMAT, Result
from titans_lm.train.device import commit, hardware
from titans_lm.train.files import write_json
from titans_lm.train.options import plain_settings
from titans_lm.train.run import COMMITS, UNKNOWN, commits_of, seconds_of

WALL = "wall_seconds"


class Clock:
    """Times a run from here on, and what it had trained before it was stopped; `run` is its folder, if it has one."""

    def __init__(self, run: Path | None = None) -> None:
        self.run, self.before = run, 0.0 if run is None else seconds_of(run)
        self.commit, self.began = commit(), time.monotonic()

    def read(self) -> Result:
        """Give the seconds, training and testing together, and the commits from the first to that of now."""
        seconds = self.before + time.monotonic() - self.began
        known = [] if self.run is None else commits_of(self.run)
        return {WALL: seconds, COMMITS: once([*known, self.commit, commit()])}


def kept(result: Result, *names: str) -> Result:
    """Take parts out of a run's result, as far as it has them, and what it was made with."""
    return {name: result[name] for name in (*names, WALL, COMMITS) if name in result}


def total_provenance(parts: Iterable[Result]) -> Result:
    """Sum the wall seconds of runs, and name their commits where they are others than that of now."""
    parts = list(parts)
    commits = once(name for part in parts for name in part.get(COMMITS, [UNKNOWN]))
    total = {WALL: sum(part[WALL] for part in parts)}
    return total if commits == [commit()] else {**total, COMMITS: commits}


def once(names: Iterable[str]) -> list[str]:
    """Leave every name out that was there before."""
    return list(dict.fromkeys(names))


def write_record(path: Path, what: str, command: str, settings: Any, parts: Iterable[Result], **found: Any) -> Result:
    """Write what an experiment found beside what it was made with; `parts` are the results of its runs."""
    record = {
        "format": FORMAT,
        "what": what,
        "command": command,
        "hardware": hardware(),
        **total_provenance(parts),
        "settings": plain_settings(settings),
        **found,
    }
    write_json(path, record)
    return record


def runs_of(models: Iterable[Result]) -> list[Result]:
    """List the trials and the runs of models, as `write_record` takes them."""
    return [part for one in models for part in [*one["tuning"], *one["runs"]]]
