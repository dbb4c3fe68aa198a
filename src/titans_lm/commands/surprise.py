"""titans surprise: what surprised the memory in a text, as a page, a plot and JSON lines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import say, show, write_result
from titans_lm.train.settings import plain_settings


@dataclass(frozen=True, kw_only=True)
class SurpriseOf:
    """Show what surprised the memory in a text: a page to look at, a plot, and a line of JSON for every token."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = None
    """File to read, as a document of its own."""
    model: Path | None = None
    """Run folder, checkpoint, or folder of a saved model."""
    memory: Path | None = None
    """Memory file to go on from (titans read makes one)."""
    out: Path = Path("surprise")
    """Folder for surprise.html, surprise.png and surprise.jsonl; files of these names are replaced."""
    max_tokens: int = 20_000
    """Tokens that the page shows, from the start; the other two have all."""
    piece_len: int = 512
    """Tokens read at once; changes speed and the memory of a call, nothing else."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the summary to this file too."""
    quiet: bool = False
    """Show nothing."""


def run_surprise(command: SurpriseOf) -> None:
    if command.file is None or command.model is None:
        raise ValueError("got no FILE or no --model; expected titans surprise FILE --model MODEL")
    from titans_lm.report.surprise.files import write_surprise
    from titans_lm.train.run import load_model, load_tokenizer

    model, tokenizer = load_model(command.model, command.device), load_tokenizer(command.model)
    result = write_surprise(
        model,
        tokenizer,
        command.file,
        command.out,
        name=str(command.model),
        memory=command.memory,
        max_tokens=command.max_tokens,
        piece_len=command.piece_len,
        quiet=command.quiet,
    )
    if not command.quiet:
        show({name: value for name, value in result.items() if name != "most_surprising"})
        say("most surprising, by the momentary surprise in multiples of its median:")
        for place in result["most_surprising"]:
            bits = "no" if place["bits"] is None else f"{place['bits']:.1f}"
            say(f"  {place['position']:>9,}  {place['momentary'] or 0.0:6.2f} ×  {bits:>5} bits  {place['context']}")
    write_result(command.json, {"settings": plain_settings(command), **result})
