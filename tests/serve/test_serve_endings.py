"""How answers end in a conversation's memory: by a token of the template, or by a stop text inside a word."""

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import titans_lm
from serve.serve_cases import plain_model, small_engine
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.serve.engine import Engine
from titans_lm.serve.schema import Chat, Completion
from titans_lm.streaming import Reader


class Read(Engine):
    """Notes what its readers are given."""

    read: ClassVar[list[Any]] = []

    def _read(self, reader: Any, text: Any, *rest: Any, **options: Any) -> None:
        self.read.append(text)
        super()._read(reader, text, *rest, **options)


def chat_engine(folder: Path, closing: str) -> Engine:
    """A model that may end an answer by a letter of text, as its template closes one."""
    model, tokenizer = plain_model(), byte_tokenizer()
    with torch.no_grad():  # as likely as the letter e
        model.lm_head.weight[ord(closing)] = model.lm_head.weight[ord("e")]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, ord(closing)]
    line = "{{ m['role'][0] }}: {{ m['content'] }}" + closing
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{line}{{% endfor %}}{{% if add_generation_prompt %}}a:{{% endif %}}"
    )
    small = small_engine(folder, model, tokenizer)
    return Read(small.model, small.tokenizer, small.store, small.settings)


@pytest.mark.parametrize(("closing", "stop", "reads"), [("\n", None, "u: again\na:"), (".", ["."], ".u: again.a:")])
def test_the_closing_of_an_answer_is_read_once(
    tmp_path: Path, closing: str, stop: list[str] | None, reads: str
) -> None:
    """Where the model has written it, or where a stop text has taken it back."""
    engine, said = chat_engine(tmp_path, closing), None
    for seed in range(50):
        asked = {"conversation": f"c{seed}", "temperature": 1.0, "max_tokens": 60, "stop": stop, "seed": seed}
        hello = Chat.model_validate(asked | {"messages": [{"role": "user", "content": "hi"}]})
        said = engine.answer(hello, lambda _: None, threading.Event())
        if said.finish == "stop":
            again = Chat.model_validate(asked | {"messages": [{"role": "user", "content": "again"}]})
            engine.answer(again, lambda _: None, threading.Event())
            break
    assert said is not None
    assert (said.finish, engine.read[-1]) == ("stop", reads)
    engine.close()


def test_what_is_shown_of_a_word_before_a_stop_text_is_remembered(tmp_path: Path) -> None:
    model, tokenizer = titans_lm.pretrained("facts")
    engine = small_engine(tmp_path, model, tokenizer)
    asked = {"prompt": "Mary went to the garden. Where is Mary?", "temperature": 0.0, "max_tokens": 4}
    whole = engine.answer(Completion(**asked), lambda _: None, threading.Event()).text
    word = next(word for word in whole.split() if len(word) > 3)
    part = engine.answer(Completion(**asked, stop=word[2:], conversation="c"), lambda _: None, threading.Event())
    assert part.text.endswith(word[:2])
    entry, expected = engine.store.get("conversation", "c"), Reader(model, tokenizer)
    assert entry is not None
    expected.read(asked["prompt"])
    expected.read(part.text, new_document=False)
    known = Reader(model, tokenizer, memory=entry.memory)
    torch.testing.assert_close(known.next_logits(), expected.next_logits(), rtol=1e-4, atol=1e-3)
    engine.close()
