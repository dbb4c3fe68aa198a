"""Forecasters of time series: errors by horizon, table by table."""

from functools import partial
from pathlib import Path
from typing import Any

from titans_lm.report.plots import Drawn, Plot
from titans_lm.report.section import TITLES, Result, Section, contender_lines, remembers, title
from titans_lm.report.table import Column, Table, bold, written
from titans_lm.report.text import average

NAMES = TITLES | {
    "attention": "attention in the memory's place", "sliding": "sliding window in the memory's place",
    "segment": "segments in the memory's place", "mamba": "Mamba in the memory's place", "patchtst": "PatchTST",
    "dlinear": "DLinear", "nlinear": "NLinear, closed form", "seasonal": "last season again",
    "repeat": "last value again",
}  # fmt: skip
NAIVE = ("seasonal", "repeat")
"""Baselines so far off that a plot with them would show nothing of the others; they are in the table."""
KINDS = {"test": "", "carried": ", carried from window to window", "still": ", frozen"}
"""Ways to read the test part: each window from a fresh state, and the two of --streaming."""
Row = tuple[Result, Result, str]
"""A table, a model, and a way to read the test part."""


named = partial(title, names=NAMES)


def kind_of(result: Result) -> list[str]:
    """Say what sets a comparison apart from that of models at several horizons."""
    variants = any(":" in one["name"] for one in result["tables"][0]["contenders"])
    horizons = result["settings"]["horizons"]
    return ["variants"] * variants + [f"{H} rows ahead" for H in horizons if len(horizons) == 1]


def joined(result: Result) -> list[Result]:
    return [table for one in (result, *result.get("others", [])) for table in one["tables"]]


def heading(result: Result) -> str:
    """Name the tables, and what sets a comparison of variants apart from that of models."""
    return f"Forecasts: {', '.join([*map(table_name, joined(result)), *kind_of(result)])}"


def tables(result: Result) -> list[Table]:
    """Errors by horizon: a line for every model and way to read the test part, table by table."""
    horizons = [str(H) for H in result["settings"]["horizons"]]
    every, minutes = joined(result), average("seconds", ".1f", 60)
    rows: list[Row] = [
        (table, one, kind) for table in every for one in table["contenders"] for kind in KINDS if kind in one
    ]

    def errors(row: Row, horizon: str) -> str:
        return " / ".join(written(row[1][row[2]][measure][horizon], ".3f") for measure in ("mse", "mae"))

    columns = [
        *([Column("table", lambda row: table_name(row[0]))] if len(every) > 1 else []),
        Column("model", lambda row: bold(f"{named(row[1]['name'])}{KINDS[row[2]]}", remembers(row[1]["name"]))),
        Column("parameters", lambda row: f"{max(run['parameters'] for run in row[1]['runs']):,}"),
        Column("learning rates", lambda row: rates([run["rate"] for run in row[1]["runs"]])),
        *(Column(H, partial(errors, horizon=H)) for H in [*horizons, *(["mean"] if len(horizons) > 1 else [])]),
        Column("minutes a run", lambda row: minutes(row[1])),
    ]
    setups = dict.fromkeys(said(one) for one in (result, *result.get("others", [])))
    return [Table(columns=columns, rows=rows, said=f"{MEASURES} {' '.join(setups)}")]


MEASURES = (
    "MSE / MAE on values scaled by the training part, over all windows of the test part, by rows ahead. The step is "
    "the best on validation, and the test part is read once. Parameters are those of the longest horizon."
)


def said(result: Result) -> str:
    settings, train = result["settings"], result["settings"]["train"]
    seeds = len(settings["seeds"])
    tried = ", ".join(f"{rate:g}" for rate in settings["rates"]) or f"{train['lr']:g}"
    notes = "".join(f" {table_name(one)}: {note}." for one in result["tables"] for note in one["notes"])
    return (
        f"{', '.join(map(table_name, result['tables']))}: {settings['lookback']} rows to forecast from, {seeds} "
        f"seed{'s' * (seeds > 1)} where a model is trained, batches of {train['batch_size']}, learning rate {tried}"
        f"{' (the best on validation)' * (len(settings['rates']) > 1)}, at most {train['epochs']} "
        f"epoch{'s' * (train['epochs'] > 1)}.{notes}"
    )


def rates(values: list[Any]) -> str:
    """Write the learning rates that were chosen, each once."""
    return ", ".join(f"{rate:g}" for rate in sorted(set(values) - {None})) or "–"


def table_name(table: Result) -> str:
    return Path(table["table"]).stem


def plots(result: Result) -> dict[str, Drawn]:
    """MSE by horizon, or its mean by table, of all but naive baselines; nothing of one horizon of one table."""
    every, horizons = joined(result), [str(H) for H in result["settings"]["horizons"]]
    errors = [{one["name"]: one["test"]["mse"] for one in table["contenders"]} for table in every]
    if len(every) > 1:
        axis, places, y_label = "table", [table_name(table) for table in every], "MSE, mean over horizons"
        drawn = {name: [of[name]["mean"] for of in errors] for name in errors[0]}
    else:
        axis, places, y_label = "horizon, rows", horizons, "MSE"
        drawn = {name: [mse[H] for H in horizons] for name, mse in errors[0].items()}
    shown = [one for one in every[0]["contenders"] if one["name"] not in NAIVE]
    lines = contender_lines(shown, lambda one: drawn[one["name"]], lambda one: named(one["name"]))
    plot = Plot(title=heading(result), x_label=axis, y_label=y_label, lines=lines, x_labels=places)
    return {"": plot} if len(places) > 1 else {}


def group(result: Result) -> str:
    """Files of the same models and horizons stand in one table, but none twice."""
    names = sorted({one["name"] for table in result["tables"] for one in table["contenders"]})
    alone = result["file"] if len(result["tables"]) > 1 or kind_of(result) else ""
    return f"{names} {result['settings']['horizons']} {alone}"


SECTION = Section(topic=lambda _: "forecast", heading=heading, group=group, tables=tables, plots=plots)
