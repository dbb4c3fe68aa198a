"""titans read, memory: read text into a memory file, and look into such files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titans_lm.commands.show import show, write_result
from titans_lm.train.settings import plain_settings


@dataclass(frozen=True, kw_only=True)
class Read:
    """Read files of any length into a memory of constant size, and save it."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")] = ()
    """Files in the order they are read; - is standard input."""
    model: Path | None = None
    """Run folder, checkpoint, or folder of a saved model."""
    out: Path | None = None
    """Memory file to write."""
    onto: Path | None = None
    """Memory file to start from."""
    resume: bool = False
    """Go on with --out where it exists: the same files, from the token of its last save."""
    save_every: int = 1_000_000
    """Tokens between two saves."""
    piece_len: int = 2048
    """Tokens read at once; changes speed and the memory of a call, nothing else."""
    precision: Literal["exact", "bfloat16"] = "exact"
    """Precision of the file: exact, or rounded to half the size."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write what was read and how fast to this file."""
    quiet: bool = False
    """Show nothing."""


@dataclass(frozen=True, kw_only=True)
class MemoryShow:
    """Show what a memory file holds: sources, model, sizes."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Memory file."""
    json: Path | None = None
    """Write it to this file too."""


@dataclass(frozen=True, kw_only=True)
class MemoryDiff:
    """Show how far two memories of one model are apart."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FIRST")]
    """Memory file."""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SECOND")]
    """Memory file."""
    json: Path | None = None
    """Write it to this file too."""


@dataclass(frozen=True, kw_only=True)
class MemoryVerify:
    """Check that a memory file is whole, that its numbers are finite and, with a model, that it is this model's."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Memory file."""
    model: Path | None = None
    """Run folder, checkpoint, or folder of a saved model."""
    json: Path | None = None
    """Write it to this file too."""


@dataclass(frozen=True, kw_only=True)
class MemoryFiles:
    """Look into memory files."""

    what: tyro.conf.OmitArgPrefixes[
        tyro.conf.OmitSubcommandPrefixes[
            Annotated[MemoryShow, tyro.conf.subcommand("show")]
            | Annotated[MemoryDiff, tyro.conf.subcommand("diff")]
            | Annotated[MemoryVerify, tyro.conf.subcommand("verify")]
        ]
    ] = tyro.MISSING


def run_read(command: Read) -> None:
    if command.model is None or command.out is None:
        raise ValueError("got no --model or no --out; expected titans read FILES --model MODEL --out FILE.memory")
    from titans_lm.streaming.read import read_files
    from titans_lm.train.run import load_model, load_tokenizer

    model, tokenizer = load_model(command.model, command.device), load_tokenizer(command.model)
    result = read_files(
        model,
        tokenizer,
        command.files,
        command.out,
        onto=command.onto,
        resume=command.resume,
        save_every=command.save_every,
        piece_len=command.piece_len,
        precision=command.precision,
        quiet=command.quiet,
    )
    if not command.quiet:
        show(result)
    write_result(command.json, {"settings": plain_settings(command), **result})


def run_memory(command: MemoryFiles) -> None:
    from titans_lm.streaming.compare import compare_memories, describe_memory, verify_memory

    what = command.what
    if isinstance(what, MemoryShow):
        result = describe_memory(what.file)
    elif isinstance(what, MemoryDiff):
        result = compare_memories(what.first, what.second)
    else:
        from titans_lm.train.run import load_model

        result = verify_memory(what.file, None if what.model is None else load_model(what.model, "cpu"))
    show(result)
    write_result(what.json, result)
