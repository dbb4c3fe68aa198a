"""titans evaluate: what models can do, measured."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from titans_lm.commands.show import say, write_result
from titans_lm.compare.perplexity_settings import PerplexitySettings
from titans_lm.compare.task_settings import CopyTask, LookupTask, PhoneBookTask, RecallTask, TaskSettings, TrackingTask
from titans_lm.train.settings import as_options

Evaluated = (
    Annotated[PerplexitySettings, tyro.conf.subcommand("perplexity", default=PerplexitySettings())]
    | Annotated[RecallTask, tyro.conf.subcommand("mqar", default=RecallTask())]
    | Annotated[CopyTask, tyro.conf.subcommand("copy", default=CopyTask())]
    | Annotated[LookupTask, tyro.conf.subcommand("lookup", default=LookupTask())]
    | Annotated[PhoneBookTask, tyro.conf.subcommand("phonebook", default=PhoneBookTask())]
    | Annotated[TrackingTask, tyro.conf.subcommand("tracking", default=TrackingTask())]
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure what models can do: books by position, and recall, copying and state tracking learned from random ids."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Evaluated], tyro.conf.arg(name="")] = tyro.MISSING


def command_line(settings: TaskSettings) -> str:
    """Write the command that the settings came from."""
    told = replace(settings, json=None, quiet=False)
    return shlex.join(["titans", "evaluate", settings.command, *as_options(told, type(settings)())])


def run_evaluate(command: Evaluate) -> None:
    settings = command.what
    tell = (lambda _: None) if settings.quiet else say
    if isinstance(settings, PerplexitySettings):
        run_perplexity_command(settings, tell)
        return
    from titans_lm.bench.scored import lines
    from titans_lm.compare.tasks import FILE, run_task

    result = run_task(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join(lines(result)))
    tell(f"numbers in {settings.out / FILE}")


def run_perplexity_command(settings: PerplexitySettings, tell: Callable[[str], None]) -> None:
    from titans_lm.bench.positions import lines
    from titans_lm.compare.perplexity import FILE, command_line, run_perplexity

    result = run_perplexity(settings, command_line(settings), tell)
    write_result(settings.json, result)
    tell("\n".join(lines(result)))
    tell(f"numbers in {settings.out / FILE}")
