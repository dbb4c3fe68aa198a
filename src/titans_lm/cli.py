"""The command `titans`: read the command line, call one public function, say what came out.

Nothing heavy is imported before a command runs, so `titans --help` answers at once. Settings come from, each over the
one before: the defaults, a resumed run, a `--config` file, the command line.
"""

import dataclasses
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from titans_lm.bench.settings import (
    AllSettings,
    ModelSettings,
    OpsSettings,
    PeersSettings,
    RenderSettings,
    ScalingSettings,
)
from titans_lm.config import nearest
from titans_lm.demo.settings import DemoSettings
from titans_lm.train.settings import LanguageSettings, merge_settings, plain_settings, read_settings_file

MISTAKE, INTERRUPTED, FAILED = 2, 130, 1
"""Exit codes: a user's mistake, Ctrl-C, and a run that could not go on."""


@dataclass(frozen=True, kw_only=True)
class Train(LanguageSettings):
    """Train a byte model on a file, a folder of text, or the Python library's own source.

    Begin with `titans train stdlib --run runs/first`; go on with `titans train --resume runs/first`.
    """

    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]")] = None
    resume: Path | None = None
    """Run folder to go on with; its settings are the defaults."""
    config: Path | None = None
    """A .json or .toml file of settings, which become the defaults; the settings.json of a run is one."""
    json: Path | None = None
    """Write what came out to this file."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Write on after a prompt, with the model of a run or any saved model."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Run folder, checkpoint, or folder of a saved model."""
    prompt: str = ""
    """Text to go on from; it starts a document."""
    prompt_file: Path | None = None
    """File to go on from, instead of --prompt."""
    max_new_tokens: int = 300
    """Most tokens to write."""
    temperature: float = 0.8
    """Sharpness of sampling; 0 takes the likeliest token every time."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that add up to this probability."""
    seed: int | None = None
    """Seed of the sampling, for the same text every time."""
    compile: bool = False
    """Compile what reads single tokens: some seconds at first, then faster; needs a C++ compiler on a CPU."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the text and how long it took to this file."""
    quiet: bool = False
    """Show the text when it is complete and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show a model's parameters and state bytes, the versions of what is installed, and the devices."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """Run folder, checkpoint, or folder of a saved model; without one, versions and devices only."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the same to this file."""


@dataclass(frozen=True, kw_only=True)
class Demo(DemoSettings):
    """Train small models in minutes, with a memory and without, and write a report of what the memory is worth."""

    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""


Measured = (
    Annotated[OpsSettings, tyro.conf.subcommand("ops", default=OpsSettings())]
    | Annotated[ModelSettings, tyro.conf.subcommand("model", default=ModelSettings())]
    | Annotated[PeersSettings, tyro.conf.subcommand("peers", default=PeersSettings())]
    | Annotated[ScalingSettings, tyro.conf.subcommand("scaling", default=ScalingSettings())]
    | Annotated[AllSettings, tyro.conf.subcommand("all", default=AllSettings())]
    | Annotated[RenderSettings, tyro.conf.subcommand("render", default=RenderSettings())]
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure time and memory of the op and of models, beside peers and beside the machine's own limit."""

    what: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Measured]] = tyro.MISSING


def run_train(command: Train) -> None:
    from titans_lm.train.language import train_language_model
    from titans_lm.train.log import ProgressReport

    names = [field.name for field in dataclasses.fields(LanguageSettings)]
    settings = LanguageSettings(**{name: getattr(command, name) for name in names})
    if command.resume is not None:
        settings = dataclasses.replace(settings, run=command.resume)
    result = train_language_model(
        settings, resume=command.resume is not None, progress=ProgressReport(quiet=command.quiet)
    )
    _write_result(command.json, result)
    if not command.quiet:
        bits = result.get("held_out_bits_per_byte")
        _say(f"held-out bits per byte {bits:.4f} after {result['steps']} steps; model in {result['model']}")


def run_generate(command: Generate) -> None:
    if command.model is None:
        raise ValueError("got no model; expected a run folder or a saved model: titans generate MODEL")
    if command.prompt and command.prompt_file is not None:
        raise ValueError("got both --prompt and --prompt-file; expected one of them")
    prompt = command.prompt if command.prompt_file is None else command.prompt_file.read_bytes()

    from titans_lm.generate import generate_text
    from titans_lm.train.run import load_model, load_tokenizer

    model, tokenizer = load_model(command.model, command.device), load_tokenizer(command.model)
    if command.compile:
        if not hasattr(model, "compile_decoding"):
            raise ValueError(f"got --compile for a {type(model).__name__}; expected a titans model, or no --compile")
        model.compile_decoding()
    generated = generate_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=command.max_new_tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
        write=None if command.quiet else _write,
    )
    _write(f"{generated.text}\n" if command.quiet else "\n")
    _write_result(command.json, {"settings": plain_settings(command), **dataclasses.asdict(generated)})


def run_info(command: Info) -> None:
    from titans_lm.train.describe import describe_model
    from titans_lm.train.device import environment

    result: dict[str, Any] = {"environment": environment()}
    if command.model is not None:
        from titans_lm.train.run import load_model, resolve_model

        model = load_model(command.model, "cpu")
        result = {"path": str(resolve_model(command.model)), **describe_model(model), **result}
    _write_result(command.json, result)
    for line in _lines(result):
        _say(line)


