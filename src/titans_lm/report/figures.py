"""What plots show: lines, panels and heat maps as plain values; `plots.py` draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

INK, SOFT, LINE, ACCENT = "#1b1f27", "#5b6472", "#e3e6eb", "#3451c6"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot; `faint` are the single values behind a smoothed one, `spread` lies on both of its sides.

    `band` is a lower and an upper line instead of a spread.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    faint: Sequence[float] | None = None
    spread: Sequence[float] | None = None
    band: tuple[Sequence[float], Sequence[float]] | None = None
    dashed: bool = False
    dotted: bool = False
    marker: bool = False


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What a plot shows."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    y_range: tuple[float | None, float | None] = (None, None)
    x_labels: Sequence[str] | None = None
    """Names of the places 0, 1, 2, … of the horizontal axis, or of `x_places`, instead of numbers."""
    x_places: Sequence[float] | None = None
    percent: bool = False
    """Whether the vertical axis counts shares of one."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """Plots one below the other over one horizontal axis, or side by side over one vertical axis with one legend."""

    title: str
    panels: Sequence[Plot]
    across: bool = False
    x_label: str = ""
    y_label: str = ""


@dataclass(frozen=True, kw_only=True)
class HeatMaps:
    """Shares from 0 to 100 over two settings, a panel for each of several things."""

    title: str
    x_label: str
    y_label: str
    x_labels: Sequence[str]
    y_labels: Sequence[str]
    panels: dict[str, Sequence[Sequence[float]]]
    """By name, the rows of numbers from the first of `y_labels` (at the top) to the last."""


Drawn = Plot | Panels | HeatMaps
