"""Line plots, panels and heat maps: plain values, drawn once and given as a PNG file and as SVG to put into a page."""

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from titans_lm.report.html import Markup, escaped
from titans_lm.train.files import write_atomically

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


DOTS = 180
"""Dots per inch of a PNG."""
CROWD = 4
"""Most lines whose names still find room between them; those of more stand beside the plot."""
FONT = "DejaVu Sans"
"""It comes with matplotlib, so a plot looks the same everywhere."""
STYLE = {
    "font.family": FONT,
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "titans",
}


def draw(plot: Drawn) -> Figure:
    shapes: dict[type, Callable[[Any], Figure]] = {Plot: draw_lines, Panels: draw_panels, HeatMaps: draw_heat}
    return shapes[type(plot)](plot)


def draw_lines(plot: Plot) -> Figure:
    """Draw the lines of one plot; a legend of many stands beside it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2 + 3.0 * (len(plot.lines) > CROWD), 3.5), layout="constrained")
        _fill(figure.add_subplot(), plot)
    return figure


def draw_panels(panels: Panels) -> Figure:
    """Draw plots below each other, or beside each other with a line at zero."""
    count = len(panels.panels)
    across = {"axes.titlesize": 10.5, "axes.titleweight": "normal", "axes.titlepad": 8, "legend.fontsize": 10}
    with matplotlib.rc_context(STYLE | (across if panels.across else {})):
        if not panels.across:
            figure = Figure(figsize=(8.2, 0.6 + 1.7 * count), layout="constrained")
            figure.suptitle(in_font(panels.title), color=SOFT, fontsize=STYLE["font.size"], parse_math=False)
            for axes, plot in zip(figure.subplots(count, sharex=True, squeeze=False)[:, 0], panels.panels, strict=True):
                _fill(axes, plot)
            return figure
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
        figure = Figure(figsize=(1.0 + 4.4 * max(count, 1.6), 4.2), layout=layout)
        heading = {"color": INK, "fontsize": 14, "fontweight": "bold", "x": 0.01, "ha": "left"}
        figure.suptitle(in_font(panels.title), parse_math=False, **heading)
        every = figure.subplots(1, count, sharey=True, squeeze=False)[0]
        for axes, plot in zip(every, panels.panels, strict=True):
            axes.axhline(0.0, color=SOFT, linewidth=0.8)
            _fill(axes, plot, legend=False)
            axes.set_xlabel(_as_it_is(panels.x_label))
        every[0].set_ylabel(_as_it_is(panels.y_label))
        every[0].autoscale(axis="y")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), CROWD), handlelength=2.2)
    return figure


def draw_heat(maps: HeatMaps) -> Figure:
    """Draw panels of numbers side by side, four in a row, each cell with its number."""
    across = min(len(maps.panels), 4)
    down = -(-len(maps.panels) // across)
    wide = 0.35 + 0.52 * len(maps.x_labels)
    # A letter of a title is some 0.085 inches wide: longer ones would run into the next panel's.
    titles = [textwrap.fill(name, max(int(wide / 0.085), 8)) for name in maps.panels]
    lines = 1 + max(title.count("\n") for title in titles)
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "axes.titlesize": 9.5}):
        across_all = 0.7 + across * wide
        heading = textwrap.fill(in_font(maps.title), max(int(across_all / 0.105), 12))
        high = 0.9 + 0.17 * heading.count("\n") + down * (0.6 + 0.15 * lines + 0.3 * len(maps.y_labels))
        figure = Figure(figsize=(across_all, high), layout="constrained")
        figure.suptitle(heading, color=INK, fontsize=11, fontweight="bold", parse_math=False)
        axes = figure.subplots(down, across, squeeze=False)
        for place in axes.flat[len(maps.panels) :]:
            place.set_visible(False)
        for place, title, values in zip(axes.flat, titles, maps.panels.values(), strict=False):
            place.imshow(np.asarray(values, float), cmap="Blues", vmin=0.0, vmax=125.0, aspect="auto")
            place.set_title(_as_it_is(title))
            place.set_xticks(range(len(maps.x_labels)), map(_as_it_is, maps.x_labels))
            place.set_yticks(range(len(maps.y_labels)), map(_as_it_is, maps.y_labels))
            place.spines[:].set_visible(False)
            for (row, column), value in np.ndenumerate(np.asarray(values, float)):
                ink = "white" if value > 70.0 else INK
                said = "–" if math.isnan(value) else f"{value:.0f}"
                place.text(column, row, said, ha="center", va="center", color=ink, fontsize=8.0)
        figure.supxlabel(_as_it_is(maps.x_label), color=SOFT, fontsize=9.5)
        figure.supylabel(_as_it_is(maps.y_label), color=SOFT, fontsize=9.5)
    return figure


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the running mean that forgets: each value is weighed `weight` less with every step, without a bias."""
    total = mass = 0.0
    means = []
    for value in values:
        total, mass = weight * total + value, weight * mass + 1.0
        means.append(total / mass)
    return means


