"""The sizes that a task is trained and tested with, as they are written on a command line."""

import dataclasses
import re

from titans_lm.data.tasks.copying import CopySettings, LookupSettings, PhoneBookSettings
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tasks.task import Task
from titans_lm.data.tasks.tracking import TrackingSettings

AT = "@"
"""What stands between a length and a depth."""
FORMS = {
    RecallSettings: "LENGTH:PAIRS, as in 64:4",
    CopySettings: "the letters of a string, as in 20 (one a row), or SHORTEST-LONGEST (as many a row as fit)",
    LookupSettings: "the letters of the string, as in 32",
    PhoneBookSettings: "the entries, as in 20",
    TrackingSettings: "the tokens of a word, as in 32",
    NeedleSettings: f"the tokens of a row, as in 1024, and behind {AT} a depth from 0 to 1 if it is one, as in 1024{AT}0.5",
}


def resized(task: Task, size: str) -> Task:
    """Give a task with the size that is written: 64:4 (recall), 5-20 (copy), 1024@0.5 (needle), 32 (the others).

    ValueError for what is no size of the task.
    """
    form = FORMS.get(type(task))
    if form is None:
        raise ValueError(f"got a {type(task).__name__}; expected one of {', '.join(kind.__name__ for kind in FORMS)}")
    wanted = r"(\d+)"
    if isinstance(task, RecallSettings):
        wanted = r"(\d+):(\d+)"
    elif isinstance(task, CopySettings):
        wanted = r"(\d+)(?:-(\d+))?"
    elif isinstance(task, NeedleSettings):
        wanted = rf"(\d+)(?:{AT}([01](?:\.\d+)?))?"
    found = re.fullmatch(wanted, size)
    if found is None:
        raise ValueError(f"got the size {size!r}; expected {form}")
    if isinstance(task, NeedleSettings):
        length, depth = found.groups()
        return dataclasses.replace(task, length=int(length), depth=task.depth if depth is None else float(depth))
    numbers = [int(part) for part in found.groups() if part is not None]
    match task:
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
            assert isinstance(task, TrackingSettings)
            return dataclasses.replace(task, length=numbers[0])
