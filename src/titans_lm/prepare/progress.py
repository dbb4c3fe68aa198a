"""How far preparing is: bytes of text, and bytes a second."""

import time

from rich.console import Console

from titans_lm.train.log import Report


class PreparingReport(Report):
    """How far preparing is; how much text lies ahead is not known."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(quiet=quiet, title="preparing", console=console)

    def start(self) -> None:
        self.began = time.monotonic()
        self.begin(total=None)

    def update(self, done: int) -> None:
        """Show how far it is."""
        rate = done / 1e6 / max(time.monotonic() - self.began, 1e-9)
        note = f"{done / 1e6:,.1f} MB  {rate:,.1f} MB/s"
        self.show(done, note, f"preparing: {note}")