def run_demo(command: Demo) -> None:
    from titans_lm.demo.run import run_demo

    settings = DemoSettings(**{field.name: getattr(command, field.name) for field in dataclasses.fields(DemoSettings)})
    _write_result(command.json, run_demo(settings, quiet=command.quiet))


def run_bench(command: Bench) -> None:
    settings = command.what
    say = (lambda _: None) if settings.quiet else _say
    if isinstance(settings, RenderSettings):
        from titans_lm.bench.render import render_results

        written = [str(path) for path in render_results(settings.results, settings.docs)]
        say("\n".join(written))
        _write_result(settings.json, {"files": written})
    else:
        from titans_lm.bench.command import run_bench

        _write_result(settings.json, run_bench(settings, say))


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "train": (Train, run_train),
    "generate": (Generate, run_generate),
    "info": (Info, run_info),
    "demo": (Demo, run_demo),
    "bench": (Bench, run_bench),
}
"""Every command: its settings, and what runs them."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2, a bug keeps its traceback."""
    args = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a screen that cannot show θ shows a question mark
    try:
        command = parse(args)
        dict(COMMANDS.values())[type(command)](command)
    except KeyboardInterrupt as error:
        told = str(error) or "interrupted"
        run = getattr(getattr(error, "checkpoint", None), "parent", None)
        _fail(f"titans: {told}{f'; go on with: titans train --resume {run.parent}' if run else ''}", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        sys.exit(FAILED)
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, ValueError | OSError) and is_mistake(error):
            _fail(f"titans: error: {_one_line(error)}", MISTAKE)
        if type(error).__name__ == "Diverged":
            _fail(f"titans: {_one_line(error)}", FAILED)
        raise


def parse(args: Sequence[str]) -> Any:
    """Turn the command line into settings; ValueError for what is wrong with it."""
    name = args[0] if args and not args[0].startswith("-") else ""
    if name and name not in COMMANDS:
        raise ValueError(f"got the command {name!r}; {nearest(name, COMMANDS)} (titans --help lists them)")
    defaults = {key: cls() for key, (cls, _) in COMMANDS.items()}
    if name:
        defaults[name] = _with_files(defaults[name], args)
    union: Any = None
    for key, (cls, _) in COMMANDS.items():
        sub = Annotated[cls, tyro.conf.subcommand(key, default=defaults[key])]
        union = sub if union is None else union | sub
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            return tyro.cli(union, prog="titans", args=list(args), description=__doc__.splitlines()[0])
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_message(errors.getvalue(), name)) from None


def is_mistake(error: Exception) -> bool:
    """Tell a user's mistake from a bug.

    The package answers wrong input with a ValueError of its own, raised by name in its own code; a ValueError out of a
    library, and every other exception, is a bug. An OSError that names a file is about the user's file.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
        return False
    return (frames[-1].line or "raise").startswith("raise")


def _with_files(default: Any, args: Sequence[str]) -> Any:
    """Let a run to resume and a config file change the defaults, before the command line is read."""
    resume, config = _value("--resume", args), _value("--config", args)
    if resume is not None and hasattr(default, "resume"):
        path = Path(resume) / "settings.json"
        if not path.is_file():
            raise ValueError(f"got the run folder {resume!r}, which holds no settings.json; expected a run to resume")
        default = merge_settings(default, read_settings_file(path))
    if config is not None and hasattr(default, "config"):
        default = merge_settings(default, read_settings_file(Path(config)))
    return default


def _value(option: str, args: Sequence[str]) -> str | None:
    """Read the value of an option straight from the arguments, the last one given."""
    found = None
    for index, arg in enumerate(args):
        if arg == option and index + 1 < len(args):
            found = args[index + 1]
        elif arg.startswith(f"{option}="):
            found = arg.partition("=")[2]
    return found


def _message(box: str, name: str) -> str:
    """Put tyro's framed error into one line: what is wrong, and the options that were perhaps meant."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = [re.sub(r"\s+", " ", part).strip(" .") for part in re.split("[─-]{10,}", " ".join(lines))]
    if "╭" not in box:  # drawn without a frame where the screen takes ASCII only: the title is a part of its own
        parts = parts[1:]
    text = re.sub(r"^Error parsing (?!-)\S+: ", "", parts[0])
    meant = [part for part in parts[1:] if part.startswith("Perhaps")]
    options = dict.fromkeys(re.findall(r"--[a-z][\w.-]+", meant[0].partition(" in titans")[0] if meant else ""))
    hint = f"; perhaps you meant {' or '.join(options)}" if options else ""
    return f"{text}{hint} (titans {f'{name} ' if name else ''}--help lists what there is)"


def _lines(value: dict[str, Any], indent: str = "") -> list[str]:
    """Lay out a result for reading."""
    lines = []
    for name, part in value.items():
        label = f"{indent}{name.replace('_', ' ')}"
        if isinstance(part, dict):
            lines += [label, *_lines(part, f"{indent}  ")]
        elif part is not None:
            shown = f"{part:,}" if isinstance(part, int) else part
            shown = (
                ", ".join(f"{p:,}" if isinstance(p, int) else str(p) for p in part) if isinstance(part, list) else shown
            )
            lines.append(f"{label}: {shown}")
    return lines


def _write_result(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        from titans_lm.train.files import write_json

        write_json(path, result)


def _say(text: str) -> None:
    _write(f"{text}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _fail(line: str, code: int) -> NoReturn:
    sys.stderr.write(f"{line}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
