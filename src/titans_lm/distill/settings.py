"""How an adapter is trained: settings that know nothing of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from titans_lm.config import check_at_least, check_between, check_not_negative
from titans_lm.data.text import HELD_OUT
from titans_lm.retrofit.settings import AdapterSettings
from titans_lm.train.settings import FitSettings


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings(FitSettings):
    """Settings of training an adapter."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*FitSettings.may_be_zero, "grow_steps")
    model: str | None = None
    """Folder or hub name of the base."""
    data: str | None = None
    """A file, a folder of text, or a folder of titans prepare with the base's tokenizer."""
    out: Path | None = None
    """Folder of the run; its model/ is the adapter."""
    steps: int = 300
    """Steps of the optimiser."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises to its peak."""
    weight_decay: float = 0.0
    """Weight decay of the weight matrices; nothing else decays."""
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    """The adapter."""
    seq_len: int = 2048
    """Tokens of a row."""
    batch_size: int = 1
    """Rows of a batch."""
    distill: float = 1.0
    """Weight of the loss KL(full attention ‖ ours), beyond the window."""
    text_loss: float = 0.0
    """Weight of the loss of the text itself, beyond the window."""
    windows: tuple[int, ...] = ()
    """Windows that one is drawn of for every batch; by default the adapter's alone."""
    sink_counts: tuple[int, ...] = ()
    """Counts of sinks that one is drawn of for every batch; by default the adapter's alone."""
    returning: float = 0.5
    """Share of the rows in which passages return that have left the window."""
    returning_weight: float = 1.0
    """Weight of the loss of these rows beside that of plain text."""
    passages: tuple[int, int] = (32, 256)
    """Shortest and longest passage of these rows, in tokens."""
    grow_steps: int = 50
    """Steps over which the distance of a return grows, from twice the window to the row."""
    held_out: float = HELD_OUT
    """Share of the documents held out for validation, never trained on; of a single file, its end."""
    valid: str | None = None
    """A file or folder to validate on instead."""
    eval_rows: int = 4
    """Rows of plain text, and as many with returns, that an evaluation reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("returning", self.returning, 0.0, 1.0)
        for name in ("distill", "text_loss", "returning_weight"):
            check_not_negative(name, getattr(self, name))
        if not self.distill and not self.text_loss:
            raise ValueError("got distill=0 and text_loss=0; expected a loss: a weight above 0 for one of them")
        shortest, longest = self.passages
        check_at_least("passages", shortest, 2)
        if longest < shortest:
            raise ValueError(f"got passages={self.passages}; expected the shortest, then the longest")
        widest, sinks = max(self.adapter.window, *self.windows, 0), max(self.adapter.sinks, *self.sink_counts, 0)
        least = widest + 1 + (longest if self.returning else 0)
        if self.seq_len < least:
            raise ValueError(
                f"got seq_len={self.seq_len} with windows of {widest} tokens; expected rows of at least {least}: what "
                "is inside the window teaches nothing"
            )
        if self.seq_len <= widest + sinks:
            raise ValueError(
                f"got seq_len={self.seq_len} with windows of {widest} tokens and {sinks} sinks; expected rows of at "
                f"least {widest + sinks + 1}: no token would reach a memory"
            )
        for window in self.windows:
            check_at_least("windows", window, 1)
        for count in self.sink_counts:
            check_at_least("sink_counts", count, 0)
