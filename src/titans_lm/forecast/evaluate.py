"""Runs over models, tables, horizons and seeds: fitted on training, chosen on validation, tested once; and their table.

A trial of a learning rate is such a run as far as it is fitted: where its rate is chosen the run that counts goes on
from there, and is tested; where it is not, the test part was never looked at.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from titans_lm.data.contents import files_sum
from titans_lm.experiments.models import plain_name
from titans_lm.experiments.runner import (
    CONTENTS,
    SPEC,
    Result,
    Say,
    kept,
    run_job,
    run_jobs,
    try_rates,
    write_record,
)
from titans_lm.forecast.baselines import ModelSpec, make_model, model_spec
from titans_lm.forecast.fit import fit_model, score, score_streamed
from titans_lm.forecast.model import Shape
from titans_lm.forecast.predict import MODEL, save_forecaster
from titans_lm.forecast.settings import EvaluateForecasters, ForecastSettings, TrainForecaster
from titans_lm.forecast.table import read_table
from titans_lm.forecast.windows import Prepared, prepare
from titans_lm.report.table import aligned, mean_with_spread
from titans_lm.train.device import choose_device
from titans_lm.train.fresh import size_of
from titans_lm.train.options import plain_settings, written_command
from titans_lm.train.parallel import check_alone
from titans_lm.train.progress import Outlook, ProgressReport
from titans_lm.train.run import RunFolder, begun_with

FILE = "results.json"
SHORTER = "fewer --epochs, --models, --horizons or --seeds"
CHOSEN = "validation_mse"
"""What learning rates are chosen by."""
KEPT = ("parameters", "validation", "test", "streaming", "steps", "best_step", "seconds", "skipped_steps", "ridge")


@dataclass(frozen=True)
class ForecastJob:
    """A model to fit to a table for one horizon from one seed, and to test; a job of `experiments.runner`."""

    model: ModelSpec
    shared: ForecastSettings
    data: Path
    horizon: int
    seed: int
    run: Path
    """Folder of the run."""
    counts: bool = True
    """Whether it is tested; else it is a trial of its learning rate, which may diverge."""
    streaming: bool = False
    progress: bool = False
    """Whether to show how far training is."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def place(self) -> str:
        """What has a learning rate of its own."""
        return f"{self.name} at horizon {self.horizon} of {self.data.stem}"

    @property
    def folder(self) -> Path:
        """Where the result goes: a trial's does not stand in the way of that of the run."""
        return self.run if self.counts else self.run.parent / "trials" / self.run.name

    @property
    def rate(self) -> float:
        return self.model.train.lr

    @property
    def work(self) -> int:
        return int(self.model.trained)

    def spec(self) -> Result:
        """Give what the result depends on: all but where it is kept."""
        return {
            "name": self.name,
            "table": self.data.stem,
            CONTENTS: {self.data.name: files_sum(self.data)},
            "reading": plain_settings(self.shared.table),
            "lookback": self.shared.lookback,
            "horizon": self.horizon,
            "seed": self.seed,
            "net": plain_settings(self.model.net),
            "train": plain_settings(self.model.train),
            "streaming": self.streaming,
        }

    def prepare(self) -> tuple[Prepared, torch.nn.Module]:
        """Read the table and make the model; ValueError for what does not go together."""
        data = prepare(read_table(self.data, self.shared.table), self.shared.table, self.shared.lookback, self.horizon)
        return data, fresh_model(self.model, data, self.seed)

    def train(self, outlook: Outlook | None = None) -> Result:
        """Fit it, from where it stopped if it did; what counts is tested once then, and saved."""
        data, model = self.prepare()
        run = RunFolder.open(self.run) if begun_with(self.run) else RunFolder.create(self.run, self.spec())
        progress = ProgressReport(quiet=not self.progress, title=self.name, outlook=outlook)
        fitted = fit_model(model, data, self.model.train, seed=self.seed, run=run, progress=progress)
        found: Result = {
            **fitted._asdict(),
            "validation": fitted.validation._asdict(),
            CHOSEN: fitted.validation.mse if math.isfinite(fitted.validation.mse) else None,
            "parameters": size_of(model),
            "windows": data.counts,
        }
        if not self.counts:
            return found
        device = choose_device(self.model.train.device)
        found["test"] = score(model, data.parts["test"], device)._asdict()
        if self.streaming:
            found["streaming"] = {
                kind: score_streamed(model, data, "test", kind, device)._asdict() for kind in ("carried", "still")
            }
        save_forecaster(self.run / MODEL, model, data, {"model": self.model.base, **self.spec(), **found})
        return {**found, "notes": list(data.notes), "rows": len(data.table.values)}

    def describe(self, result: Result) -> str:
        """Phrase the result; an error that is not finite stands as None in a file."""

        def shown(part: str, measure: str) -> str:
            error = result[part][measure]
            return f"{measure.upper()} " + ("not a number" if error is None else f"{error:.4f}")

        line = f"validation {shown('validation', 'mse')}"
        if self.counts:
            line += f", test {shown('test', 'mse')} {shown('test', 'mae')}"
        took = f", {result['steps']:,} steps in {result['seconds'] / 60:.1f} minutes" if result["steps"] else ""
        return f"{line}; {result['parameters']:,} parameters{took}"


