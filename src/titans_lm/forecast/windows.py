"""Windows over a table: where training, validation and test part, scaling by the training part, and batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from titans_lm.config import check_at_least
from titans_lm.data.batches import Batch, fingerprint, shuffled
from titans_lm.forecast.settings import TableSettings
from titans_lm.forecast.table import Table

MONTH = 30 * 24
"""Hours of a month, as the published splits of ETT have it."""
PARTS = ("train", "validation", "test")
ROWS = 2048
"""Rows (windows of one channel) that are read at once: changes speed and memory, and no number but by rounding."""


class Scaler(NamedTuple):
    """z = (x − mean) / std per channel, with the population's standard deviation; 1 for a channel that is constant."""

    mean: np.ndarray
    """(C,)."""
    std: np.ndarray
    """(C,), above 0."""

    @classmethod
    def of(cls, values: np.ndarray) -> "Scaler":
        """Take both from (R, C) rows, those of training alone; ValueError for numbers too large to be squared."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = values.mean(0), values.std(0)
        if not (np.isfinite(mean) & np.isfinite(std)).all():
            largest = np.abs(values).max()
            raise ValueError(f"got numbers as large as {largest:.3g}; expected a mean and a deviation that are finite")
        return cls(mean, np.where(constant(values), 1.0, std))

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """Scale rows, (R, C) → (R, C)."""
        return (values - self.mean) / self.std

    def undone(self, values: np.ndarray) -> np.ndarray:
        """Bring scaled rows back to the table's own units, (R, C) → (R, C)."""
        return values * self.std + self.mean


def constant(values: np.ndarray) -> np.ndarray:
    """Which channels (C,) have one value in all rows; their computed deviation may be a rounding error above zero."""
    return (values == values[:1]).all(0)


def borders(rows: int, lookback: int, settings: TableSettings, name: str = "") -> dict[str, slice]:
    """Divide rows into training, validation and test; the later two begin `lookback` rows early.

    So their first forecasts begin at the border. Of ETT, 12, 4 and 4 months of 30 days are used and the rest is not;
    else the shares of the settings, rounded down. Raises ValueError for fewer rows than the split of ETT has.
    """
    kind = split_of(name, settings)
    if kind == "shares":
        train, test = int(rows * settings.train_share), int(rows * settings.test_share)
        ends = (train, rows - test, rows)
    else:
        unit = MONTH * (4 if kind == "ettm" else 1)
        ends = (12 * unit, 16 * unit, 20 * unit)
        if rows < ends[-1]:
            raise ValueError(
                f'got {rows:,} rows for the split "{kind}", which has {ends[-1]:,}; expected as many, or split="shares"'
            )
    starts = (0, max(0, ends[0] - lookback), max(0, ends[1] - lookback))
    return {part: slice(start, stop) for part, start, stop in zip(PARTS, starts, ends, strict=True)}


def split_of(name: str, settings: TableSettings) -> str:
    """Name the split that is meant: "auto" goes by the name of the table."""
    if settings.split != "auto":
        return settings.split
    return next((kind for kind in ("etth", "ettm") if name.lower().startswith(kind)), "shares")


