"""What `titans` says: of itself, of its commands and of wrong options; and results, for reading and for files."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, Any

import tyro

from titans_lm.config import nearest
from titans_lm.train.options import RENAMED


@dataclass(frozen=True, kw_only=True)
class Written:
    """A result that may go into a file."""

    json: Path | None = None
    """Write what came out to this file too."""

    def write(self, result: dict[str, Any]) -> None:
        if self.json is not None:
            from titans_lm.train.files import write_json

            write_json(self.json, result)


@dataclass(frozen=True, kw_only=True)
class Output(Written):
    """The same, where the screen may be left alone."""

    quiet: bool = False
    """Show nothing but what was asked for."""

    def say(self, text: str) -> None:
        if not self.quiet:
            say(text)


@dataclass(frozen=True, kw_only=True)
class Configured(Output):
    """The same, of a command whose settings a file may hold."""

    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults; the settings.json of a run is one."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What has settings that a file may hold: of a command of several kinds, those of the one that is chosen."""

    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""


def output_of(settings: Any) -> Output:
    """Give the same of one of several kinds, which has these settings of its own."""
    return Output(json=settings.json, quiet=settings.quiet)


def one_of(kinds: dict[str, type]) -> Any:
    """Let a command line choose one of several settings by its name; each comes with its defaults."""
    return reduce(or_, (Annotated[kind, tyro.conf.subcommand(name, default=kind())] for name, kind in kinds.items()))


def lines_of(value: dict[str, Any], indent: str = "") -> list[str]:
    """Lay out a result for reading; what is None or an empty list is left out."""
    lines = []
    for name, part in value.items():
        label = f"{indent}{name.replace('_', ' ') if name.isidentifier() else name}"  # a file's name stays as it is
        if isinstance(part, dict):
            lines += [label, *lines_of(part, f"{indent}  ")]
        elif part is not None and part != []:
            lines.append(f"{label}: {_shown(part)}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def check_files(command: Any) -> None:
    """Refuse files for results that cannot be written, or that are given as something else: ValueError."""
    from titans_lm.train.files import check_writable

    parts = [command, *([command.what] if hasattr(command, "what") else [])]
    given = {name: value for part in parts for name, value in vars(part).items()}
    for name in ("json", "samples", "save_memory", "plot"):
        path, option = given.get(name), f"--{name.replace('_', '-')}"
        if path is not None:
            check_writable(option, path)
            also = next((other for other, value in given.items() if _is_also(path, name, other, value)), None)
            if also is not None:
                what = "a file to read" if also == "words" else also.replace("_", "-")
                raise ValueError(f"got {option} {path}, which is given as {what} too; expected a name of its own")


def _is_also(path: Path, name: str, other: str, value: Any) -> bool:
    """Tell whether another setting names the same file, which would be lost; a memory may be written where it was."""
    if other == name or {other, name} == {"memory", "save_memory"} or other == "prompt":
        return False
    if path.exists() and not path.is_file():  # a device loses nothing
        return False
    paths = [Path(one) for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, str | Path)]
    return any("\0" not in str(one) and os.path.realpath(one) == os.path.realpath(path) for one in paths)


def say(text: str) -> None:
    write(f"{text}\n")