@cache
def _letters() -> frozenset[int]:
    files = (findfont(FontProperties(family=FONT, weight=weight)) for weight in ("normal", "bold"))
    return frozenset.intersection(*(frozenset(get_font(file).get_charmap()) for file in files))


def in_font(text: str) -> str:
    """A text in the letters that the font has: for what it has not matplotlib would warn and draw an empty box."""
    return "".join(letter if letter == "\n" or ord(letter) in _letters() else "?" for letter in str(text))


def _as_it_is(text: str) -> str:
    """A text that matplotlib can write and takes for no formula, whatever stands in a user's names."""
    return in_font(text).replace("$", r"\$")


def _fill(axes: Axes, plot: Plot, *, legend: bool = True) -> None:
    for line in plot.lines:
        _draw_line(axes, line)
    axes.set(title=_as_it_is(plot.title), xlabel=_as_it_is(plot.x_label), ylabel=_as_it_is(plot.y_label))
    axes.set_ylim(*plot.y_range)
    axes.margins(x=0.02)
    if plot.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    if plot.x_labels is not None:
        axes.xaxis.set_major_locator(FixedLocator(plot.x_places or range(len(plot.x_labels))))
        axes.xaxis.set_major_formatter(FixedFormatter(list(map(_as_it_is, plot.x_labels))))
        axes.xaxis.set_minor_locator(NullLocator())
    if not legend:
        return
    if len(plot.lines) > CROWD:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.6)
        axes.tick_params(axis="x", labelsize=8.0)
    elif len(plot.lines) > 1:
        axes.legend(loc="best", handlelength=1.6)


def png(figure: Figure) -> bytes:
    file = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="png", dpi=DOTS, metadata={"Software": None})
    return file.getvalue()


def inline_svg(figure: Figure, description: str, name: str) -> Markup:
    """Give a drawn figure as an <svg> element for a page: no address in it, and ids that start with its name.

    Inside HTML an <svg> needs no namespaces, which look like addresses; the metadata holds real ones. The class keeps
    letters legible in a narrow window (style.css), where it scrolls.
    """
    file = StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{re.sub(r'[^a-z0-9]+', '-', name.lower())}-", text)
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*" width="[^"]*"', "<svg", text, count=1)
    return Markup(text.replace("<svg", f'<svg class="drawn" role="img" aria-label="{escaped(description)}"', 1))


def save_png(figure: Figure, path: Path) -> Path:
    write_atomically(path, png(figure))
    return path


def _draw_line(axes: Axes, line: Line) -> None:
    if line.faint is not None:
        axes.plot(line.x, line.faint, color=line.colour, linewidth=0.8, alpha=0.25)
    if line.spread is not None:
        middle, spread = np.asarray(line.y, float), np.asarray(line.spread, float)
        axes.fill_between(line.x, middle - spread, middle + spread, color=line.colour, alpha=0.14, linewidth=0.0)
    if line.band is not None:
        axes.fill_between(line.x, *line.band, color=line.colour, alpha=0.14, linewidth=0.0)
    label = _as_it_is(line.label)
    axes.plot(
        np.asarray(line.x),
        np.asarray(line.y, float),
        color=line.colour,
        linewidth=1.4 if line.dashed or line.dotted else 2.2,
        linestyle=(0, (4, 3)) if line.dashed else (0, (1, 2)) if line.dotted else "solid",
        marker="o" if line.marker else None,
        markersize=5,
        label=f" {label}" if label.startswith("_") else label,  # legends leave out what begins with an underscore
        solid_capstyle="round",
    )
