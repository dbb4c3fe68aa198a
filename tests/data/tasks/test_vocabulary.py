"""The tokenizer of the tasks' words: any text comes back, and what the tasks say is short."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.tasks.task_cases import decode_words
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.stories import ROOMS
from titans_lm.data.tasks.vocabulary import (
    INTRODUCTION,
    NOISE,
    NOTHING,
    NOUNS,
    encode_words,
    split_words,
    word_count,
    word_ids,
    word_tokenizer,
)
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.train.run import load_tokenizer

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
    assert ids == list(range(257, word_count()))


def test_a_sentence_is_the_same_alone_and_in_a_text() -> None:
    told = ["It was late. ", "Mary went to the hallway. ", "“No.” ", "The number is 4821937. "]
    assert encode_words("".join(told)).tolist() == [token for one in told for token in encode_words(one)]


@settings(max_examples=500)
@given(st.text(alphabet=" \n\t\r\u00a0\u2028aB.”é", max_size=14))
def test_white_space_is_made_one_space_or_a_break_between_sentences(text: str) -> None:
    """As patterns that try every cut of a run of white space would have it, whose time is quadratic in the run."""
    broken = re.sub(r"""(?<=[^\s.!?"'’”)])\s*\n\s*(?=[A-Z])""", "  ", text)
    expected = re.sub(r"(?<=\S)(?!  [A-Z])\s+(?=\S)", " ", broken)
    found = word_tokenizer().backend_tokenizer.normalizer
    assert found is not None
    assert found.normalize_str(text) == expected


@pytest.mark.parametrize("name", ["facts", "needles"])
def test_shipped_models_have_this_tokenizer(name: str) -> None:
    shipped = load_tokenizer(f"pretrained:{name}")
    assert isinstance(shipped, PreTrainedTokenizerFast)
    ours, theirs = (json.loads(one.backend_tokenizer.to_str()) for one in (word_tokenizer(), shipped))
    assert theirs["normalizer"] == ours["normalizer"]
    assert theirs["pre_tokenizer"] == ours["pre_tokenizer"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("words")
    word_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [*TEXTS, "A cart. A “No.” The (A). “A word.” John went, 48213 of them. Ä\n"])
def test_the_saved_tokenizer_makes_the_same_tokens(text: str, saved: PreTrainedTokenizerBase) -> None:
    prose = re.sub(r"(?<=\S)(?!  [A-Z])\s+(?=\S)", " ", re.sub(r"(?<=\w)\s*\n\s*(?=[A-Z])", "  ", text))
    assert saved(text).input_ids == encode_words(prose).tolist()
    assert saved.decode(saved(text).input_ids) == prose
    assert (len(saved), saved.pad_token_id) == (word_count(), NOTHING)


def test_a_line_that_begins_with_a_name_begins_a_sentence(saved: PreTrainedTokenizerBase) -> None:
    said = encode_words("Mary went to the garden.").tolist()
    for before in ("A list\n", "A list:\n\n  ", "It was late. ", "It was late.\n"):
        assert saved(f"{before}Mary went to the garden.").input_ids[-len(said) :] == said
    assert saved("in the\nbathroom").input_ids == encode_words("in the bathroom").tolist()


def test_its_chat_template_asks_as_the_tasks_do(saved: PreTrainedTokenizerBase) -> None:
    rng = np.random.default_rng(0)
    for task, form in ((BabiLongSettings(), r"\n(.*\?)"), (NeedleSettings(), r"\n(.*\?)")):
        [(asked, answer)] = task.draw_story(rng).questions
        question = re.match(form, asked)
        assert question is not None
        turn = {"role": "user", "content": question[1]}
        assert saved.apply_chat_template([turn], tokenize=False) == asked
        told = [turn, {"role": "assistant", "content": answer.strip()}, turn]
        assert saved.apply_chat_template(told, tokenize=False) == asked + answer + asked


def test_words_that_it_splits_are_named(saved: PreTrainedTokenizerBase) -> None:
    assert split_words("Where is Peter? In the bathroom, a zebra.", saved) == ["Peter", "In", "zebra"]
    assert split_words("Where is Peter?", byte_tokenizer()) == []
