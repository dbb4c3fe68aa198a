"""Plots as files and as part of a page."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text

from titans_lm.report.html import figure, section
from titans_lm.report.html import page as whole_page
from titans_lm.report.plots import HeatMaps, Line, Panels, Plot, draw, inline_svg, png, save_png, smoothed

LINES = [
    Line(label="one & only", x=[1, 2, 3], y=[0.1, 0.5, 0.4], faint=[0.0, 0.6, 0.5], colour="#3451c6"),
    Line(label="two", x=[1, 2, 3], y=[0.2, 0.2, 0.2], colour="#7a8290", dashed=True, marker=True),
]
PLOT = Plot(title="Title", x_label="step", y_label="share", lines=LINES, percent=True, y_range=(0.0, 1.0))


def test_in_a_narrow_window_a_plot_is_scrolled_and_not_shrunk(browser: Any, tmp_path: Path) -> None:
    """At the width of a phone its digits would be 4 pixels high."""
    path = tmp_path / "page.html"
    path.write_text(whole_page("title", section("plot", figure(inline_svg(draw(PLOT), "a plot", "x"), "caption"))))
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(path.as_uri())
    high = page.locator("svg text, svg g[id*=text] g").first.bounding_box()["height"]
    assert high > 6.5
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("figcaption").bounding_box()["width"] <= 400
    page.close()


def test_a_png_is_a_picture(tmp_path: Path) -> None:
    path = save_png(draw(PLOT), tmp_path / "new" / "plot.png")
    pixels = imread(path)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 900
    assert pixels[..., :3].std() > 0.01, "something is drawn"
    assert path.read_bytes() == png(draw(PLOT)), "the same every time"
    assert imread(BytesIO(png(draw(PLOT)))).shape == pixels.shape


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_an_svg_is_part_of_a_page() -> None:
    svg = inline_svg(draw(PLOT), 'A <plot> & "more"', "Recall over time")
    assert svg.startswith("<svg ")
    assert svg.rstrip().endswith("</svg>")
    assert "http" not in svg
    assert "<metadata" not in svg
    parser = Elements()
    parser.feed(svg)
    first, ids = parser.found[0][1], {attrs["id"] for _, attrs in parser.found if "id" in attrs}
    assert first["aria-label"] == 'A <plot> & "more"'
    assert "viewbox" in first
    assert "width" not in first, "the page decides how wide it is"
    assert all(name.startswith("recall-over-time-") for name in ids)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    assert used
    assert used <= ids, "what is referred to is there"


def test_two_plots_on_a_page_share_no_ids() -> None:
    a, b = (set(re.findall(r'\bid="([^"]+)"', inline_svg(draw(PLOT), "x", name))) for name in ("a", "b"))
    assert a
    assert not a & b


def test_panels_stand_one_below_the_other_over_one_axis() -> None:
    figure = draw(Panels(title="50 $ & 3 $", panels=[PLOT, replace(PLOT, title="Other", percent=False)]))
    assert imread(BytesIO(png(figure))).std() > 0.01
    first, second = figure.axes
    assert first.get_position().y0 > second.get_position().y1
    assert first.get_xlim() == second.get_xlim()
    assert figure.get_suptitle() == "50 $ & 3 $"


def test_labels_of_places() -> None:
    plot = Plot(title="", x_label="", y_label="", lines=[LINES[1]], x_labels=["a", "b", "c", "d"])
    figure = draw(plot)
    png(figure)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["a", "b", "c", "d"]


def test_a_spread_is_drawn_to_both_sides_of_its_line() -> None:
    line = replace(LINES[1], spread=[0.5] * len(LINES[1].y))
    figure = draw(Plot(title="", x_label="", y_label="", lines=[line]))
    (band,) = figure.axes[0].collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert {(x, y + side) for x, y in zip(line.x, line.y, strict=True) for side in (-0.5, 0.5)} <= corners
    assert not draw(Plot(title="", x_label="", y_label="", lines=[LINES[1]])).axes[0].collections


def test_percent_counts_shares() -> None:
    figure = draw(PLOT)
    png(figure)
    assert "100 %" in [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_a_running_mean_starts_without_bias() -> None:
    assert smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smoothed([1.0, 0.0], weight=0.5) == pytest.approx([1.0, 1 / 3])
    assert smoothed([]) == []
    assert np.std(smoothed(np.random.default_rng(0).normal(size=500).tolist())[50:]) < 0.4


def test_the_title_of_one_panel_is_not_cut_off() -> None:
    maps = HeatMaps(
        title="Needle in a haystack: tokenizer words: right answers, %", x_label="told", y_label="true",
        x_labels=["a", "b"], y_labels=["a", "b"], panels={"one": [[1.0, 2.0], [3.0, 4.0]]},
    )  # fmt: skip
    figure = draw(maps)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    heading = next(text for text in figure.texts if text.get_text().startswith("Needle")).get_window_extent(renderer)
    assert heading.x0 >= 0.0
    assert heading.x1 <= figure.bbox.x1


def test_titles_of_panels_do_not_run_into_each_other() -> None:
    """As they are drawn: each ends before the next panel's begins, whatever the names are."""
    names = ["length alone", "mean of embedded words word_size=6", "CNN", "Transformer++ word_size=6,see_length=true"]
    for labels in ("ab", "abc"):
        share = [[50.0] * len(labels)] * len(labels)
        maps = HeatMaps(
            title="title", x_label="told", y_label="true", x_labels=labels, y_labels=labels,
            panels=dict.fromkeys(names, share),
        )  # fmt: skip
        figure = draw(maps)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        for place, following in pairwise(figure.axes):
            whole, beside = place.get_tightbbox(renderer), following.get_window_extent(renderer)
            assert whole is not None
            assert whole.x1 < beside.x0, "with its title"
            assert whole.y1 < figure.bbox.y1


