"""Tables and sets of DNA that the paper is measured on, found by their names: `sets` of table3.toml and table4.toml."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKED = ".gz"
DataSet = dict[str, Any]
"""The paper's name for it (column), its file, other names in small letters (also), where it is to be had (source)."""


def find_sets(place: Path, sets: list[DataSet], kinds: list[str]) -> dict[str, Path]:
    """Find data sets in a folder, however deep, by the paper's names of them.

    `kinds` are what their files' names end with, and "folder" where a set may be one with a folder for each class. Of a
    folder with the official split the training set is taken, and of several files the one whose name says train.
    ValueError for a folder that holds none, and for a set of which there are two.
    """
    found: dict[str, list[Path]] = {}
    for path, column in _walk(place, sets, kinds):
        found.setdefault(column, []).append(path / "train" if (path / "train").is_dir() else path)
    if not found:
        raise ValueError(
            f"got --data {place}, which holds none of the sets; expected a folder with {describe_sets(sets)}"
        )
    return {one["column"]: _only(one["column"], found[one["column"]]) for one in sets if one["column"] in found}


def describe_sets(sets: list[DataSet]) -> str:
    """Say what the files are called and where they are to be had."""
    by_source: dict[str, list[str]] = {}
    for one in sets:
        by_source.setdefault(one["source"], []).append(one["file"])
    return "; ".join(f"{', '.join(names)} (from {source})" for source, names in by_source.items())


def differs_in_size(one: DataSet) -> str | None:
    """Say how a table differs in size from the paper's; None where it does not, and for what is no table.

    A line of names and a column of dates may be there or not.
    """
    if "channels" not in one:
        return None
    lines, cells = _size(Path(one["path"]))
    if lines - one["rows"] in (0, 1) and cells - one["channels"] in (0, 1):
        return None
    return (
        f"{one['column']}: NOT COMPARABLE with the paper's numbers: {one['path']} has {lines:,} lines of {cells:,} "
        f"cells, where its table has {one['rows']:,} rows of {one['channels']} channels"
    )


def _size(path: Path) -> tuple[int, int]:
    """Count the lines of a table and the cells of the last one, empty lines left out."""
    lines, last = 0, b""
    with gzip.open(path, "rb") if path.name.lower().endswith(PACKED) else path.open("rb") as file:
        for line in file:
            if line.strip():
                lines, last = lines + 1, line
    return lines, last.count(b",") + 1 if lines else 0


def _walk(place: Path, sets: list[DataSet], kinds: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield what is a data set with its column, by its name up to the first point; look into folders that are none."""
    name = place.name.partition(".")[0].lower()
    named = [
        one["column"] for one in sets if name in (one["file"].partition(".")[0].lower(), *one.get("also", ()))
    ]  # fmt: skip
    fits = "folder" in kinds if place.is_dir() else place.name.lower().removesuffix(PACKED).endswith(tuple(kinds))
    if named and fits:
        yield place, named[0]
    elif place.is_dir():
        for path in sorted(place.iterdir()):
            if not path.name.startswith("."):
                yield from _walk(path, sets, kinds)


def _only(column: str, found: list[Path]) -> Path:
    """Choose the file to train on; ValueError where that is not clear."""
    to_train = [path for path in found if "train" in path.name] or found
    if len(to_train) > 1:
        raise ValueError(
            f"got {to_train[0]} and {to_train[1]} for {column}; expected one of them: give a folder with no other"
        )
    return to_train[0]
