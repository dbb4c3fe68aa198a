"""What facts are hidden in: a few dull sentences over and over, or books; in the tokens of a tokenizer."""

import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from titans_lm.config import nearest
from titans_lm.data.tasks.task import Task, TaskPlan
from titans_lm.data.tasks.vocabulary import NOISE, encode_words, word_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from titans_lm.data.batches import Batch

    Part = tuple[np.ndarray, ...]
    """Tokens that are told, alone; or those of a question, and those of its answer."""

BYTES, WORDS = "bytes", "words"
"""Names of the tokenizers whose ids are the bytes of the text, or words of the tasks (`data/tasks/vocabulary.py`)."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip
"""Files of which the folder of a tokenizer has one at least."""
SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'’”)]))(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)\s+")
"""What is between two sentences of a book; other abbreviations are cut too, which does no harm to a haystack."""


@dataclass(frozen=True)
class Haystack:
    """Texts as tokens, and where in them a sentence may be put."""

    texts: "tuple[np.ndarray, ...]"
    places: "tuple[np.ndarray, ...]"
    """Of each text, the offsets before which a sentence begins; the first is 0."""

    def cut(self, rng: "np.random.Generator", tokens: int) -> "tuple[np.ndarray, np.ndarray]":
        """Cut so many tokens from a random sentence of a random text on, and say where in them sentences begin.

        The last sentence is cut off where the tokens are enough; where a text ends, another random one goes on.
        """
        import numpy as np

        parts, places, have = [], [], 0
        chances = np.array([len(text) for text in self.texts], float)
        chances /= chances.sum()
        while have < tokens or not parts:
            which = int(rng.choice(len(self.texts), p=chances))
            text, begins = self.texts[which], self.places[which]
            start = int(begins[rng.integers(len(begins))]) if not parts else 0
            part = text[start : start + tokens - have]
            places.append(begins[(begins >= start) & (begins < start + max(len(part), 1))] - start + have)
            parts.append(part)
            have += len(part)
        return np.concatenate(parts), np.concatenate(places)


@dataclass(frozen=True)
class Story:
    """What a row says beside the haystack."""

    before: str
    """What it begins with."""
    facts: tuple[str | tuple[str, str], ...]
    """Sentences that are hidden, in their order; a question among them, with its answer, is asked there."""
    questions: tuple[tuple[str, str], ...]
    """What it ends with: questions up to where the answer begins, each with its answer to the last character."""


def text_batch(
    rng: "np.random.Generator",
    stories: "Sequence[Story]",
    hay: Haystack | None,
    *,
    tokenizer: str = BYTES,
    length: int | None = None,
    depth: float | None = None,
) -> "Batch":
    """Hide facts in hay so that every row has `length` tokens; without hay the facts stand alone, and 0s fill the rows.

    A fact comes before a random sentence, or at the place nearest to `depth` (0 to 1) of the haystack; more of them
    keep their order, and may follow each other. All tokens of an answer are asked for, as one. Parts are turned into
    tokens one by one: no token spans the border of a fact. ValueError where facts and questions leave no room.
    """
    made = []
    for story in stories:
        before, *facts = (_encode_part(part, tokenizer) for part in (story.before, *story.facts))
        asked = [_encode_part(part, tokenizer) for part in story.questions]
        if hay is not None and length is not None:
            taken = sum(len(piece) for part in (before, *facts, *asked) for piece in part)
            if taken >= length:
                others = "" if tokenizer == WORDS else ", or fewer: tokenizer=words has one a word"
                raise ValueError(
                    f"got length={length} with tokenizer={tokenizer}; expected more than the {taken} tokens of facts "
                    f"and questions, thus larger sizes{others}"
                )
            facts = _hide(rng, facts, hay, length - taken, depth)
        made.append([before, *facts, *asked])
    return asked_batch(made)


def asked_batch(rows: "Sequence[Sequence[Part]]") -> "Batch":
    """Make a batch of rows: what is told, and questions with their answers; 0s fill the shorter rows.

    All tokens of an answer are asked for, as one, each at the token before it.
    """
    import numpy as np

    from titans_lm.data.batches import IGNORED, as_batch

    made = []
    for row in rows:
        pieces, said, questions = [], [], 0
        for part in row:
            for i, piece in enumerate(part):
                pieces.append(piece)
                said.append(np.full(len(piece), questions if i else -1))
            questions += len(part) - 1
        made.append((np.concatenate(pieces), np.concatenate(said)))
    inputs = np.zeros((len(made), max(len(ids) for ids, _ in made)), np.int64)
    targets, answers = np.full_like(inputs, IGNORED), np.full_like(inputs, IGNORED)
    for row, (ids, which) in enumerate(made):
        inputs[row, : len(ids)] = ids
        places = np.flatnonzero(which >= 0)
        targets[row, places - 1], answers[row, places - 1] = ids[places], which[places]
    return as_batch(input_ids=inputs, targets=targets, answers=answers)


def _encode_part(part: str | tuple[str, str], tokenizer: str) -> "Part":
    """Turn what is told, or a question with its answer, into tokens."""
    return tuple(encode(piece, tokenizer) for piece in ((part,) if isinstance(part, str) else part))


def _hide(
    rng: "np.random.Generator", facts: "list[Part]", hay: Haystack, room: int, depth: float | None
) -> "list[Part]":
    """Put facts between the sentences of so many tokens of hay."""
    import numpy as np

    text, places = hay.cut(rng, room)
    if depth is None:
        at = np.sort(rng.choice(places, len(facts)))
    else:
        at = np.full(len(facts), places[abs(places - depth * room).argmin()])
    first, *others = np.split(text, at)
    return [(first,), *(part for fact, after in zip(facts, others, strict=True) for part in (fact, (after,)))]


@lru_cache(maxsize=4)
def tokenizer_in(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a folder; ValueError where there is none."""
    from titans_lm.data.tokenizer import read_tokenizer

    if not Path(name).is_dir():
        raise ValueError(f"got tokenizer={name!r}; {nearest(name, [BYTES, WORDS])} (or give the folder of a tokenizer)")
    if not holds_tokenizer(Path(name)):  # of a model's folder without one, transformers makes one that knows no word
        raise ValueError(
            f"got tokenizer={name!r}, a folder without a tokenizer; expected one with a tokenizer.json, which of a run "
            "is RUN/model"
        )
    return read_tokenizer(name)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file that a tokenizer is made of."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def vocabulary(tokenizer: str) -> int:
    """Count the ids that a tokenizer makes."""
    if tokenizer == WORDS:
        return word_count()
    return 256 if tokenizer == BYTES else len(tokenizer_in(tokenizer))


