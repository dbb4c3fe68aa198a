"""Numbers over seeds, and tables: columns and what stands in their rows, laid out in Markdown or for a terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Column:
    """A heading, and how a row's cell below it is written."""

    title: str
    cell: Callable[[Any], str]

    def of(self, part: Callable[[Any], Any]) -> "Column":
        """Give the same column for rows of which only a part is looked at."""
        return Column(self.title, lambda row: self.cell(part(row)))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns, the things that make a row each, a title above them and a setup below."""

    columns: Sequence[Column] = ()
    rows: Sequence[Any] = ()
    title: str = ""
    said: str = ""
    """What was equal and what the numbers are: below the table, and on a terminal only where there are no rows."""
    on_screen: bool = True
    """Whether a terminal shows it too."""

    @property
    def head(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def body(self) -> list[list[str]]:
        return [[column.cell(row) for column in self.columns] for row in self.rows]


def markdown(table: Table) -> list[str]:
    """Lay out a table in Markdown: the first column to the left, numbers to the right."""
    head = table.head
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *table.body]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def screen(tables: Sequence[Table], *, left: int = 1) -> list[str]:
    """Lay out tables for a terminal, one below the other."""
    lines: list[str] = []
    for table in tables:
        shown = [table.title, *aligned(table.head, table.body, left=left)] if table.rows else [table.said]
        if table.on_screen and any(shown):
            lines += ["", *filter(None, shown)]
    return lines[1:]


def aligned(head: list[str], body: list[list[str]], *, left: int = 1) -> list[str]:
    """Lay out a table for a terminal: the first columns to the left, numbers to the right; Markdown's ** go."""
    columns = []
    for place, column in enumerate(zip(head, *body, strict=True)):
        cells = [cell.replace("**", "") for cell in column]
        pad = str.ljust if place < left else str.rjust
        columns.append([pad(cell, max(map(len, cells))) for cell in cells])
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def bold(text: str, whether: bool = True) -> str:
    return f"**{text}**" if whether else text
