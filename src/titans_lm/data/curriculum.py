"""Settings of a curriculum of rereading: rows of training text in which passages return."""

from dataclasses import dataclass

from titans_lm.checks import KnownSettings
from titans_lm.config import check_at_least, check_between

Share = float | tuple[float, float]
"""A share of rows: one for all steps, or (from, to), along a line over the steps."""


@dataclass(frozen=True, kw_only=True)
class RereadCurriculum(KnownSettings):
    """Rows of training text in which passages return, so that a memory is taught to keep what it has read (D40).

    A first phase has short rows in which short passages come again and again, at short gaps; in the second, a share of
    the rows of usual length holds longer passages twice. Off by default.
    """

    first_steps: int = 0
    """Steps of the first phase; 0 leaves it out."""
    first_len: int = 256
    """Tokens of a row of the first phase; its batches have as many tokens as all others, so more rows."""
    first_passages: tuple[int, int] = (8, 32)
    """Shortest and longest passage of the first phase, in tokens."""
    first_gaps: tuple[int, ...] = (0, 8, 24)
    """Tokens of other text between two passages of the first phase, each gap as likely as the others."""
    first_new: float = 0.3
    """Probability that the next passage of the first phase is a new one, and not the last one again."""
    share: Share = 0.0
    """Share of the rows after the first phase that hold a passage twice: one for all steps, or (from, to) over them."""
    repeats: int = 1
    """How many passages such a row holds twice, as far as they fit side by side; longer rows need more (D40)."""
    passages: tuple[int, int] = (64, 256)
    """Shortest and longest passage of these rows, in tokens."""
    max_gap: int | None = None
    """Most tokens between the two readings of these rows; by default what fits in the row."""

    def __post_init__(self) -> None:
        check_at_least("reread.first_steps", self.first_steps, 0)
        check_at_least("reread.first_len", self.first_len, 1)
        check_between("reread.first_new", self.first_new, 0.0, 1.0)
        check_at_least("reread.repeats", self.repeats, 1)
        if isinstance(self.share, tuple) and len(self.share) != 2:
            raise ValueError(f"got reread.share={self.share}; expected one number, or two: (from, to) over the steps")
        for share in self._shares:
            check_between("reread.share", share, 0.0, 1.0)
        for name in ("first_passages", "passages"):
            shortest, longest = getattr(self, name)
            check_at_least(f"reread.{name}", shortest, 1)
            if longest < shortest:
                raise ValueError(f"got reread.{name}={(shortest, longest)}; expected the shortest, then the longest")
        if not self.first_gaps:
            raise ValueError("got reread.first_gaps=(); expected one or more numbers of tokens")
        for gap in self.first_gaps:
            check_at_least("reread.first_gaps", gap, 0)
        if self.max_gap is not None:
            check_at_least("reread.max_gap", self.max_gap, 0)

    @property
    def is_on(self) -> bool:
        return self.first_steps > 0 or self.has_second

    @property
    def has_second(self) -> bool:
        return any(self._shares)

    @property
    def _shares(self) -> tuple[float, ...]:
        return self.share if isinstance(self.share, tuple) else (self.share, self.share)

    def share_at(self, done: float) -> float:
        """The share of rows with a passage twice when a part `done` of the second phase is over."""
        start, stop = self._shares
        return start + done * (stop - start)

    def check_run(self, steps: int, seq_len: int) -> None:
        """Check that it fits a run of so many steps on rows of `seq_len` tokens; ValueError where it does not."""
        if self.first_steps > steps:
            raise ValueError(
                f"got reread.first_steps={self.first_steps} in a run of {steps} steps; expected a first phase that is "
                "no longer than the run"
            )
        if self.first_steps and seq_len % self.first_len:
            raise ValueError(
                f"got reread.first_len={self.first_len} and seq_len={seq_len}; expected a first_len that divides "
                "seq_len, so that steps of both phases have as many tokens"
            )
        if self.first_steps:
            _check_twice("reread.first_passages", self.first_passages, max(self.first_gaps), self.first_len)
        if self.has_second:
            _check_twice("reread.passages", self.passages, 0, seq_len)


def _check_twice(name: str, passages: tuple[int, int], gap: int, length: int) -> None:
    """A row of T tokens has T + 1 with the last one to be predicted."""
    least = 2 * passages[1] + gap - 1
    if least > length:
        apart = f" and gaps of {gap}" if gap else ""
        raise ValueError(
            f"got {name}={passages}{apart} in rows of {length} tokens; expected rows of at least {least}, which hold "
            "the longest passage twice"
        )
