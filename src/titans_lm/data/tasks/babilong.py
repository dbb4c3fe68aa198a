"""Questions whose facts are scattered over a long text (BABILong): stories of bAbI between the sentences of books."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from titans_lm.config import check_at_least, check_choice
from titans_lm.data.tasks.hay import BYTES, Told, encode, haystack, text_batch, vocabulary
from titans_lm.data.tasks.stories import GIVERS, LABELS, PEOPLE, Question, Story, draw_question, read_questions

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch

TRIES = 200
"""Stories that are drawn before one is given up that is short enough."""
ROOM = 0.75
"""Share of a row that facts and question may take at most, so that there is a haystack."""


@dataclass(frozen=True, kw_only=True)
class BabiLongSettings:
    """Settings of a BABILong task. Rows are text in the tokens of a tokenizer, as long as `length` to the token.

    With `length=0` there are the facts alone (BABILong's 0k), and 0s behind rows that are shorter than others:

        Mary moved to the bathroom. John went to the hallway. Sandra went back to the office.
        Where is Mary? Answer: bathroom.

    With a length the facts stand between sentences of books, in their order, each before a random sentence (with
    replacement, so that some follow each other). The answer is the word behind "Answer:" with its full stop. An answer
    counts where greedy writing gives it and nothing else before the full stop, which is BABILong's strict rule (one
    label, and the right one) for a model that has learned the form.

    Stories whose facts and question take more than three quarters of a row are drawn again, so that short rows of qa2,
    qa3 and qa5 hold shorter, easier stories than long ones, and those of `length=0` hold all. Of qa3 in bytes 28 % fit
    1,024 tokens and 58 % fit 2,048. Accuracy by length compares like with like where `facts` is a limit that all
    lengths have room for, or where `counted` says that the stories were as long.

    Sources: BABILong (arXiv 2406.10149), bAbI (arXiv 1502.05698). Instructions and examples in the prompt, as
    pretrained models need them, are left to lm-eval's tasks.
    """

    story: Story = "qa1"
    """Task of bAbI: qa1 (one fact), qa2 (two), qa3 (three), qa4 (two relations), qa5 (three arguments)."""
    source: Path | None = None
    """A file of bAbI to take questions from; stories are drawn where none is given."""
    books: Path | None = None
    """A text or a folder of texts to hide them in; five dull sentences over and over where none is given."""
    clean: bool = False
    """Leave out sentences of the books that name one of the people of the story."""
    tokenizer: str = BYTES
    """Tokens: bytes, words (those of the task, and bytes for the rest), or the folder of a tokenizer."""
    length: int = 1024
    """Tokens of a row, with its answer; 0 is the facts alone."""
    facts: int = 0
    """Most facts of a story, whatever the length, so that all lengths have stories of one kind; 0 sets no limit."""

    def __post_init__(self) -> None:
        check_choice("story", self.story, get_args(Story))
        check_at_least("length", self.length, 0)
        check_at_least("facts", self.facts, 0)
        if self.clean and self.books is None:
            raise ValueError("got clean=True without books; expected books, whose sentences could be left out")

    @property
    def vocab_size(self) -> int:
        return vocabulary(self.tokenizer)

    @property
    def chance(self) -> float:
        """Share of answers that are right by always saying the most frequent one: of a file, of what fits a row.

        ValueError for a file of which nothing fits.
        """
        if self.source is None:  # four questions of five of qa5 ask for one of the people
            return 1.0 / (len(GIVERS) + 1) if self.story == "qa5" else 1.0 / len(LABELS[self.story])
        answers = _answers(self)
        if not answers:
            raise ValueError(f"{self._too_short()}: no question of {self.source} fits")
        return max(answers.values()) / answers.total()

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; ValueError where no story is short enough."""
        told = [self._told(rng) for _ in range(rows)]
        if not self.length:
            return text_batch(rng, told, None, tokenizer=self.tokenizer)
        people = (GIVERS if self.story == "qa5" else PEOPLE) if self.clean else ()
        hay = haystack(self.books, self.tokenizer, people)
        return text_batch(rng, told, hay, tokenizer=self.tokenizer, length=self.length)

    def counted(self, rng: "np.random.Generator", rows: int) -> list[int]:
        """Count the facts of the rows that `draw` gives for the same numbers."""
        return [len(self._told(rng).facts) for _ in range(rows)]  # stories are drawn before what they are hidden in

    def _told(self, rng: "np.random.Generator") -> Told:
        """Draw a question that fits."""
        for _ in range(TRIES):
            if self.source is None:
                found = draw_question(rng, self.story)
            else:
                questions = _questions(self.source)
                found = questions[int(rng.integers(len(questions)))]
            told = _as_told(found)
            if self._fits(told):
                return told
        raise ValueError(f"{self._too_short()}: {TRIES} stories of {self.story} did not fit")

    def _too_short(self) -> str:
        few = f" and facts={self.facts}" if self.facts else ""
        return f"got length={self.length}{few}; expected more"

    def _fits(self, told: Told) -> bool:
        if self.facts and len(told.facts) > self.facts:
            return False
        text = "".join([*told.facts, *told.questions[0]])
        # A token is a byte at least, so that most need not be encoded to know that they fit.
        if not self.length or len(text) <= ROOM * self.length:
            return True
        return self.tokenizer != BYTES and len(encode(text, self.tokenizer)) <= ROOM * self.length


def _as_told(question: Question) -> Told:
    asked = (f"\n{question.question} Answer:", f" {question.answer}.")
    return Told("", tuple(f"{fact} " for fact in question.facts), (asked,))


@lru_cache(maxsize=32)
def _answers(settings: BabiLongSettings) -> Counter[str]:
    """Count the answers of a file's questions that fit."""
    assert settings.source is not None
    return Counter(one.answer for one in _questions(settings.source) if settings._fits(_as_told(one)))


@lru_cache(maxsize=8)
def _questions(source: Path) -> tuple[Question, ...]:
    return tuple(read_questions(source))
