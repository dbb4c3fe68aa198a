"""The sizes that a task is trained and tested with, as they are written on a command line."""

import dataclasses
import re

from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.common_words import CommonWordsSettings
from titans_lm.data.tasks.copying import CopySettings, LookupSettings, PhoneBookSettings
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tasks.task import Task
from titans_lm.data.tasks.tracking import TrackingSettings
from titans_lm.data.tasks.variables import VariablesSettings

AT = "@"
"""What stands between a length and a depth."""
K = 1024
SIZES: dict[type, tuple[str, str]] = {
    RecallSettings: (r"(\d+):(\d+)", "LENGTH:PAIRS, as in 64:4"),
    CopySettings: (
        r"(\d+)(?:-(\d+))?", "the letters of a string, as in 20 (one a row), or SHORTEST-LONGEST (many a row)",
    ),
    LookupSettings: (r"(\d+)", "the letters of the string, as in 32"),
    PhoneBookSettings: (r"(\d+)", "the entries, as in 20"),
    TrackingSettings: (r"(\d+)", "the tokens of a word, as in 32"),
    NeedleSettings: (
        rf"(\d+[KM]?)(?:x(\d+))?(?:{AT}([01](?:\.\d+)?))?",
        "the tokens of a row, as in 1024 or 64K; 1024x4 has 4 needles, all asked for, 0x4 no haystack, "
        f"1024{AT}0.5 one in the middle",
    ),
    VariablesSettings: (
        r"(\d+[KM]?)(?:x(\d+))?",
        "the tokens of a row, as in 1024 or 64K; 1024x3 has three hops, 0x3 no haystack",
    ),
    CommonWordsSettings: (
        r"(\d+[KM]?)(?:x(\d+))?", "the most tokens of a row, as in 1024 or 64K; 1024x3 has three common words",
    ),
    BabiLongSettings: (r"(\d+[KM]?)", "the tokens of a row, as in 1024 or 128K; 0 is the facts alone"),
}  # fmt: skip
"""Of each task, how a size is written, and that in words."""


def resized(task: Task, size: str) -> Task:
    """Give a task with the size that is written: 64:4 (recall), 5-20 (copy), 64Kx4 or 64K@0.5 (needle), 32 (others).

    Variables and common words take 64Kx4 as well. K is 1,024 tokens, M is 1,024 K. ValueError for what is no size of
    the task.
    """
    if type(task) not in SIZES:
        raise ValueError(f"got a {type(task).__name__}; expected one of {', '.join(kind.__name__ for kind in SIZES)}")
    wanted, form = SIZES[type(task)]
    found = re.fullmatch(wanted, size)
    if found is None:
        raise ValueError(f"got the size {size!r}; expected {form}")
    if isinstance(task, NeedleSettings):
        length, needles, depth = found.groups()
        count = {} if needles is None else {"keys": int(needles), "queries": int(needles)}
        place = {} if depth is None else {"depth": float(depth)}
        return dataclasses.replace(task, length=_tokens(length), **count, **place)
    numbers = [_tokens(part) for part in found.groups() if part is not None]
    match task:
        case VariablesSettings():
            return dataclasses.replace(task, length=numbers[0], hops=numbers[1] if numbers[1:] else task.hops)
        case CommonWordsSettings():
            return dataclasses.replace(task, length=numbers[0], common=numbers[1] if numbers[1:] else task.common)
        case RecallSettings():
            return dataclasses.replace(task, length=numbers[0], pairs=numbers[1])
        case CopySettings():
            longest = numbers[-1]
            length = max(task.length, 2 * longest + 3) if len(numbers) == 2 else 2 * longest + 3
            return dataclasses.replace(task, shortest=numbers[0], longest=longest, length=length)
        case LookupSettings():
            return dataclasses.replace(task, size=numbers[0])
        case PhoneBookSettings():
            return dataclasses.replace(task, entries=numbers[0])
        case _:
            assert isinstance(task, TrackingSettings | BabiLongSettings)
            return dataclasses.replace(task, length=numbers[0])


def _tokens(written: str) -> int:
    times = {"K": K, "M": K * K}.get(written[-1], 1)
    return int(written.rstrip("KM")) * times
