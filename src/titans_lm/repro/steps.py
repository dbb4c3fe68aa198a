"""What a plan is made of: steps, each one command, and tables whose cells say which of them a number comes from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titans_lm.bench.settings import BenchSettings, ModelSettings, OpsSettings, ScalingSettings
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.settings import CompareSettings
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics import settings as dna
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.recipes.find import read_recipe
from titans_lm.train.settings import LanguageSettings, as_options, merge_settings

Result = dict[str, Any]
BENCHES: dict[type[BenchSettings], str] = {OpsSettings: "ops", ModelSettings: "model", ScalingSettings: "scaling"}
COMPARED, SCORED = "compare.json", "results.json"
"""Files that `titans compare` and the evaluations of `titans` write into their folders."""
COMMANDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    CompareSettings: (("compare",), ("data",)),
    PrepareSettings: (("prepare",), ("source",)),
    EvaluateForecasters: (("forecast", "evaluate"), ("data",)),
    dna.EvaluateSettings: (("genomics", "evaluate"), ("data",)),
    dna.TrainSettings: (("genomics", "train"), ("data",)),
    dna.PredictSettings: (("genomics", "predict"), ("model", "data")),
}
"""Of settings the words of their command, and those that stand behind the words without a name."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a plan."""

    name: str
    what: str
    """What it measures, in words."""
    settings: Any
    """Settings of a comparison, a task, questions, a benchmark, of forecasters or classifiers of DNA, of training or of
    preparing text."""
    recipe: str | None = None
    """Recipe that the settings of training lie over."""
    minutes: float | None = None
    """Minutes on two cores, where they do not follow from speeds."""

    @property
    def argv(self) -> list[str]:
        """Write the step as the words behind `titans`."""
        s = self.settings
        if isinstance(s, LanguageSettings):
            default = LanguageSettings() if self.recipe is None else from_recipe(self.recipe)
            options = as_options(replace(s, data=None), default)
            return ["train", *([self.recipe] if self.recipe else []), str(s.data), *options]
        words, bare = _command(s)
        default = type(s)()
        given = [getattr(s, name) for name in bare]
        told = [str(one) for value in given for one in (value if isinstance(value, tuple) else (value,))]
        return [*words, *told, *as_options(replace(s, **{name: getattr(default, name) for name in bare}), default)]

    @property
    def file(self) -> Path:
        """File that is there when the step is done."""
        s = self.settings
        match s:
            case CompareSettings():
                return s.out / COMPARED
            case TaskSettings() | EvaluateForecasters() | dna.EvaluateSettings():
                return s.out / SCORED
        assert s.json is not None
        return s.json


def _command(s: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give the words of the command that settings are those of, and which of them stand behind without a name."""
    match s:
        case TaskSettings():
            return ("evaluate", s.command), ()
        case QuestionSettings():
            return ("evaluate", s.command), ("models",)
        case BenchSettings():
            return ("bench", BENCHES[type(s)]), ()
    if type(s) not in COMMANDS:
        raise TypeError(f"no command for {type(s).__name__}")
    return COMMANDS[type(s)]


def from_recipe(name: str) -> LanguageSettings:
    """Give the settings of a recipe over the defaults of training."""
    return merge_settings(LanguageSettings(), read_recipe(name))


@dataclass(frozen=True)
class Found:
    """A number of ours: the mean over seeds, and the standard deviation where there are several."""

    mean: float
    sd: float | None = None
    seeds: int = 1


Read = Callable[[Result, str], Found | None]
"""Takes a number from the result of a step, for the contender of a row; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: what of the paper stands in it, and where our number comes from."""

    title: str
    """The paper's name for it only where ours is the same measure."""
    paper: str | None = None
    step: str | None = None
    read: Read | None = None
    digits: int = 1


@dataclass(frozen=True)
class Row:
    """A row: a model, as it is called here, in the paper, and in the results of the steps."""

    title: str
    paper: str | None
    contender: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that comes out."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run for a table of the paper at a scale, and how that differs from the paper."""

    table: str
    scale: str
    steps: tuple[Step, ...]
    tables: tuple[Table, ...] = ()
    differs: tuple[str, ...] = ()
    """How the setting differs from the paper's, a sentence each."""
    out: Path

    @property
    def runs(self) -> bool:
        """Whether it is to be run by `titans repro`, and not by hand."""
        return self.scale != "paper"
