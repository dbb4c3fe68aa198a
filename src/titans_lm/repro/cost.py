"""What steps take on two CPU cores, from speeds that were measured.

Speeds are tokens per second of one core of an AMD EPYC that was busy with other things too, in training; reading
without gradients is taken to be three times as fast. Those of tables 3 and 4 are per second that one core of an Intel
Xeon (Sapphire Rapids) spent on it, in steps of single models on random windows and sequences.
"""

from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.settings import CompareSettings
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.data.tasks.task import Task
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics.settings import EvaluateSettings
from titans_lm.repro.sets import DNA, SERIES, Classes, Series, set_of
from titans_lm.repro.steps import Plan, Step

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


def plan_minutes(plan: Plan) -> float:
    """Estimate the minutes of a plan on two CPU cores."""
    return sum(step_minutes(step) for step in plan.steps)


def step_minutes(step: Step) -> float:
    """Estimate the minutes of a step on two CPU cores."""
    s = step.settings
    match s:
        case CompareSettings() | TaskSettings():
            trained, tested = read_tokens(s)
            speeds = TEXT_SPEED if isinstance(s, CompareSettings) else TASK_SPEED
            return sum((trained + tested / READING) / _speed(speeds, name) for name in s.models) / s.jobs / 60
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


def read_tokens(s: CompareSettings | TaskSettings) -> tuple[float, float]:
    """Count the tokens that each model is trained on, trials of learning rates too, and those that it is tested on."""
    if isinstance(s, CompareSettings):
        row, tested = s.train.seq_len, s.test_bytes
    else:
        row, tested = mean_length(s.taught), s.examples * sum(task.length for task in s.tested.values())
    steps = len(s.seeds) * s.train.steps + (len(s.rates) * s.tune_steps if len(s.rates) > 1 else 0)
    return steps * s.train.batch_size * row, len(s.seeds) * tested


def forecast_minutes(s: EvaluateForecasters) -> float:
    """Estimate the minutes of an evaluation of forecasters on tables of the paper, as long as the official ones."""
    seconds = 0.0
    for path in s.data:
        one = set_of(path, SERIES)
        assert isinstance(one, Series)
        for horizon in s.horizons:
            trained, tested = forecast_rows(s, one, horizon)
            rows = trained + tested / READING
            seconds += sum(rows / WINDOW_SPEED[name] for name in s.models if name in WINDOW_SPEED)
    return seconds / s.jobs / 60


def forecast_rows(s: EvaluateForecasters, one: Series, horizon: int) -> tuple[int, int]:
    """Count the windows of one channel that a forecaster is trained on, and those that it reads besides."""
    train, validation, test = one.windows(s.lookback, horizon)
    runs = len(s.seeds) + max(0, len(s.rates) - 1)  # the first seed with each rate; one of these counts
    epochs = runs * s.train.epochs
    return epochs * train * one.channels, (epochs * validation + len(s.seeds) * test) * one.channels


def dna_minutes(s: EvaluateSettings) -> float:
    """Estimate the minutes of a cross-validation on a set of the paper; a file's size is taken for its nucleotides."""
    assert s.data is not None
    one = set_of(s.data, DNA)
    assert isinstance(one, Classes)
    length = min(s.train.max_length or one.longest, one.longest)
    tested = s.data.stat().st_size if s.data.is_file() else one.sequences * length
    nucleotides = classifier_steps(s) * s.train.batch_size * length + len(s.seeds) * tested / READING
    return sum(nucleotides / NUCLEOTIDE_SPEED[name] for name in s.models if name in NUCLEOTIDE_SPEED) / s.jobs / 60


def classifier_steps(s: EvaluateSettings) -> int:
    """Count the steps of a classifier over all folds and seeds, with its trials of learning rates."""
    tried = len(s.rates) * s.tune_steps if len(s.rates) > 1 else 0
    return s.folds * (tried + s.train.steps * len(s.seeds))


def _speed(speeds: dict[str, int], name: str) -> int:
    return speeds.get(name, speeds.get(name.partition(":")[0], speeds["lmm"]))


def mean_length(tasks: list[Task]) -> float:
    """Give the mean length of rows, where facts alone count as 64 tokens."""
    return sum(task.length or 64 for task in tasks) / len(tasks)
