"""Variable tracking: a program that knows only the sentences' form finds which variables hold a number."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data.tasks.task_cases import decode_words
from titans_lm.data.tasks.variables import INTRODUCTION, VariablesSettings
from titans_lm.data.tasks.vocabulary import ADJECTIVES, NOISE, NOUNS
from titans_lm.data.tokenizer import byte_tokenizer

CALLED = {"letters": r"[A-Z]{5}", "words": r"[a-z]+ [a-z]+"}


def texts(task: VariablesSettings, rows: int = 4, seed: int = 1) -> list[tuple[str, str]]:
    """Rows as text, with the answer that is asked for; all of the row's end is the answer."""
    batch = task.draw(np.random.default_rng(seed), rows)
    found = []
    for ids, targets, answers in zip(*(batch[name].numpy() for name in batch), strict=True):
        parts = [ids[: np.flatnonzero(answers == 0)[-1] + 2], targets[answers == 0]]
        assert not ids[len(parts[0]) :].any(), "nothing behind the answer"
        assert set(answers.tolist()) == {-100, 0}
        assert ((targets >= 0) == (answers == 0)).all()
        words = [decode_words(part) if task.tokenizer == "words" else bytes(part.tolist()).decode() for part in parts]
        found.append((words[0], words[1]))
    return found


def solve(text: str, called: str) -> tuple[list[str], dict[str, int]]:
    """Run the sentences in their order; give the variables with the number that is asked for, and what each holds."""
    told, question = text.removeprefix(INTRODUCTION).split("\nWhat has the number ")
    held: dict[str, int] = {}
    for name, number, other in re.findall(rf"The number of ({called}) is (?:(\d+)|the number of ({called}))\. ", told):
        assert name not in held, "told once"
        held[name] = int(number) if number else held[other]  # KeyError where it is told too early
    wanted = int(question.split("?")[0])
    return [name for name, value in held.items() if value == wanted], held


def random_settings(seed: int) -> VariablesSettings:
    rng = np.random.default_rng(seed)
    chains, hops = int(rng.integers(1, 6)), int(rng.integers(0, 6))
    name, tokenizer = (("letters", "words")[i] for i in rng.integers(0, 2, 2))
    tokenizer = {"letters": "bytes"}.get(tokenizer, tokenizer)
    room = chains * (hops + 1) * 60 + 40 * hops + 120
    length = 0 if rng.random() < 0.3 else room + int(rng.integers(0, 500))
    return VariablesSettings(chains=chains, hops=hops, name=name, tokenizer=tokenizer, length=length)


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_the_answer_is_found_in_the_text(first: int) -> None:
    seen = set()
    for seed in range(first, first + 60):
        task = random_settings(seed)
        for text, answer in texts(task, rows=2, seed=seed):
            names, held = solve(text, CALLED[task.name])
            assert answer == f" {', '.join(names)}."
            assert text.endswith(f"? Answer:{answer}")
            assert len(names) == task.hops + 1
            assert len(held) == task.chains * (task.hops + 1)
            counts = [list(held.values()).count(value) for value in set(held.values())]
            assert counts == [task.hops + 1] * task.chains
            assert all(10_000 <= value < 100_000 for value in held.values())
        if task.length:
            shape = task.draw(np.random.default_rng(0), 2)["input_ids"].shape
            assert shape == (2, task.length)
        seen.add((task.name, task.tokenizer, task.length == 0))
    assert len(seen) == 8, "every kind of row"


def test_names_are_all_of_their_kind() -> None:
    held = [set(solve(text, CALLED["letters"])[1]) for text, _ in texts(VariablesSettings(chains=40, length=0), 8)]
    letters = [set(letter) for letter in zip(*(name for row in held for name in row), strict=True)]
    assert [len(found) for found in letters] == [26] * 5, "each place has each letter"
    some = VariablesSettings(chains=1024, hops=3, name="words", length=0)
    _, everything = solve(texts(some, 1)[0][0], CALLED["words"])
    assert set(everything) == {f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS}


