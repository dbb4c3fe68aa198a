"""How far reading is: tokens, tokens a second, and the bytes of the memory, which stay the same."""

import time

from rich.console import Console

from titans_lm.train.progress import Report


class ReadingReport(Report):
    """How far reading is."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(quiet=quiet, title="reading", console=console)

    def start(self, total: int | None, before: int) -> "ReadingReport":
        """Begin to count: `total` tokens lie ahead, if that is known, and `before` behind."""
        self.before, self.began = before, time.monotonic()
        self.begin(total=total)
        return self

    def update(self, tokens: int, state_bytes: int) -> None:
        """Show how far it is."""
        read = tokens - self.before
        rate = read / max(time.monotonic() - self.began, 1e-9)
        note = f"{tokens:,} tokens  {rate:,.0f} tokens/s  memory {state_bytes / 2**20:,.1f} MiB"
        self.show(read, note, f"reading: {note}")
