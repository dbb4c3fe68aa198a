"""Completions and chat: what the library would say, with the memory that belongs to it."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serve.serve_cases import NAME, Expected, complete, serving, small_engine, text_of, wait_until_active
from titans_lm.serve.engine import Engine
from titans_lm.serve.schema import Cancelled, Completion


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return small_engine(tmp_path_factory.mktemp("store"), max_new_tokens=200, max_stored=1000)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx.Client]:
    with serving(engine) as client:
        yield client


@pytest.fixture(scope="module")
def official(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1/", api_key="none", max_retries=0) as official:
        yield official


def test_a_request_alone_starts_from_nothing(client: httpx.Client, engine: Engine) -> None:
    answer = complete(client, "abc", 12)
    assert text_of(answer) == Expected(engine.model).says("abc", 12) == text_of(complete(client, "abc", 12))
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["object"], answer["model"], answer["conversation"]) == ("text_completion", NAME, None)


def test_a_conversation_is_named_by_a_header_in_utf8(client: httpx.Client) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    given = client.post("/v1/completions", json=asked, headers={b"x-conversation": "Zoë".encode()})
    assert given.json()["conversation"] == "Zoë"
    assert client.post("/v1/completions", json=asked, headers={b"x-conversation": b"Zo\xeb"}).status_code == 400


def test_methods_that_are_made_up_are_counted_as_one(client: httpx.Client) -> None:
    for name in ("MADE", "UP"):
        assert client.request(name, "/v1/models").status_code == 405
    told = client.get("/metrics").text
    assert 'method="any",path="/v1/models",status="405"' in told
    assert "MADE" not in told


def test_a_conversation_goes_on_and_others_do_not_hear_of_it(client: httpx.Client, engine: Engine) -> None:
    ann, bob = Expected(engine.model), Expected(engine.model)
    for turn in range(3):
        for name, expected in (("ann", ann), ("bob", bob)):
            answer = complete(client, f"{name} {turn} ", conversation=name)
            assert text_of(answer) == expected.says(f"{name} {turn} ", 8)
            assert answer["memory_tokens"] == expected.memory.tokens[0]
    by_header = client.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 3, "temperature": 0}, headers={"x-conversation": "ann"}
    ).json()
    assert text_of(by_header) == ann.says("x", 3)
    assert by_header["conversation"] == "ann"


def test_a_chat_reads_only_what_is_new(client: httpx.Client, engine: Engine) -> None:
    """The whole history, its end, or the new message alone: the memory reads the new message."""
    expected, history = Expected(engine.model), []
    sent = {0: slice(None), 1: slice(None), 2: slice(-3, None), 3: slice(-1, None)}
    for turn, part in sent.items():
        history.append({"role": "user", "content": f"question {turn}?"})
        body = {"messages": history[part], "conversation": "history", "max_tokens": 9, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).json()
        said = answer["choices"][0]["message"]
        assert said["role"] == "assistant"
        start = "\n" if turn else ""
        assert said["content"] == expected.says(f"{start}user: question {turn}?\nassistant:", 9)
        assert answer["memory_tokens"] == expected.memory.tokens[0]
        history.append({"role": "assistant", "content": said["content"]})
    assert client.get("/v1/conversations/history").json()["turns"] == 4


def test_streams_say_the_same_in_pieces(client: httpx.Client) -> None:
    whole = complete(client, "stream", 20)
    body = {"prompt": "stream", "max_tokens": 20, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    *pieces, last, usage = [json.loads(line) for line in lines[:-1]]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text_of(whole)
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]


def test_the_official_client_talks_to_it_unchanged(official: openai.OpenAI, client: httpx.Client) -> None:
    assert [model.id for model in official.models.list()] == [NAME]
    assert official.models.retrieve(NAME).owned_by == "titans-lm"
    whole = official.completions.create(model=NAME, prompt="hello", max_tokens=10, temperature=0)
    assert whole.choices[0].text == text_of(complete(client, "hello", 10))
    stream = official.completions.create(model=NAME, prompt="hello", max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [
        {"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]  # fmt: skip
    asked: Any = {"model": NAME, "messages": messages, "max_tokens": 10, "temperature": 0}
    said = official.chat.completions.create(**asked, extra_body={"conversation": "official"})
    assert said.usage is not None
    assert said.usage.completion_tokens == 10
    parts = official.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"conversation": "official too"}
    )
    chunks = list(parts)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == said.usage
    with pytest.raises(openai.BadRequestError, match="temperature"):
        official.completions.create(model=NAME, prompt="x", temperature=3.0)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        official.completions.create(model="other", prompt="x")


def test_seeds_repeat_and_dials_count(client: httpx.Client) -> None:
    def sampled(**fields: Any) -> str:
        return text_of(complete(client, "dice", 16, **{"temperature": 1.5, "seed": 1, **fields}))

    assert sampled() == sampled()
    assert sampled() != sampled(seed=2)
    likeliest = text_of(complete(client, "dice", 16))
    assert sampled(top_k=1) == sampled(top_p=1e-6) == likeliest != sampled()


def test_a_stop_text_is_neither_shown_nor_remembered(client: httpx.Client, engine: Engine) -> None:
    text = text_of(complete(client, "stop here", 30))
    at = next(i for i in range(8, 28) if text.index(text[i : i + 2]) == i)  # two characters that come there first
    stop = text[at : at + 2]
    answer = complete(client, "stop here", 30, stop=["not in it", stop], conversation="stopped")
    assert text_of(answer) == text[:at]
    assert answer["choices"][0]["finish_reason"] == "stop"
    body = {"prompt": "stop here", "max_tokens": 30, "temperature": 0, "stream": True, "stop": stop}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == text[:at]
    after = Expected(engine.model)
    assert after.says("stop here", at) == text[:at]
    assert after.memory is not None
    assert answer["memory_tokens"] == after.memory.tokens[0]
    assert text_of(complete(client, " and on", 5, conversation="stopped")) == after.says(" and on", 5)


def test_tokens_may_be_given_as_numbers(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": [0, 70, 71], "max_tokens": 4, "temperature": 0}).json()
    assert answer["usage"]["prompt_tokens"] == 3
    refused = client.post("/v1/completions", json={"prompt": [5, 10**6]})
    assert refused.status_code == 400
    assert "token ids" in refused.json()["error"]["message"]


def test_who_does_not_wait_for_an_answer_has_not_asked(client: httpx.Client, engine: Engine) -> None:
    """A client that gives up and asks again must not have its question read twice."""
    expected = Expected(engine.model)
    expected.says("kept", 4)
    complete(client, "kept", 4, conversation="impatient")
    body = {"prompt": "lost", "max_tokens": 200, "temperature": 0, "conversation": "impatient"}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=0.1)
    wait_until_active(client, 0)
    assert text_of(complete(client, "on", 6, conversation="impatient")) == expected.says("on", 6)


def test_a_stream_that_is_cancelled_leaves_its_conversation_as_it_was(client: httpx.Client, engine: Engine) -> None:
    expected = Expected(engine.model)
    expected.says("kept", 4)
    complete(client, "kept", 4, conversation="cancelled")
    body = {"prompt": "lost", "max_tokens": 200, "temperature": 0, "stream": True, "conversation": "cancelled"}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until_active(client, 0)
    assert text_of(complete(client, "on", 6, conversation="cancelled")) == expected.says("on", 6)


def test_an_answer_whose_end_nobody_hears_is_not_kept(engine: Engine) -> None:
    gone = threading.Event()
    asked = Completion(prompt="lost", max_tokens=1, temperature=0, conversation="unheard")
    with pytest.raises(Cancelled):
        engine.answer(asked, lambda _: gone.set(), gone)
    assert engine.store.get("conversation", "unheard") is None
