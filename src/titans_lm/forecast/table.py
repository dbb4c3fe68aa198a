"""Tables of numbers over time, from CSV files: what is in them, what is missing, and what is refused."""

import gzip
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titans_lm.checks import load_library
from titans_lm.config import nearest
from titans_lm.forecast.settings import TableSettings

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = load_library("pandas", "tables are read with", "pip install 'titans-lm[forecast]'")

DAY = 86_400
"""Seconds."""
NONE = np.timedelta64(0)


DECIMAL_COMMA = re.compile(r"(?<![\d,])-?\d+,\d+(?![\d,])")
"""A number with a comma before its fraction."""
OFFSET = re.compile(r":\d\d(?:\.\d+)?\s*([+-]\d\d)(?::?(\d\d))?$")
"""What a time is ahead of UTC, at its end."""
EITHER_FIRST = re.compile(r"\s*\d{1,2}([./-])\d{1,2}\1\d{4}(?!\d)")
"""A date that begins with its day or its month."""
SHORT_YEAR = re.compile(r"(\s*\d{1,2}([./-])\d{1,2}\2)(\d\d)(?!\d)")
"""The same with the last two digits of its year."""
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A", "-nan", "-NaN")
"""The usual ones of the cells that pandas reads as missing."""


@dataclass(frozen=True)
class Table:
    """Numbers over time: a row per step, a column per channel."""

    name: str
    values: np.ndarray
    """(R, C), float64; every number is finite."""
    channels: tuple[str, ...]
    dates: np.ndarray | None = None
    """(R,) datetime64, strictly increasing; None for a table without dates."""
    offset: np.timedelta64 = NONE
    """What its dates are ahead of UTC, where they say so and all say the same."""
    notes: tuple[str, ...] = ()
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
        """Rows of a season, a day of minutes or hours, a week of days, a year of weeks, months or quarters."""
        if self.step is None or self.dates is None:
            return None
        if months(self.dates) == 3:
            return 4
        seconds = round(self.step / np.timedelta64(1, "s"))
        if 60 <= seconds <= 3600 or (3600 < seconds < DAY and not DAY % seconds):
            return DAY // seconds
        return 12 if 28 * DAY <= seconds <= 31 * DAY else {DAY: 7, 7 * DAY: 52}.get(seconds)

    def dates_after(self, count: int) -> np.ndarray | None:
        """Dates of the rows after the last: whole months where the dates step by months, else by the usual step."""
        if self.dates is None or self.step is None:
            return None
        by = months(self.dates)
        if by is None:
            return self.dates[-1] + np.arange(1, count + 1) * self.step
        index = pd.DatetimeIndex(self.dates)
        ends, ahead = index.is_month_end.all(), range(by, by * count + 1, by)
        offsets = (pd.offsets.MonthEnd(n) if ends else pd.DateOffset(months=n) for n in ahead)
        return pd.DatetimeIndex([index[-1] + offset for offset in offsets]).to_numpy()


def months(dates: np.ndarray) -> int | None:
    """How many calendar months dates step by, None where they do not: each by 28 to 31 days and not all by as many, or
    always from a day of one month to the same one, or from end to end, of the month so many later."""
    days = np.diff(dates) / np.timedelta64(1, "D")
    if len(days) < 2:
        return None
    if 28 <= days.min() < days.max() <= 31:
        return 1
    index = pd.DatetimeIndex(dates)
    steps = np.unique(np.diff(12 * index.year + index.month))
    same_place = len(set(index.day)) == 1 or bool(index.is_month_end.all())
    return int(steps[0]) if len(steps) == 1 and steps[0] > 0 and same_place else None


def read_table(path: Path, settings: TableSettings) -> Table:
    """Read a CSV file: dates in a column or none, and a number in every cell else; a header or none.

    The first row is a header unless it holds numbers (after a date), and also where these are 0, 1, 2, … or integers
    after a word that is no date: names that were none, as pandas writes them. A first column without a name that counts
    the rows, as pandas writes it too, is left out. Raises ValueError for a file that cannot be read as such, for cells
    that are no numbers, for missing values and sentinels as the settings have it, and for dates that do not increase.
    """
    if not path.is_file():
        raise ValueError(f"got the table {str(path)!r}, which is no file; expected a CSV file")
    frame = _read(path, settings)
    frame, left_out = _without_counter(frame, settings.channels)
    names = [str(name) for name in frame.columns]
    counted = names == [str(place) for place in range(len(names))]
    notes = [f"the first row, {', '.join(names[:3])} …, is taken for names of columns"] if counted else []
    dates, offset, frame = _split_dates(path, frame, settings)
    for name in settings.channels:
        if name not in frame.columns:
            raise ValueError(f"got the channel {name!r} for {str(path)!r}; {nearest(name, map(str, frame.columns))}")
    if not settings.channels and frame.shape[1] == 0:
        raise ValueError(f"got {str(path)!r} with dates alone; expected columns of numbers beside them")
    frame = frame[list(settings.channels)] if settings.channels else frame
    channels = tuple(str(name) for name in frame.columns)
    values, gaps = _without_gaps(path, _numbers(path, frame), channels, settings)
    if dates is not None and (other := odd_steps(dates)):
        gaps.append(
            f"{other:,} of {len(dates) - 1:,} steps between dates differ from the usual one; rows are read as even"
        )
    return Table(path.stem, values, channels, dates, offset, (*left_out, *notes, *gaps))


