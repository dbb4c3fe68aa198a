"""Fitted models on disk, and a forecast of a table: as CSV, and as a plot of history, forecast and truth."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from titans_lm.checks import one_line
from titans_lm.config import check_choice
from titans_lm.forecast.baselines import MODELS, make_model
from titans_lm.forecast.fit import streamed
from titans_lm.forecast.model import Shape
from titans_lm.forecast.settings import Memory, NetSettings, PredictSettings, TableSettings
from titans_lm.forecast.table import Table, pd, read_table
from titans_lm.forecast.windows import Prepared, Scaler
from titans_lm.report.plots import INK, SOFT, Line, Panels, Plot, draw, save_png
from titans_lm.train.checkpoint import load_weights, save_model
from titans_lm.train.device import choose_device
from titans_lm.train.files import new_folder, write_atomically, write_json
from titans_lm.train.options import merge_settings

FORMAT = "titans-lm forecaster 1"
FILE, MODEL = "forecast.json", "model"
CSV, PNG = "forecast.csv", "forecast.png"
FORECAST = "#2a6fdb"
SHOWN = 2
"""Lookbacks of history that the plot shows."""


@dataclass(frozen=True)
class FittedForecaster:
    """A model with all that it takes to forecast a table in its own units."""

    model: nn.Module
    name: str
    """Its name, as titans forecast evaluate takes it."""
    shape: Shape
    channels: tuple[str, ...]
    scaler: Scaler
    told: dict[str, Any]
    """What the file says beside that: settings, the table that it was fitted to, its errors."""

    def forecast(
        self, values: Float[np.ndarray, "R C"], *, memory: Memory = "fresh", device: torch.device | None = None
    ) -> Float[np.ndarray, "H C"]:
        """Forecast the H rows after a table (R, C) of at least L rows, both in its own units.

            "fresh"     from the last L rows
            "carried"   the memory has read all windows of L rows before them too
            "still"     the memory is frozen, in the last L rows too

        ValueError for a word that is none of these, for what is no array of numbers or of another shape, for numbers
        that are not finite, and for a memory where there is none.
        """
        L, _, C = self.shape
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf":
            got = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ValueError(
                f"got values as {got}; expected an array of numbers (R, C): frame[list(fitted.channels)].to_numpy() "
                "of a table of pandas, np.array(rows) of lists"
            )
        if values.ndim != 2 or values.shape[1] != C or len(values) < L:
            raise ValueError(f"got values {values.shape}; expected (R, C) with C = {C} and at least {L} rows")
        if not np.isfinite(values).all():
            raise ValueError("got values that are not finite; expected numbers in every cell")
        device = device or torch.device("cpu")
        model = self.model.to(device).eval()
        # a table whose columns were picked lies by columns, which torch would sum up in another order
        scaled = torch.from_numpy(np.ascontiguousarray(self.scaler.scaled(values))).float()
        if memory == "fresh":
            with torch.no_grad():
                found = model(scaled[None, -L:].to(device))
        else:
            last = range(len(scaled), len(scaled) + 1)
            [(_, found)] = streamed(model, scaled, last, memory, device=device, warm_up=len(scaled) // L - 1)
        return self.scaler.undone(found[0].double().cpu().numpy())


def save_forecaster(folder: Path, model: nn.Module, data: Prepared, told: dict[str, Any]) -> None:
    """Save a fitted model, its scaler, and what it was asked for and found; interrupted, the folder is whole or absent.

    forecast.json         what it is, what it was fitted to, mean and standard deviation per channel
    model.safetensors     its weights
    """
    fitted_to = {"season": data.season, "channels": list(data.table.channels)}
    scaler = {name: value.tolist() for name, value in data.scaler._asdict().items()}
    with new_folder(folder) as unfinished:
        save_model(unfinished, model)
        write_json(unfinished / FILE, {"format": FORMAT, **fitted_to, **scaler, **told})


def load_forecaster(path: str | Path) -> FittedForecaster:
    """Load a fitted model from its folder, or from that of its run; ValueError where it cannot be read."""
    path = Path(path)
    folder = next((found for found in (path / MODEL, path) if (found / FILE).is_file()), None)
    if folder is None:
        what = "does not exist" if not path.exists() else f"holds no {FILE}"
        raise ValueError(
            f"got the forecaster {str(path)!r}, which {what}; expected a folder that titans forecast train has made"
        )
    try:
        told = json.loads((folder / FILE).read_bytes())
        if told.get("format") != FORMAT:
            raise ValueError(f"its format is {told.get('format')!r}, not {FORMAT!r}")
        check_choice("model", told["model"], MODELS)
        shape = Shape(told["lookback"], told["horizon"], len(told["channels"]))
        model = make_model(told["model"], merge_settings(NetSettings(), told["net"]), shape, told["season"])
        load_weights(folder, model)
        scaler = Scaler(np.array(told["mean"], np.float64), np.array(told["std"], np.float64))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"the forecaster in {folder} cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
    return FittedForecaster(model.eval(), told["name"], shape, tuple(told["channels"]), scaler, told)


def predict(settings: PredictSettings) -> dict[str, Any]:
    """Forecast a table with a fitted model, and write OUT/forecast.csv and OUT/forecast.png.

    The rows from `origin` on are forecast from those before; where the table has them, they stand beside the forecast
    as truth, with the errors, scaled as in an evaluation. Raises ValueError for a model or a table that will not do,
    before anything is written.
    """
    if settings.data is not None and settings.data.resolve() in {
        (settings.out / name).resolve() for name in (CSV, PNG)
    }:
        raise ValueError(f"got --out {settings.out}, where the table would be replaced; expected another folder")
    if settings.model is None or settings.data is None:
        raise ValueError("got no model or no table; expected titans forecast predict MODEL DATA.csv")
    fitted = load_forecaster(settings.model)
    asked = {name: value for name, value in vars(settings.table).items() if value is not None}
    reading = merge_settings(TableSettings(), {**fitted.told.get("reading", {}), **asked})
    table = _with_channels(read_table(settings.data, reading), fitted.channels)
    origin = _origin(settings.origin, table, fitted.shape.lookback)
    forecast = fitted.forecast(table.values[:origin], memory=settings.memory, device=choose_device(settings.device))
    truth = table.values[origin : origin + len(forecast)]
    name, index = _index(table, origin, len(forecast))
    start = max(0, origin - SHOWN * fitted.shape.lookback)
    panels = _panels(table, name, index, start, origin, forecast, settings.plot_channels)
    title = f"{table.name}: {len(forecast)} rows ahead of row {origin:,}, {fitted.name}"
    channels = len(table.channels)
    shown = f"{len(panels)} of {channels} channels" if len(panels) < channels else None
    title += f"; {shown}" if shown else ""
    figure = draw(Panels(title=title, panels=panels))  # before anything is written
    write_atomically(settings.out / CSV, _csv(table, name, index[origin:], forecast, truth))
    save_png(figure, settings.out / PNG)
    errors: dict[str, Any] = {}
    if len(truth):
        error = fitted.scaler.scaled(forecast[: len(truth)]) - fitted.scaler.scaled(truth)
        errors = {"truth_rows": len(truth), "mse": float(np.square(error).mean()), "mae": float(np.abs(error).mean())}
    return {
        "model": fitted.name,
        "table": str(settings.data),
        "origin": origin,
        "first": origin if index.dtype.kind == "i" else str(index[origin]),
        "rows": len(forecast),
        "memory": settings.memory,
        "notes": list(table.notes),
        **errors,
        "csv": str(settings.out / CSV),
        "plot": str(settings.out / PNG),
        "plot_shows": shown and f"{shown}, the last ones; --plot-channels {channels} shows all",
    }


def _with_channels(table: Table, channels: tuple[str, ...]) -> Table:
    """Take the model's channels, in its order; ValueError where the table lacks one."""
    lacking = [name for name in channels if name not in table.channels]
    if lacking:
        raise ValueError(
            f"got a table {table.name!r} without the channels {', '.join(map(repr, lacking[:3]))}; expected those that "
            f"the model was fitted to: {', '.join(channels[:8])}"
        )
    order = [table.channels.index(name) for name in channels]
    return replace(table, values=table.values[:, order], channels=channels)


