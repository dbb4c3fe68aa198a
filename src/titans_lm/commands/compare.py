"""titans compare: models of equal size on the same text."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from titans_lm.commands.show import Configured, say
from titans_lm.experiments.settings import CompareSettings
from titans_lm.train.options import as_settings


@dataclass(frozen=True, kw_only=True)
class Compare(Configured, CompareSettings):
    """Train models of equal size on the same tokens, from several seeds, and say which predicts a test text best.

    Begin with `titans compare data/books --test book.txt`; stopped, the same command goes on.
    """

    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None


def run_compare_command(command: Compare) -> None:
    from titans_lm.experiments.text import FILE, run_compare
    from titans_lm.report.models import title
    from titans_lm.report.spread import written

    settings = as_settings(CompareSettings, command)
    result = run_compare(settings, (lambda _: None) if command.quiet else say)
    command.write(result)
    if command.quiet:
        return
    for one in sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"]):
        say(f"{title(one['name'])}: {written(one['test_bits_per_byte'], '.4f')} bits per byte of the test text")
    say(f"numbers in {settings.out / FILE}")
