"""Numbers over seeds: their mean, how far they lie apart, and how both are written."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

Spread = dict[str, Any]
"""mean, sd (None for a single seed) and seeds, as results hold them."""


def mean_with_spread(values: Sequence[float]) -> Spread:
    """Give the mean over seeds and the standard deviation, None for a single one; nan where a value is not finite."""
    finite = all(map(math.isfinite, values))
    sd = None if len(values) < 2 else stdev(values) if finite else math.nan
    return {"mean": mean(values) if finite else math.nan, "sd": sd, "seeds": len(values)}


def in_percent(found: Spread) -> Spread:
    return {**found, "mean": 100 * found["mean"], "sd": None if found["sd"] is None else 100 * found["sd"]}


def written(found: Spread, form: str) -> str:
    """Write a mean, and its standard deviation where there is one, each by a format such as .3f; – for no number."""
    if found["mean"] is None:
        return "–"
    sd = "" if found["sd"] is None else f" ± {found['sd']:{form.lstrip('+')}}"
    return f"{found['mean']:{form}}{sd}"