def _without_counter(frame: pd.DataFrame, asked: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The table without a first column that has no name, counts its rows and is not asked for; and a note of it."""
    name, first = str(frame.columns[0]), frame.iloc[:, 0]
    counts = name.startswith("Unnamed:") and first.dtype.kind == "i" and frame.shape[1] > 1 and name not in asked
    if not counts or (np.diff(first) != 1).any():
        return frame, []
    return frame.iloc[:, 1:], ["the first column, which has no name and counts the rows, is left out"]


def _read(path: Path, settings: TableSettings) -> pd.DataFrame:
    try:
        _check_separator(path, settings.separator)
        first = pd.read_csv(path, sep=settings.separator, header=None, nrows=1, dtype=str, keep_default_na=False)
        cells = [str(cell).strip() for cell in first.iloc[0]]
        header = 0 if _is_header([cell.replace(settings.decimal, ".") for cell in cells]) else None
        with warnings.catch_warnings():
            # pandas would take the first column of a header one name short for the names of the rows
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                path, sep=settings.separator, decimal=settings.decimal, header=header, skipinitialspace=True,
                index_col=False,
            )  # fmt: skip
    except pd.errors.ParserWarning as error:
        raise ValueError(
            f"got {str(path)!r} with fewer names than cells in a row; expected a name for each column"
        ) from error
    except (
        UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError, gzip.BadGzipFile, EOFError, zlib.error,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"got {str(path)!r}, which is no table: {reason}; expected a CSV file") from error
    if header is None:
        frame.columns = [f"channel {place}" for place in range(frame.shape[1])]
    elif len(set(cells)) < len(cells):
        twice = next(cell for cell in cells if cells.count(cell) > 1)
        raise ValueError(f"got {str(path)!r} with two columns named {twice!r}; expected names that differ")
    if frame.empty:
        raise ValueError(f"got {str(path)!r}, which holds no row of numbers; expected a CSV file with some")
    return frame


def _check_separator(path: Path, separator: str) -> None:
    """Refuse a file whose first two rows are parted by something else."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open  # as pandas does by itself
    with opened(path, "rt", encoding="utf-8") as file:
        head, row = file.readline(), file.readline()
    other = next((mark for mark in ",;\t|" if mark in head and mark in row and separator not in head), None)
    if other is not None:
        comma = " --table.decimal ','" if other != "," and DECIMAL_COMMA.search(row) else ""
        raise ValueError(
            f"got {str(path)!r} with no {separator!r} in its first row, but {other!r}; "
            f"expected --table.separator {other!r}{comma}"
        )


def _is_header(cells: list[str]) -> bool:
    """Whether the first row names the columns, by words or, where they had no names, by numbers."""
    first, *others = cells
    missing = [cell in MISSING for cell in cells]
    words = [not gap and not _parses(float, cell) for gap, cell in zip(missing, cells, strict=True)]
    named = words[0] and not _parses(pd.Timestamp, first)
    numbers = any(not word and not gap for word, gap in zip(words, missing, strict=True))
    if any(cells) and not numbers and (named or missing[0]):
        return True  # names alone, some of which mean a missing cell elsewhere
    if any(words[1:] or words):
        return True
    counted = [str(number) for number in range(len(cells))]
    if cells == counted != ["0"] or (first == "" and others and others == counted[:-1]):
        return True
    return named and bool(others) and all(map(str.isdecimal, others))


def _parses(kind: Callable[[str], object], cell: str) -> bool:
    try:
        kind(cell)
    except ValueError:
        return False
    return True


def _split_dates(
    path: Path, frame: pd.DataFrame, settings: TableSettings
) -> tuple[np.ndarray | None, np.timedelta64, pd.DataFrame]:
    """Take the column of dates out of the table: dates as they are written, or in UTC where their offsets differ."""
    name = settings.date
    if name is not None and name not in frame.columns:
        raise ValueError(f"got date={name!r} for {str(path)!r}; {nearest(name, map(str, frame.columns))}")
    column = frame[frame.columns[0] if name is None else name]
    numeric = pd.api.types.is_numeric_dtype(column)
    if name is None and (frame.shape[1] == 1 or numeric):
        return None, NONE, frame
    if numeric:
        raise ValueError(
            f"got numbers in the column of dates {column.name!r} of {str(path)!r}; expected dates such as 2016-07-01"
        )
    parsed = _parsed(column)
    if parsed.isna().any():
        row = int(parsed.isna().to_numpy().argmax())
        raise ValueError(
            f"got {column.iloc[row]!r} as the date of row {row} of {str(path)!r}, in column {column.name!r}; "
            "expected a date written as those before it (name another column with date)"
        )
    offset = _offset(column)
    dates = parsed.dt.tz_convert(None).to_numpy() + offset
    back = np.diff(dates) <= np.timedelta64(0)
    if back.any():
        row = int(back.argmax()) + 1
        raise ValueError(
            f"got {column.iloc[row]} in row {row} of {str(path)!r} behind {column.iloc[row - 1]}; expected dates that "
            "increase from row to row: sort the table, and leave out rows that are there twice"
        )
    return dates, offset, frame.drop(columns=column.name)


def _parsed(column: pd.Series) -> pd.Series:
    """Read dates, NaT for none: 01.02.2010 by the month first, or by the day if more are dates then, or steps alike."""
    text = column.astype(str)
    if text.str.match(SHORT_YEAR).all():
        # pandas would guess one by one; 69 to 99 are of the last century, as everywhere
        column = text = text.str.replace(
            SHORT_YEAR, lambda date: f"{date[1]}{19 + (date[3] < '69')}{date[3]}", regex=True
        )
    # offsets may differ, as on either side of a change to summer time; dates without one are left as they are
    if not text.str.match(EITHER_FIRST).all():
        return pd.to_datetime(column, errors="coerce", utc=True)
    with warnings.catch_warnings():  # pandas', of dates that tell which comes first
        warnings.simplefilter("ignore", UserWarning)
        month_first = pd.to_datetime(column, errors="coerce", utc=True)
        day_first = pd.to_datetime(column, errors="coerce", utc=True, dayfirst=True)

    def misfits(dates: pd.Series) -> tuple[int, int, int]:
        missing, steps = int(dates.isna().sum()), dates.dt.tz_convert(None).to_numpy()
        back = int((np.diff(steps) <= np.timedelta64(0)).sum())
        return missing, back, 0 if missing or back else odd_steps(steps)

    return min(month_first, day_first, key=misfits)


def _offset(column: pd.Series) -> np.timedelta64:
    """What dates that are all written with one offset, such as +05:00, are ahead of UTC; else none."""
    found = column.astype(str).str.extract(OFFSET).fillna({1: "00"})
    if found.isna().any(axis=None) or len(found.drop_duplicates()) > 1:
        return NONE
    hours, minutes = found.iloc[0]
    return np.timedelta64(60 * int(hours) + (-1 if hours[0] == "-" else 1) * int(minutes), "m")


def _numbers(path: Path, frame: pd.DataFrame) -> np.ndarray:
    """Give all cells as numbers, (R, C); missing and infinite ones as nan."""
    found = frame.apply(pd.to_numeric, errors="coerce")
    wrong = (found.isna() & frame.notna()).to_numpy(copy=True)  # a view of one channel may not be written to
    for place, kind in enumerate(frame.dtypes):
        if kind in (bool, object):  # pandas takes True and False for numbers
            wrong[:, place] |= frame.iloc[:, place].map(lambda cell: isinstance(cell, bool)).to_numpy()
    if wrong.any():
        column = int(wrong.any(0).argmax())
        row = int(wrong[:, column].argmax())
        cell = frame.iloc[row, column]
        comma = ", or --table.decimal ','" if DECIMAL_COMMA.fullmatch(str(cell)) else ""
        told = repr(bool(cell) if isinstance(cell, np.bool_) else cell)
        raise ValueError(
            f"got {told} in row {row} of {str(path)!r}, in column {frame.columns[column]!r}; expected a number{comma}"
        )
    values = np.ascontiguousarray(found.to_numpy(np.float64))  # by rows: sums over another layout round otherwise
    return np.where(np.isinf(values), np.nan, values)


def _without_gaps(
    path: Path, values: np.ndarray, names: Sequence[str], settings: TableSettings
) -> tuple[np.ndarray, list[str]]:
    """Refuse, keep, or fill with the last value before (at the start the first) what is no measurement; give notes."""
    notes = []
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
    empty = gaps.all(0)
    if empty.any():
        raise ValueError(f"got column {names[int(empty.argmax())]!r} of {str(path)!r} without a number; leave it out")
    filled = pd.DataFrame(values).mask(gaps).ffill().bfill().to_numpy() if gaps.any() else values
    return np.ascontiguousarray(filled), notes


def _where(mask: np.ndarray, names: Sequence[str]) -> str:
    """Say which cells are meant: how many, in which columns, and the first."""
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    listed = ", ".join(names[column] for column in columns[:3]) + ", …" * (len(columns) > 3)
    return f"{int(mask.sum()):,} cell{'s' * bool(mask.sum() > 1)} ({listed}; first in row {rows[0]:,})"


def odd_steps(dates: np.ndarray) -> int:
    """Count the steps that differ from the usual one; none where dates are as many months apart."""
    if len(dates) < 3 or months(dates) is not None:
        return 0
    return len(dates) - 1 - int(np.unique(np.diff(dates), return_counts=True)[1].max())
