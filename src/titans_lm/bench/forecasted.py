"""Forecasters of time series on the page of results: errors by horizon, table by table."""

from pathlib import Path
from statistics import mean
from typing import Any

from titans_lm.bench import compared
from titans_lm.bench.compared import contender_lines, remembers
from titans_lm.report.plots import Plot, Ranking
from titans_lm.report.spread import written

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
    return compared.named(name, BASES)


def heading(result: dict[str, Any]) -> str:
    """Name the tables, and what sets a comparison of variants apart from that of models."""
    told = [_table(one) for one in result["tables"]]
    if any(":" in one["name"] for one in result["tables"][0]["contenders"]):
        told.append("variants")
    if len(result["settings"]["horizons"]) == 1:
        told.append(f"{result['settings']['horizons'][0]} rows ahead")
    return f"Forecasts: {', '.join(told)}"


def rows(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Say what was equal, and give the head and the rows of a table, in the order of the settings."""
    settings, train = result["settings"], result["settings"]["train"]
    horizons = [str(H) for H in settings["horizons"]]
    several = len(result["tables"]) > 1
    seeds = len(settings["seeds"])
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"]) or f"{train['lr']:g}"
    said = (
        f"MSE and MAE on values scaled by the training part, over all windows of the test part, with "
        f"{settings['lookback']} rows to forecast from; mean ± standard deviation over "
        f"{seeds} seed{'s' * (seeds > 1)} where a model is trained. Batches of {train['batch_size']}, learning rate "
        f"{rates}{' (the best on validation)' * (len(settings['rates']) > 1)}, at most {train['epochs']} "
        f"epoch{'s' * (train['epochs'] > 1)}; the step is the best on validation, and the test part is read once. "
        "Parameters are those of the longest horizon. "
        f"{' '.join(f'{_table(one)}: {note}.' for one in result['tables'] for note in one['notes'])}"
    ).strip()
    columns = [*horizons, *(["mean"] if len(horizons) > 1 else [])]
    head = [*(["table"] if several else []), "model", "parameters", "learning rates", *columns, "minutes a run"]
    body = []
    for table in result["tables"]:
        for one in table["contenders"]:
            largest = max(run["parameters"] for run in one["runs"])
            minutes = mean(run["seconds"] for run in one["runs"]) / 60
            chosen = sorted({run["rate"] for run in one["runs"]} - {None})
            shown = ", ".join(f"{rate:g}" for rate in chosen) or "–"
            for kind, what in KINDS.items():
                if kind not in one:
                    continue
                name = f"{named(one['name'])}{what}"
                row = [*([_table(table)] if several else []), f"**{name}**" if remembers(one["name"]) else name]
                row += [f"{largest:,}", shown, *(_cell(one[kind], H) for H in columns), f"{minutes:.1f}"]
                body.append(row)
    return said, head, body


def plot(result: dict[str, Any]) -> Plot | Ranking:
    """MSE by horizon, or its mean by table where there are several, of all but naive baselines.

    Models without a memory are dashed. A single horizon of a single table is a ranking.
    """
    tables = result["tables"]
    horizons = [str(H) for H in result["settings"]["horizons"]]
    shown = [one for one in tables[0]["contenders"] if one["name"] not in NAIVE]

    def label(one: dict[str, Any]) -> str:
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


def _errors(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Find the MSE of a contender by horizon."""
    return next(one["test"]["mse"] for one in table["contenders"] if one["name"] == name)


def _table(table: dict[str, Any]) -> str:
    return Path(table["table"]).stem


def _cell(errors: dict[str, Any], horizon: str) -> str:
    """Write MSE and MAE of a horizon, or of their mean."""
    return " / ".join(written(errors[measure][horizon], ".3f") for measure in ("mse", "mae"))
