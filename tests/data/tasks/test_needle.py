"""Needles: every question can be answered from the text by a program that knows only the form."""

import re
from pathlib import Path

import numpy as np
import pytest

from titans_lm.data.tasks.needle import NeedleSettings, NeedleTask
from titans_lm.data.tasks.vocabulary import ADJECTIVES, INTRODUCTION, NOUNS, Names

FORMS = {
    "number": NeedleSettings(length=400),
    "uuid": NeedleSettings(length=400, value="uuid"),
    "words": NeedleSettings(length=400, value="words"),
    "distractors": NeedleSettings(length=1000, keys=5),
    "several values": NeedleSettings(length=1200, keys=3, values=3, queries=2, value="words"),
    "several questions": NeedleSettings(length=1500, keys=6, queries=6, value="uuid"),
}
VALUES = {"number": r"[1-9]\d{6}", "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "words": r"[a-z]+ [a-z]+"}


def texts(task: NeedleSettings, rows: int = 8) -> list[tuple[str, list[str]]]:
    """Rows as text, with the answers that are asked for."""
    batch = task.draw(np.random.default_rng(1), rows)
    return [
        (
            bytes(ids.tolist()).decode(),
            [bytes(targets[which == i].tolist()).decode() for i in range(int(which.max()) + 1)],
        )
        for ids, targets, which in zip(batch["input_ids"], batch["targets"], batch["answers"], strict=True)
    ]


@pytest.mark.parametrize("name", FORMS)
def test_every_question_is_answered_in_the_text(name: str) -> None:
    task = FORMS[name]
    for text, answers in texts(task):
        assert len(text) == task.length
        assert text.startswith(INTRODUCTION)
        hay, *questions = text.split("\nWhat ")
        told: dict[str, list[str]] = {}
        for key, value in re.findall(r"The secret \w+ of (\w+ \w+) is ([\w -]+)\. ", hay):
            told.setdefault(key, []).append(value)
        assert len(told) == task.keys
        assert all(len(found) == task.values for found in told.values())
        assert len(questions) == len(answers) == task.queries
        asked = []
        for question, answer in zip(questions, answers, strict=True):
            assert question.endswith(answer)
            again = re.fullmatch(r"(?:is|are) the (secret \w+ of (\w+ \w+))\? The \1 (?:is|are) .*\.", question)
            assert again is not None
            assert answer == f" {', '.join(told[again[2]])}."
            asked.append(again[2])
        assert len(set(asked)) == task.queries
        for key, values in told.items():
            assert tuple(key.split()) in {(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS}
            assert all(re.fullmatch(VALUES[task.value], value) for value in values)


@pytest.mark.parametrize("length", [0, 1500])
def test_questions_that_are_asked_early_come_after_their_needles(length: int) -> None:
    """All but the last may; text and needles go on behind them, and every answer is that of the text before."""
    early = 0
    for text, answers in texts(NeedleSettings(length=length, keys=4, values=2, queries=3, ask_early=True), 32):
        assert not length or len(text) == length
        said = [answer.rstrip() for answer in answers]
        for question in re.finditer(r"\nWhat are the (secret numbers of (\w+ \w+))\? The \1 are( [\d, ]+\.)", text):
            values = re.findall(rf"The secret number of {question[2]} is (\d+)\. ", text[: question.start()])
            assert question[3] == f" {', '.join(values)}." == said.pop(0)
            assert len(values) == 2
            early += text[question.end() :].strip("\0")[:6] not in ("", "\nWhat ")
        assert not said
        assert text.strip("\0").endswith(answers[-1])
    assert early > 16
    plan = NeedleTask(task=NeedleSettings(keys=2, queries=2, ask_early=True), sizes=("0x4",))
    assert plan.train_tasks[0].ask_early
    assert not any(task.ask_early for task in plan.eval_tasks.values())
    with pytest.raises(ValueError, match=r"got task\.ask_early with one question in every row"):
        NeedleTask(task=NeedleSettings(ask_early=True), sizes=("256", "1K"))


def test_rows_differ_and_a_seed_gives_the_same_again() -> None:
    found = [text for text, _ in texts(NeedleSettings(length=500), 32)]
    assert len(set(found)) == 32
    assert found == [text for text, _ in texts(NeedleSettings(length=500), 32)]
    places = [text.index("The secret") / 500 for text in found]
    assert min(places) < 0.3
    assert max(places) > 0.6


def test_it_can_be_hidden_in_books(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A short book. It ends soon. " * 50)
    for text, _ in texts(NeedleSettings(length=600, books=tmp_path / "book.txt")):
        hay = text.removeprefix(INTRODUCTION).split("\nWhat")[0]
        left = re.sub(r"The secret number of \w+ \w+ is \d+\. ", "", hay)
        assert left in ("A short book. It ends soon. " * 52) or left in (
            "It ends soon. " + "A short book. It ends soon. " * 50
        )


def test_without_a_haystack_there_are_needles_and_questions() -> None:
    for text, answers in texts(NeedleSettings(length=0, keys=3, queries=3)):
        needles, *questions = text.removeprefix(INTRODUCTION).split("\nWhat")
        assert re.fullmatch(r"(The secret number of \w+ \w+ is \d{7}\. ){3}", needles)
        assert len(questions) == len(answers) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"queries": 2}, "got queries=2 and keys=1"), ({"depth": 1.5}, "got depth=1.5"), ({"keys": 0}, "keys=0"),
        ({"depth": 0.5, "keys": 2}, "got depth=0.5 with 2 needles"), ({"value": "numbr"}, "did you mean 'number'"),
        ({"keys": 10_000}, "expected 4096 or fewer"), ({"length": -1}, "length=-1"),
    ],
)  # fmt: skip
def test_mistakes_are_told(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NeedleSettings(**change)


def test_a_row_that_is_too_short_is_told() -> None:
    with pytest.raises(ValueError, match="got length=150 with tokenizer=bytes; expected more than"):
        NeedleSettings(length=150).draw(np.random.default_rng(0), 1)


def test_words_are_different() -> None:
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) == len(set(NOUNS)) == len(NOUNS) == 64


def test_chance_is_that_of_all_values_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four words, two values are guessed once in sixteen."""
    monkeypatch.setattr("titans_lm.data.tasks.needle.TWO_WORDS", Names(("calm", "cold"), ("bell", "fern"), between=" "))
    for values, said in ((1, " calm fern."), (2, " calm fern, cold bell.")):
        task = NeedleSettings(value="words", values=values, length=0)
        answers = [answer for _, found in texts(task, 2000) for answer in found]
        assert task.chance == 0.25**values
        assert answers.count(said) / 2000 == pytest.approx(task.chance, rel=0.25)


def test_chance_of_every_kind_of_value() -> None:
    """Seven digits of which the first is no 0; 122 bits; two words."""
    found = {kind: NeedleSettings(value=kind, length=0).chance for kind in ("number", "uuid", "words")}
    assert found == {"number": 1 / 9_000_000, "uuid": 1 / 2**122, "words": 1 / (len(ADJECTIVES) * len(NOUNS))}
