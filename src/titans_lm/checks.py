"""Checks of one setting, each with what was got and what was expected."""

import dataclasses
import difflib
import importlib
import math
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

Start = float | tuple[float, float]
"""Where a gate starts: one value for all heads, or (from, to), log-spaced over the heads."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Phrase the nearest known name as a hint, or list what is known."""
    known = sorted(known)
    return did_you_mean(name, known) or f"expected one of {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Phrase the nearest known name as a hint; None where none is near."""
    match = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    return f"did you mean {match[0]!r}?" if match else None


def load_library(module: str, use: str, install: str) -> Any:
    """Import a module that not every installation has; ValueError that says what for, and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"got no {error.name or module}, which {use}; install it with: {install}") from error


NO_CODE = ", and no code is run that a model brings"


def one_line(error: BaseException, code: str = NO_CODE) -> str:
    """What an error of a library says, in a line that is not too long for a message of ours; `code` is of its own."""
    said = " ".join(str(error).split())
    return f"it needs code of its own{code}" if "trust_remote_code" in said else said[:300]


def load_pretrained(kind: Any, name: str | Path, what: str, *, code: str = NO_CODE, **settings: Any) -> Any:
    """What transformers loads by a name, running no code that lies beside it; ValueError where it cannot."""
    try:
        return kind.from_pretrained(name, **{"trust_remote_code": False, **settings})  # else it asks, and waits
    except Exception as error:  # tokenizers, safetensors and huggingface_hub have errors of no common class
        raise ValueError(f"{what} cannot be loaded: {one_line(error, code)}") from error


def neither(path: Path) -> str:
    """Say of what is neither a file nor a folder what it is."""
    return "is a pipe, which can be read only once" if path.is_fifo() else "does not exist"


def check_readable(path: Path) -> None:
    """Refuse what is neither a file nor a pipe; the shell's <(…) is one."""
    if not (path.is_file() or path.is_fifo()):
        found = "a folder" if path.is_dir() else "not there"
        raise ValueError(f"got the file {str(path)!r}, which is {found}; expected a file to read")


def check_choice(what: str, got: Any, known: Iterable[str]) -> None:
    known = tuple(known)
    if got not in known:
        hint, listed = did_you_mean(str(got), known), f"one of {', '.join(known)}"
        raise ValueError(f"got {what}={got!r}; " + (f"{hint} ({listed})" if hint else f"expected {listed}"))


def check_at_least(what: str, got: Any, least: int) -> None:
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ValueError(f"got {what}={got!r}; expected an integer of at least {least}")


def check_seed(what: str, got: Any) -> None:
    """Refuse a seed that torch or NumPy would not take, alone or with a step beside it."""
    if not isinstance(got, int) or isinstance(got, bool) or not 0 <= got < 2**32:
        raise ValueError(f"got {what}={got!r}; expected an integer from 0 to 4,294,967,295")


def check_between(what: str, got: Any, low: float, high: float) -> None:
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not low <= got <= high:
        raise ValueError(f"got {what}={got!r}; expected a number from {low} to {high}")


def check_positive(what: str, got: Any) -> None:
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not 0.0 < got < math.inf:
        raise ValueError(f"got {what}={got!r}; expected a finite number above 0")


def check_not_negative(what: str, got: Any) -> None:
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not 0.0 <= got < math.inf:
        raise ValueError(f"got {what}={got!r}; expected a finite number of at least 0")


def pairs_of_json(settings: Any, *names: str) -> None:
    """Make tuples of those settings of a frozen dataclass that are lists, as JSON has a pair."""
    for name in names:
        if isinstance(getattr(settings, name), list):
            object.__setattr__(settings, name, tuple(getattr(settings, name)))


def check_start(what: str, got: Any, most: float) -> None:
    """Check one value above 0 and below `most`, or an ascending pair of them."""
    pair = isinstance(got, tuple)
    for value in got if pair else (got,):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < most:
            raise ValueError(f"got {what}={got!r}; expected a number above 0 and below {most:g}, or a pair of them")
    if pair and (len(got) != 2 or not got[0] < got[1]):
        raise ValueError(f"got {what}={got!r}; expected one number, or two that ascend: (from, to) over the heads")


def log_spaced(start: Start, count: int, place: int = 0, of: int = 1) -> list[float]:
    """Spread a start over the heads of a memory: from · (to / from)^(j / (N − 1)), N = count · of.

    j = head · of + place for the `place`-th of `of` memories that share the spread. One value alone stands at the
    geometric mean.
    """
    if not isinstance(start, tuple):
        return [start] * count
    low, high = start
    last = count * of - 1
    return [low * (high / low) ** ((head * of + place) / last if last else 0.5) for head in range(count)]


def check_switch(what: str, got: Any) -> None:
    if not isinstance(got, bool):
        raise ValueError(f"got {what}={got!r}; expected True or False")


def check_fields(settings: Any, zero: Iterable[str] = ()) -> None:
    """Check every field of a dataclass that is a count, a switch or one of some words, or None, by its annotation.

    Counts are 1 or more; those that `zero` names may be 0.
    """
    for field in dataclasses.fields(settings):
        name, got = field.name, getattr(settings, field.name)
        hint = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
        if got is None and NoneType in kinds:
            continue
        for kind in kinds:
            if kind is int:
                check_at_least(name, got, 0 if name in zero else 1)
            elif kind is bool:
                check_switch(name, got)
            elif get_origin(kind) is Literal:
                check_choice(name, got, get_args(kind))


def check_known(cls: type, settings: Iterable[str]) -> None:
    """Fail on a setting that the config class does not have, with the nearest match."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in settings:
        if name not in names:
            raise ValueError(f"unknown setting {name!r} for {cls.__name__}; {nearest(name, names)}")


class KnownSettings:
    """Settings, a dataclass, that refuse a name that they do not have with the nearest that they do."""

    def __new__(cls, *_: Any, **settings: Any):  # to beartype Self means nothing in here
        check_known(cls, settings)
        return super().__new__(cls)


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
