"""titans evaluate: what models can do, measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro

from titans_lm.commands.show import say, write_result
from titans_lm.compare.perplexity_settings import PerplexitySettings
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.reread_settings import RereadSettings
from titans_lm.compare.ruler_settings import CommonWordsTask, VariablesTask
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
from titans_lm.train.options import written_command

Evaluated = (
    Annotated[PerplexitySettings, tyro.conf.subcommand("perplexity", default=PerplexitySettings())]
    | Annotated[RereadSettings, tyro.conf.subcommand("reread", default=RereadSettings())]
    | Annotated[RecallTask, tyro.conf.subcommand("mqar", default=RecallTask())]
    | Annotated[CopyTask, tyro.conf.subcommand("copy", default=CopyTask())]
    | Annotated[LookupTask, tyro.conf.subcommand("lookup", default=LookupTask())]
    | Annotated[PhoneBookTask, tyro.conf.subcommand("phonebook", default=PhoneBookTask())]
    | Annotated[TrackingTask, tyro.conf.subcommand("tracking", default=TrackingTask())]
    | Annotated[NeedleTask, tyro.conf.subcommand("needle", default=NeedleTask())]
    | Annotated[VariablesTask, tyro.conf.subcommand("variables", default=VariablesTask())]
    | Annotated[CommonWordsTask, tyro.conf.subcommand("common-words", default=CommonWordsTask())]
    | Annotated[BabiLongTask, tyro.conf.subcommand("babilong", default=BabiLongTask())]
    | Annotated[QuestionSettings, tyro.conf.subcommand("lm-eval", default=QuestionSettings())]
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure what models can do: books by position, passages read twice, recall, needles, lm-eval's tasks."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Evaluated], tyro.conf.arg(name="")] = tyro.MISSING


def command_line(settings: TaskSettings) -> str:
    """Write the command that the settings came from."""
    return written_command("evaluate", settings.command, settings=settings, json=None, quiet=False)


def questions_command_line(settings: QuestionSettings) -> str:
    """Write the command that the settings of questions came from."""
    unsaid = {"models": (), "json": None, "samples": None, "quiet": False}
    return written_command("evaluate", settings.command, *settings.models, settings=settings, **unsaid)


def run_evaluate(command: Evaluate) -> None:
    settings = command.what
    tell = (lambda _: None) if settings.quiet else say
    if isinstance(settings, PerplexitySettings):
        read_books(settings, tell)
    elif isinstance(settings, RereadSettings):
        read_again(settings, tell)
    elif isinstance(settings, QuestionSettings):
        ask_questions(settings, tell)
    else:
        train_on_task(settings, tell)


def train_on_task(settings: TaskSettings, tell: Callable[[str], None]) -> None:
    from titans_lm.compare.tasks import FILE, run_task
    from titans_lm.report.table import screen
    from titans_lm.report.tasks import guessed, tables

    result = run_task(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join([*screen(tables(result)), guessed(result)]))
    tell(f"numbers in {settings.out / FILE}")


def read_books(settings: PerplexitySettings, tell: Callable[[str], None]) -> None:
    from titans_lm.compare.perplexity import FILE, command_line, run_perplexity
    from titans_lm.report.books import tables
    from titans_lm.report.table import screen

    result = run_perplexity(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join(screen(tables(result))))
    tell(f"numbers in {settings.out / FILE}")


def read_again(settings: RereadSettings, tell: Callable[[str], None]) -> None:
    from titans_lm.compare.reread import FILE, command_line, run_reread
    from titans_lm.report.reread import tables
    from titans_lm.report.table import screen

    result = run_reread(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join(screen(tables(result))))
    tell(f"numbers in {settings.out / FILE}")


def ask_questions(settings: QuestionSettings, tell: Callable[[str], None]) -> None:
    from titans_lm.compare.questions import run_questions
    from titans_lm.report.lm_eval import tables
    from titans_lm.report.table import screen

    result = run_questions(settings, questions_command_line(settings), tell)
    tell("\n".join(screen(tables(result))))
    if settings.json is not None:
        tell(f"numbers in {settings.json}")
