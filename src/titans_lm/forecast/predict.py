"""A forecast of a table: as CSV, and as a plot of history, forecast and, where it is known, truth."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from titans_lm.forecast.saved import FittedForecaster, load_forecaster
from titans_lm.forecast.settings import PredictSettings
from titans_lm.forecast.table import Table, read_table
from titans_lm.report.plots import INK, SOFT, Line, Plot, draw_panels, save_png
from titans_lm.train.device import choose_device
from titans_lm.train.files import write_atomically

CSV, PNG = "forecast.csv", "forecast.png"
FORECAST = "#2a6fdb"
SHOWN = 2
"""Lookbacks of history that the plot shows."""


def predict(settings: PredictSettings) -> dict[str, Any]:
    """Forecast a table with a fitted model, and write OUT/forecast.csv and OUT/forecast.png.

    The rows from `origin` on are forecast from those before; where the table has them, they stand beside the forecast
    as truth, and the errors are told, scaled as in an evaluation. Raises ValueError for a model or a table that will
    not do, before anything is written.
    """
    if settings.model is None or settings.data is None:
        raise ValueError("got no model or no table; expected titans forecast predict MODEL DATA.csv")
    fitted, table = load_forecaster(settings.model), read_table(settings.data, settings.table)
    table = _channels_of(fitted, table)
    origin = _origin(settings.origin, table, fitted.shape.lookback)
    before = table.values[:origin]
    forecast = fitted.forecast(before, memory=settings.memory, device=choose_device(settings.device))
    truth = table.values[origin : origin + fitted.shape.horizon]
    dates = _dates(table, origin, len(forecast))
    write_atomically(settings.out / CSV, _csv(table.channels, dates, origin, forecast, truth))
    panels = _panels(table, origin, forecast, dates, fitted, settings.plot_channels)
    title = f"{table.name}: {len(forecast)} rows ahead of row {origin:,}, {fitted.name}"
    save_png(draw_panels(title, panels), settings.out / PNG)
    return {
        "model": fitted.name,
        "table": str(settings.data),
        "origin": origin,
        "first": str(dates[0]) if dates is not None else origin,
        "rows": len(forecast),
        "memory": settings.memory,
        "notes": list(table.notes),
        **_errors(fitted, forecast, truth),
        "csv": str(settings.out / CSV),
        "plot": str(settings.out / PNG),
    }


def _channels_of(fitted: FittedForecaster, table: Table) -> Table:
    """Take the model's channels, in its order; ValueError where the table lacks one."""
    lacking = [name for name in fitted.channels if name not in table.channels]
    if lacking:
        raise ValueError(
            f"got a table {table.name!r} without the channels {', '.join(map(repr, lacking[:3]))}; expected those that "
            f"the model was fitted to: {', '.join(fitted.channels[:8])}"
        )
    order = [table.channels.index(name) for name in fitted.channels]
    return Table(table.name, table.values[:, order], fitted.channels, table.dates, table.notes)


def _origin(told: str | None, table: Table, lookback: int) -> int:
    """Find the first row to forecast by its number or its date."""
    rows = len(table.values)
    origin = rows if told is None else int(told) if told.isdecimal() else _row_of(told, table)
    if not lookback <= origin <= rows:
        raise ValueError(
            f"got origin {told or 'behind the last row'}, row {origin:,} of {rows:,}; expected a row from {lookback:,} "
            f"on, as a forecast is made from {lookback:,} rows, to {rows:,}"
        )
    return origin


def _row_of(told: str, table: Table) -> int:
    import pandas as pd

    if table.dates is None:
        raise ValueError(f"got origin={told!r} for a table without dates; expected the number of a row")
    try:
        date = pd.Timestamp(told).to_datetime64()
    except ValueError as error:
        raise ValueError(f"got origin={told!r}; expected a date such as 2018-02-20, or the number of a row") from error
    return int(np.searchsorted(table.dates, date))


def _dates(table: Table, origin: int, count: int) -> np.ndarray | None:
    """Dates of the rows that are forecast: the table's own as far as they go."""
    if table.dates is None:
        return None
    known = table.dates[origin : origin + count]
    after = table.dates_after(count - len(known))
    return known if after is None else np.concatenate([known, after.astype(known.dtype)])


def _csv(
    channels: Sequence[str], dates: np.ndarray | None, origin: int, forecast: np.ndarray, truth: np.ndarray
) -> str:
    """Write a row for each step: its date or number, every channel, and the truth of each as far as it is known."""
    import pandas as pd

    frame = pd.DataFrame(forecast, columns=list(channels))
    if len(truth):
        known = np.full_like(forecast, np.nan)
        known[: len(truth)] = truth
        frame = pd.concat([frame, pd.DataFrame(known, columns=[f"{name} (truth)" for name in channels])], axis=1)
    first = ("row", np.arange(origin, origin + len(forecast))) if dates is None else ("date", dates)
    frame.insert(0, *first)
    file = io.StringIO()
    frame.to_csv(file, index=False)
    return file.getvalue()


def _panels(
    table: Table,
    origin: int,
    forecast: np.ndarray,
    dates: np.ndarray | None,
    fitted: FittedForecaster,
    most: int,
) -> list[Plot]:
    """A plot for each of the last channels: history, forecast, and truth where the table has it."""
    start = max(0, origin - SHOWN * fitted.shape.lookback)
    ahead: Any = np.arange(origin, origin + len(forecast)) if dates is None else dates
    behind: Any = np.arange(start, origin) if table.dates is None else table.dates[start:origin]
    truth = table.values[origin : origin + len(forecast)]
    plots = []
    shown = range(max(0, len(table.channels) - most), len(table.channels))
    for place in shown:
        lines = [Line(label="history", x=behind, y=table.values[start:origin, place].tolist(), colour=SOFT)]
        if len(truth):
            y = truth[:, place].tolist()
            lines.append(Line(label="truth", x=ahead[: len(truth)], y=y, colour=INK, dashed=True))
        lines.append(Line(label="forecast", x=ahead, y=forecast[:, place].tolist(), colour=FORECAST))
        last = place == shown[-1]
        label = ("row" if dates is None else "date") if last else ""
        plots.append(Plot(title="", x_label=label, y_label=table.channels[place], lines=lines))
    return plots


def _errors(fitted: FittedForecaster, forecast: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """How far off the forecast is where the truth is known, on scaled values; nothing where none is."""
    if not len(truth):
        return {}
    error = fitted.scaler.scaled(forecast[: len(truth)]) - fitted.scaler.scaled(truth)
    return {"truth_rows": len(truth), "mse": float(np.square(error).mean()), "mae": float(np.abs(error).mean())}
