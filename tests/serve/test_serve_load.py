"""Many clients at once, and a server that is killed: nothing is mixed up, and nothing acknowledged is lost.

TITANS_LOAD_SECONDS says how long the clients go on; the project's own figure was taken with 120.
"""

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forks import Command, start_titans
from serve.serve_cases import Expected, plain_model, serving, small_engine, text_of
from titans_lm.data.tokenizer import byte_tokenizer

SECONDS = float(os.environ.get("TITANS_LOAD_SECONDS", "0.5"))
CLIENTS, CONVERSATIONS = 32, 8
PATTERNS = [f"House {i} has the door {colour}. " for i, colour in enumerate(("red", "blue", "green", "black") * 2)]


def memory_of(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.slow
def test_many_clients_on_a_few_conversations(tmp_path: Path) -> None:
    """Each conversation gets its own texts, from several clients; what it says is what its memory alone would say."""
    engine = small_engine(tmp_path, in_memory=3, workers=2)
    said: list[dict[int, tuple[str, str]]] = [{} for _ in range(CONVERSATIONS)]
    sizes: list[int] = []
    with serving(engine) as client, ThreadPoolExecutor(CLIENTS) as pool:
        url, until = str(client.base_url), time.monotonic() + SECONDS

        def one(number: int) -> int:
            own, asked = number % CONVERSATIONS, 0
            with httpx.Client(base_url=url, timeout=120.0) as mine:
                while not asked or time.monotonic() < until:  # on a busy machine too, everyone asks once
                    text = f"{PATTERNS[own]}{number} asks {asked}: "
                    body = {"prompt": text, "max_tokens": 6, "temperature": 0, "conversation": f"c{own}"}
                    response = mine.post("/v1/completions", json=body)
                    assert response.status_code == 200, response.text
                    answer = response.json()
                    said[own][answer["memory_tokens"]] = text, text_of(answer)
                    asked += 1
            return asked

        def watch() -> None:
            while time.monotonic() < until:
                sizes.append(memory_of(os.getpid()))
                time.sleep(0.2)

        watcher = threading.Thread(target=watch)
        watcher.start()
        total = sum(pool.map(one, range(CLIENTS)))
        watcher.join()
        assert client.get("/health").json() == {"status": "ok", "active": 0, "stored": CONVERSATIONS, "in_memory": 3}
    assert total == sum(map(len, said)), "two answers came out of one state of a conversation"
    for turns in said:
        expected = Expected(engine.model)
        for tokens in sorted(turns):  # the order in which the server took them
            text, answer = turns[tokens]
            assert answer == expected.says(text, 6)
            assert expected.memory is not None
            assert expected.memory.tokens[0] == tokens
    assert len({answer for turns in said for _, answer in turns.values()}) > CONVERSATIONS
    settled = sizes[len(sizes) // 4 :]
    growth = (max(settled) - min(settled)) / min(settled)
    print(f"{total} answers in {SECONDS:g} s, resident memory grew by {growth:.1%}")  # noqa: T201 - shown with -s
    assert growth < 0.25


def start_server(folder: Path, store: Path, **variables: str) -> tuple[Command, str]:
    """A server as a user starts it, and its address."""
    streams = store.with_name("server")
    command = start_titans(streams, "serve", folder, "--port", 0, "--out", store, "--device", "cpu", **variables)
    until, said = time.monotonic() + 60, ""
    while not said.endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.01)
        said = command.out.read_text() if command.out.exists() else ""
        assert said or command.process.is_alive(), command.log.read_text()
    return command, said.split(" at ")[1].split(",")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    plain_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.slow
def test_killed_while_it_serves_nothing_acknowledged_is_lost(folder: Path, tmp_path: Path) -> None:
    """kill −9 under load, again and again: every conversation stands where its last answer said, or one turn on."""
    luck, model = random.Random(0), plain_model()
    expected = {name: Expected(model) for name in ("a", "b", "c")}
    turns = dict.fromkeys(expected, 0)
    for life in range(4):
        server, url = start_server(folder, tmp_path / "store")
        stop = time.monotonic() + luck.uniform(0.1, 0.8)
        for name, one in expected.items():  # an answer that was lost on its way is known to have been given
            response = httpx.get(f"{url}/v1/conversations/{name}")
            stored = response.json()["tokens"] if response.status_code == 200 else 0
            known = 0 if one.memory is None else one.memory.tokens[0]
            assert stored >= known, "an acknowledged turn is lost"
            if stored > known:
                one.says(f"{name}{turns[name]} ", 5)
                turns[name] += 1
                assert one.memory is not None
                assert one.memory.tokens[0] == stored

        def talk(name: str, url: str = url) -> None:
            while True:
                text = f"{name}{turns[name]} "
                body = {"prompt": text, "max_tokens": 5, "temperature": 0, "conversation": name}
                try:
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()
                except (httpx.TransportError, json.JSONDecodeError):
                    return
                assert text_of(answer) == expected[name].says(text, 5)
                turns[name] += 1

        with ThreadPoolExecutor(3) as pool:
            talking = [pool.submit(talk, name) for name in expected]
            while time.monotonic() < stop or min(turns.values()) <= life:  # one turn of each at least
                assert not any(one.done() for one in talking), "somebody has stopped talking"
                time.sleep(0.02)
            server.process.kill()
            for one in talking:
                one.result(60)
        assert server.ended() == -signal.SIGKILL, life
    assert min(turns.values()) >= 4


def test_it_stops_when_it_is_asked_to_and_says_what_is_wrong_with_an_address(folder: Path, tmp_path: Path) -> None:
    server, url = start_server(folder, tmp_path / "store", TITANS_API_KEY="from the environment")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    headers = {"authorization": "Bearer from the environment"}
    assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "small"
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "conversation": "kept"}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
    port = url.rsplit(":", 1)[1]
    second = start_titans(tmp_path / "second", "serve", folder, "--port", port, "--out", tmp_path / "two")
    assert second.ended() == 2
    assert "cannot be had" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()
    stream = body | {"max_tokens": 4000, "stream": True, "conversation": "running"}
    with httpx.stream("POST", f"{url}/v1/completions", json=stream, headers=headers, timeout=60.0) as running:
        lines = running.iter_lines()  # held: without it httpx closes the stream
        next(lines)
        server.process.terminate()
        assert server.ended(20) in (0, -signal.SIGTERM)  # 10 seconds are given to what runs
        try:
            finished = "data: [DONE]" in list(lines)
        except httpx.TransportError:
            finished = False
    assert len(list((tmp_path / "store").rglob("*.memory"))) == 1 + finished
    assert not list((tmp_path / "store").rglob(".unfinished-*"))