def fresh_model(spec: ModelSpec, data: Prepared, seed: int) -> torch.nn.Module:
    """Make a model for a table's windows, with the weights that its seed draws; ValueError for what will not train."""
    windows = data.parts["train"]
    if spec.trained:
        if spec.train.windows > 1 and not spec.has_memory:
            raise ValueError(
                f"got windows={spec.train.windows} for {spec.name!r}, which has no memory to carry between windows; "
                "expected windows=1, or windows=… in the names of models that have one"
            )
        windows.spanning(spec.train.windows)  # rows enough for that
    torch.manual_seed(seed)
    return make_model(spec.base, spec.net, Shape(windows.lookback, windows.horizon, windows.channels), data.season)


def train_forecaster(settings: TrainForecaster, say: Say) -> dict[str, Any]:
    """Fit a model to a table, test it once, and leave it in OUT/model; stopped, the same call goes on.

    Raises ValueError for a table, a model or a folder that will not do.
    """
    check_alone()
    if settings.data is None:
        raise ValueError("got no table; expected a CSV file: titans forecast train DATA.csv")
    spec = model_spec(settings.model, settings)
    job = ForecastJob(
        spec, settings, settings.data, settings.horizon, settings.seed, settings.out, progress=not settings.quiet
    )
    data, model = job.prepare()
    for note in data.notes:
        say(f"note: {note}")
    counts = ", ".join(f"{count:,} {part}" for part, count in data.counts.items())
    say(f"{data.table.name}: {len(data.table.values):,} rows of {len(data.table.channels)} channels; windows: {counts}")
    say(f"{job.name}: {size_of(model):,} parameters; run folder {job.folder}")
    result = run_job(job, Outlook("--epochs N", say=say))
    say(job.describe(result))
    command = written_command("forecast", "train", str(settings.data), settings=settings, data=None)
    return {"command": command, "model": str(job.folder / MODEL), **result}


def evaluate_forecasters(settings: EvaluateForecasters, say: Say) -> dict[str, Any]:
    """Fit and test all models on all tables and horizons, and write OUT/results.json; stopped, the same call goes on.

    Every model is made once for every table and horizon before the first is trained: ValueError for what will not do.
    The wall time is that of the runs that count, with the trials that they went on from.
    """
    if not settings.data:
        raise ValueError("got no table; expected a CSV file or more: titans forecast evaluate DATA.csv")
    if len({path.stem for path in settings.data}) < len(settings.data):
        listed = ", ".join(map(str, settings.data))
        raise ValueError(f"got two tables of one name in {listed}; expected names that differ")
    specs = [model_spec(name, settings) for name in settings.models]
    for path in settings.data:
        table = read_table(path, settings.table)
        for horizon in settings.horizons:
            data = prepare(table, settings.table, settings.lookback, horizon)
            for spec in specs:
                fresh_model(spec, data, 0)
    jobs = _jobs(settings, specs, say)
    runs = run_jobs(jobs, settings.jobs, say, Outlook(SHORTER, say=say))
    tables = [[run for job, run in zip(jobs, runs, strict=True) if job.data == path] for path in settings.data]
    return write_record(
        settings.out / FILE, "forecast", evaluate_command(settings), settings, runs,
        tables=[_table(settings, own) for own in tables],
    )  # fmt: skip


