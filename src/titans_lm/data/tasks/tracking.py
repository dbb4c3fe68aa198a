"""State tracking: a word of group elements, and after each of them the product of all so far (parity, S3, A5, S5).

Products in A5 and S5 cannot be computed by circuits of constant depth (unless TC0 = NC1), which is what a model that
reads all tokens at once is; see "The Illusion of State in State-Space Models" (Merrill, Petty, Sabharwal; arXiv
2404.08819).
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar, Literal

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.data.tasks.task import SizedTask, TaskPlan

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch


Group = Literal["parity", "s3", "a5", "s5"]
ORDERS = {"parity": 2, "s3": 6, "a5": 60, "s5": 120}
"""Elements of each group."""


@dataclass(frozen=True, kw_only=True)
class TrackingSettings(SizedTask, KnownSettings):
    """Words of elements of a group; what is asked for at every token is the product of the word so far.

    With `group="parity", length=6`, the elements 0 and 1:

        input_ids     1    0    1    1    0    1
        targets       1    1    0    1    1    0

    Elements of s3, a5 and s5 are permutations p of 3 or 5 things, numbered in the order of `itertools.permutations`;
    the product "p, then q" sends i to q[p[i]].
    """

    size_fields = ("length",)
    size_form = r"(\d+)", "the tokens of a word, as in 32"
    group: Group = "s5"
    """parity (two elements), s3 (6), a5 (60) or s5 (120)."""
    length: int = 32
    """Tokens of a word."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def vocab_size(self) -> int:
        return ORDERS[self.group]

    @property
    def chance(self) -> float:
        return 1.0 / self.vocab_size

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; every element is as likely as any other."""
        from titans_lm.data.batches import as_batch

        table = products(self.group)
        inputs = rng.integers(0, len(table), (rows, self.length))
        targets = inputs.copy()
        for place in range(1, self.length):
            targets[:, place] = table[targets[:, place - 1], inputs[:, place]]
        return as_batch(input_ids=inputs, targets=targets)


@dataclass(frozen=True, kw_only=True)
class TrackingTask(TaskPlan):
    """Train and test models on state tracking: the product of a word of group elements so far. Sizes are tokens."""

    name: ClassVar[str] = "tracking"
    title: ClassVar[str] = "State tracking"
    task: TrackingSettings = field(default_factory=TrackingSettings)
    sizes: tuple[str, ...] = ("8", "16", "32")
    test_sizes: tuple[str, ...] = ("16", "32", "64", "128")


@cache
def elements(group: Group) -> list[tuple[int, ...]]:
    """List the permutations that a group is made of."""
    things = {"parity": 2, "s3": 3, "a5": 5, "s5": 5}[group]
    return [p for p in permutations(range(things)) if group != "a5" or _is_even(p)]


@cache
def products(group: Group) -> "np.ndarray":
    """Tabulate the group: entry [p, q] is the number of "p, then q"."""
    import numpy as np

    listed = elements(group)
    number = {p: index for index, p in enumerate(listed)}
    return np.array([[number[tuple(q[i] for i in p)] for q in listed] for p in listed])


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p))) % 2 == 0
