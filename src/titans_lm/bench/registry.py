"""What can be measured: benchmarks, which are commands and list cases, and subjects, which make a case ready to run.

A benchmark is a generator of cases that gets the row of each back; it imports torch where it needs it, and not before:

    @benchmark("copying", CopyingSettings)
    def copying(settings, bench):
        for tokens in settings.lengths:
            row = yield Case(label=f"T {tokens:,}", kind="copy", case={"tokens": tokens})

That makes `titans bench copying`, and a part of `titans bench all`. A subject is what a worker runs for a `kind`.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titans_lm.bench.settings import ALLOCATORS, BenchSettings

if TYPE_CHECKING:
    from titans_lm.bench.run import Bench

Row = dict[str, Any]
Header = dict[str, Any]
S = TypeVar("S", bound=BenchSettings)


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


@dataclass(frozen=True)
class Comparison:
    """Sides that take turns for as many rounds as are set; their rows come back as a list."""

    title: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class Repeated:
    """A case that runs once a round, each in a process of its own; its row has the medians of these numbers."""

    case: Case
    medians: tuple[str, ...]
    kept: tuple[str, ...]
    """What is kept of every round."""


Cases = Generator[Case | list[Case] | Comparison | Repeated, Any, Header | None]
"""What a benchmark yields, to get rows back; what it returns changes the header of its file."""


@dataclass(frozen=True)
class Benchmark:
    """A command of `titans bench`."""

    settings: type[BenchSettings]
    cases: Callable[[Any, "Bench"], Cases]
    needs_gpu: bool = False
    """Whether it is refused without a GPU, and no part of all of them."""


@dataclass(frozen=True)
class Subject:
    """What a worker does for a kind of case."""

    build: Callable[[dict[str, Any], Any], Any]
    load: Callable[[dict[str, Any]], None]
    """Imports what a case needs, before anybody looks at the memory."""
    timed: bool
    """Whether `build` gives a step that is to be timed; otherwise it gives the row."""


BENCHMARKS: dict[str, Benchmark] = {}
SUBJECTS: dict[str, Subject] = {}


def benchmark(
    name: str, settings: type[S], *, needs_gpu: bool = False
) -> Callable[[Callable[[S, "Bench"], Cases]], Callable[[S, "Bench"], Cases]]:
    """Make a generator of cases a command."""

    def register(cases: Callable[[S, "Bench"], Cases]) -> Callable[[S, "Bench"], Cases]:
        BENCHMARKS[name] = Benchmark(settings, cases, needs_gpu)
        return cases

    return register


def subject(
    kind: str, *, load: Callable[[dict[str, Any]], None] = lambda case: None, timed: bool = True
) -> Callable[[Callable[[dict[str, Any], Any], Any]], Callable[[dict[str, Any], Any], Any]]:
    """Make a function of a request and a device what a worker does for a kind of case."""

    def register(build: Callable[[dict[str, Any], Any], Any]) -> Callable[[dict[str, Any], Any], Any]:
        SUBJECTS[kind] = Subject(build, load, timed)
        return build

    return register


def benchmarks() -> dict[str, Benchmark]:
    """Give all benchmarks by name, in the order of the command's help."""
    for module in ("ops", "models", "peers", "scaling", "kernels"):
        import_module(f"titans_lm.bench.{module}")
    return BENCHMARKS


def subjects() -> dict[str, Subject]:
    """Give all subjects by the kind of case; this imports torch."""
    for module in ("subjects_op", "subjects_model", "sides"):
        import_module(f"titans_lm.bench.{module}")
    return SUBJECTS


def allocators(device: str, wanted: Sequence[str] = tuple(ALLOCATORS)) -> tuple[str, ...]:
    """Give the allocator settings worth measuring: on a GPU memory is torch's own affair, and one is enough."""
    return tuple(wanted) if device == "cpu" else tuple(wanted)[:1]
