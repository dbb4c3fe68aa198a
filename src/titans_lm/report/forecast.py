"""Forecasters of time series on the page of results: errors by horizon, table by table."""

from pathlib import Path

from titans_lm.report import models
from titans_lm.report.figures import Plot, Ranking
from titans_lm.report.models import contender_lines, remembers
from titans_lm.report.section import Section
from titans_lm.report.sources import Result
from titans_lm.report.spread import written
from titans_lm.report.table import Column, Table, bold
from titans_lm.report.text import average

BASES = {
    "attention": "attention in the memory's place", "sliding": "sliding window in the memory's place",
    "segment": "segments in the memory's place", "mamba": "Mamba in the memory's place", "patchtst": "PatchTST",
    "dlinear": "DLinear", "nlinear": "NLinear, closed form", "seasonal": "last season again",
    "repeat": "last value again",
}  # fmt: skip
NAIVE = ("seasonal", "repeat")
"""Baselines so far off that a plot with them would show nothing of the others; they are in the table."""
KINDS = {"test": "", "carried": ", carried from window to window", "still": ", held still"}
"""Ways to read the test part: each window from a fresh start, and the two of --streaming."""


def named(name: str) -> str:
    """Name a contender for a reader, a varied one by what was varied."""
    return models.named(name, BASES)


def heading(result: Result) -> str:
    """Name the tables, and what sets a comparison of variants apart from that of models."""
    told = [_table(one) for one in result["tables"]]
    if any(":" in one["name"] for one in result["tables"][0]["contenders"]):
        told.append("variants")
    if len(result["settings"]["horizons"]) == 1:
        told.append(f"{result['settings']['horizons'][0]} rows ahead")
    return f"Forecasts: {', '.join(told)}"


def tables(result: Result) -> list[Table]:
    """Errors by horizon: a line for every model and way to read the test part, table by table."""
    horizons = [str(H) for H in result["settings"]["horizons"]]
    several, minutes = len(result["tables"]) > 1, average("seconds", ".1f", 60)
    rows = [
        (table, one, kind) for table in result["tables"] for one in table["contenders"] for kind in KINDS if kind in one
    ]

    def model(row: tuple[Result, Result, str]) -> str:
        return bold(f"{named(row[1]['name'])}{KINDS[row[2]]}", remembers(row[1]["name"]))

    return [
        Table(
            said=said(result),
            columns=[
                *([Column("table", lambda row: _table(row[0]))] if several else []),
                Column("model", model),
                Column("parameters", lambda row: f"{max(run['parameters'] for run in row[1]['runs']):,}"),
                Column("learning rates", lambda row: _rates(row[1])),
                *(
                    Column(H, lambda row, H=H: _cell(row[1][row[2]], H))
                    for H in (*horizons, *(["mean"] if len(horizons) > 1 else []))
                ),
                Column("minutes a run", lambda row: minutes(row[1])),
            ],
            rows=rows,
        )
    ]


def said(result: Result) -> str:
    """Say what was equal, and what the numbers are."""
    settings, train = result["settings"], result["settings"]["train"]
    seeds = len(settings["seeds"])
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"]) or f"{train['lr']:g}"
    return (
        f"MSE and MAE on values scaled by the training part, over all windows of the test part, with "
        f"{settings['lookback']} rows to forecast from; mean ± standard deviation over "
        f"{seeds} seed{'s' * (seeds > 1)} where a model is trained. Batches of {train['batch_size']}, learning rate "
        f"{rates}{' (the best on validation)' * (len(settings['rates']) > 1)}, at most {train['epochs']} "
        f"epoch{'s' * (train['epochs'] > 1)}; the step is the best on validation, and the test part is read once. "
        "Parameters are those of the longest horizon. "
        f"{' '.join(f'{_table(one)}: {note}.' for one in result['tables'] for note in one['notes'])}"
    ).strip()


def plot(result: Result) -> Plot | Ranking:
    """MSE by horizon, or its mean by table where there are several, of all but naive baselines.

    Models without a memory are dashed. A single horizon of a single table is a ranking.
    """
    tables = result["tables"]
    horizons = [str(H) for H in result["settings"]["horizons"]]
    shown = [one for one in tables[0]["contenders"] if one["name"] not in NAIVE]

    def label(one: Result) -> str:
        return named(one["name"])

    if len(tables) > 1:
        drawn = contender_lines(shown, lambda one: [_errors(table, one["name"])["mean"] for table in tables], label)
        axis, places = "table", [_table(table) for table in tables]
    else:
        drawn = contender_lines(shown, lambda one: [one["test"]["mse"][H] for H in horizons], label)
        axis, places = "horizon, rows", horizons
    if len(places) == 1:
        values = {line.label: (line.y[0], line.spread[0] if line.spread else None) for line in drawn}
        return Ranking(title=heading(result), x_label="model", y_label="MSE", values=values)
    return Plot(title=heading(result), x_label=axis, y_label="MSE", lines=drawn, x_labels=places)


def _errors(table: Result, name: str) -> Result:
    """Find the MSE of a contender by horizon."""
    return next(one["test"]["mse"] for one in table["contenders"] if one["name"] == name)


def _rates(one: Result) -> str:
    """Write the learning rates that were chosen, each once."""
    return ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in one["runs"]} - {None})) or "–"


def _table(table: Result) -> str:
    return Path(table["table"]).stem


def _cell(errors: Result, horizon: str) -> str:
    """Write MSE and MAE of a horizon, or of their mean."""
    return " / ".join(written(errors[measure][horizon], ".3f") for measure in ("mse", "mae"))


SECTION = Section(heading=heading, tables=tables, plots=lambda result: {"": plot(result)})
