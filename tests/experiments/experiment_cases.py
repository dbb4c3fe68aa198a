"""Experiments by their tasks, and their runs, for the tests of this room."""

from typing import Any

from titans_lm.experiments.runner import Run, final_runs, lr_trials
from titans_lm.experiments.settings import TASK_EXPERIMENTS, CompareSettings
from titans_lm.experiments.tasks import TaskJob, TrainedModel, task_job
from titans_lm.experiments.text import TextJob, text_job

RecallExperiment: Any = TASK_EXPERIMENTS["mqar"]
NeedleExperiment: Any = TASK_EXPERIMENTS["needle"]
VariablesExperiment: Any = TASK_EXPERIMENTS["variables"]
BabiLongExperiment: Any = TASK_EXPERIMENTS["babilong"]


def trials(settings: CompareSettings, size: int) -> list[TextJob]:
    return [text_job(settings, size, run) for run in lr_trials(settings)]


def finals(settings: CompareSettings, size: int, rates: dict[str, float]) -> list[TextJob]:
    return [text_job(settings, size, run) for run in final_runs(settings, rates)]


def _task_jobs(settings: Any, size: int | None, runs: list[Run]) -> list[TaskJob]:
    return [task_job(settings, size, run, TrainedModel.find(run.name)) for run in runs]


def task_trials(settings: Any, size: int | None) -> list[TaskJob]:
    return _task_jobs(settings, size, lr_trials(settings))


def task_finals(settings: Any, size: int | None, rates: dict[str, float]) -> list[TaskJob]:
    return _task_jobs(settings, size, final_runs(settings, rates))
