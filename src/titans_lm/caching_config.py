"""Settings of memory caching, and every check of them."""

from dataclasses import dataclass
from typing import Literal

from titans_lm.checks import check_between

Caching = Literal["residual", "grm", "ssc"]
CachingStart = Literal["checkpoint", "independent"]
CachingLengths = Literal["equal", "fenwick"]
MOST_POWERS = 63
"""Powers of two that a counter of tokens has."""


@dataclass(frozen=True, kw_only=True)
class CachingConfig:
    """Which memories at the ends of earlier segments answer too (`caching.py`)."""

    memory_caching: Caching | None = None
    """How memories at the ends of earlier segments answer too (lmm, mag, mal; D52): residual, a sum; grm, weighed by
    how a segment's mean key fits the token; ssc, the best of them alone. Nothing is cached by default."""
    caching_segment: int = 256
    """Tokens of a segment, after which the memory is cached."""
    caching_slots: int = 16
    """Cached memories of a row at most; the state has room for as many from the start."""
    caching_top: int = 4
    """Cached memories that a token reads with ssc."""
    caching_open: float = 4.0
    """Start of the logit that is added to the open segment's score, learned per head with grm and ssc; large leaves a
    memory to answer alone at first."""
    caching_start: CachingStart = "checkpoint"
    """Whether the memory goes on after a segment, or starts independently anew."""
    caching_lengths: CachingLengths = "equal"
    """Segments of one length, the last of them kept; or fenwick: joined to powers of two, so that few cover all."""

    def check_caching(self) -> None:
        check_between("caching_open", self.caching_open, -100.0, 100.0)
        if self.memory_caching is None:
            return
        if self.caching_lengths == "fenwick" and self.caching_slots > MOST_POWERS:
            raise ValueError(
                f"got caching_slots={self.caching_slots} with caching_lengths='fenwick', each of which is a power of "
                f"two; expected {MOST_POWERS} at most"
            )
        if self.caching_start == "independent" and self.caching_lengths == "fenwick":
            raise ValueError(
                "got caching_start='independent' with caching_lengths='fenwick', whose segments are joined; expected "
                "caching_start='checkpoint'"
            )
