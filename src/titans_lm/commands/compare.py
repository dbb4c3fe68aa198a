"""titans compare: models of equal size on the same text."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import say, write_result
from titans_lm.experiments.settings import CompareSettings


@dataclass(frozen=True, kw_only=True)
class Compare(CompareSettings):
    """Train models of equal size on the same tokens, from several seeds, and say which predicts a test text best.

    Begin with `titans compare data/books --test book.txt`; stopped, the same command goes on.
    """

    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""


def run_compare_command(command: Compare) -> None:
    from titans_lm.experiments.text import FILE, run_compare
    from titans_lm.report.models import title
    from titans_lm.report.spread import written

    names = [field.name for field in dataclasses.fields(CompareSettings)]
    settings = CompareSettings(**{name: getattr(command, name) for name in names})
    result = run_compare(settings, (lambda _: None) if command.quiet else say)
    write_result(command.json, result)
    if command.quiet:
        return
    for one in sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"]):
        say(f"{title(one['name'])}: {written(one['test_bits_per_byte'], '.4f')} bits per byte of the test text")
    say(f"numbers in {settings.out / FILE}")
