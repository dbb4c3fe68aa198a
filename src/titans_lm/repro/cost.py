"""What steps take: minutes on two CPU cores from speeds that were measured, GPU-hours as `titans train --dry-run` does.

Speeds are tokens per second of one core of an AMD EPYC that was busy with other things too, in training; reading
without gradients is taken to be three times as fast. Those of tables 3 and 4 are per second that one core of an Intel
Xeon (Sapphire Rapids) spent on it, in steps of single models on random windows and sequences.
"""

from dataclasses import replace
from functools import cache

from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.settings import CompareSettings, contender, variant
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.config import BackboneConfig
from titans_lm.data.tasks.task import Task
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics.settings import EvaluateSettings
from titans_lm.repro.sets import DNA, SERIES, Classes, Series, set_of
from titans_lm.repro.steps import Plan, Result, Step
from titans_lm.train.settings import LanguageSettings

TEXT_SPEED = {
    "lmm": 2800, "mac": 2200, "mag": 2600, "mal": 2400, "sliding": 7800, "attention": 6700, "llama": 5500,
    "mamba2": 1400, "lmm:memory_depth=1": 4800, "lmm:memory_depth=3": 2200, "lmm:memory_depth=4": 1800,
}  # fmt: skip
"""Width 128, 3 blocks, a hidden layer of the memory twice as wide as its input."""
TASK_SPEED = {
    "lmm": 10_700, "mac": 8600, "mag": 8700, "mal": 8700, "sliding": 40_000, "attention": 40_000,
    "lmm:memory_depth=1": 30_000,
}  # fmt: skip
"""Width 64, 2 blocks, the same memory, rows of 128 tokens."""
WINDOW_SPEED = {"lmm": 6600, "attention": 18_000, "patchtst": 25_000, "dlinear": 110_000, "mamba": 650}
"""Windows of one channel: 96 rows in six patches, one block of width 32, a memory of one layer; the mean over horizons
of 96 and 720. Closed forms take seconds, and are not counted."""
NUCLEOTIDE_SPEED = {"lmm": 24_000, "attention": 32_000, "words": 150_000, "cnn": 400_000}
"""Nucleotides of two blocks of width 64 with embedded words, of those words alone, or of the CNN, in rows of 251. Words
that are counted take seconds."""
READING = 3.0
"""How much faster a model reads than it trains."""
QUESTION_BYTES = 2_750
"""Bytes of all choices of an item, added up over the tasks of table 1."""
FLOPS = 989e12 * 0.05
"""FLOP/s that a GPU is taken to reach: what `titans train --dry-run` assumes."""


def plan_minutes(plan: Plan) -> float:
    """Estimate the minutes of a plan on two CPU cores."""
    return sum(step_minutes(step) for step in plan.steps)


def step_minutes(step: Step) -> float:
    """Estimate the minutes of a step on two CPU cores."""
    s = step.settings
    match s:
        case CompareSettings():
            per_step = s.train.batch_size * s.train.seq_len
            tried = len(s.rates) * s.tune_steps * per_step if len(s.rates) > 1 else 0
            tokens = tried + len(s.seeds) * (s.train.steps * per_step + s.test_bytes / READING)
            return sum(tokens / _speed(TEXT_SPEED, name) for name in s.models) / s.jobs / 60
        case TaskSettings():
            taught = s.train.steps * s.train.batch_size * mean_length(s.taught)
            tested = s.examples * sum(task.length for task in s.tested.values())
            tokens = len(s.seeds) * (taught + tested / READING)
            return sum(tokens / _speed(TASK_SPEED, name) for name in s.models) / s.jobs / 60
        case QuestionSettings():
            # One after another, on both cores: no faster than one, in doubt.
            count = (s.limit or 5_000) * QUESTION_BYTES / READING
            names = [name.rpartition("/")[2].rpartition("-seed")[0] for name in s.models]
            return sum(count / _speed(TEXT_SPEED, name) for name in names) / 60
        case EvaluateForecasters():
            return forecast_minutes(s)
        case EvaluateSettings():
            return dna_minutes(s)
    return step.minutes or 0.0