def test_signs_of_formulas_in_names_are_shown_as_they_are() -> None:
    """Two $ would be italic mathematics, or an error of its grammar."""
    name = "$_a^$"
    lines = [Line(label=f"{name} {place}", x=[0, 1], y=[0.0, 1.0], colour="#000000") for place in range(2)]
    plot = Plot(title=name, x_label=name, y_label=name, lines=lines, x_labels=[name, name])
    maps = HeatMaps(
        title=name, x_label=name, y_label=name, x_labels=[name], y_labels=[name], panels={name: [[1.0]]}
    )  # fmt: skip
    across = Panels(title=name, panels=[plot], across=True, x_label=name, y_label=name)
    for drawn in (plot, maps, across, Panels(title=name, panels=[plot])):
        figure = draw(drawn)
        FigureCanvasAgg(figure).draw()
        shown = [text for text in figure.findobj(Text) if "_a^" in text.get_text()]
        assert shown
        for text in shown:
            assert text._preprocess_math(text.get_text())[1] is not True, text.get_text()


def test_every_line_has_its_name_in_the_legend_whatever_that_is() -> None:
    """Legends leave out what begins with an underscore; of letters that the font has not matplotlib warns."""
    names = ["_mine", "_yours", "模型", "é"]
    lines = [Line(label=name, x=[0, 1], y=[0.0, 1.0], colour="#000000") for name in names]
    plot = Plot(title="模型", x_label="模", y_label="模", lines=lines, x_labels=["模", "型"])
    for drawn in (plot, replace(plot, lines=[*lines, LINES[1]]), Panels(title="模型", panels=[plot], across=True)):
        figure = draw(drawn)
        FigureCanvasAgg(figure).draw()
        (legend,) = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
        assert [text.get_text().strip() for text in legend.get_texts()][:4] == ["_mine", "_yours", "??", "é"]
    maps = HeatMaps(title="模", x_label="模", y_label="模", x_labels=["模"], y_labels=["模"], panels={"模": [[1.0]]})
    FigureCanvasAgg(draw(maps)).draw()
