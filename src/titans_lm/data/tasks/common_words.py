"""Common words, RULER-style as `needle.py` is: which words of a long list come more often than the others?"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.config import check_at_least
from titans_lm.data.tasks.haystack import BYTES, asked_batch, encode_all, vocabulary
from titans_lm.data.tasks.task import COUNTED, SizedTask, TaskPlan
from titans_lm.data.tasks.vocabulary import TWO_WORDS, Names

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch
    from titans_lm.data.tasks.haystack import Part

Word = Literal["letters", "words"]
SYLLABLES = tuple(consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou")
WORDS = {"letters": Names(*[SYLLABLES] * 3), "words": TWO_WORDS}
INTRODUCTION = "Keep the words in mind."


@dataclass(frozen=True, kw_only=True)
class CommonWordsSettings(SizedTask, KnownSettings):
    """Settings of the common words. Rows are text in the tokens of a tokenizer; as many words as fit into `length`.

    With `common=2, often=4, rarely=1, length=184`:

        Keep the words in mind. qareho. finiqu. berahi. nedegu. berahi. nedegu. berahi. nedegu. hisoma. xehili.
        nedegu. nakega. berahi.
        What are the 2 common words? Answer: berahi, nedegu.

    The answer is what follows "Answer:": the common words, and the full stop that ends it; it counts where all of it is
    right. Common words come `often` times each, all others `rarely` times (the last perhaps fewer, as it fits), in an
    order drawn at random. A row ends where another word would not fit into `length`; 0s fill the shorter ones.

    The answer is in the order of the alphabet. RULER counts the words that are in an answer, in any order; here an
    answer is read with the right tokens before each, so that there must be one right answer. The alphabet's order
    depends on nothing but which words are common: how often each came is all that a reader must know, not where.

    RULER's own counts are 30 and 3 of ten words, and in rows shorter than 4,096 tokens 6 and 1.
    Source: RULER (arXiv 2404.06654).
    """

    size_fields = "length", "common"
    size_form = COUNTED, "the most tokens of a row, as in 1024 or 64K; 1024x3 has three common words"
    common: int = 10
    """Words that come often."""
    often: int = 30
    """How many times each of them comes."""
    rarely: int = 3
    """How many times each of the others comes."""
    word: Word = "letters"
    """What words are: six letters in three syllables (a million), or an adjective with a noun (4,096: shorter rows)."""
    tokenizer: str = BYTES
    """Tokens: bytes, words (those of the task, and bytes for the rest), or the folder of a tokenizer."""
    length: int = 4096
    """Most tokens of a row, with its answer."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least("often", self.often, self.rarely + 1)
        if self.common >= len(WORDS[self.word]):
            raise ValueError(
                f"got common={self.common}; expected fewer than the {len(WORDS[self.word])} words that there are"
            )

    @property
    def vocab_size(self) -> int:
        return vocabulary(self.tokenizer)

    @property
    def chance(self) -> float:
        """Share of answers that are right as a whole by saying any words in their order."""
        return 1 / math.comb(len(WORDS[self.word]), self.common)

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; ValueError where they are too short for the common words, or too long for those that there are."""
        return asked_batch([self._row(rng) for _ in range(rows)])

    def _row(self, rng: "np.random.Generator") -> "list[Part]":
        """Draw what a row says, and its question with the answer."""
        import numpy as np

        kind = WORDS[self.word]
        count = int(self.length / (self.rarely * _tokens_of_one(self.word, self.tokenizer))) + 1
        while True:
            count = min(count, len(kind) - self.common)
            words = [kind[pick] for pick in rng.choice(len(kind), self.common + count, replace=False).tolist()]
            said = encode_all([f" {word}." for word in words], self.tokenizer)
            sizes = np.array([len(one) for one in said])
            before, *asked = encode_all([INTRODUCTION, *_asked(words[: self.common])], self.tokenizer)
            taken = len(before) + sum(map(len, asked)) + self.often * int(sizes[: self.common].sum())
            rare = np.repeat(np.arange(self.common, len(words)), self.rarely)
            ends = taken + np.cumsum(sizes[rare])
            if ends[-1] >= self.length:
                break
            if len(words) == len(kind):
                raise ValueError(
                    f"got length={self.length}, for which the {len(words)} words of word={self.word!r} are too few "
                    f"with rarely={self.rarely}; expected about {ends[-1]} or less, or more of rarely"
                )
            count += count // 2 + 1
        rare = rare[ends <= self.length]
        if not len(rare):
            raise ValueError(
                f"got length={self.length} with tokenizer={self.tokenizer}; expected larger sizes, of {ends[0]} tokens "
                f"or more: common words and question take {taken}, and another word must fit in"
            )
        order = rng.permutation(np.concatenate([np.repeat(np.arange(self.common), self.often), rare]))
        return [(before,), *((said[one],) for one in order.tolist()), tuple(asked)]


def _asked(common: list[str]) -> tuple[str, str]:
    """Ask for words, and answer."""
    what = "is the common word" if len(common) == 1 else f"are the {len(common)} common words"
    return f"\nWhat {what}? Answer:", f" {', '.join(sorted(common))}."


@lru_cache(maxsize=8)
def _tokens_of_one(kind: Word, tokenizer: str) -> float:
    """Measure the tokens of a word on 64 of them, the mean."""
    words = WORDS[kind]
    some = [f" {words[which]}." for which in range(0, len(words), len(words) // 64)]
    return sum(map(len, encode_all(some, tokenizer))) / len(some)


@dataclass(frozen=True, kw_only=True)
class CommonWordsTask(TaskPlan):
    """Train and test models on common words: which words of a list come more often than the others?

    Begin with `titans evaluate common-words --models lmm sliding`. Sizes are the most tokens of a row (512x4: with four
    common words); --test-sizes may be of any length, as long rows are read in pieces. An answer counts where all of the
    common words are right.
    """

    name: ClassVar[str] = "common-words"
    title: ClassVar[str] = "Common words"
    task: CommonWordsSettings = field(default_factory=lambda: CommonWordsSettings(often=6, rarely=1))
    sizes: tuple[str, ...] = ("256x2", "512x4", "1024")
    curriculum: bool = True
    test_sizes: tuple[str, ...] = ("1024", "4096", "16384", "65536")
    examples: int = 128
