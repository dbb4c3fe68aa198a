"""The command `titans`: read the command line, call one public function, say what came out.

Nothing heavy is imported before a command runs, so `titans --help` answers at once. Settings come from, each over the
one before: the defaults, a recipe, a resumed run or a model to begin with, a `--config` file, the command line.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import reduce
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import tyro

from titans_lm import __version__
from titans_lm.allocator import keep_freed_memory
from titans_lm.checks import is_mistake
from titans_lm.commands import COMMANDS
from titans_lm.commands.show import (
    check_files,
    kinds_in,
    meant,
    one_of,
    options_in,
    overview,
    plainly,
    say,
    shortened,
    tidied,
    unknown_options,
)
from titans_lm.config import nearest
from titans_lm.recipes.find import read_recipe, recipe_as_option
from titans_lm.train.options import merge_settings, read_settings_file

EACH = (tyro.conf.CascadeSubcommandArgs,)
"""Of commands of several kinds: what all of them take stands behind the word of each."""
MISTAKE, INTERRUPTED, FAILED = 2, 130, 1
"""Exit codes: a user's mistake, Ctrl-C, and a run that could not go on."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2, a bug keeps its traceback."""
    args = list(sys.argv[1:] if args is None else args)
    for name in ("stdin", "stdout", "stderr"):  # those that were closed (>&-)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a screen that cannot show θ shows a question mark
    try:
        command = parse(args)
        check_files(command)
        keep_freed_memory()
        dict(COMMANDS.values())[type(command)](command)
    except KeyboardInterrupt as error:
        told = str(error) or "interrupted"
        run = getattr(getattr(error, "checkpoint", None), "parent", None)
        goes_on = run is not None and args[0] in ("train", "retrofit")  # others begin again with their own command
        _fail(
            f"titans: {told}{f'; go on with: titans {args[0]} --resume {run.parent}' if goes_on else ''}", INTERRUPTED
        )
    except BrokenPipeError:
        sys.exit(FAILED)
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, ValueError | OSError) and is_mistake(error):
            _fail(f"titans: error: {_one_line(error)}", MISTAKE)
        if type(error).__name__ == "Diverged":
            _fail(f"titans: {_one_line(error)}", FAILED)
        raise


def parse(args: Sequence[str]) -> Any:
    """Turn the command line into settings; ValueError for what is wrong with it, SystemExit after a help."""
    args = list(args)
    if any(arg.startswith(("--tyro-print-completion", "--tyro-write-completion")) for arg in args):
        kinds = one_of({key: cls for key, (cls, _) in COMMANDS.items()})
        return tyro.cli(kinds, prog="titans", args=args, config=EACH)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    name = args[0] if args else "--help"
    if name.startswith("-"):
        _show_about(name)
    words = _words(name, args[1:2])
    kind = COMMANDS[name][0]
    for option in ("--help", "-h", "--help-all"):
        if option in args:
            text = _help_of(words)
            _show(text if option == "--help-all" else shortened(text, words))
    if hasattr(kind(), "recipe"):
        args = recipe_as_option(args)
    out, errors = StringIO(), StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            default = _with_files(_default(name, words), args)
            return tyro.cli(kind, default=default, prog=f"titans {name}", args=args[1:], config=EACH)
    except SystemExit as stop:
        known = options_in(_help_of(words))
        said = _said_behind(stop) or _unframed(errors.getvalue())
        raise ValueError(_message(said, words, unknown_options(args, known), known)) from None


def _words(name: str, following: list[str]) -> str:
    """Name the command, and its kind where it has several; ValueError for one that there is not."""
    if name not in COMMANDS:
        raise ValueError(f"got the command {name!r}; {nearest(name, COMMANDS)} (titans --help lists them)")
    if "what" not in COMMANDS[name][0].__dataclass_fields__ or not following or following[0].startswith("-"):
        return name
    kinds = kinds_in(_help_of(name))
    if following[0] not in kinds:
        hint = f"{nearest(following[0], kinds)} (titans {name} --help lists them)"
        raise ValueError(f"got {following[0]!r} behind titans {name}; {hint}")
    return f"{name} {following[0]}"


def _show_about(option: str) -> NoReturn:
    """Show what there is, or the version."""
    if option in ("-V", "--version"):
        _show(f"titans-lm {__version__}")
    if option not in ("-h", "--help", "--help-all"):
        raise ValueError(f"got {option!r} and no command; expected a command first (titans --help lists them)")
    said = {name: (kind.__doc__ or "").splitlines()[0].partition(": ")[0] for name, (kind, _) in COMMANDS.items()}
    _show(overview({name: line.rstrip(".") for name, line in said.items()}, __version__))


