"""How far reading is: tokens, tokens a second, and the bytes of the memory, which stay the same."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from titans_lm.train.log import QUIET_SECONDS


class ReadingReport:
    """A bar on a terminal, a line now and then elsewhere, nothing when quiet. Writes to stderr."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console, self.quiet = console or Console(stderr=True), quiet
        self.bar: Progress | None = None

    def start(self, total: int | None, before: int) -> "ReadingReport":
        """Begin to count: `total` tokens lie ahead, if that is known, and `before` behind."""
        self.total, self.before = total, before
        self.began = self.last_line = time.monotonic()
        if self.console.is_terminal and not self.quiet:
            self.bar = Progress(
                TextColumn("reading"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
                console=self.console,
            )  # fmt: skip
            self.bar.start()
            self.task = self.bar.add_task("reading", total=total, note="")
        return self

    def __enter__(self) -> "ReadingReport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def update(self, tokens: int, state_bytes: int) -> None:
        """Show how far it is."""
        if self.quiet:
            return
        now = time.monotonic()
        rate = (tokens - self.before) / max(now - self.began, 1e-9)
        note = f"{tokens:,} tokens  {rate:,.0f} tokens/s  memory {state_bytes / 2**20:,.1f} MiB"
        if self.bar is not None:
            self.bar.update(self.task, completed=tokens - self.before, note=note)
        elif now - self.last_line >= QUIET_SECONDS:
            self.last_line = now
            self.console.print(f"reading: {note}", markup=False, highlight=False, soft_wrap=True)
