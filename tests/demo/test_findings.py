"""Sentences that follow the numbers, wherever they go."""

from types import SimpleNamespace
from typing import Any

import pytest

from model_cases import small_config
from titans_lm.demo.findings import interval, language_findings, percent, reading_findings, recall_findings, signed
from titans_lm.evaluate.accuracy import Recall
from titans_lm.evaluate.bits_per_byte import Bucket
from titans_lm.evaluate.intervals import Difference


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
        (5_000, 9_800, ("not learned", "learned (", "no better than the window")),
        (10_000, 3_000, ("100 %", "above chance, but not learned", "nowhere within reach")),
        (20, 156, ("worse than chance", "no better than chance", "no better than the window")),
    ],
)
def test_recall_otherwise(memory: int, window: int, told: tuple[str, ...]) -> None:
    lines = recalled(memory, window)
    assert all(words in line for words, line in zip(told, lines, strict=True)), lines


def read(
    reset: Difference, none: Difference, inside: Difference | None = None, gains: tuple[float, ...] = (0.0, -0.02)
) -> str:
    def scores(bits: float, shift: tuple[float, ...]) -> Any:
        buckets = tuple(Bucket(64 * i, 64 * i + 64, 640, 3.0 + x) for i, x in enumerate(shift))
        return SimpleNamespace(bits_per_byte=bits, by_position=buckets)

    outcome: Any = SimpleNamespace(
        against_reset=reset,
        against_none=none,
        reset_against_none=inside or Difference(0.0, -0.1, 0.1, 20),
        segment_len=64,
        with_memory=scores(2.9, gains),
        reset=scores(3.0, tuple(0.0 for _ in gains)),
        without=scores(3.1, tuple(0.1 for _ in gains)),
        memory=SimpleNamespace(steps=90, planned_steps=90),
    )
    return " ".join(language_findings(outcome))


HELPS, HURTS, NOTHING = (
    Difference(-0.1, -0.12, -0.08, 20),
    Difference(0.1, 0.08, 0.12, 20),
    Difference(-0.01, -0.03, 0.01, 20),
)


def test_a_memory_that_helps() -> None:
    text = read(HELPS, HELPS, Difference(-0.06, -0.08, -0.04, 20))
    assert "2.900 bits per byte with the memory, 3.000 with the memory reset every 64 bytes, and 3.100 without" in text
    assert text.count("saves bits (−0.100 bits per byte, 95 % interval −0.120 to −0.080, over 20 documents)") == 2
    assert "−0.060 is there even when the memory is reset" in text
    assert "−0.020 in bytes 64–127" in text
    assert "hurts" not in text
    assert "worse" not in text


def test_a_memory_that_does_not() -> None:
    text = read(NOTHING, HURTS, gains=(0.0, -0.01, 0.03, -0.01))
    assert "Carrying the memory from segment to segment makes no difference that 20 documents can show" in text
    assert "the memory costs bits (+0.100" in text
    assert "the memory does not help here, it hurts" in text
    assert "worse than a fresh one in bytes 128–191." in text
    assert "helps here" not in text
    assert "inside a segment" not in text


def test_one_document_shows_nothing() -> None:
    assert "no difference that one document can show" in read(Difference(-1.0, -1.0, -1.0, 1), HELPS)


@pytest.mark.parametrize(("agreement", "told"), [(0.6, "too"), (0.1, "mostly not"), (-0.5, "easy to predict")])
def test_two_kinds_of_surprise(agreement: float, told: str) -> None:
    reading: Any = SimpleNamespace(agreement=lambda: agreement)
    [line] = reading_findings(reading)
    assert told in line
    assert signed(agreement, 2) in line


def test_numbers_in_words() -> None:
    assert [percent(x) for x in (1.0, 0.99999, 0.5, 0.0156, 0.0)] == ["100 %", "99.9 %", "50.0 %", "1.6 %", "0.0 %"]
    assert (signed(-0.0214), signed(0.1, 1)) == ("−0.021", "+0.1")
    assert interval(HELPS) == "−0.120 to −0.080"
