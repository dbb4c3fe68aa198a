"""Settings of TNT, and every check of them."""

from dataclasses import dataclass
from typing import Any

from titans_lm.checks import check_at_least


@dataclass(frozen=True, kw_only=True)
class TNTConfig:
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