def _origin(given: str | None, table: Table, lookback: int) -> int:
    """Find the first row to forecast by its number or its date."""
    rows = len(table.values)
    if given is None or given.isdecimal():
        origin = rows if given is None else int(given)
    elif table.dates is None:
        raise ValueError(f"got origin={given!r} for a table without dates; expected the number of a row")
    else:
        try:
            when = pd.Timestamp(given)
            if pd.isna(when) or given[0] in "+-":
                raise ValueError("no date")
        except ValueError as error:
            raise ValueError(
                f"got origin={given!r}; expected a date such as 2018-02-20, or the number of a row"
            ) from error
        date = when.to_datetime64() + (0 if when.tzinfo is None else table.offset)
        origin = int(np.searchsorted(table.dates, date))
        after = table.dates_after(1)  # None of a single row, which has no step
        if after is not None and date > max(after[0], table.dates[-1] + np.diff(table.dates).max()):
            raise ValueError(
                f"got origin={given!r}, behind the table, which ends at {table.dates[-1]}; expected a date in "
                "it, or none to forecast what follows"
            )
    if not lookback <= origin <= rows:
        raise ValueError(
            f"got origin {given or 'behind the last row'}, row {origin:,} of {rows:,}; expected a row from "
            f"{lookback:,} on, as a forecast is made from {lookback:,} rows, to {rows:,}"
        )
    return origin


