"""Stop texts and chat histories, apart from any model."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf.hf_cases import words
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.serve.chat import divide, mark, render
from titans_lm.serve.schema import Message
from titans_lm.serve.writing import Writing

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
    writing.finish()
    assert "".join(shown) == writing.text
    assert writing.text == "w1 w2 "
    assert writing.memory == After(2)


def test_the_longest_known_part_of_a_history_is_not_read_again() -> None:
    messages = [Message(role="user" if i % 2 == 0 else "assistant", content=str(i)) for i in range(6)]
    known = [mark(message.role, message.text) for message in messages[:4]]
    assert divide(messages, known) == 4
    assert divide(messages[2:], known) == 2
    assert divide(messages[4:], known) == 0
    assert divide(messages[:4], known) == 4
    assert divide(messages, []) == 0
    changed = [*messages[:3], Message(role="assistant", content="edited"), *messages[4:]]
    assert divide(changed, known) == 0


def test_new_messages_are_rendered_as_the_template_would_go_on() -> None:
    tokenizer = words()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
    messages = [
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
        Message(role="user", content="c"),
    ]
    whole = render(tokenizer, [], messages, False)
    assert whole == "<user>a\n<assistant>b\n<user>c\n<assistant>"
    for cut in range(3):
        assert whole.endswith(render(tokenizer, messages[:cut], messages[cut:], cut > 0))
    plain = [render(TOKENIZER, messages[:i], messages[i:j], i > 0) for i, j in pairwise((0, 1, 3))]
    assert plain == ["user: a\nassistant:", "\nassistant: b\nuser: c\nassistant:"]