class Windows:
    """All windows of a part: x = rows [i, i + L), y = rows [i + L, i + L + H), for every i that has both.

    `span` windows one after another can be taken as one: rows [i, i + span · L) and H after them.
    """

    def __init__(self, series: Float[Tensor, "R C"], lookback: int, horizon: int, span: int = 1) -> None:
        for what, got in (("lookback", lookback), ("horizon", horizon), ("span", span)):
            check_at_least(what, got, 1)
        self.series, self.lookback, self.horizon, self.span = series, lookback, horizon, span
        self.channels = series.shape[1]
        self.reach = span * lookback + horizon
        """Rows of one window with what follows it."""
        if len(series) < self.reach:
            raise ValueError(
                f"got {len(series):,} rows; expected at least {self.reach:,} for one window of {span * lookback} rows "
                f"and {horizon} to forecast: give more rows, or a smaller lookback or horizon"
            )

    def __len__(self) -> int:
        return len(self.series) - self.reach + 1

    def spanning(self, span: int) -> "Windows":
        """The same rows in windows of several times the length."""
        return Windows(self.series, self.lookback, self.horizon, span)

    def batch(self, places: Int[Tensor, " B"]) -> Batch:
        """Give windows by their numbers: past (B, span · L, C) and future (B, H, C)."""
        values = self.series[places[:, None] + torch.arange(self.reach)]
        return {"past": values[:, : -self.horizon], "future": values[:, -self.horizon :]}

    def in_order(self, size: int) -> Iterator[Batch]:
        """Give every window once, in order; the last batch is as large as what is left."""
        for places in torch.arange(len(self)).split(size):
            yield self.batch(places)


def windows_at_once(channels: int, most: int) -> int:
    """Windows of all channels that are read at once, so that a table of many channels takes no more memory."""
    return max(1, min(most, ROWS // channels))


class WindowBatches:
    """Batches by step: every window once an epoch, in an order that the seed and the epoch decide; none is dropped."""

    def __init__(self, windows: Windows, *, batch_size: int, seed: int) -> None:
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.steps = -(-len(windows) // batch_size)
        """Steps of an epoch."""
        digest = fingerprint([windows.series.numpy().view(np.uint8)], kind="windows", batch_size=batch_size, seed=seed)
        self.fingerprint = f"{digest} {windows.lookback} {windows.horizon} {windows.span}"

    def __call__(self, step: int) -> Batch:
        epoch, place = divmod(step, self.steps)
        order = shuffled(self.seed, epoch, len(self.windows))
        return self.windows.batch(torch.from_numpy(order[place * self.batch_size : (place + 1) * self.batch_size]))


@dataclass(frozen=True)
class Prepared:
    """A table, scaled and divided, for one lookback and horizon."""

    table: Table
    scaler: Scaler
    scaled: Float[Tensor, "R C"]
    """All rows, float32."""
    borders: dict[str, slice]
    parts: dict[str, Windows]
    notes: tuple[str, ...]
    season: int | None
    """Rows of a season, as the settings or the dates have it."""

    @property
    def counts(self) -> dict[str, int]:
        """Windows of each part."""
        return {part: len(windows) for part, windows in self.parts.items()}


def prepare(table: Table, settings: TableSettings, lookback: int, horizon: int) -> Prepared:
    """Divide a table and scale it by its training rows; ValueError where a part has fewer rows than one window."""
    rows, kind = len(table.values), split_of(table.name, settings)
    found = borders(rows, lookback, settings, table.name)
    for part, border in found.items():
        if border.stop - border.start < lookback + horizon:
            raise ValueError(
                f"got {border.stop - border.start:,} rows for {part} in {table.name!r} ({rows:,} rows); "
                f"expected at least {lookback + horizon:,}, one window of {lookback} rows and {horizon} to forecast: "
                "give more rows, or a smaller lookback or horizon"
            )
    notes, train = list(table.notes), table.values[found["train"]]
    if kind != "shares":
        why = "by its name: " if settings.split == "auto" else ""
        rest = rows - found["test"].stop
        notes.append(f'{why}split "{kind}", 12, 4 and 4 months of 30 days; {rest:,} rows behind them are not used')
    if still := [table.channels[place] for place in np.flatnonzero(constant(train))]:
        notes.append(f"constant in the training rows, and so scaled by 1: {', '.join(still)}")
    scaler = Scaler.of(train)
    scaled = torch.from_numpy(scaler.scaled(table.values)).float()
    parts = {part: Windows(scaled[border], lookback, horizon) for part, border in found.items()}
    return Prepared(table, scaler, scaled, found, parts, tuple(notes), settings.period or table.season)