def evaluate_command(settings: EvaluateForecasters) -> str:
    """Write the command that the settings came from."""
    return written_command("forecast", "evaluate", *map(str, settings.data), settings=settings, data=())


def _jobs(settings: EvaluateForecasters, specs: list[ModelSpec], say: Say) -> list[ForecastJob]:
    """List the runs that count, each with the best rate of trials of the first seed unless its name says its own."""
    places = [(path, horizon, spec) for path in settings.data for horizon in settings.horizons for spec in specs]
    rated = [place for place in places if settings.rates and place[2].trained and not place[2].own_rate]
    best, first = {place: settings.rates[0] for place in rated}, settings.seeds[0]
    if len(settings.rates) > 1:
        jobs = [_job(settings, *place, first, rate, counts=False) for place in rated for rate in settings.rates]
        runs = sum(spec.trained for _, _, spec in places) * len(settings.seeds)
        _, found = try_rates(jobs, settings.jobs, say, CHOSEN, Outlook(SHORTER, say=say, later=runs))
        best = dict(zip(rated, found.values(), strict=True))
    return [
        _job(settings, *place, seed, best.get(place))
        for place in places
        for seed in (settings.seeds if place[2].trained else (first,))
    ]


def _job(
    settings: EvaluateForecasters, path: Path, horizon: int, spec: ModelSpec, seed: int, rate: float | None, **own: Any
) -> ForecastJob:
    if rate is not None:
        spec = spec._replace(train=dataclasses.replace(spec.train, lr=rate))
    named = plain_name(f"{spec.name}-{horizon}")
    if spec.trained:
        named += f"-lr{spec.train.lr:.15g}-seed{seed}"
    run, streaming = settings.out / path.stem / named, settings.streaming and spec.has_memory
    return ForecastJob(spec, settings, path, horizon, seed, run, streaming=streaming, **own)


def _table(settings: EvaluateForecasters, runs: list[Result]) -> Result:
    first = runs[0]
    return {
        "table": first[SPEC]["table"],
        "rows": first["rows"],
        "notes": first["notes"],
        "windows": {str(run[SPEC]["horizon"]): run["windows"] for run in runs},
        "contenders": [_model(name, [run for run in runs if run["name"] == name]) for name in settings.models],
    }


def _model(name: str, runs: list[Result]) -> Result:
    """Sum up the runs of a model: for each horizon over seeds, and for each seed over horizons."""
    errors = {"test": [run["test"] for run in runs]}
    if all("streaming" in run for run in runs):
        errors |= {kind: [run["streaming"][kind] for run in runs] for kind in ("carried", "still")}
    return {
        "name": name,
        "runs": [
            {
                "horizon": run[SPEC]["horizon"],
                "seed": run[SPEC]["seed"],
                "rate": run[SPEC]["train"]["lr"] if run["steps"] else None,
                **kept(run, *KEPT),
            }
            for run in runs
        ],
        **{kind: {measure: _by_horizon(runs, found, measure) for measure in ("mse", "mae")}
           for kind, found in errors.items()},
    }  # fmt: skip


def _by_horizon(runs: list[Result], errors: list[Result], measure: str) -> Result:
    by_horizon: dict[str, list[float]] = {}
    by_seed: dict[int, list[float]] = {}
    for run, error in zip(runs, errors, strict=True):
        value = math.nan if error[measure] is None else error[measure]  # a file has no number that is not finite
        by_horizon.setdefault(str(run[SPEC]["horizon"]), []).append(value)
        by_seed.setdefault(run[SPEC]["seed"], []).append(value)
    spread = {horizon: mean_with_spread(found) for horizon, found in by_horizon.items()}
    return {**spread, "mean": mean_with_spread([mean(found) for found in by_seed.values()])}


def lines(result: Result) -> list[str]:
    """Write a table of test errors for each table that was read: a row for each horizon and their mean."""
    written = []
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
        written += ["", f"{table['table']}: test MSE and MAE on scaled values", *aligned(head, body)]
        written += [f"note: {note}" for note in table["notes"]]
    return written[1:]


def _cell(found: Result) -> str:
    return f"{found['mean']:.3f}" + ("" if found["sd"] is None else f"±{found['sd']:.3f}")
