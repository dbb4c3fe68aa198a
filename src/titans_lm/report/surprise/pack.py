"""Numbers of a page, small: sixteen bits each on a logarithmic scale, which page.js turns back into numbers."""

from base64 import b64encode
from typing import Any

import numpy as np

from titans_lm.report.surprise.text import TokenText
from titans_lm.surprise import PARTS, Surprise

NOTHING, TOP = 0xFFFF, 0xFFFE
"""The code of what is no number, and that of the largest."""
FLOOR = 1e-50
"""What is smaller than this share of the largest counts as zero, so that no scale is too coarse."""


def pack(values: np.ndarray) -> dict[str, Any]:
    """Pack series of numbers of at least 0, (…, N): code 0 is zero, c up to 65534 is low · e^{step · (c − 1)}.

    A number comes back with a relative error of at most ln(1 / FLOOR) / 65533 / 2, which is below 1e-3; what is not
    finite becomes nothing. Codes are in base64, little-endian, the scales of the series in flat lists.
    """
    x = values.astype(np.float64)
    known = np.isfinite(x)
    high = np.where(known, x, 0.0).max(-1, initial=0.0)
    counts = known & (x > FLOOR * high[..., None])
    low = np.where(counts, x, np.inf).min(-1, initial=np.inf)
    low, high = (np.where(counts.any(-1), bound, 1.0) for bound in (low, high))
    step = np.log(high / low) / (TOP - 1)
    place = np.log(np.where(counts, x, low[..., None]) / low[..., None])
    codes = np.where(counts, 1 + np.rint(place / np.where(step > 0.0, step, 1.0)[..., None]), 0)
    packed = base64(np.where(known, codes, NOTHING).astype("<u2"))
    return {"codes": packed, "low": low.ravel().tolist(), "step": step.ravel().tolist()}


def base64(x: np.ndarray) -> str:
    return b64encode(np.ascontiguousarray(x).tobytes()).decode()


def by_piece(values: np.ndarray, starts: np.ndarray, *, total: bool = False) -> np.ndarray:
    """The mean, or the total, of the tokens of each piece: (T, …) as (P, …)."""
    sums = np.add.reduceat(values[: starts[-1]].astype(np.float64), starts[:-1], axis=0)
    return sums if total else sums / np.diff(starts).reshape(-1, *[1] * (values.ndim - 1))


def page_data(surprise: Surprise, text: TokenText, pieces: int) -> dict[str, Any]:
    """What page.js needs of the first pieces: all sizes of each block, head and layer, and bits.

    A piece of several tokens has the mean of their sizes and the sum of their bits.
    """
    starts = text.starts[: pieces + 1]
    sizes = {}
    for what in PARTS:
        found = by_piece(surprise.part(what), starts)  # (P, blocks, H, L)
        sizes[what] = {**pack(np.moveaxis(found, 0, -1)), "scale": surprise.scale(what).ravel().tolist()}
    blocks, heads, layers = surprise.part().shape[1:]
    return {
        "blocks": blocks,
        "heads": heads,
        "layers": layers,
        "pieces": pieces,
        "tokens": int(starts[-1]),
        "starts": base64(starts[:-1].astype("<u4")),
        "sizes": sizes,
        "bits": pack(by_piece(surprise.bits, starts, total=True)),
    }
