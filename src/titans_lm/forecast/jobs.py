"""Runs: a model, a table, a horizon and a seed; fitted on training, chosen on validation, tested once."""

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from titans_lm.compare.jobs import Result, Say, work
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


@dataclass(frozen=True)
class ForecastJob:
    """A model to fit to a table for one horizon from one seed, and to test."""

    who: Contender
    shared: ForecastSettings
    data: Path
    horizon: int
    seed: int
    folder: Path
    counts: bool = True
    streaming: bool = False
    warm_up: int = 0
    progress: bool = False
    """Whether to show how far training is."""

    @property
    def name(self) -> str:
        return self.who.name

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
        return begun_with(self.folder)

    def prepare(self) -> tuple[Prepared, torch.nn.Module]:
        """Read the table and make the model; ValueError for what does not go together."""
        data = prepared(self.data, self.shared.table, self.shared.lookback, self.horizon)
        return data, fresh_model(self.who, data, self.seed)

    def train(self) -> Result:
        """Fit it, from where it stopped if it did, test it once, and save it."""
        data, model = self.prepare()
        run = RunFolder.open(self.folder) if self.begun() else RunFolder.create(self.folder, self.asked())
        progress = ProgressReport(title=self.name) if self.progress else None
        fitted = fit_model(model, data, self.who.train, seed=self.seed, run=run, progress=progress)
        device = choose_device(self.who.train.device)
        found: Result = {
            "validation": fitted.validation._asdict(),
            "test": score(model, data.parts["test"], device)._asdict(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": fitted.steps,
            "best_step": fitted.best_step,
            "seconds": fitted.seconds,
            "skipped_steps": fitted.skipped,
            "ridge": fitted.penalty,
            "windows": data.counts,
        }
        if self.streaming and self.who.has_memory:
            found["streaming"] = {
                kind: score_streamed(model, data, "test", kind, device, warm_up=self.warm_up)._asdict()
                for kind in ("carried", "still")
            }
        save_forecaster(self.folder / MODEL, model, self.who, data, found)
        return {**found, "notes": list(data.notes), "rows": len(data.table.values)}

    def told(self, result: Result) -> str:
        """Phrase what came out."""
        test, validation = result["test"], result["validation"]
        spent = f", {result['steps']:,} steps in {result['seconds'] / 60:.1f} minutes" if result["steps"] else ""
        return (
            f"validation MSE {validation['mse']:.4f}, test MSE {test['mse']:.4f} MAE {test['mae']:.4f}; "
            f"{result['parameters']:,} parameters{spent}"
        )


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
    at once. With several learning rates, the first seed is trained with each; the best on validation is that of all
    seeds. The test part decides nothing.
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
                _check(one, data)
    chosen = _with_rates(settings, who, say)
    results = work([job for group in chosen.values() for job in group], settings.jobs, say)
    numbered = iter(results)
    return {str(path): [next(numbered) for _ in group] for path, group in chosen.items()}


def _check(who: Contender, data: Prepared) -> None:
    """Try what would fail after hours: the model, and rows enough for what it reads while training."""
    fresh_model(who, data, 0)
    if who.trained:
        data.parts["train"].spanning(who.train.windows)


def _with_rates(settings: EvaluateForecasters, who: list[Contender], say: Say) -> dict[Path, list[ForecastJob]]:
    """List the runs that count, by table; where there are learning rates to choose from, each with its best."""
    first = settings.seeds[0]
    places = [(path, horizon, one) for path in settings.data for horizon in settings.horizons for one in who]
    tried = {
        (path, horizon, one.name): [
            _job(settings, _at_rate(one, rate), path, horizon, first) for rate in settings.rates
        ]
        for path, horizon, one in places
        if one.trained and settings.rates
    }  # fmt: skip
    results = iter(work([job for jobs in tried.values() for job in jobs], settings.jobs, say))
    best: dict[tuple[Path, int, str], Contender] = {}
    for place, jobs in tried.items():
        found = [(next(results)["validation"]["mse"], job.who) for job in jobs]
        best[place] = min(found, key=lambda one: one[0])[1]
    chosen: dict[Path, list[ForecastJob]] = {path: [] for path in settings.data}
    for path, horizon, one in places:
        fitted = best.get((path, horizon, one.name), one)
        for seed in settings.seeds if one.trained else (first,):
            chosen[path].append(_job(settings, fitted, path, horizon, seed))
    return chosen


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
