"""titans evaluate: what models can do, measured."""

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from titans_lm.commands.show import say, write_result
from titans_lm.compare.perplexity_settings import PerplexitySettings
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.task_settings import (
    BabiLongTask,
    CopyTask,
    LookupTask,
    NeedleTask,
    PhoneBookTask,
    RecallTask,
    TaskSettings,
    TrackingTask,
)
from titans_lm.train.settings import as_options


@dataclass(frozen=True, kw_only=True)
class Questions(QuestionSettings):
    """Ask trained models lm-eval's tasks (--tasks piqa), or files of questions scored as lm-eval does (--local DIR).

    Begin with `titans evaluate lm-eval runs/first --tasks piqa arc_easy --limit 100`.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")] = ()
    """Run folders, checkpoints, or folders of saved models: ours, or any causal language model of Hugging Face."""


Evaluated = (
    Annotated[PerplexitySettings, tyro.conf.subcommand("perplexity", default=PerplexitySettings())]
    | Annotated[RecallTask, tyro.conf.subcommand("mqar", default=RecallTask())]
    | Annotated[CopyTask, tyro.conf.subcommand("copy", default=CopyTask())]
    | Annotated[LookupTask, tyro.conf.subcommand("lookup", default=LookupTask())]
    | Annotated[PhoneBookTask, tyro.conf.subcommand("phonebook", default=PhoneBookTask())]
    | Annotated[TrackingTask, tyro.conf.subcommand("tracking", default=TrackingTask())]
    | Annotated[NeedleTask, tyro.conf.subcommand("needle", default=NeedleTask())]
    | Annotated[BabiLongTask, tyro.conf.subcommand("babilong", default=BabiLongTask())]
    | Annotated[Questions, tyro.conf.subcommand("lm-eval", default=Questions())]
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure what models can do: books by position, recall, tracking, needles, facts in books, lm-eval's tasks."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Evaluated], tyro.conf.arg(name="")] = tyro.MISSING


def command_line(settings: TaskSettings) -> str:
    """Write the command that the settings came from."""
    told = replace(settings, json=None, quiet=False)
    return shlex.join(["titans", "evaluate", settings.command, *as_options(told, type(settings)())])


def questions_command_line(settings: QuestionSettings) -> str:
    """Write the command that the settings of questions came from."""
    told = replace(settings, models=(), json=None, samples=None, quiet=False)
    words = ["titans", "evaluate", settings.command, *settings.models, *as_options(told, type(settings)())]
    return shlex.join(words)


def run_evaluate(command: Evaluate) -> None:
    settings = command.what
    tell = (lambda _: None) if settings.quiet else say
    if isinstance(settings, PerplexitySettings):
        read_books(settings, tell)
    elif isinstance(settings, Questions):
        ask_questions(settings, tell)
    else:
        train_on_task(settings, tell)


def train_on_task(settings: TaskSettings, tell: Callable[[str], None]) -> None:
    from titans_lm.bench.scored import guessed, lines
    from titans_lm.compare.tasks import FILE, run_task

    result = run_task(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join([*lines(result), guessed(result)]))
    tell(f"numbers in {settings.out / FILE}")


def read_books(settings: PerplexitySettings, tell: Callable[[str], None]) -> None:
    from titans_lm.bench.positions import lines
    from titans_lm.compare.perplexity import FILE, command_line, run_perplexity

    result = run_perplexity(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join(lines(result)))
    tell(f"numbers in {settings.out / FILE}")


def ask_questions(command: Questions, tell: Callable[[str], None]) -> None:
    from titans_lm.bench.answered import lines
    from titans_lm.compare.questions import run_questions

    names = [field.name for field in dataclasses.fields(QuestionSettings)]
    settings = QuestionSettings(**{name: getattr(command, name) for name in names})
    result = run_questions(settings, questions_command_line(settings), tell)
    tell("\n".join(lines(result)))
    if settings.json is not None:
        tell(f"numbers in {settings.json}")
