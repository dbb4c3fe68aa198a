"""titans retrofit: give a pretrained model a memory."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import Configured
from titans_lm.distill.settings import RetrofitSettings
from titans_lm.train.options import as_settings


@dataclass(frozen=True, kw_only=True)
class Retrofit(Configured, RetrofitSettings):
    """Give a pretrained model a memory: its attention keeps a window, and an adapter is trained to recall the rest."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    resume: Path | None = None
    """Run folder to go on with; its settings are the defaults."""


def run_retrofit(command: Retrofit) -> None:
    from titans_lm.distill.train import retrofit
    from titans_lm.train.progress import Outlook, ProgressReport

    settings = as_settings(RetrofitSettings, command)
    if command.resume is not None:
        settings = dataclasses.replace(settings, out=command.resume)
    progress = ProgressReport(quiet=command.quiet, outlook=Outlook("--steps N"))
    result = retrofit(settings, resume=command.resume is not None, progress=progress)
    command.write(result)
    shares = ", ".join(
        f"{result[f'{kind}_share']:.1%} on {kind}" for kind in ("text", "returns") if f"{kind}_share" in result
    )
    command.say(f"share of the gap recovered: {shares}; model in {result['model']}")
