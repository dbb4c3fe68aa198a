"""titans demo, bench: what a memory keeps of a long text; time and memory of what runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from titans_lm.bench.registry import benchmarks
from titans_lm.bench.settings import AllSettings, BenchSettings, RenderSettings
from titans_lm.commands.show import Chosen, Configured, one_of, say, write_result
from titans_lm.demo.settings import DemoSettings
from titans_lm.train.options import as_settings


@dataclass(frozen=True, kw_only=True)
class Demo(Configured, DemoSettings):
    """Hide facts in a long text, read it once with what ships, ask its memory files, and write a report."""


KINDS = {**{name: one.settings for name, one in benchmarks().items()}, "all": AllSettings, "render": RenderSettings}
if TYPE_CHECKING:
    Measured = BenchSettings | RenderSettings
else:
    Measured = one_of({name: (kind, kind()) for name, kind in KINDS.items()})


@dataclass(frozen=True, kw_only=True)
class Bench(Chosen):
    """Measure time and memory of the op and of models, beside peers and beside the machine's own limit."""

    what: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Measured]] = tyro.MISSING


def run_demo(command: Demo) -> None:
    from titans_lm.demo.run import run_demo

    command.write(run_demo(as_settings(DemoSettings, command), quiet=command.quiet))


def run_bench(command: Bench) -> None:
    settings = command.what
    tell = (lambda _: None) if settings.quiet else say
    if isinstance(settings, RenderSettings):
        from titans_lm.report.page import render_results

        written = [str(path) for path in render_results(settings.results, settings.docs)]
        tell("\n".join(written))
        write_result(settings.json, {"files": written})
    else:
        from titans_lm.bench.run import run_bench

        write_result(settings.json, run_bench(settings, tell))
