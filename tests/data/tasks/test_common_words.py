"""Common words: a program that can read and count finds which words of a list come often."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.tasks.task_cases import decode_words
from titans_lm.data.tasks.common_words import CommonWordsSettings
from titans_lm.data.tokenizer import byte_tokenizer

FORM = {"letters": r"(?:[b-df-hj-np-tv-xz][aeiou]){3}", "words": r"[a-z]+ [a-z]+"}


def texts(task: CommonWordsSettings, rows: int = 4, seed: int = 1) -> list[tuple[str, str, int]]:
    """Rows as text, the answer that is asked for, and the tokens of each row."""
    batch = task.draw(np.random.default_rng(seed), rows)
    found = []
    for ids, targets, answers in zip(*(batch[name].numpy() for name in batch), strict=True):
        end = int(np.flatnonzero(answers == 0)[-1]) + 2
        assert not ids[end:].any(), "nothing behind the answer"
        assert set(answers.tolist()) == {-100, 0}
        assert ((targets >= 0) == (answers == 0)).all()
        parts = [ids[:end], targets[answers == 0]]
        text, answer = (
            decode_words(part) if task.tokenizer == "words" else bytes(part.tolist()).decode() for part in parts
        )
        found.append((text, answer, end))
    return found


def counted(text: str, form: str) -> Counter[str]:
    """Read a row: nothing but the list between the introduction and the question."""
    told = text.removeprefix("Keep the words in mind.").split("\nWhat ")[0]
    assert re.fullmatch(rf"( {form}\.)+", told)
    return Counter(told.removeprefix(" ").removesuffix(".").split(". "))


def random_settings(seed: int) -> CommonWordsSettings:
    rng = np.random.default_rng(seed)
    common, rarely = int(rng.integers(1, 8)), int(rng.integers(1, 4))
    often = rarely + int(rng.integers(1, 12))
    word = ("letters", "words")[int(rng.integers(2))]
    tokenizer = ("bytes", "words")[int(rng.integers(2))]
    length = 24 * common * (often + 1) + 80 + int(rng.integers(0, 1500))
    return CommonWordsSettings(
        common=common, often=often, rarely=rarely, word=word, tokenizer=tokenizer, length=length
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_the_answer_is_found_by_counting(first: int) -> None:
    seen = set()
    for seed in range(first, first + 60):
        task = random_settings(seed)
        for text, answer, size in texts(task, rows=2, seed=seed):
            counts = counted(text, FORM[task.word])
            most = [word for word, _ in counts.most_common(task.common)]
            assert answer == f" {', '.join(sorted(most))}."
            what = "is the common word" if task.common == 1 else f"are the {task.common} common words"
            assert text.endswith(f"\nWhat {what}? Answer:{answer}")
            assert [counts[word] for word in most] == [task.often] * task.common
            others = [count for word, count in counts.items() if word not in most]
            assert others
            assert max(others) <= task.rarely
            assert sum(count < task.rarely for count in others) <= 1, "all but the last that fits"
            longest = 25 if task.tokenizer == "bytes" else 8
            assert task.length - longest < size <= task.length, "no other word would fit"
        seen.add((task.word, task.tokenizer, task.common == 1))
    assert len(seen) == 8, "every kind of row"


def test_the_list_is_shuffled_and_rows_differ() -> None:
    task = CommonWordsSettings(common=3, often=10, rarely=1, length=2000)
    places, rows = [], texts(task, 40)
    for text, answer, _ in rows:
        listed = text.split("\nWhat")[0].split(". ")[1:]
        common = answer.strip(" .").split(", ")
        places += [i / len(listed) for i, word in enumerate(listed) if word.strip(".") in common]
    assert np.histogram(places, 5, (0, 1))[0].min() > 0.7 * len(places) / 5
    assert len({answer for _, answer, _ in rows}) == 40
    assert [row[0] for row in rows] == [row[0] for row in texts(task, 40)]
    assert [row[0] for row in rows] != [row[0] for row in texts(task, 40, seed=2)]


def test_all_words_but_the_last_may_be_needed() -> None:
    """The 4,096 of adjective and noun fill rows up to where they are all said."""
    task = CommonWordsSettings(common=2, often=2, rarely=1, word="words", tokenizer="words", length=12_000)
    text, _, size = texts(task, 1)[0]
    assert 11_997 <= size <= 12_000
    assert len(counted(text, FORM["words"])) > 3900
    with pytest.raises(
        ValueError,
        match="got length=20000, for which the 4096 words of word='words' are too few with rarely=1; expected",
    ) as told:
        task.resized("20000").draw(np.random.default_rng(0), 1)
    most = re.search(r"expected about (\d+) or less", str(told.value))
    assert most is not None
    for length in (int(most[1]), int(most[1]) - 10):
        counts = counted(texts(task.resized(str(length)), 1, seed=0)[0][0], FORM["words"])
        assert len(counts) >= 4090


def test_long_rows_can_be_drawn() -> None:
    task = CommonWordsSettings(length=1 << 20)
    text, answer, size = texts(task, 1)[0]
    assert (1 << 20) - 8 < size <= 1 << 20
    assert answer == f" {', '.join(sorted(word for word, _ in counted(text, FORM['letters']).most_common(10)))}."


def test_a_saved_tokenizer_makes_the_same_row(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    assert texts(CommonWordsSettings(tokenizer=str(tmp_path))) == texts(CommonWordsSettings())


def test_the_docstring_shows_a_row() -> None:
    task = CommonWordsSettings(common=2, often=4, rarely=1, length=184)
    text = texts(task, 1, seed=0)[0][0]
    assert " ".join(text.split()) in " ".join((CommonWordsSettings.__doc__ or "").split())


def test_chance_is_that_of_any_words() -> None:
    assert CommonWordsSettings(common=1, word="words").chance == pytest.approx(1 / 4096)
    assert CommonWordsSettings(common=2, word="words").chance == pytest.approx(2 / (4096 * 4095))
    assert CommonWordsSettings(common=1).chance == pytest.approx(1e-6)


def test_sizes_are_tokens_and_common_words() -> None:
    task = CommonWordsSettings(common=5, often=7)
    found = {size: task.resized(size) for size in ("512", "2Kx3", "1M")}
    assert {size: (one.length, one.common, one.often) for size, one in found.items()} == {
        "512": (512, 5, 7), "2Kx3": (2048, 3, 7), "1M": (1 << 20, 5, 7),
    }  # fmt: skip
    for wrong in ("", "x3", "512x", "512@0.5"):
        with pytest.raises(ValueError, match=re.escape(f"got the size {wrong!r}; expected the most tokens of a row")):
            task.resized(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"common": 0}, "common=0"), ({"rarely": 0}, "rarely=0"), ({"length": 0}, "length=0"),
        ({"often": 3}, "got often=3; expected an integer of at least 4"),
        ({"word": "leters"}, "did you mean 'letters'"),
        ({"word": "words", "common": 4096}, "got common=4096; expected fewer than the 4096 words"),
    ],
)  # fmt: skip
def test_mistakes_are_told(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CommonWordsSettings(**change)


def test_a_row_that_is_too_short_is_told() -> None:
    """Ten words of eight tokens, thirty times: 2,400, with 23 before, 38 of the question and 80 of the answer."""
    with pytest.raises(
        ValueError, match=r"got length=2000 with tokenizer=bytes; .*, of 2549 tokens or more: .* take 2541"
    ):
        CommonWordsSettings(length=2000).draw(np.random.default_rng(0), 1)
    for length in (2548, 2549):
        task = CommonWordsSettings(length=length)
        if length < 2549:
            with pytest.raises(ValueError, match="of 2549 tokens or more"):
                task.draw(np.random.default_rng(0), 1)
        else:
            assert len(counted(texts(task, 1)[0][0], FORM["letters"])) == 11