def test_chains_take_turns_and_the_question_is_for_any_of_them() -> None:
    firsts, turns = [], 0
    for text, _ in texts(VariablesSettings(chains=2, hops=4, length=0), 200):
        names, held = solve(text, CALLED["letters"])
        mine = [name in names for name in held]
        firsts.append(mine[0])
        turns += sum(a != b for a, b in pairwise(mine))
    assert 60 < sum(firsts) < 140
    assert 4.5 < turns / 200 < 5.5, "five of nine neighbours are of two chains (2 · 5 · 5 / 10)"


def test_without_hops_a_number_has_one_variable() -> None:
    for text, answer in texts(VariablesSettings(chains=1, hops=0, length=0), 20):
        told = re.fullmatch(
            r"Keep the numbers in mind\.\nThe number of ([A-Z]{5}) is (\d{5})\. \n"
            r"What has the number (\d{5})\? Answer: ([A-Z]{5})\.",
            text,
        )
        assert told is not None
        assert (told[1], told[2]) == (told[4], told[3])
        assert answer == f" {told[1]}."


def test_chains_are_hidden_in_dull_sentences_or_books(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A short book. It ends soon. " * 50)
    for books, known in ((None, NOISE), (tmp_path / "book.txt", ("A short book.", "It ends soon."))):
        for text, _ in texts(VariablesSettings(length=1500, books=books), 6):
            told = text.removeprefix(INTRODUCTION).split("\nWhat has")[0]
            left = re.sub(r"The number of [A-Z]{5} is (\d{5}|the number of [A-Z]{5})\. ", "", told)
            assert len(left) > 800
            assert left in " ".join([*known] * 200)
    places = [text.index("The number of") for text, _ in texts(VariablesSettings(chains=1, hops=0, length=3000), 60)]
    assert min(places) < 700
    assert max(places) > 2200


def test_a_saved_tokenizer_makes_the_same_row(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    assert texts(VariablesSettings(tokenizer=str(tmp_path))) == texts(VariablesSettings())


def test_long_rows_are_as_long_as_they_are_asked_to_be() -> None:
    task = VariablesSettings(length=1 << 20)
    batch = task.draw(np.random.default_rng(0), 1)
    assert batch["input_ids"].shape == (1, 1 << 20)
    text, answer = texts(task, 1)[0]
    assert answer == f" {', '.join(solve(text, CALLED['letters'])[0])}."


def test_the_docstring_shows_a_row() -> None:
    task = VariablesSettings(chains=2, hops=2, name="words", length=540)
    text = texts(task, 1, seed=0)[0][0]
    assert " ".join(text.split()) in " ".join((VariablesSettings.__doc__ or "").split())


@pytest.mark.parametrize(
    ("name", "hops", "chance"), [("words", 0, 1 / 4096), ("words", 1, 1 / (4096 * 4095)), ("letters", 0, 26.0**-5)]
)
def test_chance_is_that_of_any_names(name: str, hops: int, chance: float) -> None:
    assert VariablesSettings(name=name, hops=hops).chance == pytest.approx(chance)
    assert VariablesSettings(hops=200).chance == 0.0


def test_sizes_are_tokens_and_hops() -> None:
    task = VariablesSettings(chains=3, hops=2)
    found = {size: task.resized(size) for size in ("512", "2Kx7", "0x0", "1M")}
    assert {size: (one.length, one.hops, one.chains) for size, one in found.items()} == {
        "512": (512, 2, 3), "2Kx7": (2048, 7, 3), "0x0": (0, 0, 3), "1M": (1 << 20, 2, 3),
    }  # fmt: skip
    for wrong in ("", "x3", "512x", "512:3", "3k"):
        with pytest.raises(ValueError, match=re.escape(f"got the size {wrong!r}; expected the tokens of a row")):
            task.resized(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chains": 0}, "chains=0"), ({"hops": -1}, "hops=-1"), ({"length": -1}, "length=-1"),
        ({"name": "leters"}, "did you mean 'letters'"),
        ({"chains": 90_001}, "got chains=90001; expected 90000 or fewer"),
        ({"chains": 1000, "hops": 4, "name": "words"}, "which need 5000 names; expected 4096 or fewer of name='words'"),
    ],
)  # fmt: skip
def test_mistakes_are_told(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VariablesSettings(**change)


def test_a_row_that_is_too_short_is_told() -> None:
    with pytest.raises(ValueError, match="got length=200 with tokenizer=bytes; expected more than the"):
        VariablesSettings(length=200).draw(np.random.default_rng(0), 1)
