"""Stop texts and chat histories, apart from any model."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf.hf_cases import words
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.serve.chat import Writing, divide, mark, remembered, render
from titans_lm.serve.schema import ClientError, Message

TOKENIZER = byte_tokenizer()


@dataclass(frozen=True)
class After:
    """Stands for the memory after so many bytes."""

    bytes: int


@pytest.mark.usefixtures("unchecked")
@given(
    text=st.text(alphabet="abé€", max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_ends_before_the_first_stop_text(text: str, stops: list[str]) -> None:
    shown: list[str] = []
    memory: Any = After(0)
    writing = Writing(TOKENIZER, stops, shown.append, memory)
    ends = []  # where a stop text is complete for the first time, and where it begins
    for end in range(len(text) + 1):
        starts = [text.find(stop, 0, end) for stop in stops if text.find(stop, 0, end) >= 0]
        if starts:
            ends = [min(starts)]
            break
    expected = text[: ends[0]] if ends else text
    for count, byte in enumerate(text.encode(), 1):
        memory = After(count)
        writing.put(byte, memory)
        if writing.stopped:
            break
    writing.finish()
    assert "".join(shown) == writing.text == expected
    assert writing.stopped == bool(ends)
    assert writing.memory == After(len(expected.encode()))


@pytest.mark.usefixtures("unchecked")
def test_words_are_shown_whole_and_stopped_at() -> None:
    tokenizer, shown = words(), []
    ids = tokenizer("w1 w2 w3 w4").input_ids
    memory: Any = After(0)
    writing = Writing(tokenizer, ["w3"], shown.append, memory)
    for count, token in enumerate(ids, 1):
        memory = After(count)
        writing.put(token, memory)
        if writing.stopped:
            break
    writing.finish()
    assert "".join(shown) == writing.text
    assert writing.text == "w1 w2 "
    assert writing.memory == After(2)


class HalfCharacters:
    """Tokens of bytes, some of which end inside of a character, as byte-level BPE has them."""

    pieces = (b"h", b"i", b" \xf0\x9f", b"\x98", b"\x80")

    def __len__(self) -> int:
        return len(self.pieces)

    def decode(self, ids: list[int], **_: object) -> str:
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")


@pytest.mark.usefixtures("unchecked")
def test_a_stop_text_that_begins_inside_of_a_token_is_forgotten_whole() -> None:
    shown, tokenizer = [], cast(Any, HalfCharacters())
    memory: Any = After(0)
    writing = Writing(tokenizer, ["\U0001f600"], shown.append, memory)
    for token in range(5):
        memory = After(token + 1)
        writing.put(token, memory)
    assert (writing.stopped, "".join(shown)) == (True, "hi ")
    assert writing.memory == After(2), "the next token has half of the stop text"
    assert writing.unread == " ", "which was shown, and is to be read"


def test_the_longest_known_part_of_a_history_is_not_read_again() -> None:
    messages = [Message(role="user" if i % 2 == 0 else "assistant", content=f" {i}") for i in range(6)]
    known = [mark(message.role, message.text) for message in messages[:4]]
    assert divide(messages, known, []) == 4
    assert divide(messages[2:], known, []) == 2
    assert divide(messages[4:], known, []) == 0
    assert divide(messages[:4], known, []) == 4
    assert divide(messages, [], []) == 0
    changed = [*messages[:3], Message(role="assistant", content="edited"), *messages[4:]]
    assert divide(changed, known, []) == 0
    trimmed = [Message(role=message.role, content=message.text.strip()) for message in messages]
    assert divide(trimmed, known, []) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titans_lm.serve.chat.REMEMBERED", 2)
        assert divide(messages, known[2:], []) == 4  # more was said than is remembered
    for new in (Message(role="system", content="be brief"), Message(role="user", content="before")):
        assert divide([new, *messages], known, []) == 0, "it would never be read"


def test_instructions_are_read_once() -> None:
    system, other = Message(role="system", content="be brief"), Message(role="system", content="be long")
    first, second = Message(role="user", content="a"), Message(role="user", content="b")
    notes = remembered([], [], [system, first], "answer")
    said = Message(role="assistant", content="answer")
    for messages, read in (
        ([system, first, said, second], 3), ([system, said, second], 2), ([system, second], 1), ([second], 0),
        ([other, second], 0), ([other, said, second], 0),
    ):  # fmt: skip
        assert divide(messages, notes["messages"], notes["instructions"]) == read


TEMPLATE = """{{ bos_token }}{% if messages[0].role != 'system' %}<system>you help</end>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<{{ m.role }}>{{ m.content }}</end>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""  # noqa: E501


def test_new_messages_are_rendered_as_the_template_would_go_on() -> None:
    tokenizer = words()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</end>"})
    tokenizer.chat_template = TEMPLATE
    a, c = Message(role="user", content="a"), Message(role="user", content="c")
    assert render(tokenizer, [a], 0, False) == "<system>you help</end>\n<user>a</end>\n<assistant>"
    assert render(tokenizer, [c], 1, True) == "</end>\n<user>c</end>\n<assistant>"
    assert not render(tokenizer, [a], 0, True, opened=True).startswith("<s>"), "one text has one beginning"
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</end>{% endfor %}<s>assistant"
    for opened, first in ((False, ""), (True, "<s>")):  # a turn begins so, too: the reader writes none in a document
        assert render(tokenizer, [a], 0, True, opened) == f"{first}user a</end><s>assistant"
    assert render(tokenizer, [c], 1, True, opened=True) == "</end><s>user c</end><s>assistant"
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ClientError, match="no tools"):
        render(tokenizer, [Message(role="tool", content="x")], 0, False)


def test_without_a_template_messages_are_lines() -> None:
    a, b, c = (Message(role=role, content=text) for role, text in (("user", "a"), ("assistant", "b"), ("user", "c")))
    assert render(TOKENIZER, [a], 0, False) == "user: a\nassistant:"
    assert render(TOKENIZER, [b, c], 1, True) == "\nassistant: b\nuser: c\nassistant:"


@pytest.mark.usefixtures("unchecked")
def test_few_memories_are_held() -> None:
    """Also of text without a space, and where every character may be the start of a stop text."""
    for stops in ([], ["a" * 50 + "b"]):
        writing = Writing(TOKENIZER, stops, lambda _: None, cast(Any, After(0)))
        for count in range(1, 500):
            writing.put(ord("a"), cast(Any, After(count)))
            assert len(writing._memories) <= (52 if stops else 1)
        assert writing.memory == After(499)