def encode(text: str, tokenizer: str = BYTES) -> "np.ndarray":
    """Turn a piece of text into tokens, without marks of a begin or an end."""
    return encode_all([text], tokenizer)[0]


def encode_all(texts: "Sequence[str]", tokenizer: str) -> "list[np.ndarray]":
    """Turn pieces of text into tokens, each on its own."""
    import numpy as np

    if tokenizer == BYTES:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
    if tokenizer == WORDS:
        return [encode_words(text) for text in texts]
    found = tokenizer_in(tokenizer)(list(texts), add_special_tokens=False).input_ids
    return [np.asarray(ids, np.int64) for ids in found]


@lru_cache(maxsize=4)
def noise(tokenizer: str = BYTES) -> Haystack:
    """Make hay of five sentences that come again and again, as long as a long book."""
    import numpy as np

    sentences = encode_all([f"{sentence} " for sentence in NOISE], tokenizer)
    lengths = np.array([len(sentence) for sentence in sentences])
    again = -(-(1 << 20) // lengths.sum())
    ends = np.cumsum(np.tile(lengths, again))
    return Haystack((np.tile(np.concatenate(sentences), again),), (np.concatenate([[0], ends[:-1]]),))


@lru_cache(maxsize=4)
def books(source: Path, tokenizer: str = BYTES, without: tuple[str, ...] = ()) -> Haystack:
    """Make hay of the texts of a file or a folder: white space becomes one space, marks part the sentences.

    ValueError for a text that is not UTF-8, and where no sentence is left.
    """
    import numpy as np

    from titans_lm.data.text import read_documents

    texts, places = [], []
    named = re.compile(rf"\b({'|'.join(without)})\b") if without else None
    for document in read_documents(source)[0]:
        sentences = SENTENCE.split(" ".join(document.text(source).split()))
        kept = [f"{one} " for one in sentences if one and not (named and named.search(one))]
        if not kept:
            continue
        pieces = encode_all(kept, tokenizer)
        texts.append(np.concatenate(pieces))
        places.append(np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])[:-1]]))
    if not texts:
        why = f"in which every sentence names one of {', '.join(without)}" if without else "which has no sentence"
        raise ValueError(f"got {source}, {why}; expected other text")
    return Haystack(tuple(texts), tuple(places))


class HiddenFacts(Task, Protocol):
    """What needles, variables and stories share: facts that are hidden in text, in the tokens of a tokenizer."""

    @property
    def books(self) -> Path | None:
        """The text to hide them in."""

    @property
    def tokenizer(self) -> str:
        """What tokens are."""

    @property
    def depth(self) -> float | None:
        """Where the facts are; any place where it is None."""
        return None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Words whose sentences are left out of the books."""
        return ()

    @property
    def vocab_size(self) -> int:
        return vocabulary(self.tokenizer)

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; ValueError where what they say leaves no room for a haystack."""
        stories = [self.draw_story(rng) for _ in range(rows)]
        hay = None
        if self.length:
            hay = noise(self.tokenizer) if self.books is None else books(self.books, self.tokenizer, self.left_out)
        return text_batch(rng, stories, hay, tokenizer=self.tokenizer, length=self.length, depth=self.depth)

    @abstractmethod
    def draw_story(self, rng: "np.random.Generator") -> Story:
        """Draw what a row says."""


@dataclass(frozen=True, kw_only=True)
class HiddenTask(TaskPlan):
    """What needles, variables and stories share: facts that are hidden in text, and another text to test in."""

    task: Any
    curriculum: bool = True
    test_books: Path | None = None
    """A text or a folder of texts to test in; those of the task where none is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_books is not None and self.task.books is None:
            raise ValueError("got test_books without task.books; expected books to train in as well")

    @property
    def test_task(self) -> Any:
        """The task as it is tested, in a text of its own where one is given; sizes go over it."""
        return self.task if self.test_books is None else replace(self.task, books=self.test_books)