def forecast_minutes(s: EvaluateForecasters) -> float:
    """Estimate the minutes of an evaluation of forecasters on tables of the paper, as long as the official ones."""
    seconds = 0.0
    for path in s.data:
        one = set_of(path, SERIES)
        assert isinstance(one, Series)
        for horizon in s.horizons:
            train, validation, test = one.windows(s.lookback, horizon)
            trained = len(s.seeds) + max(0, len(s.rates) - 1)  # the first seed with each rate; one of these counts
            windows = trained * s.train.epochs * (train + validation / READING) + len(s.seeds) * test / READING
            rows = windows * one.channels
            seconds += sum(rows / WINDOW_SPEED[name] for name in s.models if name in WINDOW_SPEED)
    return seconds / s.jobs / 60


def dna_minutes(s: EvaluateSettings) -> float:
    """Estimate the minutes of a cross-validation on a set of the paper; a file's size is taken for its nucleotides."""
    assert s.data is not None
    one = set_of(s.data, DNA)
    assert isinstance(one, Classes)
    tried = len(s.rates) * s.tune_steps * s.folds if len(s.rates) > 1 else 0
    steps = tried + s.train.steps * s.folds * len(s.seeds)
    length = min(s.train.max_length or one.longest, one.longest)
    tested = s.data.stat().st_size if s.data.is_file() else one.sequences * length
    nucleotides = steps * s.train.batch_size * length + len(s.seeds) * tested / READING
    return sum(nucleotides / NUCLEOTIDE_SPEED[name] for name in s.models if name in NUCLEOTIDE_SPEED) / s.jobs / 60


def _speed(speeds: dict[str, int], name: str) -> int:
    return speeds.get(name, speeds.get(name.partition(":")[0], speeds["lmm"]))


def mean_length(tasks: list[Task]) -> float:
    """Give the mean length of rows, where facts alone count as 64 tokens."""
    return sum(task.length or 64 for task in tasks) / len(tasks)


def step_hours(step: Step) -> float | None:
    """Estimate the GPU-hours of a step by its matrix products; None for what is neither training nor counted.

    Baselines are counted as full attention of ours with as many parameters; those of the Mamba family are not. Tests
    and trials of learning rates are not counted.
    """
    s = step.settings
    match s:
        case LanguageSettings():
            found = training(s)
            return None if found is None else found["gpu_hours"]
        case CompareSettings():
            tokens = s.train.steps * s.train.batch_size * s.train.seq_len * len(s.seeds)
            return sum(_hours(_model(s, name), s.train.seq_len, tokens) for name in s.models)
        case TaskSettings():
            length = round(mean_length(s.taught))
            tokens = s.train.steps * s.train.batch_size * length * len(s.seeds)
            return sum(_hours(_model(s, name), length, tokens) for name in s.models)
    return None


@cache
def training(settings: LanguageSettings) -> Result | None:
    """Estimate a training run; a baseline as full attention of its size, None for one of the Mamba family."""
    from titans_lm.recipes.estimate import estimate_training

    if settings.baseline is None:
        return estimate_training(settings)
    if settings.baseline.startswith("mamba"):
        return None
    parameters = estimate_training(replace(settings, baseline=None))["parameters"]
    model = replace(settings.model, architecture="attention")
    return estimate_training(replace(settings, baseline=None, model=model, parameters=parameters))


def _model(s: CompareSettings | TaskSettings, name: str) -> BackboneConfig:
    shared = replace(s.train, model=replace(s.train.model, architecture="lmm"))
    if variant(name).is_ours:
        return contender(shared, name, None).model
    return replace(shared.model, architecture="attention")


def _hours(model: BackboneConfig, length: int, tokens: float) -> float:
    from titans_lm.bench.flops import model_flops

    return 3.0 * sum(model_flops(model, 259, length).values()) * tokens / FLOPS / 3600
