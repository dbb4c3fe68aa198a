"""Clients without a key, or without patience, that would keep others out; and what is not deleted is not forgotten."""

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.serve_cases import complete, serving, small_engine
from titans_lm.serve import store as stored
from titans_lm.serve.app import Connection
from titans_lm.serve.auth import Auth
from titans_lm.serve.batching import Cancelled, Runner
from titans_lm.serve.settings import ServeSettings

MOST = 6
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(Connection, "most", MOST)
    with serving(small_engine(tmp_path, max_body_bytes=2**17, max_new_tokens=100_000), "secret") as client:
        yield client


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Connections that the server has closed by itself."""
    found: list[Any] = []
    close = Connection.close
    monkeypatch.setattr(Connection, "close", lambda one: (found.append(one), close(one)))
    return found


def connected(client: httpx.Client, stack: ExitStack, **options: int) -> socket.socket:
    made = stack.enter_context(socket.socket())
    for name, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    made.settimeout(30)
    made.connect((client.base_url.host, client.base_url.port))
    return made


def wait_for(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_body_that_nobody_reads_is_not_waited_for(client: httpx.Client) -> None:
    """Nor does it take room from those with the key."""
    with ExitStack() as stack:
        for _ in range(MOST):
            other = connected(client, stack)
            head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % 2**17
            other.sendall(head + b" " * 2**16)
            assert b" 405 " in other.recv(1000)
        assert httpx.get(f"{client.base_url}/health").status_code == 200


def test_those_that_were_answered_make_room(client: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MOST):
            other = connected(client, stack)
            other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in other.recv(1000)


def test_an_answer_that_nobody_takes_ends(
    client: httpx.Client, closed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "patience", 0.3)
    with ExitStack() as stack:
        other = connected(client, stack, SO_RCVBUF=2**12)
        with suppress(OSError):
            other.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 900)
        wait_for(lambda: closed)


def test_what_is_sent_ahead_has_an_end(
    client: httpx.Client, closed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "ahead", 2**16)
    body = b'{"model": "small", "prompt": "a", "max_tokens": 100000}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as stack:
        other = connected(client, stack)
        other.sendall(head + body)
        with suppress(OSError):
            for _ in range(100):
                other.sendall(b"x" * 2**18)
        wait_for(lambda: closed)
    client.headers.update(KEY)
    assert complete(client, "still there")["choices"][0]["finish_reason"] == "length"


class Asked:
    """A request whose client is there, or has gone."""

    def __init__(self, gone: bool) -> None:
        self.gone = gone

    async def is_disconnected(self) -> bool:
        return self.gone


def test_requests_that_wait_for_a_thread_go_with_their_clients() -> None:
    go_on = threading.Event()

    def work(*_: Any) -> int:
        assert go_on.wait(60)
        return 7

    async def crowd() -> None:
        runner = Runner(1, 3)
        first = asyncio.create_task(runner.run("a", work, Asked(gone=False)))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(runner.run(name, work, Asked(gone=True))) for name in ("a", "b")]
        for other in others:
            with pytest.raises(Cancelled):
                await other
        await asyncio.sleep(0.05)
        assert runner.active == 1, "what has begun keeps its conversation"
        go_on.set()
        assert await first == 7
        await runner.close()

    asyncio.run(crowd())


def test_what_a_disk_does_not_let_go_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    engine = small_engine(tmp_path)
    with serving(engine) as client:
        client.headers["Connection"] = "close"  # as it is after a 500, sooner or later
        made = client.post("/v1/memories", json={"name": "book", "text": "Mary is in the kitchen."})
        assert made.status_code == 200, made.text
        with monkeypatch.context() as patched:
            patched.setattr(stored, "remove_file", refused)
            answer = client.delete("/v1/memories/book")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert client.get("/v1/memories/book").status_code == 200
        assert client.delete("/v1/memories/book").json()["deleted"] is True
        assert client.get("/v1/memories/book").status_code == 404


def test_a_body_that_takes_too_long_is_not_sent_again() -> None:
    told: list[dict[str, Any]] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"9")]
    auth = Auth(None, ServeSettings(max_seconds=0.05), None)
    asyncio.run(auth({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send))
    assert told[0]["status"] == 408
    assert (b"x-should-retry", b"false") in told[0]["headers"]