def write(text: str) -> None:
    """Show a text at once; where that fails, nothing more is shown: at exit Python would complain once more."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        raise


OFTEN = {
    "batch-size", "config", "data", "device", "epochs", "horizon", "horizons", "jobs", "json", "lookback", "lr",
    "max-new-tokens", "max-tokens", "memory", "model", "model.architecture", "models", "out", "parameters", "port",
    "prompt", "prompt-file", "quick", "quiet", "rates", "resume", "save-memory", "scale", "seed", "seeds", "seq-len",
    "sizes", "steps", "temperature", "test", "test-sizes", "text", "between", "train-bpe", "folds",
    "dry-run", "host", "tasks", "limit",
}  # fmt: skip
"""Options that a short help shows, in whichever command they are."""
FEW = 14
"""Options that are shown whole."""
ELSEWHERE = {
    "epochs": "steps", "learning-rate": "lr", "max-steps": "steps", "num-steps": "steps", "output": "out",
    "output-dir": "out", "save-dir": "out", "run": "out", "num-train-epochs": "steps", "max-length": "seq-len",
    "block-size": "seq-len", "max-tokens": "max-new-tokens", "weights": "model", "checkpoint": "model",
    "lr": "rates", "seed": "seeds", "baseline": "models", "steps": "epochs", "seq-len": "lookback",
}  # fmt: skip
"""Options of other libraries and of other commands, and what they are called here; the first that a command has."""
FORMER = {"train.": "", "net.backbone.": "model.", "net.": ""}
"""How options began, and what they begin with now; RENAMED has those that are called otherwise altogether."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
ENTRY = re.compile(r"  -[\w-]")
"""How the lines of a help begin that name an option."""


def overview(commands: dict[str, str], version: str) -> str:
    """List the commands, each with the first sentence of what it does."""
    width = max(map(len, commands))
    return "\n".join([
        f"titans-lm {version}: sequence models whose memory keeps learning while they read", "",
        "usage: titans COMMAND [SETTINGS]", "",
        *(f"  {name:<{width}}  {said}" for name, said in commands.items()), "",
        "titans COMMAND --help shows the settings that people change, --help-all shows all of them.",
        "Begin with: titans demo, or titans train stdlib --out runs/first",
        "Completion for a shell: titans --tyro-print-completion bash (or zsh)",
    ])  # fmt: skip


def tidied(text: str) -> str:
    """Say settings that may be left out without the type of nothing, in a help that tyro wrote without frames."""
    columns = re.sub(r"\{None\}\|(\S+)(  +)", r"\1\2       ", text)  # what follows stays in its column
    shown = columns.replace("{None}|", "").replace("{None,", "{")
    found = re.sub(r"\s*\(default:\s+(None)?\s*\)", "", shown)
    return "\n".join(line.rstrip() for line in found.splitlines()).rstrip()


def shortened(text: str, words: str) -> str:
    """Leave the settings that people change in a help, and say how to see the others."""
    many = len(options_in(text))
    if many <= FEW:
        return text
    kept = "\n".join(line for panel in _panels(text.splitlines()) for line in _often(panel))
    return f"{kept.rstrip()}\n\ntitans {words} --help-all shows all {many} settings"


def _panels(lines: list[str]) -> Iterator[list[str]]:
    """Part a help at the titles of its panels, which have a line below them."""
    starts = [at - 1 for at, line in enumerate(lines) if re.fullmatch(r" -{9,}", line)]
    for start, stop in pairwise([0, *starts, len(lines)]):
        yield lines[start:stop]


def _often(panel: list[str]) -> list[str]:
    """Leave what is often set in a panel of options, nothing of one without, and any other panel as it is."""
    if not any(ENTRY.match(line) for line in panel):
        return panel
    kept, keep = [], False
    for line in panel[2:]:
        if ENTRY.match(line):
            keep = any(option.removeprefix("--") in OFTEN for option in OPTION.findall(line))
        kept += [line] * (keep and bool(line))
    return [*panel[:2], *kept, ""] if kept else []


def options_in(text: str) -> set[str]:
    """List the options that a help explains."""
    return {option for line in text.splitlines() if ENTRY.match(line) for option in OPTION.findall(line)}


def kinds_in(text: str) -> list[str]:
    """List the words that a command takes in its second place, by its help."""
    found = re.search(r"\{([\w,-]+)\}", text.splitlines()[0])
    return found[1].split(",") if found else []


def plainly(error: str) -> str:
    """Say an error of tyro's as all others are said: what was got, and what was expected."""
    error = re.sub(r"^Error parsing (?!-)\S+: ", "", error)
    for pattern, said in ERRORS.items():
        found = re.match(pattern, error)
        if found is not None:
            return said(*found.groups())
    return error


