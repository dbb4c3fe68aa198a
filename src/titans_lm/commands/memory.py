"""titans read, ask, memory, surprise: text into a memory, questions to it, memory files, what surprised it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titans_lm.commands.show import Configured, Written, lines_of, say
from titans_lm.train.options import plain_settings


@dataclass(frozen=True, kw_only=True)
class Read(Configured):
    """Read files of any length into a memory of constant size, and save it."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")] = ()
    """Files or pipes in the order they are read; - is standard input."""
    model: Path | None = None
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME."""
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


@dataclass(frozen=True, kw_only=True)
class Ask(Configured):
    """Read files of any length at constant memory, and answer a question from what the memory keeps.

    Begin with `titans ask notes.txt "Where is Mary?" --out notes.memory`; go on without the text:
    `titans ask "Where is John?" --memory notes.memory`. What a model knows to answer, its card says.
    """

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES QUESTION")] = ()
    """Files in the order they are read (- is standard input), then the question."""
    model: Path | None = None
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME; by default the one that comes with the
    package and was taught such a question."""
    memory: Path | None = None
    """Memory file to go on from, or to ask."""
    out: Path | None = None
    """Memory file to write, so that more can be asked without the text."""
    max_new_tokens: int = 32
    """Most tokens of the answer."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class MemoryShow(Written):
    """Show what a memory file holds: sources, model, sizes."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Memory file."""


@dataclass(frozen=True, kw_only=True)
class MemoryDiff(Written):
    """Show how far two memories of one model are apart."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FIRST")]
    """Memory file."""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SECOND")]
    """Memory file."""


@dataclass(frozen=True, kw_only=True)
class MemoryVerify(Written):
    """Check that a memory file is whole, that its numbers are finite and, with a model, that it is this model's."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Memory file."""
    model: Path | None = None
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME."""


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


@dataclass(frozen=True, kw_only=True)
class SurpriseOf(Configured):
    """Show what surprised the memory in a text: a page to look at, a plot, and a line of JSON for every token."""

    file: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = None
    """File to read, as a document of its own."""
    model: Path | None = None
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME."""
    memory: Path | None = None
    """Memory file to go on from (titans read makes one)."""
    out: Path = Path("runs/surprise")
    """Folder for surprise.html, surprise.png and surprise.jsonl; files of these names are replaced."""
    max_tokens: int = 20_000
    """Tokens that the page shows, from the start; the other two have all."""
    piece_len: int = 512
    """Tokens read at once; changes speed and the memory of a call, nothing else."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""


def run_read(command: Read) -> None:
    if command.model is None or command.out is None:
        raise ValueError("got no --model or no --out; expected titans read FILES --model MODEL --out FILE.memory")
    from titans_lm.streaming.file import check_memory_file
    from titans_lm.streaming.read import check_reading, read_files
    from titans_lm.train.run import load_model, load_tokenizer

    check_reading(command.files, command.out, resume=command.resume)
    check_memory_file(command.onto)
    model, tokenizer = load_model(command.model, command.device), load_tokenizer(command.model)
    names = ("onto", "resume", "save_every", "piece_len", "precision", "quiet")
    result = read_files(
        model, tokenizer, command.files, command.out, **{name: getattr(command, name) for name in names}
    )
    command.say("\n".join(lines_of(result)))
    command.write({"settings": plain_settings(command), **result})


def run_ask(command: Ask) -> None:
    if not command.words:
        raise ValueError('got no question; expected titans ask FILE "Where is Mary?"')
    from titans_lm.ask import ask_files, check_asked
    from titans_lm.train.run import load_model, load_tokenizer
    from titans_lm.train.shipped import model_asked, taught_instead

    *files, question = command.words
    check_asked(files, question, command.memory, command.out)
    asked = model_asked(question) if command.model is None else command.model
    model, tokenizer = load_model(asked, command.device), load_tokenizer(asked)
    names = ("memory", "out", "max_new_tokens", "quiet")
    result = ask_files(model, tokenizer, files, question, **{name: getattr(command, name) for name in names})
    if (example := taught_instead(asked, question)) is not None:
        command.say(f'warning: {asked} was taught questions such as "{example}"; its answer to others means nothing')
    if result["read_in_part"]:
        command.say(f"warning: {', '.join(result['read_in_part'])} was read only in part: titans read --resume goes on")
    if result["split_words"]:
        words = ", ".join(result["split_words"])
        command.say(f"warning: the model was not taught the words {words}, and spells them; its answer may be wrong")
    if command.out is not None:
        command.say(f"{result['tokens_read']:,} tokens read; memory of {result['memory_bytes']:,} bytes: {command.out}")
    say(result["answer"])
    command.write({"settings": plain_settings(command), "model": str(asked), **result})


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
    say("\n".join(lines_of(result)))
    what.write(result)


def run_surprise(command: SurpriseOf) -> None:
    if command.file is None or command.model is None:
        raise ValueError("got no FILE or no --model; expected titans surprise FILE --model MODEL")
    from titans_lm.checks import check_readable
    from titans_lm.report.surprise.files import write_surprise
    from titans_lm.streaming.file import check_memory_file
    from titans_lm.train.run import load_model, load_tokenizer

    check_readable(command.file)
    check_memory_file(command.memory)
    model, tokenizer = load_model(command.model, command.device), load_tokenizer(command.model)
    names = ("memory", "max_tokens", "piece_len", "quiet")
    given = {name: getattr(command, name) for name in names}
    result = write_surprise(model, tokenizer, command.file, command.out, name=str(command.model), **given)
    command.say("\n".join(lines_of({name: value for name, value in result.items() if name != "most_surprising"})))
    command.say("most surprising, by the momentary surprise in multiples of its median:")
    for place in result["most_surprising"]:
        bits, size = "no" if place["bits"] is None else f"{place['bits']:.1f}", place["momentary"] or 0.0
        command.say(f"  {place['position']:>9,}  {size:6.2f} ×  {bits:>5} bits  {place['context']}")
    command.write({"settings": plain_settings(command), **result})
