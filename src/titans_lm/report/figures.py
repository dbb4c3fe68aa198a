"""What plots show: lines, panels, heat maps and rankings as plain values; `plots.py` draws them."""

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
    wide: bool = True


@dataclass(frozen=True, kw_only=True)
class Panels:
    """Plots side by side over one vertical axis; what lines are is said once, below them."""

    title: str
    x_label: str
    y_label: str
    panels: Sequence[Plot]


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


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """A number for each of many things, the largest at the top."""

    title: str
    x_label: str
    """What the things are."""
    y_label: str
    """What the numbers are."""
    values: dict[str, tuple[float, float | None]]
    """By name, the number and its spread where there is one."""
    marked: str | None = None
    """The one that all others are compared with."""


Drawn = Plot | Panels | HeatMaps | Ranking