def _words(listed: str) -> list[str]:
    """Read the words of a list or tuple in Python."""
    return re.findall(r"'(.*?)'", listed)


NUMBERS = {"INT": "a whole number", "FLOAT": "a number"}
ERRORS: dict[str, Callable[..., str]] = {
    r"invalid choice '(.*)' for argument '(--\S+)'\. Expected one of \((.*?),?\)": lambda got, option, known: (
        f"got {option} {got}; {nearest(got, _words(known))}"
    ),
    r"Error parsing (--\S+): invalid literal for int\(\) with base 10: '(.*)'": lambda option, got: (
        f"got {option} {got}; expected a whole number"
    ),
    r"Error parsing (--\S+): could not convert string to float: '(.*)'": lambda option, got: (
        f"got {option} {got}; expected a number"
    ),
    r"Error parsing (--\S+): no type matching (\S+) could be instantiated from \[(.*?)\]": lambda option, kind, got: (
        f"got {option} {' '.join(_words(got))}; expected {NUMBERS.get(kind.removeprefix('{None}|'), kind)}"
    ),
    r"Error parsing (--\S+): Could not (?:find valid parse for|parse) arguments:? \[(.*?)\]": lambda option, got: (
        f"got {option} {' '.join(_words(got))}; expected values as its help shows them"
    ),
    r"Missing value for argument '(--\S+)'\. Expected (\d+) values": lambda option, count: (
        f"got {option} with no value, or too few; expected {count} behind it"
    ),
    r"Expected one of \{(.*)\}": lambda kinds: f"got no word for what to do; expected one of {kinds}",
    r"Missing from titans [^:]*: (\S+) .*\(required\)": lambda name: f"got no {name}; expected one",
    r"Unrecognized options: (.*)": lambda words: f"got {words}, for which there is no place; expected an option before",
}
"""How tyro's errors are written, and what is said in their place."""


def unknown_options(args: Iterable[str], known: set[str]) -> list[str]:
    """List the options of a command line that a command does not have."""
    written = (arg.partition("=")[0] for arg in args)
    return [option for option in written if OPTION.fullmatch(option) and option.replace("_", "-") not in known]


def _called_here(name: str, known: set[str]) -> str:
    """Give the name that a command has for what other libraries, other commands or earlier versions call otherwise."""
    names = {**ELSEWHERE, **{before.replace("_", "-"): now.replace("_", "-") for before, now in RENAMED.items()}}
    seen: list[str] = []
    while f"--{name}" not in known and name not in seen:
        seen.append(name)
        name = next((names[near] for near in difflib.get_close_matches(name, names, n=1, cutoff=0.8)), name)
    return name if f"--{name}" in known else seen[0]


def meant(option: str, known: set[str]) -> list[str]:
    """Give the options of the same command that were perhaps meant, none of them the one that was written."""
    written = option.removeprefix("--").replace("_", "-")
    start = next((start for start in FORMER if written.startswith(start)), "")
    written = FORMER.get(start, "") + written.removeprefix(start)
    last = written.rpartition(".")[2]
    others = sorted(one for one in known - {option} if option.startswith("--no-") or not one.startswith("--no-"))
    if f"--{written}" in others:
        return [f"--{written}"]
    wanted = _called_here(last, known)
    same = [other for other in others if other.removeprefix("--").rpartition(".")[2] in (wanted, last)]
    plain = {re.sub(r"\W", "", other): other for other in others}
    written = re.sub(r"\W", "", option)
    near = difflib.get_close_matches(written, plain, n=2)
    likeness = [difflib.SequenceMatcher(None, name, written).ratio() for name in near]
    close = [plain[name] for name, like in zip(near, likeness, strict=True) if like > likeness[0] - 0.1]
    return (same or close)[:2]
