"""Text of any length, and where in it sentences may be put."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from titans_lm.data.tasks.haystack import Story, books, encode, noise, text_batch, vocabulary
from titans_lm.data.tasks.vocabulary import NOISE
from titans_lm.data.tokenizer import byte_tokenizer

BOOK = 'It was late.  "Who is\nthere?" said Mr. Brown. Nobody spoke! Mary went to the kitchen. The end'
SENTENCES = [
    "It was late.",
    '"Who is there?"',
    "said Mr. Brown.",
    "Nobody spoke!",
    "Mary went to the kitchen.",
    "The end",
]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(BOOK)
    (tmp_path / "other.txt").write_text("One. Two. Three.")
    return tmp_path


def text_of(ids: np.ndarray) -> str:
    return bytes(np.asarray(ids, np.uint8)).decode()


def test_books_are_cut_into_sentences(shelf: Path) -> None:
    hay = books(shelf)
    starts = [*hay.places[0].tolist(), len(hay.texts[0])]
    assert [text_of(hay.texts[0][a:b]) for a, b in pairwise(starts)] == [f"{s} " for s in SENTENCES]
    assert text_of(hay.texts[1]) == "One. Two. Three. "


def test_sentences_that_name_somebody_can_be_left_out(shelf: Path) -> None:
    assert [text_of(text) for text in books(shelf, without=("Mary", "Brown")).texts] == [
        'It was late. "Who is there?" Nobody spoke! The end ', "One. Two. Three. ",
    ]  # fmt: skip
    (shelf / "lamb.txt").write_text("Mary had a lamb.")
    with pytest.raises(ValueError, match="every sentence names one of Mary, Brown"):
        books(shelf / "lamb.txt", without=("Mary", "Brown"))
    (shelf / "lamb.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match=r"lamb\.txt, which has no sentence; expected other text"):
        books(shelf / "lamb.txt")


def test_a_book_that_is_not_utf_8_is_told_with_its_place(shelf: Path) -> None:
    """As a folder and as a file: nothing is put in place of what cannot be read."""
    (shelf / "deep").mkdir()
    (shelf / "deep" / "latin.txt").write_bytes("One. Two caf\xe9s. ".encode("latin-1"))
    for source in (shelf, shelf / "deep" / "latin.txt"):
        said = f"got {shelf / 'deep' / 'latin.txt'}, which is not UTF-8 at byte 12 (invalid continuation byte); "
        with pytest.raises(ValueError, match=re.escape(f"{said}expected text in UTF-8")):
            books(source)
    (shelf / "deep" / "latin.txt").write_text("One. Two caf\xe9s. ", encoding="utf-8")
    assert [text_of(text) for text in books(shelf).texts][1] == "One. Two caf\xe9s. "


def goes_on(text: str, whole: list[str]) -> bool:
    """Whether a text is whole books, one after the other; the last may be cut."""
    while text:
        book = next((one for one in whole if text.startswith(one[: len(text)])), None)
        if book is None:
            return False
        text = text[len(book) :]
    return True


@pytest.mark.parametrize("tokens", [1, 5, 200, 5000])
def test_hay_is_as_long_as_it_is_asked_to_be(shelf: Path, tokens: int) -> None:
    """It begins with a sentence, goes on as the book does, and sentences begin where it says."""
    hay = books(shelf)
    whole = [text_of(text) for text in hay.texts]
    for seed in range(20):
        ids, places = hay.cut(np.random.default_rng(seed), tokens)
        text = text_of(ids)
        assert len(text) == tokens
        assert places[0] == 0
        assert (np.diff(places) > 0).all()
        ends = [one[start:] for one in whole for start in range(len(one))]
        assert any(goes_on(text[len(end) :], whole) for end in ends if text.startswith(end[:tokens]))
        known = [sentence for one in whole for sentence in (*SENTENCES, "One.", "Two.", "Three.") if sentence in one]
        assert all(any(text[place:].startswith(one[: tokens - place]) for one in known) for place in places)


def test_noise_comes_again_and_again() -> None:
    ids, places = noise().cut(np.random.default_rng(0), 1000)
    text = text_of(ids)
    assert all(text[place:].startswith(NOISE) or len(text) - place < max(map(len, NOISE)) for place in places)
    assert text.count(NOISE[0]) in range(6, 9)


def test_a_tokenizer_is_a_folder(tmp_path: Path, shelf: Path) -> None:
    """A saved byte tokenizer makes what the word bytes makes."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    saved = str(tmp_path / "tokenizer")
    assert (encode("a–b", saved) == encode("a–b")).all()
    assert vocabulary("bytes") == 256
    assert vocabulary(saved) == 259
    for a, b in zip(books(shelf, saved).texts, books(shelf).texts, strict=True):
        assert (a == b).all()
    assert (noise(saved).places[0] == noise().places[0]).all()
    with pytest.raises(ValueError, match="got tokenizer='byte'; did you mean 'bytes'"):
        encode("a", "byte")
    (shelf / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"a folder without a tokenizer; expected one with a tokenizer\.json, which"):
        encode("a", str(shelf))


def test_what_is_told_stands_between_sentences_and_answers_are_asked_for() -> None:
    told = Story("Begin. ", ("FACT ONE. ", "FACT TWO. "), (("\nFirst?", " yes."), ("\nSecond?", " no.")))
    for seed in range(20):
        batch = text_batch(np.random.default_rng(seed), [told, told], noise(), length=300)
        for ids, targets, answers in zip(*(batch[name].numpy() for name in batch), strict=True):
            text = text_of(ids)
            assert len(text) == 300
            assert text.endswith("\nFirst? yes.\nSecond? no.")
            hay = text.removeprefix("Begin. ").removesuffix("\nFirst? yes.\nSecond? no.")
            before, between = hay.split("FACT ONE. ")
            between, after = between.split("FACT TWO. ")
            assert not before or before.endswith(". ")
            assert not between or between.endswith(". ")
            repeated = " ".join([*NOISE] * 4)
            assert before + between + after in repeated
            assert text_of(targets[answers == 0]) == " yes."
            assert text_of(targets[answers == 1]) == " no."
            asked = answers >= 0
            assert (targets[~asked] < 0).all()
            assert (ids[1:][asked[:-1]] == targets[:-1][asked[:-1]]).all(), "asked for at the token before"


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_a_depth_is_the_place_between_sentences_that_is_nearest(depth: float) -> None:
    told = Story("", ("FACT. ",), (("\nQ?", " a."),))
    batch = text_batch(np.random.default_rng(0), [told] * 4, noise(), length=2000, depth=depth)
    for ids in batch["input_ids"]:
        assert abs(text_of(ids.numpy()).index("FACT") / 1987 - depth) <= max(map(len, NOISE)) / 1987


def test_without_hay_rows_are_as_long_as_they_are() -> None:
    rows = [Story("", ("A fact. ",), (("Q?", " a."),)), Story("", (), (("Q?", " a."),))]
    batch = text_batch(np.random.default_rng(0), rows, None)
    assert [text_of(ids.numpy()) for ids in batch["input_ids"]] == ["A fact. Q? a.", "Q? a." + 8 * "\0"]
    assert [text_of(t[t >= 0].numpy()) for t in batch["targets"]] == [" a.", " a."]


def test_too_little_room_is_told() -> None:
    with pytest.raises(
        ValueError,
        match="got length=13 with tokenizer=bytes; expected more than the 13 tokens of facts and questions",
    ):
        text_batch(np.random.default_rng(0), [Story("", ("A fact. ",), (("Q?", " a."),))], noise(), length=13)
