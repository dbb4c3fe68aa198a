"""titans retrofit: give a pretrained model a memory."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import say, write_result
from titans_lm.retrofit.settings import RetrofitSettings


@dataclass(frozen=True, kw_only=True)
class Retrofit(RetrofitSettings):
    """Give a pretrained model a memory: its attention keeps a window, and an adapter is trained to recall the rest."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Folder or hub name of the base."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    """A file, a folder of text, or a folder of titans prepare with the base's tokenizer."""
    resume: Path | None = None
    """Run folder to go on with; its settings are the defaults."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write what came out to this file."""
    quiet: bool = False
    """Show no progress."""


def run_retrofit(command: Retrofit) -> None:
    from titans_lm.retrofit.train import retrofit
    from titans_lm.train.log import ProgressReport

    names = [field.name for field in dataclasses.fields(RetrofitSettings)]
    settings = RetrofitSettings(**{name: getattr(command, name) for name in names})
    if command.resume is not None:
        settings = dataclasses.replace(settings, out=command.resume)
    result = retrofit(settings, resume=command.resume is not None, progress=ProgressReport(quiet=command.quiet))
    write_result(command.json, result)
    if not command.quiet:
        shares = ", ".join(f"{result[f'{kind}_share']:.1%} on {kind}" for kind in ("text", "returns"))
        say(f"share of the gap recovered: {shares}; adapter in {result['adapter']}")
