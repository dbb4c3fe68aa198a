"""Settings of what is beyond the paper, TNT and memory caching, and every check of them."""

from dataclasses import dataclass
from typing import Any, Literal

from titans_lm.checks import KnownSettings, check_at_least, check_between


@dataclass(frozen=True, kw_only=True)
class TNTConfig(KnownSettings):
    """A global memory and local ones that start anew in every shard of a text (`tnt.py`)."""

    tnt_global_chunk: int = 256
    """Tokens of a chunk of the global memory, which is read as it was at the chunk's start (tnt; D54)."""
    tnt_local_chunks: tuple[int, ...] = (8,)
    """Tokens of a chunk of each local memory; chunk_size is that of other blocks (tnt)."""
    tnt_shard: int = 512
    """Tokens after which the local memories start anew: a multiple of all chunks (tnt)."""
    tnt_projection: bool = True
    """Whether a query to a local memory is projected on the keys of its shard (tnt)."""

    def check_tnt(self) -> None:
        given: Any = self.tnt_local_chunks
        if not isinstance(given, list | tuple) or not given:
            raise ValueError(
                f"got tnt_local_chunks={given!r}; expected the chunk size of at least one local memory, such as (8,)"
            )
        object.__setattr__(self, "tnt_local_chunks", tuple(given))  # JSON has lists
        for chunk in given:
            check_at_least("tnt_local_chunks", chunk, 1)
        for name, chunks in (("tnt_global_chunk", [self.tnt_global_chunk]), ("tnt_local_chunks", given)):
            if any(self.tnt_shard % chunk for chunk in chunks):
                raise ValueError(
                    f"got {name}={getattr(self, name)} and tnt_shard={self.tnt_shard}; expected a shard that is a "
                    "multiple of every chunk, so that none begins inside one"
                )

    def check_tnt_goes_with(self) -> None:
        """Refuse, for a stack with the block, settings that its memories do not have."""
        for name, alone in (("decay_first", False), ("omega_window", 1)):
            if getattr(self, name) != alone:
                raise ValueError(
                    f"got {name}={getattr(self, name)} with tnt; expected {name}={alone}, or another block"
                )
        if self.memory_backend == "triton":  # pyrefly: ignore
            raise ValueError(
                "got memory_backend='triton' with tnt, which no kernel does; expected memory_backend='auto'"
            )


Caching = Literal["residual", "grm", "ssc"]
CachingStart = Literal["checkpoint", "independent"]
CachingLengths = Literal["equal", "fenwick"]
MOST_POWERS = 63
"""Powers of two that a counter of tokens has."""


@dataclass(frozen=True, kw_only=True)
class CachingConfig(KnownSettings):
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
