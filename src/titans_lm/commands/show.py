"""What commands take beside their own settings, and what they say: results for reading and for files."""

import sys
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any

import tyro


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
            lines.append(f"{label}: {', '.join(map(_shown, part if isinstance(part, list) else [part]))}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def check_files(command: Any) -> None:
    """Refuse files for results that cannot be written, before anything has been computed: ValueError."""
    from titans_lm.train.files import check_writable

    for settings in (command, getattr(command, "what", None)):
        for name in ("json", "samples", "save_memory", "plot"):
            path = getattr(settings, name, None)
            if path is not None:
                check_writable(f"--{name.replace('_', '-')}", path)


def say(text: str) -> None:
    write(f"{text}\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
