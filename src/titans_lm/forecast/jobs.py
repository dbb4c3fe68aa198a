"""Runs: a model, a table, a horizon and a seed; fitted on training, chosen on validation, tested once.

A trial of a learning rate is such a run as far as it is fitted: where its rate is chosen the run that counts goes on
from there, and is tested; where it is not, the test part was never looked at.
"""

import dataclasses
import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from titans_lm.compare.jobs import Result, Say, best_rate, work
from titans_lm.forecast.contenders import Contender, contender, make_model
from titans_lm.forecast.fitting import fit_model
from titans_lm.forecast.model import Shape
from titans_lm.forecast.saved import MODEL, save_forecaster
from titans_lm.forecast.score import score, score_streamed
from titans_lm.forecast.settings import EvaluateForecasters, ForecastSettings, TrainForecaster
from titans_lm.forecast.table import read_table
from titans_lm.forecast.windows import Prepared, prepare, prepared
from titans_lm.train.device import choose_device
from titans_lm.train.log import ProgressReport
from titans_lm.train.run import RunFolder, begun_with
from titans_lm.train.settings import plain_settings

TRIALS = "trials"
"""Folder of the results of trials, beside the runs."""


@dataclass(frozen=True)
class ForecastJob:
    """A model to fit to a table for one horizon from one seed, and to test."""

    who: Contender
    shared: ForecastSettings
    data: Path
    horizon: int
    seed: int
    run: Path
    """Folder of the run."""
    counts: bool = True
    """Whether it is tested; else it is a trial of its learning rate, which may diverge."""
    streaming: bool = False
    warm_up: int = 0
    progress: bool = False
    """Whether to show how far training is."""

    @property
    def name(self) -> str:
        return self.who.name

    @property
    def folder(self) -> Path:
        """Where the result goes: a trial's does not stand in the way of that of the run."""
        return self.run if self.counts else self.run.parent / TRIALS / self.run.name

    @property
    def rate(self) -> float:
        return self.who.train.lr

    def asked(self) -> Result:
        """Tell what the result depends on: all but where it is kept."""
        return {
            "name": self.name,
            "table": self.data.stem,
            "contents": hashlib.blake2b(self.data.read_bytes(), digest_size=16).hexdigest(),
            "reading": plain_settings(self.shared.table),
            "lookback": self.shared.lookback,
            "horizon": self.horizon,
            "seed": self.seed,
            "net": plain_settings(self.who.net),
            "train": plain_settings(self.who.train),
            "streaming": self.streaming,
            "warm_up": self.warm_up,
        }

    def begun(self) -> Result | None:
        """Tell what a run that is not done was begun with."""
        return begun_with(self.run)

    def prepare(self) -> tuple[Prepared, torch.nn.Module]:
        """Read the table and make the model; ValueError for what does not go together."""
        data = prepared(self.data, self.shared.table, self.shared.lookback, self.horizon)
        return data, fresh_model(self.who, data, self.seed)

    def train(self) -> Result:
        """Fit it, from where it stopped if it did; what counts is tested once then, and saved."""
        data, model = self.prepare()
        run = RunFolder.open(self.run) if self.begun() else RunFolder.create(self.run, self.asked())
        progress = ProgressReport(title=self.name) if self.progress else None
        fitted = fit_model(model, data, self.who.train, seed=self.seed, run=run, progress=progress)
        found: Result = {
            "validation": fitted.validation._asdict(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": fitted.steps,
            "best_step": fitted.best_step,
            "seconds": fitted.seconds,
            "skipped_steps": fitted.skipped,
            "ridge": fitted.penalty,
            "windows": data.counts,
        }
        if not self.counts:
            return found
        found |= self._tested(model, data)
        save_forecaster(self.run / MODEL, model, self.who, data, found)
        return {**found, "notes": list(data.notes), "rows": len(data.table.values)}

    def _tested(self, model: torch.nn.Module, data: Prepared) -> Result:
        device = choose_device(self.who.train.device)
        found: Result = {"test": score(model, data.parts["test"], device)._asdict()}
        if self.streaming and self.who.has_memory:
            found["streaming"] = {
                kind: score_streamed(model, data, "test", kind, device, warm_up=self.warm_up)._asdict()
                for kind in ("carried", "still")
            }
        return found

    def told(self, result: Result) -> str:
        """Phrase what came out."""
        shown = [f"{part} MSE {_shown(result[part]['mse'])}" for part in ("validation", "test") if part in result]
        if self.counts:
            shown[-1] += f" MAE {_shown(result['test']['mae'])}"
        spent = f", {result['steps']:,} steps in {result['seconds'] / 60:.1f} minutes" if result["steps"] else ""
        return f"{', '.join(shown)}; {result['parameters']:,} parameters{spent}"


def _shown(error: float | None) -> str:
    """Write an error; one that is no number stands as None in a file."""
    return "not a number" if error is None else f"{error:.4f}"


def fresh_model(who: Contender, data: Prepared, seed: int) -> torch.nn.Module:
    """Make a model for a table's windows, with the weights that its seed draws."""
    torch.manual_seed(seed)
    windows = data.parts["train"]
    return make_model(who.base, who.net, Shape(windows.lookback, windows.horizon, windows.channels), data.season)


def training_job(settings: TrainForecaster) -> ForecastJob:
    """Make the run of `titans forecast train`; ValueError without a table."""
    if settings.data is None:
        raise ValueError("got no table; expected a CSV file: titans forecast train DATA.csv")
    _check_tables((settings.data,))
    who = contender(settings.model, settings)
    return ForecastJob(
        who, settings, settings.data, settings.horizon, settings.seed, settings.out, progress=not settings.quiet
    )


def evaluate(settings: EvaluateForecasters, say: Say) -> dict[str, list[Result]]:
    """Do all runs of an evaluation, and give the results that count by table, in order; what was done before is read.

    Every model is made once for every table and horizon before the first is trained, so that what will not do is told
    at once. With several learning rates, the first seed is trained with each, but for models whose names say their own;
    the best on validation is that of all seeds, and only then is anything tested.
    """
    if not settings.data:
        raise ValueError("got no table; expected a CSV file or more: titans forecast evaluate DATA.csv")
    _check_tables(settings.data)
    who = [contender(name, settings) for name in settings.models]
    for path in settings.data:
        table = read_table(path, settings.table)
        for horizon in settings.horizons:
            data = prepare(table, settings.table, settings.lookback, horizon)
            for one in who:
                check(one, data)
    chosen = _with_rates(settings, who, say)
    results = work([job for group in chosen.values() for job in group], settings.jobs, say)
    numbered = iter(results)
    return {str(path): [next(numbered) for _ in group] for path, group in chosen.items()}


def check(who: Contender, data: Prepared) -> None:
    """Try what would fail after hours: the model, what it reads while training, and rows enough for that.

    ValueError for what will not do.
    """
    fresh_model(who, data, 0)
    if who.trained:
        if who.train.windows > 1 and not who.has_memory:
            raise ValueError(
                f"got windows={who.train.windows} for {who.name!r}, which has no memory to carry between windows; "
                "expected windows=1, or windows=… in the names of models that have one"
            )
        data.parts["train"].spanning(who.train.windows)


def _with_rates(settings: EvaluateForecasters, who: list[Contender], say: Say) -> dict[Path, list[ForecastJob]]:
    """List the runs that count, by table; where there are learning rates to choose from, each with its best."""
    first = settings.seeds[0]
    places = [(path, horizon, one) for path in settings.data for horizon in settings.horizons for one in who]
    rated = [place for place in places if settings.rates and place[2].trained and not place[2].own_rate]
    tried = {place: [_trial(settings, rate, *place) for rate in settings.rates] for place in rated}
    if len(settings.rates) == 1:
        best = dict.fromkeys(rated, settings.rates[0])
    else:
        results = iter(work([job for jobs in tried.values() for job in jobs], settings.jobs, say))
        best = {place: _best_rate(place[2].name, jobs, [next(results) for _ in jobs]) for place, jobs in tried.items()}
    chosen: dict[Path, list[ForecastJob]] = {path: [] for path in settings.data}
    for path, horizon, one in places:
        rate = best.get((path, horizon, one))
        fitted = one if rate is None else _at_rate(one, rate)
        for seed in settings.seeds if one.trained else (first,):
            chosen[path].append(_job(settings, fitted, path, horizon, seed))
    return chosen


def _trial(settings: EvaluateForecasters, rate: float, path: Path, horizon: int, who: Contender) -> ForecastJob:
    job = _job(settings, _at_rate(who, rate), path, horizon, settings.seeds[0])
    return dataclasses.replace(job, counts=False)


def _best_rate(name: str, jobs: list[ForecastJob], results: list[Result]) -> float:
    """Choose the rate that is best on validation; one that diverged, or forecasts no number, is not taken."""
    tried: list[Result] = []
    for job, result in zip(jobs, results, strict=True):
        error = result.get("validation", {}).get("mse")
        tried.append({"rate": job.rate, "mse": error if error is not None and math.isfinite(error) else None})
    return best_rate(f"{name} at horizon {jobs[0].horizon} of {jobs[0].data.stem}", tried, "mse")


def _at_rate(who: Contender, rate: float) -> Contender:
    return who._replace(train=dataclasses.replace(who.train, lr=rate))


def _job(settings: EvaluateForecasters, who: Contender, path: Path, horizon: int, seed: int) -> ForecastJob:
    named = re.sub(r"[^\w.=,-]", "-", f"{who.name}-{horizon}")
    if who.trained:
        named += f"-lr{who.train.lr:g}-seed{seed}"
    streaming = settings.streaming and who.has_memory
    return ForecastJob(
        who, settings, path, horizon, seed, settings.out / path.stem / named, streaming=streaming,
        warm_up=settings.warm_up if streaming else 0,
    )  # fmt: skip


def _check_tables(paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.is_file():
            raise ValueError(f"got the table {str(path)!r}, which is no file; expected a CSV file")
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):
        raise ValueError(f"got two tables of one name in {', '.join(map(str, paths))}; expected names that differ")
