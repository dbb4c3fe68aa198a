"""Questions whose facts are scattered over a long text (BABILong): stories of bAbI between the sentences of books."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.data.tasks.haystack import BYTES, HiddenFacts, HiddenTask, Story, encode
from titans_lm.data.tasks.stories import GIVERS, LABELS, PEOPLE, BabiTask, Question, draw_question, read_questions
from titans_lm.data.tasks.task import SizedTask
from titans_lm.data.text import overlap

if TYPE_CHECKING:
    import numpy as np


TRIES = 200
"""Stories that are drawn before one is given up that is short enough."""
ROOM = 0.75
"""Share of a row that facts and question may take at most, so that there is a haystack."""


@dataclass(frozen=True, kw_only=True)
class BabiLongSettings(SizedTask, KnownSettings, HiddenFacts):
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
    lengths have room for, or where `count_facts` says that the stories were as long.

    Sources: BABILong (arXiv 2406.10149), bAbI (arXiv 1502.05698). Instructions and examples in the prompt, as
    pretrained models need them, are left to lm-eval's tasks.
    """

    size_fields = ("length",)
    size_form = r"(\d+[KM]?)", "the tokens of a row, as in 1024 or 128K; 0 is the facts alone"
    story: BabiTask = "qa1"
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
        check_fields(self, zero=["length", "facts"])
        if self.clean and self.books is None:
            raise ValueError("got clean=True without books; expected books, whose sentences could be left out")

    @property
    def chance(self) -> float:
        """Share of answers that are right by always saying the most frequent one: of a file, of what fits a row.

        ValueError for a file of which nothing fits.
        """
        if self.source is None:  # four questions of five of qa5 ask for one of the people
            return 1.0 / (len(GIVERS) + 1) if self.story == "qa5" else 1.0 / len(LABELS[self.story])
        answers = Counter(one.answer for one in _fitting(self))
        if not answers:
            raise ValueError(f"{self._too_short()}: no question of {self.source} fits")
        return max(answers.values()) / answers.total()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Words whose sentences are left out of the books: the people of the story."""
        return (GIVERS if self.story == "qa5" else PEOPLE) if self.clean else ()

    def count_facts(self, rng: "np.random.Generator", rows: int) -> list[int]:
        """Count the facts of the rows that `draw` gives for the same numbers."""
        return [len(self.draw_story(rng).facts) for _ in range(rows)]  # drawn before what they are hidden in

    def draw_story(self, rng: "np.random.Generator") -> Story:
        """Draw a question that fits."""
        for _ in range(TRIES):
            if self.source is None:
                found = draw_question(rng, self.story)
            else:
                questions = _questions(self.source)
                found = questions[int(rng.integers(len(questions)))]
            story = _as_story(found)
            if self._fits(story):
                return story
        if self.source is not None and (fitting := _fitting(self)):  # so few of the file fit that none was met
            return _as_story(fitting[int(rng.integers(len(fitting)))])
        raise ValueError(f"{self._too_short()}: {TRIES} stories of {self.story} did not fit")

    def _too_short(self) -> str:
        limits = [f"{name}={most}" for name in ("length", "facts") if (most := getattr(self, name))]
        return f"got {' and '.join(limits)}; expected more{' of one or both' if len(limits) > 1 else ''}"

    def _fits(self, story: Story) -> bool:
        if self.facts and len(story.facts) > self.facts:
            return False
        text = "".join(map("".join, [*story.facts, *story.questions[0]]))
        # A token is a byte at least, so that most need not be encoded to know that they fit.
        if not self.length or len(text.encode()) <= ROOM * self.length:
            return True
        return self.tokenizer != BYTES and len(encode(text, self.tokenizer)) <= ROOM * self.length


def _as_story(question: Question) -> Story:
    asked = (f"\n{question.question} Answer:", f" {question.answer}.")
    return Story("", tuple(f"{fact} " for fact in question.facts), (asked,))


@lru_cache(maxsize=32)
def _fitting(settings: BabiLongSettings) -> tuple[Question, ...]:
    """List the questions of a file that fit."""
    assert settings.source is not None
    return tuple(one for one in _questions(settings.source) if settings._fits(_as_story(one)))


@lru_cache(maxsize=8)
def _questions(source: Path) -> tuple[Question, ...]:
    return tuple(read_questions(source))


@dataclass(frozen=True, kw_only=True)
class BabiLongTask(HiddenTask):
    """Train and test models on questions about facts that are scattered over books (BABILong).

    Begin with `titans evaluate babilong --task.books books/ --task.tokenizer words --models lmm sliding
    --model.conv-size 8`: a place is named up to five tokens behind its person. Sizes are tokens of a row, 0 the
    facts alone; --test-sizes may be of any length, as 1M, as long rows are read in pieces.
    """

    name: ClassVar[str] = "babilong"
    title: ClassVar[str] = "Facts in books (BABILong's form)"
    task: BabiLongSettings = field(default_factory=BabiLongSettings)
    sizes: tuple[str, ...] = ("0", "512", "1K", "2K")
    test_sizes: tuple[str, ...] = ("0", "1K", "4K", "16K", "64K")
    test_source: Path | None = None
    """A file of bAbI with the questions to test on, not those of task.source; drawn stories where none is given."""
    examples: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        source, test = self.task.source, self.test_source
        if source is not None and (test is None or overlap(source, test)):
            raise ValueError(
                f"got task.source={str(source)!r} and {'no' if test is None else 'the same'} "
                "test_source, which would test on the questions that are taught; expected test_source with another "
                "file: bAbI has one to train on and one to test on"
            )

    @property
    def test_task(self) -> BabiLongSettings:
        """The task as it is tested, in a text and by a file of questions of its own; sizes go over it."""
        return replace(self.task, source=self.test_source, books=super().test_task.books)
