"""titans demo, bench: train small models and measure what a memory is worth; time and memory of what runs."""

import dataclasses
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from titans_lm.bench.registry import benchmarks
from titans_lm.bench.settings import AllSettings, BenchSettings, RenderSettings
from titans_lm.commands.show import say, write_result
from titans_lm.demo.settings import DemoSettings


@dataclass(frozen=True, kw_only=True)
class Demo(DemoSettings):
    """Train small models in minutes, with a memory and without, and write a report of what the memory is worth."""

    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""


if TYPE_CHECKING:
    Measured = BenchSettings | RenderSettings
else:
    _kinds = {
        **{name: one.settings for name, one in benchmarks().items()},
        "all": AllSettings,
        "render": RenderSettings,
    }
    Measured = reduce(or_, (Annotated[cls, tyro.conf.subcommand(name, default=cls())] for name, cls in _kinds.items()))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure time and memory of the op and of models, beside peers and beside the machine's own limit."""

    what: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Measured]] = tyro.MISSING


def run_demo(command: Demo) -> None:
    from titans_lm.demo.run import run_demo

    settings = DemoSettings(**{field.name: getattr(command, field.name) for field in dataclasses.fields(DemoSettings)})
    write_result(command.json, run_demo(settings, quiet=command.quiet))


def run_bench(command: Bench) -> None:
    settings = command.what
    tell = (lambda _: None) if settings.quiet else say
    if isinstance(settings, RenderSettings):
        from titans_lm.report.page import render_results

        written = [str(path) for path in render_results(settings.results, settings.docs)]
        tell("\n".join(written))
        write_result(settings.json, {"files": written})
    else:
        from titans_lm.bench.command import run_bench

        write_result(settings.json, run_bench(settings, tell))
