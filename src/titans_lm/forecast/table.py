"""Tables of numbers over time, from CSV files: what is in them, what is missing, and what is said otherwise."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titans_lm.config import nearest
from titans_lm.forecast.settings import TableSettings

if TYPE_CHECKING:
    import pandas

SEASONS = {
    "minutes": (86_400, range(60, 3601)),
    "days": (7 * 86_400, range(86_400, 86_401)),
    "weeks": (52 * 7 * 86_400, range(7 * 86_400, 7 * 86_400 + 1)),
}
"""Seconds of a season, by the seconds of a step that it goes with: a day, a week, a year."""
MONTH = range(28 * 86_400, 31 * 86_400 + 1)


@dataclass(frozen=True)
class Table:
    """Numbers over time: a row per step, a column per channel."""

    name: str
    values: np.ndarray
    """(R, C), float64; every number is finite."""
    channels: tuple[str, ...]
    dates: np.ndarray | None = None
    """(R,) datetime64, strictly increasing; None for a table without dates."""
    notes: tuple[str, ...] = field(default=())
    """What a reader of the table should know: what was filled or kept, and steps that differ."""

    @property
    def step(self) -> np.timedelta64 | None:
        """The most frequent difference of two dates."""
        if self.dates is None or len(self.dates) < 2:
            return None
        steps, counts = np.unique(np.diff(self.dates), return_counts=True)
        return steps[counts.argmax()]

    @property
    def season(self) -> int | None:
        """Rows of a season, by the step: a day of minutes or hours, a week of days, a year of weeks or months."""
        if self.step is None:
            return None
        seconds = round(self.step / np.timedelta64(1, "s"))
        if seconds in MONTH:
            return 12
        return next((season // seconds for season, steps in SEASONS.values() if seconds in steps), None)

    def dates_after(self, count: int) -> np.ndarray | None:
        """Dates of the rows behind the last: whole months where the dates step by months, else by the usual step."""
        if self.dates is None or self.step is None:
            return None
        last, ahead = self.dates[-1], np.arange(1, count + 1)
        if not monthly(self.dates):
            return last + ahead * self.step
        month = last.astype("M8[M]")
        if np.all((self.dates + np.timedelta64(1, "D")).astype("M8[M]") > self.dates.astype("M8[M]")):
            return (month + ahead + 1).astype(last.dtype) - ((month + 1).astype(last.dtype) - last)  # the months' ends
        return (month + ahead).astype(last.dtype) + (last - month.astype(last.dtype))


def monthly(dates: np.ndarray) -> bool:
    """Whether dates step by months: each by 28 to 31 days, and not all by as many."""
    days = np.diff(dates) / np.timedelta64(1, "D")
    return len(days) > 1 and bool(28 <= days.min() < days.max() <= 31)


def check_pandas() -> None:
    """Raise ValueError where pandas is missing, so that it is told before anything is done."""
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"got no {error.name}, which tables are read with; install it with: pip install 'titans-lm[forecast]'"
        ) from error


def read_table(path: Path, settings: TableSettings) -> Table:
    """Read a CSV file: dates in a column or none, and a number in every cell else; a header or none.

    The first row is a header unless it holds numbers (behind a date), and also where these are 0, 1, 2, … or integers
    behind a word that is no date: names that were none, as pandas writes them. Raises ValueError for a file that cannot
    be read as such, for cells that are no numbers, for missing values and sentinels as the settings have it, and for
    dates that do not increase.
    """
    if not path.is_file():
        raise ValueError(f"got the table {str(path)!r}, which is no file; expected a CSV file")
    frame = _read(path, settings)
    named = [str(name) for name in frame.columns]
    counted = named == [str(place) for place in range(len(named))]
    told = [f"the first row, {', '.join(named[:3])} …, is taken for names of columns"] if counted else []
    dates, frame = _dates(path, frame, settings)
    frame = _chosen(path, frame, settings)
    values = np.column_stack([_numbers(path, frame[name], name) for name in frame.columns])
    names = tuple(str(name) for name in frame.columns)
    values, notes = _without_gaps(path, values, names, settings)
    return Table(path.stem, values, names, dates, (*told, *notes, *_uneven(dates)))


def _read(path: Path, settings: TableSettings) -> "pandas.DataFrame":
    import pandas as pd

    try:
        first = pd.read_csv(path, sep=settings.separator, header=None, nrows=1, dtype=str, keep_default_na=False)
        cells = [str(cell).strip() for cell in first.iloc[0]]
        headed = _is_header(cells)
        with warnings.catch_warnings():
            # pandas would take the first column of a header one name short for the names of the rows
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                path, sep=settings.separator, header=0 if headed else None, skipinitialspace=True, index_col=False
            )
    except pd.errors.ParserWarning as error:
        raise ValueError(
            f"got {str(path)!r} with fewer names than cells in a row; expected a name for each column"
        ) from error
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"got {str(path)!r}, which is no table: {reason}; expected a CSV file") from error
    if headed and len(set(cells)) < len(cells):
        twice = next(cell for cell in cells if cells.count(cell) > 1)
        raise ValueError(f"got {str(path)!r} with two columns named {twice!r}; expected names that differ")
    if not headed:
        frame.columns = [f"channel {place}" for place in range(frame.shape[1])]
    if frame.empty:
        raise ValueError(f"got {str(path)!r}, which holds no row of numbers; expected a CSV file with some")
    return frame


def _is_header(cells: list[str]) -> bool:
    """Tell whether the first row names the columns, by words or, where they had no names, by numbers."""
    first, *others = cells
    if not all(map(_is_number, others or cells)):
        return True
    counted = [str(number) for number in range(len(cells))]
    if cells == counted != ["0"] or (first == "" and others == counted[:-1] and others):
        return True
    return bool(others) and not _is_number(first) and not _is_date(first) and all(map(str.isdecimal, others))


def _is_date(cell: str) -> bool:
    import pandas as pd

    try:
        return not pd.isna(pd.Timestamp(cell))
    except ValueError:
        return False


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == ""
    return True


def _dates(
    path: Path, frame: "pandas.DataFrame", settings: TableSettings
) -> tuple[np.ndarray | None, "pandas.DataFrame"]:
    """Take the column of dates out of the table."""
    import pandas as pd

    name = settings.date
    if name is not None and name not in frame.columns:
        raise ValueError(f"got date={name!r} for {str(path)!r}; {nearest(name, map(str, frame.columns))}")
    first = frame.columns[0]
    if name is None and (frame.shape[1] == 1 or pd.api.types.is_numeric_dtype(frame[first])):
        return None, frame
    column = frame[first if name is None else name]
    if pd.api.types.is_numeric_dtype(column):
        raise ValueError(
            f"got numbers in the column of dates {column.name!r} of {str(path)!r}; expected dates such as 2016-07-01"
        )
    # offsets may differ, as on either side of a change to summer time; dates without one are left as they are
    parsed = pd.to_datetime(column, errors="coerce", utc=True)
    if parsed.isna().any():
        row = int(parsed.isna().to_numpy().argmax())
        raise ValueError(
            f"got {column.iloc[row]!r} as the date of row {row} of {str(path)!r}, in column {column.name!r}; "
            "expected a date written as those before it (name another column with date)"
        )
    dates = parsed.dt.tz_convert(None).to_numpy()
    back = np.diff(dates) <= np.timedelta64(0)
    if back.any():
        row = int(back.argmax()) + 1
        raise ValueError(
            f"got {column.iloc[row]} in row {row} of {str(path)!r} behind {column.iloc[row - 1]}; expected dates that "
            "increase from row to row: sort the table, and leave out rows that are there twice"
        )
    return dates, frame.drop(columns=column.name)


def _chosen(path: Path, frame: "pandas.DataFrame", settings: TableSettings) -> "pandas.DataFrame":
    """Take the channels that are asked for, in the order that they are asked for in."""
    for name in settings.channels:
        if name not in frame.columns:
            raise ValueError(f"got the channel {name!r} for {str(path)!r}; {nearest(name, map(str, frame.columns))}")
    if not settings.channels and frame.shape[1] == 0:
        raise ValueError(f"got {str(path)!r} with dates alone; expected columns of numbers beside them")
    return frame[list(settings.channels)] if settings.channels else frame


def _numbers(path: Path, column: "pandas.Series", name: str) -> np.ndarray:
    import pandas as pd

    found = pd.to_numeric(column, errors="coerce")
    wrong = found.isna() & column.notna()
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise ValueError(
            f"got {column.iloc[row]!r} in row {row} of {str(path)!r}, in column {name!r}; expected a number"
        )
    return found.to_numpy(np.float64)


def _without_gaps(
    path: Path, values: np.ndarray, names: Sequence[str], settings: TableSettings
) -> tuple[np.ndarray, list[str]]:
    """Apply the rules for missing values and sentinels."""
    notes = []
    values = np.where(np.isinf(values), np.nan, values)
    missing, sentinel = np.isnan(values), np.isin(values, settings.sentinels)
    if sentinel.any():
        where = _where(sentinel, names)
        listed = " or ".join(f"{number:g}" for number in settings.sentinels)
        if settings.sentinel == "error":
            raise ValueError(
                f"got {listed} in {where} of {str(path)!r}, which means that nothing was measured there; expected "
                'sentinel="fill" (the last value before it) or "keep" (as published results on Weather do)'
            )
        notes.append(f"{listed} in {where}: {'kept' if settings.sentinel == 'keep' else 'filled'}")
    if missing.any():
        where = _where(missing, names)
        if settings.missing == "error":
            raise ValueError(
                f'got no number in {where} of {str(path)!r}; expected missing="fill" (the last value before it), '
                "or a table without gaps"
            )
        notes.append(f"no number in {where}: filled")
    gaps = missing | (sentinel if settings.sentinel == "fill" else False)
    return (_filled(path, values, gaps, names) if gaps.any() else values), notes


def _where(mask: np.ndarray, names: Sequence[str]) -> str:
    """Say which cells are meant: how many, in which columns, and the first."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    listed = ", ".join(names[column] for column in columns[:3]) + ", …" * (len(columns) > 3)
    return f"{int(mask.sum()):,} cell{'s' * bool(mask.sum() > 1)} ({listed}; first in row {rows[0]:,})"


def _filled(path: Path, values: np.ndarray, gaps: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Carry the last value forward, so that no cell tells of a later one; before the first value stands that value."""
    empty = gaps.all(0)
    if empty.any():
        raise ValueError(f"got column {names[int(empty.argmax())]!r} of {str(path)!r} without a number; leave it out")
    rows = np.where(gaps, 0, np.arange(len(values))[:, None])
    rows = np.maximum.accumulate(rows, axis=0)
    first = (~gaps).argmax(0)
    return np.take_along_axis(values, np.maximum(rows, first), axis=0)


def _uneven(dates: np.ndarray | None) -> list[str]:
    """Tell of steps that differ from the usual one: rows are taken to follow each other evenly."""
    if dates is None or len(dates) < 3:
        return []
    _, counts = np.unique(np.diff(dates), return_counts=True)
    other = len(dates) - 1 - int(counts.max())
    if other == 0 or monthly(dates):
        return []
    return [f"{other:,} of {len(dates) - 1:,} steps between dates differ from the usual one; rows are read as even"]
