"""What `titans forecast train` and `titans forecast evaluate` run."""

from pathlib import Path
from typing import Any

from titans_lm.compare.jobs import Say, run_job
from titans_lm.forecast.jobs import check, evaluate, training_job
from titans_lm.forecast.report import FILE, collected
from titans_lm.forecast.saved import MODEL
from titans_lm.forecast.settings import EvaluateForecasters, TrainForecaster
from titans_lm.train.files import write_json
from titans_lm.train.settings import written_command


def train_forecaster(settings: TrainForecaster, say: Say) -> dict[str, Any]:
    """Fit a model to a table, test it once, and leave it in OUT/model; stopped, the same call goes on.

    Raises ValueError for a table, a model or a folder that will not do.
    """
    job = training_job(settings)
    data, model = job.prepare()
    check(job.who, data)
    for note in data.notes:
        say(f"note: {note}")
    counts = ", ".join(f"{count:,} {part}" for part, count in data.counts.items())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{data.table.name}: {len(data.table.values):,} rows of {len(data.table.channels)} channels; windows: {counts}")
    say(f"{job.name}: {parameters:,} parameters; run folder {job.folder}")
    result = run_job(job)
    say(job.told(result))
    return {"command": train_command(settings), "model": str(job.folder / MODEL), **result}


def evaluate_forecasters(settings: EvaluateForecasters, say: Say) -> dict[str, Any]:
    """Fit and test all models on all tables and horizons, and write OUT/results.json; stopped, the same call goes on.

    Raises ValueError for a table or a model that will not do, before anything is trained.
    """
    result = collected(settings, evaluate_command(settings), evaluate(settings, say))
    write_json(settings.out / FILE, result)
    return result


def train_command(settings: TrainForecaster) -> str:
    """Write the command that the settings came from."""
    return _command("train", [settings.data] if settings.data else [], settings, None)


def evaluate_command(settings: EvaluateForecasters) -> str:
    """Write the command that the settings came from."""
    return _command("evaluate", list(settings.data), settings, ())


def _command(word: str, paths: list[Path], settings: Any, none: Any) -> str:
    return written_command("forecast", word, *map(str, paths), settings=settings, data=none, json=None, quiet=False)
