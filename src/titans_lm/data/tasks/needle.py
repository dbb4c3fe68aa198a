"""Needles in a haystack: sentences that tie a value to a key, hidden in text of any length, and a question at its end.

The form of RULER's S-NIAH and its siblings with several keys, values and questions; all words are ours, so that results
are RULER-style, not RULER's own (those are reached through lm-eval).
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.data.tasks.haystack import BYTES, HiddenFacts, HiddenTask, Story
from titans_lm.data.tasks.task import AT, COUNTED, Task, read_size
from titans_lm.data.tasks.vocabulary import INTRODUCTION, TWO_WORDS

if TYPE_CHECKING:
    import numpy as np


Kind = Literal["number", "uuid", "words"]


@dataclass(frozen=True, kw_only=True)
class NeedleSettings(KnownSettings, HiddenFacts):
    """Settings of one needle task. Rows are text in the tokens of a tokenizer, as long as `length` to the token.

    With the noise haystack (`…` stands for more of it), a number, and one needle:

        Something secret is hidden in this text. Keep it in mind.
        The river runs past the mill. A cart stands in the yard. … The secret number of brave otter is 4821937. The
        clock in the hall is slow. …
        What is the secret number of brave otter? The secret number of brave otter is 4821937.

    The answer is what follows the last "is": the value, and the full stop that ends it.

    `keys` are the needles with keys of their own (more than are asked for are distractors: multi-key), `values` the
    needles of each key (multi-value: the answer has all of them in the order of the text), `queries` the keys that are
    asked for, one question after the other, each with its answer (multi-query).

    PK, N and W of Titans' table 2 are the noise haystack with a number, books with a number, and books with a uuid
    (RULER's S-NIAH 1 to 3). Source: RULER (arXiv 2404.06654).
    """

    size_fields = "length", "depth"
    value: Kind = "number"
    """What is hidden: a number of seven digits, a uuid of 36 characters, or two words."""
    books: Path | None = None
    """A text or a folder of texts to hide it in; five dull sentences over and over where none is given."""
    tokenizer: str = BYTES
    """Tokens: bytes, words (those of the task, and bytes for the rest), or the folder of a tokenizer."""
    length: int = 1024
    """Tokens of a row, with its answers; 0 is without a haystack, as long as it takes."""
    depth: float | None = None
    """Where the needle is, from 0 (the begin) to 1 (the end of the haystack); any place where it is not given."""
    keys: int = 1
    """Needles of different keys."""
    values: int = 1
    """Needles of each key."""
    queries: int = 1
    """Keys that are asked for, one after the other."""
    ask_early: bool = False
    """Whether questions, but for the last, may come before the end, with text and needles behind them; not in tests."""

    def __post_init__(self) -> None:
        check_fields(self, zero=["length"])
        if self.keys > len(TWO_WORDS):
            raise ValueError(f"got keys={self.keys}; expected {len(TWO_WORDS)} or fewer")
        if self.queries > self.keys:
            raise ValueError(f"got queries={self.queries} and keys={self.keys}; expected no more queries than keys")
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"got depth={self.depth}; expected a place from 0 (the begin) to 1 (the end)")
        if self.depth is not None and self.keys * self.values > 1:
            raise ValueError(
                f"got depth={self.depth} with {self.keys * self.values} needles; expected keys=1 and values=1, or no "
                "depth: several needles are anywhere"
            )

    @property
    def chance(self) -> float:
        """Share of answers that are right as a whole by saying any values, with several of a key all of them."""
        one = {"number": 1 / 9_000_000, "uuid": 2.0**-122, "words": 1 / len(TWO_WORDS)}[self.value]
        return one**self.values

    def resized(self, size: str) -> "NeedleSettings":
        """Give the task with rows of so many tokens, 64K, 64Kx4 with four needles, all asked for, or 64K@0.5."""
        written, at, depth = size.partition(AT)
        form = (
            "the tokens of a row, as in 1024 or 64K; 1024x4 has 4 needles, all asked for, 0x4 no haystack, "
            f"1024{AT}0.5 one in the middle"
        )
        if at and re.fullmatch(r"[01](\.\d+)?", depth) is None:
            raise ValueError(f"got the size {size!r}; expected {form}")
        length, count = read_size(written, COUNTED, form)
        keys = {} if count is None else {"keys": count, "queries": count}
        return replace(self, length=length, **keys, **({"depth": float(depth)} if at else {}))

    def draw_story(self, rng: "np.random.Generator") -> Story:
        """Draw what a row says."""
        keys = [TWO_WORDS[pick] for pick in rng.choice(len(TWO_WORDS), self.keys, replace=False).tolist()]
        needles = [(key, self._value(rng)) for key in keys for _ in range(self.values)]
        needles = [needles[i] for i in rng.permutation(len(needles))]
        facts = [f"The secret {self._thing} of {key} is {value}. " for key, value in needles]
        questions = [
            (self._question(key), f" {', '.join(value for of, value in needles if of == key)}.")
            for key in keys[: self.queries]
        ]
        early = int(rng.integers(self.queries)) if self.ask_early else 0
        told: list[tuple[float, str | tuple[str, str]]] = [*enumerate(facts)]
        for key, (asked, answer) in zip(keys[:early], questions[:early], strict=True):
            last = max(i for i, (of, _) in enumerate(needles) if of == key)
            told.append((last + (len(needles) - last) * float(rng.random()), (asked, f"{answer} ")))
        told.sort(key=lambda one: one[0])
        return Story(INTRODUCTION, tuple(part for _, part in told), tuple(questions[early:]))

    @property
    def _thing(self) -> str:
        return {"number": "number", "uuid": "code", "words": "word"}[self.value]

    def _question(self, key: str) -> str:
        verb, thing = ("are", f"{self._thing}s") if self.values > 1 else ("is", self._thing)
        return f"\nWhat {verb} the secret {thing} of {key}? The secret {thing} of {key} {verb}"

    def _value(self, rng: "np.random.Generator") -> str:
        match self.value:
            case "number":
                return str(rng.integers(1_000_000, 10_000_000))
            case "uuid":
                import uuid

                return str(uuid.UUID(bytes=rng.bytes(16), version=4))
            case "words":
                return TWO_WORDS[int(rng.integers(len(TWO_WORDS)))]


@dataclass(frozen=True, kw_only=True)
class NeedleTask(HiddenTask):
    """Train and test models on needles in a haystack, far beyond the lengths that they were trained on.

    Begin with `titans evaluate needle --task.tokenizer words --models lmm sliding`. Sizes are tokens of a row (512x4:
    with four needles, all asked for; 0x8: eight, without a haystack); --test-sizes may be of any length, as long rows
    are read in pieces. An answer counts where all of its characters are right.
    """

    name: ClassVar[str] = "needle"
    title: ClassVar[str] = "Needles in a haystack"
    task: NeedleSettings = field(default_factory=NeedleSettings)
    sizes: tuple[str, ...] = ("0x8", "256", "512x4", "1024")
    """Sizes to train on, one a batch: many needles without a haystack first, as nothing is learned without."""
    test_sizes: tuple[str, ...] = ("1024", "4096", "16384", "65536")
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Places of the needle that every size is tested at, 0 the begin and 1 the end; of several needles, any."""
    examples: int = 64
    """Rows that are tested of every size, at every depth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.depths)) != len(self.depths):
            raise ValueError(f"got depths={self.depths!r}; expected every depth once")
        taught = [self.task.resized(size) for size in self.sizes] or [self.task]
        if self.task.ask_early and all(task.queries == 1 for task in taught):
            raise ValueError(
                "got task.ask_early with one question in every row, which is at the end; expected sizes with several "
                "needles, such as 1Kx4, or task.queries=2 or more"
            )

    @property
    def test_task(self) -> NeedleSettings:
        """The task as it is tested: all questions at the end; sizes go over it."""
        return replace(super().test_task, ask_early=False)

    @property
    def eval_tasks(self) -> dict[str, Task]:
        """Tasks to test on, by their sizes and depths."""
        found: dict[str, Task] = {}
        for size in self.test_sizes or self.sizes or (str(self.task.length),):
            task: NeedleSettings = self.test_task.resized(size)
            placed = task.length and task.keys * task.values == 1 and task.depth is None
            at_depths = {f"{size}{AT}{at:.15g}": replace(task, depth=at) for at in self.depths if placed}
            found |= at_depths or {size: task}
        return found