def _default(name: str, words: str) -> Any:
    """Give the defaults of a command; those of its kind too, where that has some."""
    kind = COMMANDS[name][0]
    if words == name or not hasattr(kind(), "config"):
        return kind()
    return tyro.cli(kind, default=kind(), args=words.split()[1:], config=EACH)


def _help_of(words: str) -> str:
    """Give everything that tyro says of a command."""
    name, *rest = words.split()
    kind = COMMANDS[name][0]
    written = StringIO()
    with redirect_stdout(written), redirect_stderr(written), suppress(SystemExit):
        tyro.cli(kind, default=kind(), prog=f"titans {name}", args=[*rest, "--help"], config=EACH)
    return tidied(written.getvalue())


def _show(text: str) -> NoReturn:
    say(text)
    sys.exit(0)


def _with_files(default: Any, args: Sequence[str]) -> Any:
    """Let a recipe, a run to resume and a config file change the defaults, each over the one before."""
    config, layers = _value("config", args, {}), []
    values = read_settings_file(Path(config)) if config is not None and hasattr(default, "config") else {}
    resume, recipe, out = (_value(name, args, values) for name in ("resume", "recipe", "out"))
    # The file that a run was begun with may name an init: taken up, the run goes on with weights of its own.
    init = _value("init", args, values if _value("resume", args, {}) is None else {})
    if hasattr(default, "recipe") and recipe is not None:
        if resume is not None:
            raise ValueError(
                f"got the recipe {recipe!r} and --resume {resume}; a run goes on with its own settings: expected no "
                "recipe"
            )
        layers.append(read_recipe(str(recipe)))
    if resume is not None and not isinstance(getattr(default, "resume", False), bool):  # a run, and not a switch
        path = Path(str(resume)) / "settings.json"
        if out is not None and Path(out).resolve() != path.parent.resolve():
            raise ValueError(
                f"got --out {out} and --resume {resume}; expected no --out: a run goes on in its own folder"
            )
        if not path.is_file():
            raise ValueError(f"got the run folder {resume!r}, which holds no settings.json; expected a run to resume")
        layers.append(read_settings_file(path))
    if init is not None and hasattr(default, "init"):
        if resume is not None:
            raise ValueError(
                f"got --init {init} and --resume {resume}; expected one of them: a run goes on with its own weights"
            )
        from titans_lm.train.sized import saved_settings

        layers.append(saved_settings(Path(str(init))))
    if hasattr(default, "what"):
        if values and default.what is tyro.MISSING:
            raise ValueError("got --config before what to do; expected the word for that first, and options behind it")
        return default if not values else replace(default, what=merge_settings(default.what, values))
    return reduce(merge_settings, filter(None, [*layers, values]), default)


def _value(name: str, args: Sequence[str], values: dict[str, Any]) -> Any:
    """Read the value of an option straight from the arguments, the last one given, or else from those of a file."""
    found = values.get(name)
    for index, arg in enumerate(args):
        if arg == f"--{name}" and index + 1 < len(args):
            found = args[index + 1]
        elif arg.startswith(f"--{name}="):
            found = arg.partition("=")[2]
    return found


def _message(said: str, words: str, unknown: list[str], known: set[str]) -> str:
    """Say in one line what is wrong, and the options that were perhaps meant."""
    where = f"(titans {words} --help lists what there is)"
    if unknown:
        hints = list(dict.fromkeys(other for option in unknown for other in meant(option, known)))
        hint = f"perhaps you meant {' or '.join(hints)}" if hints else f"titans {words} has none that is like it"
        return f"got the unknown option {', '.join(unknown)}; {hint} {where}"
    return f"{said} {where}"


def _said_behind(error: BaseException | None) -> str:
    """Find what our settings said themselves: a frame breaks long names, and numbers at their commas."""
    while error is not None and not (isinstance(error, ValueError) and is_mistake(error)):
        error = error.__context__
    return "" if error is None else _one_line(error)


def _unframed(box: str) -> str:
    """Put tyro's framed error into one line."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = [re.sub(r"\s+", " ", part).strip(" .") for part in re.split("[─-]{10,}", " ".join(lines))]
    if "╭" not in box:  # drawn without a frame where the screen takes ASCII only: the title is a part of its own
        parts = parts[1:]
    return plainly(parts[0])


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _fail(line: str, code: int) -> NoReturn:
    sys.stderr.write(f"{line}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
