"""Answers that are written as one batch: each is what it would be alone, whoever comes, goes or fails meanwhile."""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model_cases import MEMORIES, one_block
from serve.serve_cases import check_said, complete, crowd, plain_model, serving, small_engine
from streaming.stream_cases import assert_same_memory, reading_model
from titans_lm.data.tokenizer import EOS, byte_tokenizer
from titans_lm.generate import Chooser
from titans_lm.ops.state import map_state
from titans_lm.serve.batching import IDLE, Batcher
from titans_lm.serve.schema import Cancelled
from titans_lm.streaming import Memory, Reader

PROMPTS = ["a", "two words", "x" * 17, "The lighthouse keeper counted every ship. ", "né", "12345678"]


def chooser(temperature: float = 0.0, seed: int = 0) -> Chooser:
    return Chooser(temperature, 0, 1.0, seed, "cpu")


def read(model: Any, prompt: str) -> Memory:
    reader = Reader(model, byte_tokenizer())
    reader.read(prompt)
    return reader.memory


def alone(model: Any, memory: Memory, choose: Chooser, count: int) -> tuple[list[int], Memory]:
    reader = Reader(model, byte_tokenizer(), memory=memory)
    return list(reader.write(choose, count)), reader.memory


def wait_for(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


class Writing:
    """Answers of a batcher, each in a thread as requests are."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.pool = batcher, ThreadPoolExecutor(32)

    def start(self, memory: Memory, choose: Chooser, count: int, also: Callable[[int], bool] = lambda _: True) -> Any:
        found: list[int] = []
        last: list[Callable[[], Memory]] = []

        def take(token: int, after: Callable[[], Memory]) -> bool:
            found.append(token)
            last[:] = [after]
            return also(len(found)) and token != EOS  # a reader ends there by itself

        def work() -> tuple[list[int], Memory]:
            with self.batcher.write(memory, choose, take, count):
                return found, last[0]()

        return self.pool.submit(work)


@pytest.fixture
def batcher() -> Any:
    made: list[Batcher] = []

    def make(model: Any, most: int = 16) -> Writing:
        made.append(Batcher(model, byte_tokenizer(), most))
        return Writing(made[-1])

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("architecture", [*MEMORIES, "sliding", "sliding+lmm+sliding"])
def test_an_answer_is_what_it_would_be_alone(architecture: str, batcher: Any) -> None:
    """Prompts of all lengths, answers that end at different tokens, some drawn; and the memories they leave."""
    model = reading_model(architecture, **one_block(architecture))
    memories, writing = [read(model, prompt) for prompt in PROMPTS], batcher(model)
    counts, heat = [5 + 3 * i for i in range(len(PROMPTS))], [0.0, 0.0, 1.3, 0.0, 0.8, 0.0]
    told = [
        writing.start(memory, chooser(t, seed=i), n)
        for i, (memory, t, n) in enumerate(zip(memories, heat, counts, strict=True))
    ]
    for i, (memory, t, n) in enumerate(zip(memories, heat, counts, strict=True)):
        tokens, after = alone(model, memory, chooser(t, seed=i), n)
        found, kept = told[i].result(600)
        assert found == tokens
        assert_same_memory(kept, after)


def test_tokens_are_the_same_in_float32(batcher: Any) -> None:
    model = plain_model().float()
    memories, writing = [read(model, prompt) for prompt in PROMPTS], batcher(model)
    told = [writing.start(memory, chooser(), 25) for memory in memories]
    for memory, one in zip(memories, told, strict=True):
        assert one.result(600)[0] == alone(model, memory, chooser(), 25)[0]


def test_one_alone_leaves_the_very_bits_that_a_reader_leaves(batcher: Any) -> None:
    model = reading_model("mac")
    memory = read(model, PROMPTS[3])
    found, kept = batcher(model).start(memory, chooser(), 12).result(600)
    tokens, after = alone(model, memory, chooser(), 12)
    assert found == tokens
    assert_same_memory(kept, after, tolerance=0.0)


def test_answers_join_and_leave_and_the_first_to_come_is_the_first_to_be_served(batcher: Any) -> None:
    """A batch of two: the third waits for a place and the fourth for the next; every step gives a token to each."""
    model = plain_model("lmm")
    writing, order, reached = batcher(model, most=2), [], threading.Event()

    def noted(name: str) -> Callable[[int], bool]:
        return lambda _: order.append(name) or True

    def held(count: int) -> bool:
        order.append("a")
        return reached.wait(600) if count == 1 else True

    memories = {name: read(model, name) for name in "abcd"}
    told = {"a": writing.start(memories["a"], chooser(), 12, held)}
    wait_for(lambda: bool(order))
    for position, (name, count) in enumerate({"b": 4, "c": 3, "d": 3}.items()):
        told[name] = writing.start(memories[name], chooser(), count, noted(name))
        wait_for(lambda position=position: len(writing.batcher._waiting) > position)
    reached.set()
    for name, one in told.items():
        assert one.result(600)[0] == alone(model, memories[name], chooser(), len(one.result()[0]))[0]
    assert "".join(order) == "a" + "ab" * 4 + "ac" * 3 + "ad" * 3 + "a"


@pytest.mark.parametrize("architecture", ["lmm", "mac", "sliding"])
def test_seats_that_were_left_are_taken_by_others(architecture: str, batcher: Any, monkeypatch: Any) -> None:
    """Many short answers beside a long one: rows are written over, and no answer and no memory is another's."""
    model = reading_model(architecture, num_hidden_layers=1)
    writing, joined = batcher(model, most=3), []
    join = Memory.join
    monkeypatch.setattr(Memory, "join", lambda parts: joined.append(len(parts)) or join(parts))
    memories = [read(model, f"{n} " * (n + 1)) for n in range(9)]
    before = [map_state(torch.clone, memory.state) for memory in memories]
    long = writing.start(memories[0], chooser(), 150)
    wait_for(lambda: writing.batcher.rows == 1)
    short = []
    for n, memory in enumerate(memories[1:]):
        short.append(writing.start(memory, chooser(), 4 + n % 3))
        if n % 2:
            short[-1].result(600)
    for memory, count, told in zip(memories, [150, *(4 + n % 3 for n in range(8))], [long, *short], strict=True):
        tokens, after = alone(model, memory, chooser(), count)
        found, kept = told.result(600)
        assert found == tokens
        assert_same_memory(kept, after)
    for memory, state in zip(memories, before, strict=True):
        assert_same_memory(memory, replace(memory, state=state), tolerance=0.0)
    assert sum(size > 1 for size in joined) < 8, "most took a row that was there"


def test_an_empty_seat_is_given_up_after_some_steps(batcher: Any) -> None:
    """Until then it is computed with the others; the answer that goes on is the same."""
    model = plain_model("lmm")
    memories, writing = [read(model, name) for name in "ab"], batcher(model)
    seats, reached = [], threading.Event()

    def counted(count: int) -> bool:
        seats.append(len(writing.batcher._seats))
        return reached.wait(600) if count == 1 else True

    long = writing.start(memories[0], chooser(), 20, counted)
    wait_for(lambda: bool(seats))
    short = writing.start(memories[1], chooser(), 3)
    wait_for(lambda: len(writing.batcher._waiting) > 0)
    reached.set()
    for memory, count, told in zip(memories, (20, 3), (long, short), strict=True):
        assert told.result(600)[0] == alone(model, memory, chooser(), count)[0]
    assert (seats[0], seats[1], seats[-1]) == (1, 2, 1)
    assert seats.count(2) == 3 + 2 * IDLE


def test_who_fails_or_goes_disturbs_nobody(batcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model("lmm")
    memories, writing = [read(model, prompt) for prompt in PROMPTS[:3]], batcher(model)

    def gone(count: int) -> bool:
        if count == 3:
            raise Cancelled
        return True

    def broken(_: torch.Tensor) -> int:
        raise RuntimeError("no such choice")

    sick = chooser(1.0)
    sick.warpers.append(lambda _, logits: broken(logits))
    told = [writing.start(memories[0], chooser(), 20), writing.start(memories[1], chooser(), 20, gone)]
    failing = writing.start(memories[2], sick, 20)
    with pytest.raises(Cancelled):
        told[1].result(600)
    with pytest.raises(RuntimeError, match="no such choice"):
        failing.result(600)
    assert told[0].result(600)[0] == alone(model, memories[0], chooser(), 20)[0]

    with monkeypatch.context() as now:
        now.setattr(Reader, "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("the model fails")))
        with pytest.raises(RuntimeError, match="the model fails"):
            writing.start(memories[0], chooser(), 3).result(600)
    assert writing.start(memories[0], chooser(), 3).result(600)[0] == alone(model, memories[0], chooser(), 3)[0]
    writing.batcher.close()
    with pytest.raises(Cancelled):
        writing.start(memories[0], chooser(), 3).result(600)


def test_many_clients_at_once_each_hear_their_own(tmp_path: Path) -> None:
    """32 clients on 8 conversations, some streaming, some breaking off: what is heard is what the memory alone says."""
    engine = small_engine(tmp_path, plain_model("lmm"), in_memory=3)
    assert engine.batcher.most == 16
    with serving(engine) as client:
        said = crowd(str(client.base_url), turns=2)
        metrics = client.get("/metrics").text
    assert all(len(turns) == 8 for turns in said), "two answers came out of one state of a conversation"
    check_said(said, engine.model)
    written = sum(len(answer) for turns in said for _, answer in turns.values())
    [counted] = re.findall(r'titans_tokens_total\{kind="completion"\} (\d+)', metrics)
    assert int(counted) == written


def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    with serving(small_engine(tmp_path, plain_model("lmm"), in_memory=1)) as client:
        for name in ("one", "two"):
            complete(client, "hello", 4, conversation=name)
        client.post("/v1/memories", json={"text": "a book", "name": "book"})
        assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
        for path in ("/nowhere", "/v1/nothing/at/all"):
            assert client.get(path).status_code == 404
        found = client.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'^[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.]+$')
    lines = found.text.splitlines()
    assert all(sample.match(line) or line.startswith(("# HELP titans_", "# TYPE titans_")) for line in lines)
    for line in (
        'titans_requests_total{method="POST",path="/v1/completions",status="200"} 2',
        'titans_requests_total{method="POST",path="/v1/completions",status="400"} 1',
        'titans_requests_total{method="any",path="other",status="404"} 2',
        'titans_request_seconds_count{path="/v1/completions"} 3',
        'titans_request_seconds_bucket{path="/v1/completions",le="10.0"} 3',
        'titans_request_seconds_bucket{path="/v1/completions",le="+Inf"} 3',
        'titans_tokens_total{kind="completion"} 8',
        'titans_tokens_total{kind="prompt"} 19',  # two prompts and a book, each after <bos>
        "titans_active_requests 0",
        "titans_batch_rows 0",
        'titans_memories{kind="conversation",where="disk"} 2',
        'titans_memories{kind="memory",where="disk"} 1',
    ):
        assert line in lines
    counts = [int(x) for x in re.findall(r'_bucket\{path="/v1/completions",le="[^"]+"\} (\d+)', found.text)]
    assert counts == sorted(counts)
    assert sum(int(n) for n in re.findall(r'where="ram"\} (\d+)', found.text)) == 1


def test_bodies_are_parsed_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is parsed, others are answered."""
    from titans_lm.serve.schema import Completion

    parse, began, go_on = Completion.model_validate_json, threading.Event(), threading.Event()

    def slowly(body: bytes) -> Completion:
        began.set()
        assert go_on.wait(300)
        return parse(body)

    monkeypatch.setattr(Completion, "model_validate_json", slowly)
    with serving(small_engine(tmp_path, plain_model("lmm"))) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, client, "hello", 3)
        assert began.wait(300)
        assert client.get("/health").status_code == 200
        go_on.set()
        assert asked.result(600)["usage"]["completion_tokens"] == 3
