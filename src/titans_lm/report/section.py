"""How a kind of result stands on the page of results and on a terminal: one declaration for each kind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titans_lm.report.figures import Drawn, HeatMaps
from titans_lm.report.sources import FORMAT, Result, source_of_models
from titans_lm.report.table import Table, markdown


def no_plots(_: Result) -> dict[str, Drawn]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, where the numbers come from, tables with what is said before each, and plots."""

    heading: Callable[[Result], str]
    tables: Callable[[Result], list[Table]]
    plots: Callable[[Result], dict[str, Drawn]] = no_plots
    """By what follows the name of the result's file in theirs."""
    source: Callable[[Result, str], list[str]] = source_of_models
    format: str = FORMAT
    together: bool = False
    """Whether files of this kind make one section: the first, with `others` for further devices and precisions."""
    expected: bool = False
    """Whether the page says so where nothing was measured."""

    def named_plots(self, result: Result) -> dict[str, Drawn]:
        """Give the plots by the names of their files."""
        return {f"{Path(result['file']).stem}{name}": drawn for name, drawn in self.plots(result).items()}

    def lines(self, result: Result, link: str, heading: str) -> list[str]:
        """Lay out a result in Markdown; `link` leads from the page to the folder of its file and plots."""
        parts = [f"## {heading}", "", *self.source(result, link)]
        for table in self.tables(result):
            parts += ["", table.said] if table.said else []
            parts += ["", *markdown(table)] if table.rows else []
        for name, drawn in self.named_plots(result).items():
            parts += ["", f"![{described(drawn)}]({link}/{name}.png)"]
        return parts


def described(drawn: Drawn) -> str:
    """Say what a plot shows."""
    if isinstance(drawn, HeatMaps):
        return f"{drawn.title}, by {drawn.x_label} and {drawn.y_label}"
    return f"{drawn.title}: {drawn.y_label} by {drawn.x_label}"
