"""How far something is: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

Own = TypeVar("Own", bound="Report")
QUIET_SECONDS = 10.0
"""Seconds between two lines of progress where the screen is a file."""
SHOWN = ("bits_per_token", "accuracy")
"""Metrics of a loss that the progress shows beside it."""


class Report:
    """A bar on a terminal, a line now and then elsewhere, nothing when quiet. Writes to stderr; a context manager."""

    def __init__(self, *, quiet: bool = False, title: str, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.quiet = title, quiet
        self.last_line = -float("inf")
        self.bar: Progress | None = None

    def begin(self, *columns: ProgressColumn, total: int | None, done: int = 0) -> None:
        """Show the bar, where there is one to show: `done` of `total` lie behind."""
        self.last_line = time.monotonic()
        if self.console.is_terminal and not self.quiet:
            named, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
            self.bar = Progress(named, BarColumn(), *columns, note, TimeRemainingColumn(), console=self.console)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=total, completed=done, note="")

    def __enter__(self: Own) -> Own:  # not Self, which the tests' checks of single methods cannot resolve
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(self, completed: int, note: str, line: str, *, last: bool = False) -> None:
        """Move the bar; where there is none, write a line if some time has passed since the one before, or at last."""
        if self.bar is not None:
            self.bar.update(self.task, completed=completed, note=note)
        elif last or time.monotonic() - self.last_line >= QUIET_SECONDS:
            self.last_line = time.monotonic()
            self.say(line)

    def say(self, text: str) -> None:
        """Write a line beside the progress."""
        if self.quiet:
            return
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class TokenReport(Report):
    """How many tokens have been read."""

    def start(self, total: int | None) -> "TokenReport":
        """Begin to count up to `total`, if that is known. Used as a context manager, it ends by itself."""
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.begin(total=total)
        return self

    def read(self, count: int) -> None:
        """Count tokens that have been read since the last time."""
        self.done += count
        rate = self.done / max(time.monotonic() - self.began, 1e-9)
        of, left = "", ""
        if self.total is not None:
            of = f" of {self.total:,}"
            left = f"  {(self.total - self.done) / max(rate, 1e-9) / 60.0:.1f} minutes left"
        note = f"{self.done:,}{of} tokens  {rate:,.0f} tokens/s"
        self.show(self.done, note, f"{self.title}: {note}{left}")


class ByteReport(Report):
    """How much text has been read; how much lies ahead is not known."""

    def start(self) -> None:
        """Begin to count."""
        self.began = time.monotonic()
        self.begin(total=None)

    def update(self, done: int) -> None:
        """Show how many bytes have been read, and how fast."""
        rate = done / 1e6 / max(time.monotonic() - self.began, 1e-9)
        note = f"{done / 1e6:,.1f} MB  {rate:,.1f} MB/s"
        self.show(done, note, f"{self.title}: {note}")


class ProgressReport(Report):
    """How far a run is."""

    def __init__(self, *, quiet: bool = False, title: str = "training", console: Console | None = None) -> None:
        super().__init__(quiet=quiet, title=title, console=console)
        self.total, self.rate = 0, 0.0

    def start(self, total: int, done: int = 0) -> "ProgressReport":
        """Begin to count: `done` of `total` steps lie behind. Used as a context manager, it ends by itself."""
        self.total, self.rate = total, 0.0
        self.begin(MofNCompleteColumn(), total=total, done=done)
        return self

    def update(self, record: dict[str, Any]) -> None:
        """Show a step: its loss, how many tokens a second go by, and what the last evaluation found."""
        self.rate = 0.9 * self.rate + 0.1 * record["tokens_per_second"] if self.rate else record["tokens_per_second"]
        extra = "".join(f"  {name} {value:.3f}" for name, value in record.items() if name in SHOWN)
        note = f"loss {record['loss']:.3f}{extra}  {self.rate:,.0f} tokens/s"
        line = f"{self.title} {record['step']}/{self.total}  {note}"
        self.show(record["step"], note, line, last=record["step"] == self.total)
