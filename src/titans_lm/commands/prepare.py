"""titans prepare: text into tokens, once."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import say, write_result
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.train.settings import plain_settings


@dataclass(frozen=True, kw_only=True)
class Prepare(PrepareSettings):
    """Turn text into a folder of tokens that titans train reads: files, folders, JSON lines, parquet, data sets.

    Begin with `titans prepare books/ --out data/books --train-bpe 8192`, then `titans train data/books`.
    """

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = None
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write what came out to this file."""
    quiet: bool = False
    """Show nothing."""


def run_prepare(command: Prepare) -> None:
    from titans_lm.prepare.progress import PreparingReport
    from titans_lm.prepare.run import prepare

    settings = PrepareSettings(**{f.name: getattr(command, f.name) for f in dataclasses.fields(PrepareSettings)})
    with PreparingReport(quiet=command.quiet) as progress:
        result = prepare(settings, progress=progress)
    write_result(command.json, {"settings": plain_settings(settings), **result})
    if command.quiet:
        return
    counts = (
        f"{result['train_tokens']:,} tokens of {result['train_documents']:,} documents to train on, "
        f"{result['held_out_tokens']:,} of {result['held_out_documents']:,} held out; {result['tokenizer']}"
    )
    say(counts)
    if "was_there" in result:
        say(f"{result['folder']} was there already and is whole: nothing was done")
    else:
        say(
            f"{result['seconds']:.1f} s, {result['megabytes_per_second']:.1f} MB/s, "
            f"{result['peak_resident_bytes'] / 2**20:,.0f} MiB at most; {result['skipped']} skipped; {result['folder']}"
        )
