"""What can be measured: benchmarks, which are commands and list cases, and subjects, which make a case ready to run.

A benchmark is a generator of cases that gets the row of each back; it imports torch where it needs it, and not before:

    @benchmark("copying", CopyingSettings)
    def copying(settings, at):
        for tokens in settings.lengths:
            row = yield Case(label=f"T {tokens:,}", kind="copy", case={"tokens": tokens})

That makes `titans bench copying`, and a part of `titans bench all`. A subject is what a worker runs for a `kind`.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from titans_lm.bench.settings import ALLOCATORS, BenchSettings


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure: what the worker is asked for, and what the row is called."""

    label: str
    kind: str
    case: dict[str, Any]
    mode: str = ""
    allocator: str = "default"
    side: str = "ours"
    python: Path | None = None
    """Interpreter of another environment, which runs peer_side.py; None is this one."""
    missing: str | None = None
    """Why it cannot be measured here."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What this case has otherwise than the others: repeats, warmup."""


class Comparison(NamedTuple):
    """Sides that take turns for as many rounds as are set; their rows come back as a list."""

    title: str
    cases: Sequence[Case]


class Repeated(NamedTuple):
    """A case that runs once a round; its row has the medians of these numbers, and `rounds` what is kept of each."""

    case: Case
    medians: tuple[str, ...]
    kept: tuple[str, ...]


class Place(NamedTuple):
    """Where a benchmark runs: a device, where progress goes, and whether it is the only one."""

    device: str
    say: Callable[[str], None]
    alone: bool = True


Cases = Generator[Case | list[Case] | Comparison | Repeated, Any, dict[str, Any] | None]
"""What a benchmark yields, to get rows back; what it returns changes the header of its file."""
Measure = Callable[[Any, Place], Cases]
Build = Callable[[dict[str, Any], Any], Any]


class Benchmark(NamedTuple):
    """A command of `titans bench`; one that needs a GPU is refused without, and no part of all of them."""

    settings: type[BenchSettings]
    cases: Measure
    needs_gpu: bool


class Subject(NamedTuple):
    """What a worker does for a kind of case: imports, before memory is looked at, and a step to time, or the row."""

    build: Build
    load: Callable[[dict[str, Any]], None]
    timed: bool


BENCHMARKS: dict[str, Benchmark] = {}
SUBJECTS: dict[str, Subject] = {}


def benchmark(name: str, settings: type[BenchSettings], *, needs_gpu: bool = False) -> Callable[[Measure], Measure]:
    """Make a generator of cases a command."""

    def register(cases: Measure) -> Measure:
        BENCHMARKS[name] = Benchmark(settings, cases, needs_gpu)
        return cases

    return register


def subject(
    kind: str, *, load: Callable[[dict[str, Any]], None] = lambda case: None, timed: bool = True
) -> Callable[[Build], Build]:
    """Make a function of a request and a device what a worker does for a kind of case."""

    def register(build: Build) -> Build:
        SUBJECTS[kind] = Subject(build, load, timed)
        return build

    return register


def benchmarks() -> dict[str, Benchmark]:
    """Give all benchmarks by name, in the order of the command's help, whoever imported them first."""
    for module in ("kinds", "peers"):
        import_module(f"titans_lm.bench.{module}")
    order = ("ops", "model", "peers", "scaling", "tnt", "training", "kernels")
    return {name: BENCHMARKS[name] for name in (*order, *BENCHMARKS)}


def subjects() -> dict[str, Subject]:
    """Give all subjects by the kind of case; this imports torch."""
    for module in ("subjects_op", "subjects_model"):
        import_module(f"titans_lm.bench.{module}")
    return SUBJECTS


def allocators(device: str, wanted: Sequence[str] = tuple(ALLOCATORS)) -> tuple[str, ...]:
    """Give the allocator settings worth measuring: on a GPU memory is torch's own affair, and one is enough."""
    return tuple(wanted) if device == "cpu" else tuple(wanted)[:1]
