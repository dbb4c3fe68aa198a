"""How a kernel is launched: a small fixed set of tiles and warps, of which the fastest is found once and kept.

No choice here changes what a kernel computes. In Triton's interpreter there is nothing to choose.
"""

from collections.abc import Callable
from typing import Any

import triton

WARPS = (4, 8)
TILES = (16, 32, 64)
"""Hidden channels of a deep memory that are worked on at a time."""
INTERPRETED_TILE = 16
KEYS = ("C", "D", "F", "NORM", "INIT", "FRESH", "REPLAY", "PRECISION")
"""What a choice depends on, as far as a kernel is told it; the types of its tensors come on their own."""


def configurations(tiles: bool) -> list[triton.Config]:
    """List what is tried; `tiles` for kernels that work on BF hidden channels at a time."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BF": INTERPRETED_TILE} if tiles else {})]
    return [
        triton.Config({"BF": tile} if tiles else {}, num_warps=warps, num_stages=1)
        for tile in (TILES if tiles else TILES[:1])
        for warps in WARPS
    ]


def tuned(*restored: str, tiles: bool = False) -> Callable[[Any], Any]:
    """Decorate a kernel; `restored` names what it changes in place, which a trial must not."""

    def decorate(kernel: Any) -> Any:
        keys = [key for key in KEYS if key in kernel.arg_names]
        return triton.autotune(
            configurations(tiles),
            key=keys,
            restore_value=list(restored),
            cache_results=not triton.knobs.runtime.interpret,
        )(kernel)

    return decorate
