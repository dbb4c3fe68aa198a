"""The first five bAbI tasks: people who walk about with things, and where or who; read from files, or drawn here.

The sentences are those of the data set (Weston et al., arXiv 1502.05698; 1.2), so that models may be trained on drawn
stories and tested on the published ones. How stories are drawn is ours.
"""

import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

BabiTask = Literal["qa1", "qa2", "qa3", "qa4", "qa5"]
PEOPLE, GIVERS = ("Daniel", "John", "Mary", "Sandra"), ("Bill", "Fred", "Jeff", "Mary")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
GO = ("journeyed to", "moved to", "travelled to", "went back to", "went to")
TAKE, DROP = ("got", "grabbed", "picked up", "took"), ("discarded", "dropped", "left", "put down")
GIVE = ("gave", "handed", "passed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
WORDS = (
    *PEOPLE, *GIVERS, *ROOMS, *THINGS, *GO, *TAKE, *DROP, *GIVE, *OPPOSITE, "the", "there", "The", "is", "of", "to",
    "Where", "was", "before", "What", "did", "give", "Who", "received", "Answer",
)  # fmt: skip
"""Everything that sentences and questions are made of."""
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS),
    "qa5": (*GIVERS, *THINGS),
}
"""All answers that a task has."""


@dataclass(frozen=True)
class Question:
    """What was told before a question, the question, and its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


def read_questions(path: Path) -> list[Question]:
    """Read a file of bAbI's form (plain or gzip): numbered lines, 1 begins a story, questions have tabs.

    Raises ValueError for a file that is not of this form.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        text = data.decode()
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"got {path}, which cannot be read ({error}); expected text in UTF-8, plain or .gz") from error
    facts: list[str] = []
    found = []
    for count, line in enumerate(text.splitlines(), start=1):
        parts = re.fullmatch(r"(\d+) ([^\t]+)(?:\t([^\t]+)\t[\d ]*)?", line.rstrip())
        if parts is None:
            raise ValueError(f"{path}, line {count}: got {line[:80]!r}; expected a number and a sentence, as in bAbI")
        number, sentence, answer = parts.groups()
        if number == "1":
            facts = []
        if answer is None:
            facts.append(sentence.strip())
        else:
            found.append(Question(tuple(facts), sentence.strip(), answer))
    if not found:
        raise ValueError(f"got {path}, which has no question; expected a file of bAbI's form")
    return found


def draw_question(rng: "np.random.Generator", story: BabiTask) -> Question:
    """Draw a story, and a question of it."""
    match story:
        case "qa1":
            return _whereabouts(rng)
        case "qa2" | "qa3":
            return _things(rng, before=story == "qa3")
        case "qa4":
            return _map(rng)
        case "qa5":
            return _gifts(rng)


def _pick(rng: "np.random.Generator", choices: "tuple[str, ...] | list[str]") -> str:
    return choices[int(rng.integers(len(choices)))]


def _whereabouts(rng: "np.random.Generator") -> Question:
    """qa1: people go somewhere, twice before every question; 2 to 10 facts."""
    facts, at = [], {}
    for _ in range(2 * int(rng.integers(1, 6))):
        who, where = _pick(rng, PEOPLE), _pick(rng, ROOMS)
        at[who] = where
        facts.append(f"{who} {_pick(rng, GO)} the {where}.")
    who = _pick(rng, sorted(at))
    return Question(tuple(facts), f"Where is {who}?", at[who])


