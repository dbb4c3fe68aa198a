"""Needles in a haystack: sentences that tie a value to a key, hidden in text of any length, and a question at its end.

The form of RULER's S-NIAH and its siblings with several keys, values and questions; all words are ours, so that results
are RULER-style, not RULER's own (those are reached through lm-eval).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from titans_lm.config import check_at_least, check_choice
from titans_lm.data.tasks.hay import BYTES, Told, haystack, text_batch, vocabulary

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch

Kind = Literal["number", "uuid", "words"]
FRAME = ("The secret", "What is the secret", "number", "code", "word", "numbers", "codes", "words", "of", "are")
"""Words of needles and questions."""
INTRODUCTION = "Something secret is hidden in this text. Keep it in mind.\n"
ADJECTIVES = (
    "amber", "bitter", "brave", "calm", "clever", "cold", "crisp", "curious", "dark", "dusty", "eager", "early",
    "faint", "fierce", "frozen", "gentle", "golden", "grand", "hasty", "hollow", "humble", "icy", "jolly", "keen",
    "lazy", "little", "lonely", "loud", "lucky", "mellow", "mild", "misty", "modest", "noble", "odd", "pale", "plain",
    "polite", "proud", "quick", "quiet", "rapid", "rare", "rough", "royal", "rusty", "salty", "sharp", "shy", "silent",
    "silver", "sleepy", "slow", "smooth", "solid", "steady", "stormy", "sunny", "sweet", "tall", "tidy", "vivid",
    "warm", "wild",
)  # fmt: skip
NOUNS = (
    "acorn", "anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "bell", "bridge", "candle", "canyon",
    "castle", "cedar", "cloud", "comet", "copper", "cradle", "crane", "desert", "drum", "eagle", "ember", "falcon",
    "feather", "fern", "forest", "fountain", "garden", "glacier", "hammer", "harbor", "hazel", "island", "ivory",
    "jacket", "kettle", "ladder", "lantern", "lemon", "lizard", "maple", "marble", "meadow", "mirror", "needle",
    "ocean", "orchard", "otter", "paper", "pebble", "pillow", "quarry", "raven", "ribbon", "saddle", "shadow",
    "shepherd", "spoon", "thistle", "tower", "tunnel", "violin", "willow",
)  # fmt: skip


def spelled(which: int, places: Sequence[Sequence[str]], between: str = "") -> str:
    """Write a name by its number: one part for every place, and the last place changes with every number."""
    parts = []
    for choices in reversed(places):
        which, at = divmod(which, len(choices))
        parts.append(choices[at])
    return between.join(reversed(parts))


def two_words(which: int) -> str:
    """Write an adjective and a noun by their number."""
    return spelled(which, (ADJECTIVES, NOUNS), " ")


def two_words_count() -> int:
    """Count the pairs of an adjective and a noun."""
    return len(ADJECTIVES) * len(NOUNS)


@dataclass(frozen=True, kw_only=True)
class NeedleSettings:
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

    def __post_init__(self) -> None:
        check_choice("value", self.value, get_args(Kind))
        check_at_least("length", self.length, 0)
        for name in ("keys", "values", "queries"):
            check_at_least(name, getattr(self, name), 1)
        if self.keys > two_words_count():
            raise ValueError(f"got keys={self.keys}; expected {two_words_count()} or fewer")
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
    def vocab_size(self) -> int:
        return vocabulary(self.tokenizer)

    @property
    def chance(self) -> float:
        """Share of answers that are right as a whole by saying any values, with several of a key all of them."""
        one = {"number": 1 / 9_000_000, "uuid": 2.0**-122, "words": 1 / two_words_count()}[self.value]
        return one**self.values

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; ValueError where needles and question leave no room for a haystack."""
        hay = haystack(self.books, self.tokenizer) if self.length else None
        told = [self._told(rng) for _ in range(rows)]
        return text_batch(rng, told, hay, tokenizer=self.tokenizer, length=self.length, depth=self.depth)

    def _told(self, rng: "np.random.Generator") -> Told:
        """Draw what a row says."""
        keys = [two_words(int(pick)) for pick in rng.choice(two_words_count(), self.keys, replace=False)]
        needles = [(key, self._value(rng)) for key in keys for _ in range(self.values)]
        needles = [needles[i] for i in rng.permutation(len(needles))]
        facts = tuple(f"The secret {self._thing} of {key} is {value}. " for key, value in needles)
        questions = tuple(
            (self._question(key), f" {', '.join(value for of, value in needles if of == key)}.")
            for key in keys[: self.queries]
        )
        return Told(INTRODUCTION, facts, questions)

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
                return two_words(int(rng.integers(two_words_count())))
