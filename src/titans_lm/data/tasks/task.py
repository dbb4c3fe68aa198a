"""What a synthetic task is, and at which sizes it is trained and tested.

A task is one file, which says what a row is (its settings, which draw) and what is usual (a `TaskPlan`: its command,
its title, sizes to train and to test on), and one line of `TASKS`. Settings load nothing heavy: a command line lists
them before anything runs.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from titans_lm.config import check_at_least, check_positive

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch

AT = "@"
"""What stands between a length and a depth."""
UNITS = {"K": 1024, "M": 1024 * 1024}
"""Tokens that letters behind a number stand for."""
COUNTED = r"(\d+[KM]?)(?:x(\d+))?"
"""The pattern of sizes that are tokens, and how many of something: 64Kx4."""


@runtime_checkable
class Task(Protocol):
    """Settings of a task, which can draw rows of it.

    A drawn batch has `input_ids` and `targets` (IGNORED where nothing is asked) and may have `answers`: for every
    target the number of the answer in its row that it is a part of. An answer is right where all of its parts are;
    without `answers` every target is an answer of its own.
    """

    @property
    def vocab_size(self) -> int:
        """Ids that rows are made of."""

    @property
    def length(self) -> int:
        """Tokens of a row."""

    @property
    def chance(self) -> float:
        """Share of answers that are right as a whole without knowing anything but the task."""

    def resized(self, size: str) -> "Task":
        """Give the task with a size as it is written on a command line; ValueError for what is none."""

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows."""


def read_size(size: str, pattern: str, form: str) -> list[int | None]:
    """Read the numbers of a size, K is 1,024 and M is 1,024 K; None for one that is left out.

    ValueError, with the `form` in words, for what is no size.
    """
    found = re.fullmatch(pattern, size)
    if found is None:
        raise ValueError(f"got the size {size!r}; expected {form}")
    return [None if part is None else int(part.rstrip("KM")) * UNITS.get(part[-1], 1) for part in found.groups()]


class SizedTask:
    """Settings of a task whose sizes are numbers, each for one of them."""

    size_fields: ClassVar[tuple[str, ...]]
    """Settings that a size says."""
    size_form: ClassVar[tuple[str, str]]
    """A pattern with a group for each of them, and the same in words."""

    def resized(self, size: str) -> Any:
        """Give the task with a size; a number that is left out changes nothing."""
        own: Any = self
        read = zip(self.size_fields, read_size(size, *self.size_form), strict=True)
        return replace(own, **{name: number for name, number in read if number is not None})


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """A task with the sizes that it is trained and tested at."""

    name: ClassVar[str]
    """Word behind `titans evaluate`."""
    title: ClassVar[str]
    """What the page of results calls it."""
    task: Task
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ()
    """Sizes to train on, one a batch."""
    shares: tuple[float, ...] = ()
    """How often each size is trained on beside the others, such as 4 2 1; all as often where none are given."""
    curriculum: bool = False
    """Whether the sizes to train on join one after the other, evenly over the first half of the steps."""
    test_sizes: tuple[str, ...] = ()
    """Sizes to test on."""
    examples: int = 1024
    """Rows that are tested of every size."""
    test_tokens: int = 0
    """Most tokens that are tested of every size: of long rows fewer are. 0 sets no limit."""

    def __post_init__(self) -> None:
        check_at_least("examples", self.examples, 1)
        check_at_least("test_tokens", self.test_tokens, 0)
        for name in ("sizes", "test_sizes"):
            sizes = getattr(self, name)
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"got {name}={sizes!r}; expected every size once")
            for size in sizes:
                self.task.resized(size)
        if self.shares and len(self.shares) != len(self.sizes):
            raise ValueError(
                f"got {len(self.shares)} shares for {len(self.sizes)} sizes; expected one for each, or none"
            )
        for share in self.shares:
            check_positive("shares", share)

    @property
    def train_tasks(self) -> list[Task]:
        """Tasks to train on."""
        return list(self.trial_tasks.values())

    @property
    def trial_tasks(self) -> dict[str, Task]:
        """Tasks that a learning rate is chosen by: those it is trained on, none that is to show how far it carries."""
        return {size: self.task.resized(size) for size in self.sizes} or {"": self.task}

    @property
    def test_task(self) -> Task:
        """The task as it is tested; sizes go over it."""
        return self.task

    @property
    def eval_tasks(self) -> dict[str, Task]:
        """Tasks to test on, by their sizes."""
        task = self.test_task
        return {size: task.resized(size) for size in self.test_sizes or self.sizes} or {"": task}
