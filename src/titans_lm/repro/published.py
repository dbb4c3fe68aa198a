"""What the paper prints: `published.toml`, read when it is asked for."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = "arXiv 2501.00663"
EMPTY = "–"
"""A cell that is empty in the paper."""
Cells = dict[str, float | None]


@dataclass(frozen=True)
class Group:
    """Rows of a table that belong together: models of one size."""

    title: str
    rows: dict[str, Cells]
    """Of every row its cells by column; None where the paper has none."""


@dataclass(frozen=True)
class Published:
    """A table or a figure of the paper."""

    name: str
    title: str
    where: str
    columns: tuple[str, ...]
    shown: str
    """Group that stands beside small models: that of the smallest."""
    notes: tuple[str, ...]
    errata: tuple[str, ...]
    groups: dict[str, Group]

    @property
    def digits(self) -> int:
        """Count the digits behind the point: the most that a number of the table has."""
        values = [v for group in self.groups.values() for row in group.rows.values() for v in row.values()]
        return max((len(f"{v:.4f}".rstrip("0").partition(".")[2]) for v in values if v is not None), default=0)

    def cell(self, row: str | None, column: str | None) -> float | None:
        """Give a number of the group that is shown; None where the paper has no such row, column or number."""
        if row is None or column is None or self.shown not in self.groups:
            return None
        return self.groups[self.shown].rows.get(row, {}).get(column)


@cache
def published() -> dict[str, Published]:
    """Read all tables and figures."""
    told = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    return {
        name: Published(
            name=name,
            title=one["title"],
            where=one["where"],
            columns=tuple(one["columns"]),
            shown=one.get("shown", ""),
            notes=tuple(one["notes"]),
            errata=tuple(one["errata"]),
            groups={key: _group(group, one["columns"]) for key, group in one.get("groups", {}).items()},
        )
        for name, one in told.items()
    }


def _group(told: dict, columns: list[str]) -> Group:
    rows = {
        name: {column: None if value == EMPTY else float(value) for column, value in zip(columns, values, strict=True)}
        for name, values in told["rows"].items()
    }
    return Group(told["title"], rows)
