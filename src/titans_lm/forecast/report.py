"""What an evaluation found: the file of results, and a table of errors to read."""

from statistics import mean
from typing import Any

from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import Result
from titans_lm.compare.spent import spent, spent_on
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.report.spread import mean_with_spread
from titans_lm.report.table import aligned
from titans_lm.train.settings import plain_settings

FILE = "results.json"
KEPT = ("parameters", "validation", "test", "streaming", "steps", "best_step", "seconds", "skipped_steps", "ridge")


def collected(settings: EvaluateForecasters, command: str, found: dict[str, list[Result]]) -> Result:
    """Put the results of runs together, table by table and model by model.

    The wall time is that of the runs that count, with the trials that they went on from.
    """
    return {
        "format": FORMAT,
        "what": "forecast",
        "command": command,
        "hardware": hardware(),
        **spent_on(run for runs in found.values() for run in runs),
        "settings": plain_settings(settings),
        "tables": [_table(settings, runs) for runs in found.values()],
    }


def _table(settings: EvaluateForecasters, runs: list[Result]) -> Result:
    first = runs[0]
    windows = {run["asked"]["horizon"]: run["windows"] for run in runs}
    return {
        "table": first["asked"]["table"],
        "rows": first["rows"],
        "notes": first["notes"],
        "windows": {str(horizon): counts for horizon, counts in windows.items()},
        "contenders": [_contender(name, [run for run in runs if run["name"] == name]) for name in settings.models],
    }


def _contender(name: str, runs: list[Result]) -> Result:
    """Sum up the runs of a model: for each horizon over seeds, and for each seed over horizons."""
    horizons = list(dict.fromkeys(run["asked"]["horizon"] for run in runs))
    seeds = list(dict.fromkeys(run["asked"]["seed"] for run in runs))
    kinds = {"test": lambda run: run["test"]}
    for kind in ("carried", "still"):
        if all("streaming" in run for run in runs):
            kinds[kind] = lambda run, kind=kind: run["streaming"][kind]
    return {
        "name": name,
        "runs": [
            {
                "horizon": run["asked"]["horizon"],
                "seed": run["asked"]["seed"],
                "rate": run["asked"]["train"]["lr"] if run["steps"] else None,
                **{key: run[key] for key in KEPT if key in run},
                **spent(run),
            }
            for run in runs
        ],
        **{kind: _errors(runs, horizons, seeds, error) for kind, error in kinds.items()},
    }


def _errors(runs: list[Result], horizons: list[int], seeds: list[int], error: Any) -> Result:
    found = {(run["asked"]["horizon"], run["asked"]["seed"]): error(run) for run in runs}
    return {
        measure: {
            **{str(H): mean_with_spread([found[H, seed][measure] for seed in seeds]) for H in horizons},
            "mean": mean_with_spread([mean(found[H, seed][measure] for H in horizons) for seed in seeds]),
        }
        for measure in ("mse", "mae")
    }


def lines(result: Result) -> list[str]:
    """Write a table of test errors for each table that was read: a row for each horizon and their mean."""
    told = []
    for table in result["tables"]:
        columns = [
            (one["name"] if kind == "test" else f"{one['name']} {kind}", one[kind])
            for one in table["contenders"]
            for kind in ("test", "carried", "still")
            if kind in one
        ]
        horizons = [*table["windows"], *(["mean"] if len(table["windows"]) > 1 else [])]
        head = ["horizon", *(name for name, _ in columns)]
        body = [[H, *(f"{_cell(one['mse'][H])}  {_cell(one['mae'][H])}" for _, one in columns)] for H in horizons]
        told += ["", f"{table['table']}: test MSE and MAE on scaled values", *aligned(head, body)]
        told += [f"note: {note}" for note in table["notes"]]
    return told[1:]


def _cell(found: Result) -> str:
    return f"{found['mean']:.3f}" + ("" if found["sd"] is None else f"±{found['sd']:.3f}")