def _index(table: Table, origin: int, count: int) -> tuple[str, np.ndarray]:
    """A name that no channel has, and dates of all rows up to the last; numbers where there is no step of dates."""
    known = None if table.dates is None else table.dates[: origin + count]
    after = None if known is None else table.dates_after(origin + count - len(known))
    dated = known is not None and (after is not None or len(known) == origin + count)
    name = "date" if dated else "row"
    while name in table.channels:
        name += "_"
    if not dated:
        return name, np.arange(origin + count)
    return name, known if after is None else np.concatenate([known, after.astype(known.dtype)])


def _csv(table: Table, name: str, index: np.ndarray, forecast: np.ndarray, truth: np.ndarray) -> str:
    """Write a row for each step: its date or number, every channel, and the truth of each as far as it is known."""
    frame = pd.DataFrame(forecast, columns=list(table.channels))
    if len(truth):
        known = pd.DataFrame(truth, columns=[f"{name} (truth)" for name in table.channels])
        frame = pd.concat([frame, known], axis=1)
    frame.insert(0, name, index)
    return frame.to_csv(index=False)


def _panels(
    table: Table, name: str, index: Any, start: int, origin: int, forecast: np.ndarray, most: int
) -> list[Plot]:
    """A plot for each of the last channels: history, forecast, and truth where the table has it."""
    truth = table.values[origin : origin + len(forecast)]
    plots, count = [], len(table.channels)
    for place in range(max(0, count - most), count):
        known, true, ahead = (rows[:, place].tolist() for rows in (table.values[start:origin], truth, forecast))
        lines = [Line(label="history", x=index[start:origin], y=known, colour=SOFT)]
        if true:
            lines.append(Line(label="truth", x=index[origin : origin + len(true)], y=true, colour=INK, dashed=True))
        lines.append(Line(label="forecast", x=index[origin:], y=ahead, colour=FORECAST))
        label = name if place == count - 1 else ""
        plots.append(Plot(title="", x_label=label, y_label=table.channels[place], lines=lines))
    return plots
