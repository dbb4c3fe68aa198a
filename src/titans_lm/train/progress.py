"""How far something is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

Own = TypeVar("Own", bound="Report")
QUIET_SECONDS = 10.0
"""Seconds between two lines of progress where the screen is a file."""
LONG_SECONDS, MEASURED_SECONDS, MEASURED_STEPS = 120.0, 5.0, 3
"""Time from which on a run is long, and what must have gone by before that is told: the first step does not count."""
BITS, ACCURACY = "bits_per_token", "accuracy"
"""Metrics of a loss that the progress shows beside it."""
NARROW, NARROW_BAR, BAR = 110, 8, 40
"""Columns of a terminal from which on a bar has its full width, and what that is, else and then."""


class Report:
    """A bar on a terminal, a line now and then elsewhere, nothing when quiet. Writes to stderr; a context manager."""

    def __init__(self, *, quiet: bool = False, title: str, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.quiet = title, quiet
        self.last_line = -float("inf")
        self.bar: Progress | None = None

    def begin(self, *columns: ProgressColumn, total: int | None, done: int = 0) -> None:
        """Show the bar, where there is one to show: `done` of `total` lie behind."""
        self.began = self.last_line = time.monotonic()
        if self.console.is_terminal and not self.quiet:
            named, note = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[note]"))
            bar = BarColumn(BAR if self.console.width >= NARROW else NARROW_BAR)
            self.bar = Progress(named, bar, *columns, note, TimeRemainingColumn(), console=self.console)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=total, completed=done, note="")

    def __enter__(self: Own) -> Own:  # not Self, which the tests' checks of single methods cannot resolve
        return self

    def __exit__(self, *_: object) -> None:
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
        if not self.quiet:
            self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class CountReport(Report):
    """How much has been read, how fast, and how long the rest takes, where the end is known."""

    def start(self, total: int | None = None) -> "CountReport":
        """Begin to count up to `total`, if that is known. Used as a context manager, it ends by itself."""
        self.total, self.done = total, 0
        self.first: tuple[int, float] | None = None
        self.begin(total=total)
        return self

    def read(self, count: int) -> None:
        """Count tokens that have been read since the last time."""
        self.reach(self.done + count)

    def reach(self, done: int) -> None:
        """Show how many tokens have been read."""
        self.done = done
        of = "" if self.total is None else f" of {self.total:,}"
        self.update(done, f"{done:,}{of} tokens  {self.rate(done):,.0f} tokens/s")

    def rate(self, count: float) -> float:
        """Give what was counted since the start for each second of it."""
        return count / max(time.monotonic() - self.began, 1e-9)

    def update(self, done: int, note: str) -> None:
        """Show how far it is, with a note of how much that is."""
        self.show(done, note, f"{self.title}: {note}{self._share(done, time.monotonic())}")

    def _share(self, done: int, now: float) -> str:
        """Say how much of all that is, and how long the rest takes; what a run before read took no time."""
        if not self.total:
            return ""
        began, since = self.first = self.first or (done, now)
        left = (now - since) / max(done - began, 1) * max(self.total - done, 0)
        when = f", {in_words(left)} left" if done > began else ""
        return f"  {min(done / self.total, 1.0):.0%}{when}"


class Outlook:
    """Says once, by the first steps, how long training is going to take here, where that is long."""

    def __init__(self, shorter: str, *, say: Callable[[str], None] | None = None, later: float = 0.0) -> None:
        self.shorter, self.say, self.later = shorter, say, later
        self.others, self.told = 0.0, False
        self.first: tuple[int, float] | None = None

    def begin(self, work: Sequence[int]) -> None:
        """Begin a run; `work` is what it and those behind it take, by any measure, before what comes later."""
        self.others, self.first = (self._rest(work) / work[0] if work[0] else 0.0), None

    def ended(self, seconds: float, work: Sequence[int], at_once: int) -> None:
        """Take notice of the end of the first run of `work`: of runs side by side nothing is known before."""
        self.tell(seconds / work[0] * self._rest(work) / at_once)

    def _rest(self, work: Sequence[int]) -> float:
        return sum(work[1:]) + self.later

    def step(self, step: int, total: int) -> None:
        """Take notice of a step of the next run, one of `total`."""
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        steps, seconds = step - self.first[0], now - self.first[1]
        if steps >= MEASURED_STEPS and seconds >= MEASURED_SECONDS:
            self.tell(seconds / steps * (total - step + total * self.others))

    def tell(self, seconds: float) -> None:
        """Say how long it takes, unless that was said, or is short."""
        if not self.told and seconds >= LONG_SECONDS and self.say is not None:
            self.say(f"about {in_words(seconds)} of training to go here; for a look: {self.shorter}")
        self.told = True


def in_words(seconds: float) -> str:
    """Round a time to what one says of it."""
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


class ProgressReport(Report):
    """How far a run is."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        title: str = "training",
        console: Console | None = None,
        outlook: Outlook | None = None,
    ) -> None:
        super().__init__(quiet=quiet, title=title, console=console)
        self.total, self.rate, self.outlook = 0, 0.0, outlook
        self.bytes_per_token: float | None = None
        """With it bits are told per byte, as evaluations tell them."""
        if outlook is not None and outlook.say is None:
            outlook.say = self.say

    def start(self, total: int, done: int = 0) -> "ProgressReport":
        """Begin to count: `done` of `total` steps lie behind. Used as a context manager, it ends by itself."""
        self.total, self.rate = total, 0.0
        self.begin(MofNCompleteColumn(), total=total, done=done)
        return self

    def update(self, record: dict[str, Any]) -> None:
        """Show a step: its loss, how many tokens a second go by, and what the last evaluation found."""
        if self.outlook is not None:
            self.outlook.step(record["step"], self.total)
        self.rate = 0.9 * self.rate + 0.1 * record["tokens_per_second"] if self.rate else record["tokens_per_second"]
        found = [f"loss {record['loss']:.3f}", *self._beside(record), f"{self.rate:,.0f} tokens/s"]
        note = "  ".join(found[self.console.width < NARROW and len(found) > 2 :])  # the loss has no room beside a bar
        line = f"{self.title} {record['step']}/{self.total}  {'  '.join(found)}"
        self.show(record["step"], note, line, last=record["step"] == self.total)

    def _beside(self, record: dict[str, Any]) -> list[str]:
        """Phrase what a step found beside its loss."""
        said = []
        if BITS in record:
            of = "token" if self.bytes_per_token is None else "byte"
            said.append(f"{record[BITS] / (self.bytes_per_token or 1.0):.3f} bits/{of}")
        return [*said, f"{ACCURACY} {record[ACCURACY]:.3f}"] if ACCURACY in record else said