class World:
    """Who is where and has what; every action is a fact."""

    def __init__(self, rng: "np.random.Generator", people: tuple[str, ...]) -> None:
        self.rng, self.people = rng, people
        self.facts: list[str] = []
        self.at: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.trail: dict[str, list[str]] = {thing: [] for thing in THINGS}
        """Where each thing has been since it was first taken, one room after the other."""
        self.gifts: list[tuple[str, str, str]] = []

    def act(self) -> None:
        """Let somebody do something that is possible: walk half of the time, else take or drop."""
        who = _pick(self.rng, self.people)
        if who not in self.at or self.rng.random() < 0.5:
            return self.walk(who)
        here = [self.at[who]]  # a thing that nobody has touched may be anywhere
        near = [thing for thing in THINGS if thing not in self.holder and (self.trail[thing] or here)[-1] == here[0]]
        has = [thing for thing in THINGS if self.holder.get(thing) == who]
        there = " there" if self.rng.random() < 0.2 else ""
        if near and (not has or self.rng.random() < 0.6):
            thing = _pick(self.rng, near)
            self.holder[thing] = who
            self.facts.append(f"{who} {_pick(self.rng, TAKE)} the {thing}{there}.")
            self._moved(thing)
        elif has:
            thing = _pick(self.rng, has)
            del self.holder[thing]
            self.facts.append(f"{who} {_pick(self.rng, DROP)} the {thing}{there}.")
        else:
            self.walk(who)

    def walk(self, who: str) -> None:
        """Send somebody to another room, with all that they have."""
        self.at[who] = _pick(self.rng, [room for room in ROOMS if room != self.at.get(who)])
        self.facts.append(f"{who} {_pick(self.rng, GO)} the {self.at[who]}.")
        for thing in [thing for thing, holder in self.holder.items() if holder == who]:
            self._moved(thing)

    def give(self) -> bool:
        """Let somebody give a thing to somebody who is in the same room, if there are such."""
        able = [
            (thing, holder, other)
            for thing, holder in sorted(self.holder.items())
            for other in self.people
            if other != holder and self.at.get(other, self.at[holder]) == self.at[holder]
        ]
        if not able:
            return False
        thing, holder, other = able[int(self.rng.integers(len(able)))]
        self.holder[thing], self.at[other] = other, self.at[holder]
        self.gifts.append((holder, thing, other))
        self.facts.append(f"{holder} {_pick(self.rng, GIVE)} the {thing} to {other}.")
        return True

    def _moved(self, thing: str) -> None:
        where, trail = self.at[self.holder[thing]], self.trail[thing]
        if trail[-1:] != [where]:
            trail.append(where)


def _things(rng: "np.random.Generator", *, before: bool) -> Question:
    """qa2: where is a thing? qa3: where was it before it came to a room?"""
    # Half of the published stories of qa2 have 14 facts or more, of qa3 42.
    world, more = World(rng, PEOPLE), int(rng.geometric(0.02 if before else 0.08))
    while True:
        world.act()
        known = [thing for thing in THINGS if len(world.trail[thing]) > int(before)]
        more -= bool(known)
        if not known or more > 0:
            continue
        thing = _pick(rng, known)
        trail = world.trail[thing]
        if not before:
            return Question(tuple(world.facts), f"Where is the {thing}?", trail[-1])
        return Question(tuple(world.facts), f"Where was the {thing} before the {trail[-1]}?", trail[-2])


def _map(rng: "np.random.Generator") -> Question:
    """qa4: three rooms, two of them on two sides of the third."""
    first, middle, last = (ROOMS[i] for i in rng.permutation(len(ROOMS))[:3])
    one = _pick(rng, tuple(OPPOSITE))
    other = _pick(rng, [way for way in OPPOSITE if way != one])
    told = []
    for room, way in ((first, one), (last, other)):  # the room is that way of the middle one
        turned = rng.random() < 0.5
        one_way = f"The {middle} is {OPPOSITE[way]} of the {room}."
        told.append(one_way if turned else f"The {room} is {way} of the {middle}.")
    room, way = [(first, one), (last, other)][int(rng.integers(2))]
    turned = rng.random() < 0.5
    question = f"What is the {middle} {OPPOSITE[way]} of?" if turned else f"What is {way} of the {middle}?"
    return Question(tuple(told[i] for i in rng.permutation(2)), question, room)


def _gifts(rng: "np.random.Generator") -> Question:
    """qa5: somebody gives something to somebody; who, what, to whom? The last gift that the question fits counts."""
    world = World(rng, GIVERS)
    gifts = int(rng.geometric(0.3))
    while len(world.gifts) < gifts:
        if rng.random() >= 0.3 or not world.give():
            world.act()
    for _ in range(int(rng.integers(0, 6))):
        world.act()
    giver, thing, taker = world.gifts[-1]
    questions = (
        (f"What did {giver} give to {taker}?", thing), (f"Who did {giver} give the {thing} to?", taker),
        (f"Who gave the {thing} to {taker}?", giver), (f"Who gave the {thing}?", giver),
        (f"Who received the {thing}?", taker),
    )  # fmt: skip
    question, answer = questions[int(rng.integers(len(questions)))]
    return Question(tuple(world.facts), question, answer)
