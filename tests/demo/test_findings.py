"""Sentences that follow the numbers, wherever they go."""

from types import SimpleNamespace
from typing import Any

import pytest

from model_cases import small_config
from titans_lm.demo import report
from titans_lm.demo.hidden import Fact, Hidden, Kind, went
from titans_lm.demo.report import recall_findings, search_findings
from titans_lm.demo.search import Asked, Found, Reading
from titans_lm.evaluate.accuracy import Recall
from titans_lm.report.html import Markup


@pytest.fixture(autouse=True)
def _loose(unchecked: None) -> None:
    """Outcomes are made up here."""


def recalled(memory: int, window: int) -> list[str]:
    outcome: Any = SimpleNamespace(
        memory_recall=Recall(memory, 10_000, 1 / 64),
        window_recall=Recall(window, 10_000, 1 / 64),
        task=SimpleNamespace(gap=40),
        window=SimpleNamespace(config=small_config("sliding", window=16)),
        reach=36,
    )
    return recall_findings(outcome)


def test_recall_as_hoped() -> None:
    lines = recalled(9_990, 156)
    assert "names 99.9 % of the values after a gap of 40 filler tokens: learned (guessing gives 1.6 %)" in lines[0]
    assert "36 tokens back at most, names 1.6 %: no better than chance" in lines[1]
    assert "is in the memory" in lines[2]


@pytest.mark.parametrize(
    ("memory", "window", "told"),
    [
        (156, 156, ("no better than chance", "no better than chance", "no better than the window")),
        (5_000, 156, ("above chance, but not learned", "no better than chance", "has not learned the task")),
        (5_001, 5_000, ("not learned", "not learned", "cannot be told from the window")),
        (5_000, 9_800, ("not learned", "learned (", "no better than the window")),
        (10_000, 3_000, ("100 %", "above chance, but not learned", "nowhere within reach")),
        (20, 156, ("worse than chance", "no better than chance", "no better than the window")),
    ],
)
def test_recall_otherwise(memory: int, window: int, told: tuple[str, ...]) -> None:
    lines = recalled(memory, window)
    assert all(words in line for words, line in zip(told, lines, strict=True)), lines


def asked(kind: Kind, right: bool, ago: int, other: str = "") -> Asked:
    answers = {"memory": "a" if right else "b", "reset": other, "window": ""}
    return Asked(kind=kind, question="?", expected="a", tokens_ago=ago, at=1000, answers=answers)


NUMBER = Fact("number", "brave otter", "4821937", "The secret number of brave otter is 4821937.")


def found_by(
    *questions: Asked, facts: tuple[Fact, ...] = (went("Mary", "went to", "garden"),), **changes: Any
) -> Found:
    reading = Reading(
        model="facts", parameters=155_012, tokens=1000, seconds=2.0, state_bytes=59_928, files=["facts.memory"],
        file_bytes=61_000,
    )  # fmt: skip
    hidden = Hidden(["…"], [1000], list(facts), [10] * len(facts), changes.pop("split", []))
    given = {"seed": 7, "own": False, "source": "a text", "tokens": 1000, "text_bytes": 1100, "window": 64, **changes}
    return Found(hidden=hidden, readings=[reading], asked=list(questions), **given)


def told(*questions: Asked, **changes: Any) -> str:
    return "\n".join(search_findings(found_by(*questions, **changes)))


def test_a_search_as_hoped() -> None:
    found = told(asked("place", True, 900), asked("place", True, 40, "a"), asked("number", True, 500))
    assert "1,000 tokens of a text were read, with 1 sentence of the draw 7 hidden in them" in found
    assert "its memory stayed at 60 kB, and is a file of 61 kB" in found
    assert (
        "Asked 2 times where people are, the memory file alone is right 2 times (100 %), the furthest from 900" in found
    )
    assert "with its memory reset 1, and having read the last 64 tokens alone 0 (guessing gives 0.3)." in found
    assert "Asked 1 time what a secret number is, the memory file alone is right 1 time (100 %)" in found
    assert "no better" not in found


def test_a_search_otherwise() -> None:
    found = told(asked("place", False, 900, "a"), own=True, split=["Peter"])
    assert "1 sentence of your own" in found
    assert "right 0 times (0.0 %); the same model with its memory reset 1" in found
    assert "So the memory is no better than they are here." in found
    assert "were not taught the words Peter" in found
    assert "secret number" not in found


@pytest.mark.parametrize(
    "facts", [(went("Mary", "went to", "garden"),), (NUMBER,), (went("Mary", "ran to", "hall"), NUMBER)]
)
def test_the_page_tells_of_what_is_hidden_alone(facts: tuple[Fact, ...]) -> None:
    kinds = {fact.kind for fact in facts}
    shown = report._search(found_by(facts=facts), {"distance": Markup()})
    for words in ("People walk about", "above the line sentences of people", "places that people had left"):
        assert (words in shown) == ("place" in kinds)
    for words in ("umbers by their names", "numbers; thin lines"):
        assert (words in shown) == ("number" in kinds)
