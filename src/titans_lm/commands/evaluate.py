"""titans evaluate: what models can do, measured."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from titans_lm.commands.show import Chosen, say, write_result
from titans_lm.experiments.reading_settings import GapSettings, PerplexitySettings, QuestionSettings, RereadSettings
from titans_lm.experiments.settings import TASK_EXPERIMENTS
from titans_lm.train.options import written_command

KINDS = {
    "perplexity": PerplexitySettings, "reread": RereadSettings, **TASK_EXPERIMENTS, "gap": GapSettings,
    "lm-eval": QuestionSettings,
}  # fmt: skip
"""Every evaluation by its word behind `titans evaluate`."""
Evaluated: Any = functools.reduce(
    operator.or_, (Annotated[kind, tyro.conf.subcommand(name, default=kind())] for name, kind in KINDS.items())
)


@dataclass(frozen=True, kw_only=True)
class Evaluate(Chosen):
    """Measure what models can do: books by position, passages read twice, recall, needles, lm-eval's tasks."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Evaluated], tyro.conf.arg(name="")] = tyro.MISSING


def command_line(settings: Any) -> str:
    """Write the command that the settings came from."""
    word = next(name for name, kind in KINDS.items() if type(settings) is kind)
    if word in TASK_EXPERIMENTS:
        return written_command("evaluate", word, settings=settings)
    unsaid = {"models": (), **({"samples": None} if word == "lm-eval" else {})}
    return written_command("evaluate", word, *settings.models, settings=settings, **unsaid)


def run_evaluate(command: Evaluate) -> None:
    from titans_lm.report.table import screen

    settings = command.what
    tell: Callable[[str], None] = (lambda _: None) if settings.quiet else say
    command_words = command_line(settings)
    match settings:
        case PerplexitySettings():
            from titans_lm.experiments.books import FILE, run_perplexity
            from titans_lm.report.books import tables

            result, lines, written = run_perplexity(settings, command_words, tell), [], settings.out / FILE
        case RereadSettings():
            from titans_lm.experiments.reread import FILE, run_reread
            from titans_lm.report.reread import tables

            result, lines, written = run_reread(settings, command_words, tell), [], settings.out / FILE
        case GapSettings():
            from titans_lm.experiments.gap import FILE, run_gap
            from titans_lm.report.gap import tables

            result, lines, written = run_gap(settings, command_words, tell), [], settings.out / FILE
        case QuestionSettings():
            from titans_lm.experiments.lm_eval import run_questions
            from titans_lm.report.lm_eval import tables

            result, lines, written = run_questions(settings, command_words, tell), [], settings.json
        case _:
            from titans_lm.experiments.tasks import FILE, run_task
            from titans_lm.report.tasks import guessed, tables

            result = run_task(settings, command_words, tell)
            lines, written = [guessed(result)], settings.out / FILE
    if not isinstance(settings, QuestionSettings):
        write_result(settings.json, result)
    tell("\n".join([*screen(tables(result)), *lines]))
    if written is not None:
        tell(f"numbers in {written}")
