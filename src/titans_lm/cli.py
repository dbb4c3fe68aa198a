"""The command `titans`: read the command line, call one public function, say what came out.

Nothing heavy is imported before a command runs, so `titans --help` answers at once. Settings come from, each over the
one before: the defaults, a recipe or a resumed run, a `--config` file, the command line.
"""

import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import reduce
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import tyro

from titans_lm.commands import COMMANDS
from titans_lm.commands.show import one_of
from titans_lm.config import nearest
from titans_lm.recipes.find import OPTION, read_recipe, recipe_as_option
from titans_lm.train.options import merge_settings, read_settings_file

MISTAKE, INTERRUPTED, FAILED = 2, 130, 1
"""Exit codes: a user's mistake, Ctrl-C, and a run that could not go on."""


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
    if hasattr(defaults.get(name), "recipe"):
        args = recipe_as_option(args)
    if name:
        defaults[name] = _with_files(defaults[name], args)
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            return tyro.cli(
                one_of({key: (cls, defaults[key]) for key, (cls, _) in COMMANDS.items()}),
                prog="titans",
                args=list(args),
                description=__doc__.splitlines()[0],
            )
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
    """Let a recipe, a run to resume and a config file change the defaults, each over the one before."""
    resume, config = _value("--resume", args), _value("--config", args)
    values = read_settings_file(Path(config)) if config is not None and hasattr(default, "config") else {}
    recipe, layers = _value(OPTION, args) or values.get("recipe"), []
    if hasattr(default, "recipe") and recipe is not None:
        if resume is not None:
            raise ValueError(
                f"got the recipe {recipe!r} and --resume {resume}; a run goes on with its own settings: expected no "
                "recipe"
            )
        layers.append(read_recipe(str(recipe)))
    if resume is not None and not isinstance(getattr(default, "resume", False), bool):  # a run, and not a switch
        path = Path(resume) / "settings.json"
        if not path.is_file():
            raise ValueError(f"got the run folder {resume!r}, which holds no settings.json; expected a run to resume")
        layers.append(read_settings_file(path))
    return reduce(merge_settings, filter(None, [*layers, values]), default)


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


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _fail(line: str, code: int) -> NoReturn:
    sys.stderr.write(f"{line}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
