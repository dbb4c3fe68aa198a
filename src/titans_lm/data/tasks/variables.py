"""Variable tracking, RULER-style as `needle.py` is: numbers handed from variable to variable, in sentences in text."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, ClassVar, Literal

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.data.tasks.haystack import BYTES, HiddenFacts, HiddenTask, Story
from titans_lm.data.tasks.task import COUNTED, SizedTask
from titans_lm.data.tasks.vocabulary import TWO_WORDS, Names

if TYPE_CHECKING:
    import numpy as np


Name = Literal["letters", "words"]
NAMES = {"letters": Names(*[ascii_uppercase] * 5), "words": TWO_WORDS}
LEAST, MOST = 10_000, 99_999
"""Numbers: all of five digits."""
INTRODUCTION = "Keep the numbers in mind.\n"


@dataclass(frozen=True, kw_only=True)
class VariablesSettings(SizedTask, KnownSettings, HiddenFacts):
    """Settings of variable tracking. Rows are text in the tokens of a tokenizer, as long as `length` to the token.

    With `chains=2, hops=2, name="words", length=540`, in the noise haystack:

        Keep the numbers in mind.
        The number of hollow mirror is 55326. The number of grand copper is 92147. The number of quiet ocean is
        the number of grand copper. A cart stands in the yard. Bread is baked before it is light. The clock in
        the hall is slow. The number of modest mirror is the number of quiet ocean. The number of brave lemon is
        the number of hollow mirror. Nobody has come down the road. The number of solid falcon is the number of
        brave lemon. The rive
        What has the number 92147? Answer: grand copper, quiet ocean, modest mirror.

    The answer is what follows "Answer:": every variable of one chain, and the full stop that ends it; it counts where
    all of it is right. A chain begins with a number, and each hop hands that on from the variable before. A variable is
    told once, after the one that it takes its number from; sentences of other chains stand between.

    The answer has the order of the text. RULER counts the names that are in an answer, in any order; here an answer is
    read with the right tokens before each, so that there must be one right answer. The order of the text is that of the
    chain itself: each variable of the answer has its number from the one before it.

    RULER's own setting is one chain of four hops, in which case every variable of the text is in the answer.
    Source: RULER (arXiv 2404.06654).
    """

    size_fields = "length", "hops"
    size_form = COUNTED, "the tokens of a row, as in 1024 or 64K; 1024x3 has three hops, 0x3 no haystack"
    chains: int = 2
    """Numbers that are handed on; one of them is asked for."""
    hops: int = 4
    """How often each is handed on: a chain has one variable more than hops."""
    name: Name = "letters"
    """What variables are called: five capital letters, or two words."""
    books: Path | None = None
    """A text or a folder of texts to hide the chains in; five dull sentences over and over where none is given."""
    tokenizer: str = BYTES
    """Tokens: bytes, words (those of the task, and bytes for the rest), or the folder of a tokenizer."""
    length: int = 1024
    """Tokens of a row, with its answer; 0 is without a haystack, as long as it takes."""

    def __post_init__(self) -> None:
        check_fields(self, zero=["hops", "length"])
        if self.chains > MOST - LEAST + 1:
            raise ValueError(f"got chains={self.chains}; expected {MOST - LEAST + 1} or fewer")
        if self.chains * (self.hops + 1) > len(NAMES[self.name]):
            raise ValueError(
                f"got chains={self.chains} of hops={self.hops}, which need {self.chains * (self.hops + 1)} names; "
                f"expected {len(NAMES[self.name])} or fewer of name={self.name!r}"
            )

    @property
    def chance(self) -> float:
        """Share of answers that are right as a whole by saying any names."""
        return 1 / math.perm(len(NAMES[self.name]), self.hops + 1)

    def draw_story(self, rng: "np.random.Generator") -> Story:
        """Draw what a row says."""
        size = self.hops + 1
        picks = rng.choice(len(NAMES[self.name]), self.chains * size, replace=False).tolist()
        names = [NAMES[self.name][pick] for pick in picks]
        values = (LEAST + rng.choice(MOST - LEAST + 1, self.chains, replace=False)).tolist()
        facts, said = [], [0] * self.chains
        for place in rng.permutation(self.chains * size).tolist():  # chains take turns, each in its own order
            chain = place // size
            at = chain * size + said[chain]
            held = f"the number of {names[at - 1]}" if said[chain] else str(values[chain])
            facts.append(f"The number of {names[at]} is {held}. ")
            said[chain] += 1
        question = f"\nWhat has the number {values[0]}? Answer:"
        return Story(INTRODUCTION, tuple(facts), ((question, f" {', '.join(names[:size])}."),))


@dataclass(frozen=True, kw_only=True)
class VariablesTask(HiddenTask):
    """Train and test models on variable tracking: which variables hold a number that was handed from one to the next?

    Begin with `titans evaluate variables --task.tokenizer words --task.name words --models lmm sliding`. Sizes are
    tokens of a row (1024x2: with chains of two hops; 0x2: without a haystack); --test-sizes may be of any length, as
    long rows are read in pieces. An answer counts where all variables of the chain are right.
    """

    name: ClassVar[str] = "variables"
    title: ClassVar[str] = "Variable tracking"
    task: VariablesSettings = field(default_factory=VariablesSettings)
    sizes: tuple[str, ...] = ("0x0", "0x1", "0x2", "0x4", "1024")
    """Sizes to train on, one a batch: a number and its variable first, then longer chains, then a haystack."""
    test_sizes: tuple[str, ...] = ("1024", "4096", "16384", "65536")
    examples: int = 128
