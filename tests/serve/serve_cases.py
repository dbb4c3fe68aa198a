"""A server in the test's own process, on a port of its own, and what it should answer."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from streaming.stream_cases import reading_model
from titans_lm.data.tokenizer import byte_tokenizer, decode_bytes
from titans_lm.generate import Chooser
from titans_lm.serve.app import Connection, create_app
from titans_lm.serve.engine import Engine
from titans_lm.serve.settings import ServeSettings
from titans_lm.serve.store import Store
from titans_lm.streaming import Memory, Reader

NAME = "small"


def plain_model(architecture: str = "mac") -> Any:
    """A model in float64 whose greedy text can be read: no mark is in it, and every byte is a character.

    Its keys start at random: one whose values start as the token itself (D32) repeats a single letter.
    """
    model = reading_model(architecture, induction_init=False, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight[:32] = 0.0
        model.lm_head.weight[127:] = 0.0
    return model


def small_engine(folder: Path, model: Any = None, tokenizer: Any = None, **settings: Any) -> Engine:
    model = plain_model() if model is None else model
    given = ServeSettings(out=folder, **{"in_memory": 4, "max_stored": 20, **settings})
    store = Store(given.out, model, in_memory=given.in_memory, most=given.max_stored)
    return Engine(model, byte_tokenizer() if tokenizer is None else tokenizer, store, given)


@contextmanager
def serving(engine: Engine, key: str | None = None) -> Iterator[httpx.Client]:
    """A client of a running server; the server stops as it does when it is asked to."""
    app = create_app(engine, NAME, key)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5, http=Connection)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(600):
            if server.started or not thread.is_alive():
                break
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop"


def wait_until_active(client: httpx.Client, number: int, seconds: float = 30.0) -> None:
    """Wait until so many requests are computed or wait."""
    end = time.monotonic() + seconds
    while (active := client.get("/health").json()["active"]) != number:
        assert time.monotonic() < end, f"{active} requests are active, and not {number}"
        time.sleep(0.02)


class Expected:
    """What a conversation should say, from the library alone."""

    def __init__(self, model: Any, memory: Memory | None = None) -> None:
        self.model, self.memory = model, memory

    def says(self, text: str, tokens: int) -> str:
        """Read a text, write on, and keep both."""
        reader = Reader(self.model, byte_tokenizer(), memory=self.memory)
        opened = reader.memory.open[0]
        reader.read(text, new_document=not opened)
        new = list(reader.write(Chooser(0.0, 0, 1.0, None, "cpu"), tokens))
        self.memory = reader.memory
        return decode_bytes(new).decode(errors="replace")


def complete(client: httpx.Client, prompt: str, tokens: int = 8, **fields: Any) -> Any:
    """Ask for the likeliest continuation and give the answer's JSON."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: Any) -> str:
    return answer["choices"][0]["text"]


def crowd(url: str, *, turns: int = 0, seconds: float = 0.0) -> list[dict[int, tuple[str, str]]]:
    """Let 32 clients talk in 8 conversations, some streaming and breaking off, so many turns each or so long.

    Gives by conversation what was asked and said, by the tokens in its memory after it. Every ten turns of a client
    the conversations are new ones: a model with random weights is chaotic, and within some 1,500 tokens lifts the last
    bit in which a product of many rows differs from that of one to another letter.
    """
    said: dict[str, dict[int, tuple[str, str]]] = {}
    end = time.monotonic() + seconds

    def one(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120.0) as mine:
            turn = 0
            while turn < turns or time.monotonic() < end:
                body = {"prompt": f"{number} leaves", "max_tokens": 300, "temperature": 0, "stream": True}
                if number % 8 == 0 and (turn == 0 or not turns):
                    with mine.stream("POST", "/v1/completions", json=body) as response:
                        next(response.iter_lines())
                text = f"{number} asks {turn}: "
                name = f"c{number % 8}-{turn // 10}"
                answer = complete(mine, text, 5 + number % 3, conversation=name)
                mine_said = said.setdefault(name, {})
                assert answer["memory_tokens"] not in mine_said, "two answers came out of one state"
                mine_said[answer["memory_tokens"]] = text, text_of(answer)
                turn += 1

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(32)))
    return list(said.values())


def check_said(said: list[dict[int, tuple[str, str]]], model: Any) -> None:
    """Hold what conversations heard against the library alone, in the order in which the server took the turns."""
    for turns in said:
        expected = Expected(model)
        for tokens in sorted(turns):
            text, answer = turns[tokens]
            assert answer == expected.says(text, len(answer))
            assert expected.memory is not None
            assert expected.memory.tokens[0] == tokens
