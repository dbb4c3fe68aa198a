"""A long text, and facts and numbers that are hidden in it: drawn from a seed, or a user's own; and where they stand.

The text is a user's, or from this machine's Python library: its manual's topics, then what its modules say of
themselves.
"""

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from titans_lm.data.tasks.haystack import SENTENCE
from titans_lm.data.tasks.stories import GO, PEOPLE, ROOMS
from titans_lm.data.tasks.vocabulary import TWO_WORDS, encode_words

Kind = Literal["place", "number"]
PLACE = re.compile(rf"([A-Z]\w*) (?:{'|'.join(GO)}) the (\w+)\.")
NUMBER = re.compile(r"The secret number of (\w+ \w+) is (\d+)\.")
SENTENCES_PER_LINE = 5
LIBRARY = "the manual and the docstrings of this machine's Python library"


@dataclass(frozen=True)
class Fact:
    """A sentence that says where somebody is, or a number by its name."""

    kind: Kind
    about: str
    answer: str
    sentence: str

    @property
    def question(self) -> str:
        return f"Where is {self.about}?" if self.kind == "place" else f"What is the secret number of {self.about}?"


@dataclass(frozen=True)
class Hidden:
    """A text with facts in it, in parts: after each of them can be asked what was said so far."""

    parts: list[str]
    ends: list[int]
    """Tokens up to the end of each part."""
    facts: list[Fact]
    places: list[int]
    """Tokens before each fact."""
    split: list[str] = field(default_factory=list)
    """Words of the facts that the models were not taught."""

    def known(self, part: int) -> dict[tuple[Kind, str], tuple[Fact, int]]:
        """Give the last that was said of everybody and everything by the end of a part, and how many tokens before."""
        end = self.ends[part]
        return {
            (fact.kind, fact.about): (fact, end - place)
            for fact, place in zip(self.facts, self.places, strict=True)
            if place < end
        }


def drawn_facts(rng: np.random.Generator, parts: int, moves: int, numbers: int) -> list[list[Fact]]:
    """Draw what is said in each part: all people go somewhere in the first, `moves` times somebody in each later one.

    Numbers of seven digits have names of two words, no two the same. Where a room is the answer to more than a quarter
    of what is asked after the parts, rooms are drawn again: naming one room always shall not look like knowing.
    """
    told: list[list[Fact]] = []
    for part in range(parts):
        who = rng.permutation(PEOPLE) if part == 0 else rng.choice(PEOPLE, moves)
        told.append([went(str(one), str(rng.choice(GO)), str(rng.choice(ROOMS))) for one in who])
    for pick in rng.choice(len(TWO_WORDS), numbers, replace=False):
        name, number = TWO_WORDS[int(pick)], str(rng.integers(1_000_000, 10_000_000))
        fact = Fact("number", name, number, f"The secret number of {name} is {number}.")
        told[int(rng.integers(parts))].append(fact)
    told = [[facts[i] for i in rng.permutation(len(facts))] for facts in told]
    again = rng.spawn(1)[0]
    while max(asked := _places_asked(told).values()) > max(1, sum(asked) // 4):
        told = [[_elsewhere(fact, again) for fact in facts] for facts in told]
    return told


def _places_asked(told: list[list[Fact]]) -> Counter[str]:
    """How often each room is where somebody is after a part."""
    at: dict[str, str] = {}
    found: Counter[str] = Counter()
    for facts in told:
        at |= {fact.about: fact.answer for fact in facts if fact.kind == "place"}
        found.update(at.values())
    return found


def _elsewhere(fact: Fact, rng: np.random.Generator) -> Fact:
    """The same person, the same way, to a room drawn anew."""
    if fact.kind == "number":
        return fact
    how = fact.sentence.removeprefix(f"{fact.about} ").removesuffix(f" the {fact.answer}.")
    return went(fact.about, how, str(rng.choice(ROOMS)))


def went(who: str, how: str, where: str) -> Fact:
    """Say where somebody went."""
    return Fact("place", who, where, f"{who} {how} the {where}.")


def own_facts(path: Path) -> list[Fact]:
    """Read a user's facts, one a line; ValueError for a line of neither form."""
    found = []
    for count, line in enumerate(_read(path).splitlines(), 1):
        sentence = line.strip()
        place, number = PLACE.fullmatch(sentence), NUMBER.fullmatch(sentence)
        if place is not None:
            found.append(Fact("place", place[1], place[2], sentence))
        elif number is not None:
            found.append(Fact("number", number[1], number[2], sentence))
        elif sentence:
            raise ValueError(
                f"{path}, line {count}: got {sentence[:60]!r}; expected 'Mary went to the garden.' (or "
                f"{', '.join(GO)}) or 'The secret number of brave otter is 4821937.'"
            )
    if not found:
        raise ValueError(f"got the facts {str(path)!r}, which are none; expected a sentence a line")
    return found


def hide(rng: np.random.Generator, sentences: list[str], counts: list[int], told: list[list[Fact]]) -> Hidden:
    """Put the facts of every part between its sentences, in their order; parts are of equally many tokens."""
    edges = np.searchsorted(np.cumsum(counts), np.linspace(0, sum(counts), len(told) + 1)[1:-1]).tolist()
    bounds = [0, *edges, len(sentences)]
    if any(start == stop for start, stop in pairwise(bounds)):
        raise ValueError(
            f"got a text of {len(sentences):,} sentences that does not divide into {len(told)} parts of like length; "
            "expected prose, where facts can be hidden between sentences"
        )
    parts: list[str] = []
    ends: list[int] = []
    facts: list[Fact] = []
    places: list[int] = []
    total = 0
    for said, (start, stop) in zip(told, pairwise(bounds), strict=True):
        before = np.sort(rng.integers(start, stop, len(said))).tolist()
        written, waiting = [], list(zip(before, said, strict=True))
        for at in range(start, stop):
            while waiting and waiting[0][0] == at:
                fact = waiting.pop(0)[1]
                facts.append(fact)
                places.append(total)
                written.append(fact.sentence)
                total += count_tokens(fact.sentence)
            written.append(sentences[at])
            total += counts[at]
        lines = [written[i : i + SENTENCES_PER_LINE] for i in range(0, len(written), SENTENCES_PER_LINE)]
        parts.append("\n".join(map(" ".join, lines)) + " ")
        ends.append(total)
    return Hidden(parts, ends, facts, places)


def sentences_of(text: str) -> list[str]:
    """Part a text at its sentences; white space becomes one space."""
    return [one for one in SENTENCE.split(" ".join(text.split())) if one]


def library() -> Iterator[str]:
    """Give what the library has to read, a text after another: always in the same order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems pack it apart
        topics = {}
    yield from topics.values()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def long_text(source: Path | None, tokens: int) -> tuple[list[str], list[int]]:
    """Give the sentences of a file (all of it), or so many tokens of the library, and the tokens of each sentence.

    ValueError for a file that is no text or is empty.
    """
    texts = library() if source is None else [_read(source)]
    kept: list[str] = []
    counts: list[int] = []
    total = 0
    for sentence in chain.from_iterable(map(sentences_of, texts)):
        if source is None and total >= tokens:
            break
        kept.append(sentence)
        counts.append(count_tokens(sentence))
        total += counts[-1]
    if source is not None and not kept:
        raise ValueError(f"got the file {str(source)!r}, which is empty; expected some text")
    return kept, counts


def count_tokens(sentence: str) -> int:
    """Count the tokens of a sentence, and one for the space before it."""
    return len(encode_words(sentence)) + 1


def _read(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"got the file {str(source)!r}, which cannot be read ({error}); expected UTF-8 text"
        ) from error
