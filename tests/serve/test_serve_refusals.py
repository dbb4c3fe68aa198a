"""What a client does wrong is said in a 4xx, costs nothing, and leaves the server as it was."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.serve_cases import complete, serving, small_engine, wait_until_active
from titans_lm.serve.app import Connection, serve_model
from titans_lm.serve.auth import Auth
from titans_lm.serve.schema import ClientError
from titans_lm.serve.settings import ServeSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMITS = {"max_body_bytes": 20_000, "max_prompt_tokens": 5_000, "max_new_tokens": 100, "max_stored": 3}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(small_engine(tmp_path_factory.mktemp("store"), **LIMITS)) as client:
        yield client
        assert complete(client, "still there")["choices"][0]["finish_reason"] == "length"


MALFORMED: list[tuple[str, Any, str]] = [
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": {"text": "x"}}, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, "one in each request"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 101}, "at most 100"),
    (TEXT, {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 1e400}, "max_tokens"),
    (TEXT, {"prompt": "x", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "x", "temperature": float("nan")}, "temperature"),
    (TEXT, {"prompt": "x", "temperature": 1e-40}, "temperature"),
    (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "x", "top_p": 1e-9}, "top_p"),
    (TEXT, {"prompt": "x", "converastion": "c"}, "did you mean 'conversation'"),
    (TEXT, {"prompt": "x", "min_p": 0.1}, "min_p"),
    (TEXT, {"prompt": [[]] * 1000}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": [1] * 1000}]}, "content"),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}, "tool_calls"),
    ("/v1/memories", {str(i): i for i in range(1000)}, "got the field '0'"),
    (TEXT, {"prompt": "x", "n": 2}, "n: "),
    (TEXT, {"prompt": "x", "logprobs": 3}, "logprobs is not done"),
    (TEXT, {"prompt": "x", "echo": True}, "echo is not done"),
    (TEXT, {"prompt": "x", "stop": [""]}, "stop"),
    (TEXT, {"prompt": "x", "stop": ["x"] * 17}, "stop: List should have at most 16 items"),
    (TEXT, {"prompt": "x", "logprobs": 0}, "logprobs is not done"),
    (TEXT, {"prompt": [[1, 2]]}, "prompt.0: "),
    (TEXT, {"prompt": "x", "seed": -1}, "seed"),
    (TEXT, {"prompt": "x", "model": "gpt-5"}, "no model 'gpt-5'"),
    (TEXT, {"prompt": "x", "memory": "none"}, "no memory 'none'"),
    (TEXT, {"prompt": "x", "conversation": ""}, "conversation"),
    (TEXT, {"prompt": "x", "conversation": "x" * 201}, "conversation"),
    (TEXT, {"prompt": "x", "conversation": {"id": "x"}}, "conversation"),
    (TEXT, {"prompt": "x", "conversation": "two\nlines"}, "line breaks"),
    ("/v1/memories", {"text": "x", "name": "x\x00"}, "control characters"),
    ("/v1/memories", {"text": "x", "name": ".."}, "addresses leave out"),
    (TEXT, {"prompt": "x", "conversation": "."}, "addresses leave out"),
    (TEXT, {"prompt": "x", "memory": "x\u2028"}, "line breaks"),
    (TEXT, {"prompt": "x" * 5_001}, "5,000 tokens"),
    (TEXT, {"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "got the field 'usage'"),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": "false"}}, "stream_options.include_usage"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
     "messages.0.function_call"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
     "messages.0.content.0.type: Input should be 'text'"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools is not done"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
     "response_format is not done"),
    ("/v1/memories", {"name": "x"}, "text"),
    ("/v1/memories", {"text": "x", "path": "/etc/passwd"}, "path"),
    ("/v1/memories", {"text": "x", "onto": "none"}, "no memory"),
    ("/v1/memories", {"text": "x" * 5_001}, "5,000 tokens"),
    ("/v1/surprise", {"text": ""}, "text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "says"), MALFORMED)
def test_what_is_wrong_is_named(client: httpx.Client, path: str, body: Any, says: str) -> None:
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert says in error["message"]
    assert "Value error" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_header_and_a_body_name_one_conversation(client: httpx.Client) -> None:
    body, header = {"prompt": "x", "max_tokens": 1, "conversation": "body"}, {"x-conversation": "header"}
    assert "another conversation" in client.post(TEXT, json=body, headers=header).json()["error"]["message"]
    assert client.post(TEXT, json=body, headers={"x-conversation": "body"}).status_code == 200
    assert client.delete("/v1/conversations/body").status_code == 200


def test_an_address_that_is_none_is_told_the_nearest(client: httpx.Client) -> None:
    told = client.post("/v1/completion", json={}).json()["error"]["message"]
    assert told == "there is nothing at '/v1/completion'; did you mean '/v1/completions'?"


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_stream_is_refused_before_it_begins(client: httpx.Client, stream: bool) -> None:
    response = client.post(TEXT, json={"prompt": "x", "memory": "none", "stream": stream})
    assert response.status_code == 404


RAW: list[tuple[bytes, dict[str, str]]] = [
    (b"", {}),
    (b"{", {}),
    (b"null", {}),
    (b"[]", {}),
    (b'"prompt"', {}),
    (b"\xff\xfe{}", {}),
    (b"[" * 9_000, {}),
    (b'{"prompt": "\\ud800"}', {}),
    (b'{"prompt": "x", "conversation": "\\udc80"}', {}),
    (b'{"text": "\\ud800 x", "prompt": 1, "messages": 1}', {}),
    (b'{"\\ud800": 1, "text": "x", "prompt": "x", "messages": [{"role": "user"}]}', {}),
    (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}),
    (b'{"prompt": "x"}', {"content-type": "text/plain"}),
    (b"<x/>", {"content-type": "application/xml"}),
    (b"\x1f\x8b\x08", {"content-encoding": "gzip"}),
    ('{"prompt": "x", "text": "x", "messages": "x"}'.encode("utf-16"), {}),
]


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/memories", "/v1/surprise"])
@pytest.mark.parametrize(("body", "headers"), RAW)
def test_bodies_that_are_no_request(client: httpx.Client, path: str, body: bytes, headers: dict[str, str]) -> None:
    response = client.post(path, content=body, headers={"content-type": "application/json", **headers})
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["message"]


def test_huge_bodies_are_not_taken_in(client: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(1000):
            yield b"x" * 1000

    for body in (b"x" * 20_001, endless()):
        response = client.post(TEXT, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert "20,000 bytes" in response.json()["error"]["message"]
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n")
        assert b" 413 " in raw.recv(1000)
    assert client.get("/health").json()["active"] == 0


def test_unknown_addresses_and_methods(client: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404), ("GET", TEXT, 405), ("PUT", "/v1/memories", 405), ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404), ("DELETE", "/v1/conversations/none", 404), ("GET", "/v1/models/none", 404),
    ):  # fmt: skip
        response = client.request(method, path)
        assert response.status_code == status, (method, path)
        assert response.json()["error"]["message"]


def test_a_page_is_what_it_is_whatever_is_asked(client: httpx.Client) -> None:
    for path in ("/", "/page.js", "/page.css"):
        plain = client.get(path)
        for query in ("content=<script>alert(1)</script>", "kind=text/html", "kind=%E2%82%AC"):
            asked = client.get(f"{path}?{query}")
            assert (asked.content, asked.headers["content-type"]) == (plain.content, plain.headers["content-type"])
        assert "script-src 'self'" in plain.headers["content-security-policy"]


def test_only_this_machine_s_names_without_a_key(client: httpx.Client) -> None:
    for host, status in (
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("", 403),
        ("localhost:1", 200),
        ("[::1]", 200),
    ):
        assert client.get("/v1/models", headers={"host": host}).status_code == status, host
    twice = [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil.example")]
    assert client.get("/v1/models", headers=twice).status_code == 403


def test_a_full_store_takes_no_more(client: httpx.Client) -> None:
    for name in "abc":
        complete(client, "x", 1, conversation=name)
    response = client.post(TEXT, json={"prompt": "x", "conversation": "d"})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "store_full"
    complete(client, "x", 1, conversation="a")
    assert client.delete("/v1/conversations/a").status_code == 200
    complete(client, "x", 1, conversation="d")


def test_only_who_has_the_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(small_engine(tmp_path_factory.mktemp("store")), key="secret") as client:
        for given in (None, "Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret2", "Bearer \xff"):
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("GET", "/v1/memories/x"), ("GET", "/v1")):
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401, (given, path)
                assert response.json()["error"]["code"] == "invalid_api_key"
        for given in ("Bearer secret", "bearer secret"):
            assert client.get("/v1/models", headers={"authorization": given}).status_code == 200
        assert client.get("/health").status_code == client.get("/").status_code == 200


@pytest.mark.parametrize("key", ["voilà", "są", "clé"])  # à ends in a byte that latin-1 takes for a space
def test_a_key_may_have_any_letters(key: str) -> None:
    auth = Auth(None, ServeSettings(), key)
    auth._check_key("/v1/models", {"authorization": f" Bearer  {key} ".encode().decode("latin-1").strip(" ")})


def test_too_many_at_once_are_told_to_come_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = small_engine(tmp_path_factory.mktemp("store"), max_batch=1, max_waiting=1)
    body = {"prompt": "x", "max_tokens": 4000, "temperature": 0, "stream": True}
    with serving(engine) as client, ThreadPoolExecutor(1) as pool:
        with client.stream("POST", TEXT, json=body) as first:
            lines = first.iter_lines()  # held: without it httpx closes the stream
            next(lines)
            waiting = pool.submit(client.post, TEXT, json={"prompt": "x", "max_tokens": 2})
            wait_until_active(client, 2)
            refused = client.post(TEXT, json={"prompt": "x"})
            assert refused.status_code == 429
            assert (refused.json()["error"]["code"], refused.headers["x-should-retry"]) == ("busy", "true")
        assert waiting.result(60).status_code == 200


def test_no_request_computes_longer_than_it_may(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(small_engine(tmp_path_factory.mktemp("store"), max_seconds=0.3)) as client:
        answer = client.post(TEXT, json={"prompt": "x", "max_tokens": 4000, "temperature": 0}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 4000
        late = client.post("/v1/memories", json={"text": "x" * 900_000, "name": "late"})
        assert (late.status_code, late.headers["x-should-retry"]) == (408, "false")
        assert client.get("/v1/memories").json()["data"] == []


def test_waiting_for_a_place_is_not_computing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tmp_path_factory.mktemp("store"), max_seconds=1.0, workers=1)
    write = engine.batcher.write

    def waits(*given: Any) -> Any:
        time.sleep(1.2)
        return write(*given)

    monkeypatch.setattr(engine.batcher, "write", waits)
    with serving(engine) as client, engine._reading:
        leaves = threading.Timer(1.2, engine._reading.release)
        leaves.start()
        answer = client.post(TEXT, json={"prompt": "x", "max_tokens": 3, "temperature": 0}).json()
        engine._reading.acquire()  # for the block to release
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"workers": 0}, "workers=0"), ({"host": ""}, "empty host"), ({"port": 70000}, "port"),
     ({"max_seconds": 0.0}, "max_seconds"), ({"api_key": ""}, "api_key")],
)  # fmt: skip
def test_settings_that_make_no_sense(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServeSettings(**settings)


def test_pages_of_other_places_get_nothing(client: httpx.Client) -> None:
    """A browser sends a POST without Content-Type, or one for forms, to anybody; it says whose page asks."""
    here = f"{client.base_url.host}:{client.base_url.port}"
    body = b'{"prompt": "x", "max_tokens": 1, "conversation": "theirs"}'
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/jsonp"}):
        assert client.post(TEXT, content=body, headers=headers).status_code == 415, headers
    json_type = {"content-type": "application/json; charset=utf-8"}
    for origin, status in (
        ("http://evil.example", 403), ("null", 403), (f"http://{here}.evil.example", 403), (f"http://{here}", 200),
    ):  # fmt: skip
        headers = {**json_type, "origin": origin}
        sent = b'{"prompt": "x", "max_tokens": 1}' if status == 200 else body
        assert client.post(TEXT, content=sent, headers=headers).status_code == status, origin
    assert client.get("/v1/conversations/theirs").status_code == 404


@pytest.mark.parametrize(("host", "local"), [
    ("127.0.0.1", True), ("127.0.0.2", True), ("127.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False),
    ("10.0.0.1", False),
])  # fmt: skip
def test_every_address_of_this_machine_for_itself_checks_the_host(host: str, local: bool) -> None:
    auth = Auth(None, ServeSettings(host=host), None)
    for name in ("127.0.0.1:8000", "localhost", "127.9.9.9", "[::1]:80"):
        auth._check_host(name)
    if local:
        with pytest.raises(ClientError, match="for this machine alone"):
            auth._check_host("evil.example")
    else:
        auth._check_host("evil.example")


@pytest.mark.parametrize("body", [
    b"[[]" + b",[]" * 100_000 + b"]",
    b'{"prompt": "x", "metadata": [' + b'"",' * 200_000 + b'""]}',
    b'{"a": "\\\\", "b": [' + b"1," * 500_000 + b"1]}",
    b'{"a": "\\"]", "b": [' + b"{}," * 100_001 + b"1]}",
])  # fmt: skip
def test_bodies_of_too_many_parts_are_not_parsed(tmp_path: Path, body: bytes) -> None:
    auth = Auth(None, ServeSettings(out=tmp_path, max_prompt_tokens=5_000), None)
    with pytest.raises(ClientError, match="too many parts"):
        auth._check_parts(body)
    auth._check_parts(json.dumps({"prompt": body.decode() + "\\", "metadata": [[1]]}).encode())


def test_there_is_room_for_some_large_bodies_at_once(tmp_path: Path) -> None:
    """Each is half there; what has gone makes room again, and small ones are never refused."""
    most = 2**20

    async def opened(auth: Auth, size: int, left: asyncio.Event) -> int:
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": b"x" * size, "more_body": True}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await auth({"type": "http", "method": "POST", "path": TEXT, "headers": headers}, receive, send)
        return sent[0]["status"] if sent else 0

    async def run() -> None:
        auth, left = Auth(None, ServeSettings(out=tmp_path, max_body_bytes=most), None), asyncio.Event()
        tasks = [asyncio.create_task(opened(auth, most - 1, left)) for _ in range(8)]
        await asyncio.sleep(0)
        assert await opened(auth, most - 1, left) == 429
        small = asyncio.create_task(opened(auth, 2**16, left))
        await asyncio.sleep(0)
        left.set()
        assert await asyncio.gather(*tasks, small) == [0] * 9
        assert auth.held == 0

    asyncio.run(run())


def test_clients_that_send_everything_first_hear_that_it_is_too_much(client: httpx.Client) -> None:
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=30)
    body, headers = b"x" * 150_000, {"content-type": "application/json"}
    for given in (body, iter([body[:75_000], body[75_000:]])):
        connection.request("POST", TEXT, given, headers, encode_chunked=not isinstance(given, bytes))
        response = connection.getresponse()
        assert response.status == 413
        response.read()
        connection.close()


def test_of_far_too_much_nothing_is_received() -> None:
    told: list[dict[str, Any]] = []
    headers = [(b"host", b"localhost"), (b"content-length", b"%d" % (9 * 2**16))]

    async def receive() -> Any:
        raise AssertionError("it is not asked for")

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    auth = Auth(None, ServeSettings(max_body_bytes=2**16), None)
    asyncio.run(auth({"type": "http", "method": "POST", "path": TEXT, "headers": headers}, receive, send))
    assert told[0]["status"] == 413


def test_connections_that_send_no_request_keep_out_nobody(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "most", 8)
    monkeypatch.setattr(Connection, "seconds", 0.5)
    with serving(small_engine(tmp_path_factory.mktemp("store"))) as client, ExitStack() as stack:
        assert client.get("/health").status_code == 200
        address = (client.base_url.host, client.base_url.port)
        half = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(20)]
        for connection in half:
            with suppress(OSError):
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        assert httpx.get(f"{client.base_url}/health").status_code == 200
        for connection in half:
            with suppress(ConnectionResetError):
                assert connection.recv(10) == b"", "it is closed"
        after = stack.enter_context(socket.create_connection(address, timeout=30))
        after.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in after.recv(1000)
        after.sendall(b"GET /health HT")
        with suppress(ConnectionResetError):
            while after.recv(1000):
                pass


def test_a_taken_address_is_told_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServeSettings(port=taken.getsockname()[1], out=tmp_path / "store")
        with pytest.raises(ValueError, match=r"got the address 127\.0\.0\.1:\d+, which cannot be had"):
            serve_model(tmp_path / "nothing", settings)
    with pytest.raises(ValueError, match="nothing"):
        serve_model(tmp_path / "nothing", settings)
    with socket.create_server(("127.0.0.1", settings.port)):
        assert not settings.out.exists()
