"""The tokenizer of the tasks' words: any text comes back, and what the tasks say is short."""

import pytest

from data.tasks.task_cases import decode_words
from titans_lm.data.tasks.stories import ROOMS
from titans_lm.data.tasks.vocabulary import INTRODUCTION, NOISE, NOUNS, encode_words, word_ids

TEXTS = [
    "",
    INTRODUCTION,
    " ".join(NOISE),
    "What’s a zebra?\n\n  Two  spaces, otters and Otter.",
    "the the  the",
    "12 3",
    "007 1 22",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(text: str) -> None:
    assert decode_words(encode_words(text)) == text


def test_words_of_the_tasks_are_one_token() -> None:
    assert len(encode_words("The secret number of brave otter is 4821937.")) == 7 + 4 + 1
    assert len(encode_words("The number of quiet ocean is the number of grand copper.")) == 11 + 1
    assert len(encode_words("What has the number 48213?")) == 4 + 3 + 1
    for word in (*NOUNS, *ROOMS):
        assert encode_words(f" {word}").tolist() == [word_ids()[f" {word}"]]
    assert encode_words("zebra").tolist() == list(b"zebra")
    ids = sorted(word_ids().values())
    assert ids == list(range(256, 256 + len(ids)))
