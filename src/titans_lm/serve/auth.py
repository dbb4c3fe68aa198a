"""What a request passes before anything looks into it: whom it is for, its key, and the size of its body."""

import asyncio
import hmac
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from titans_lm.serve.schema import ClientError
from titans_lm.serve.settings import ServeSettings

SMALL = 2**16
"""Bytes of a body that nobody counts: there are as many of them as connections."""
AT_ONCE = 8
"""Largest bodies that there is room for at once, all requests together."""
STRINGS, CONTAINERS = 200_000, 100_000
"""Most texts, and most lists and objects, in a body: each takes a hundred times the bytes that it is written in."""
DRAINED, DRAINING = 8, 2.0
"""Largest bodies that are still received, and for how many seconds, from a client that is told to send less."""


class Auth:
    """ASGI middleware: 401 without the key, 413 for a body that is too large, 408 for one that does not arrive.

    Below /v1 the body is taken in whole before the application sees the request: nothing is computed for a part of one.
    """

    def __init__(self, app: Any, settings: ServeSettings, api_key: str | None) -> None:
        self.app, self.settings, self.key = app, settings, api_key
        self.local = _is_loopback(_address(settings.host))
        self.held = 0
        """Bytes of large bodies of all requests."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        headers = dict(request.headers.items())  # of one that is sent twice the last
        try:
            self._check_host(headers.get("host", ""))
            self._check_origin(headers)
            self._check_key(scope["path"], headers)
            await self._pass(request, send)
            return
        except ClientError as error:
            refusal = error
        # What the client still sends is not waited for, so the connection cannot be used again.
        response = JSONResponse(refusal.body(), refusal.status, {"connection": "close", **retry_header(refusal)})
        await response(scope, receive, send)

    def _check_host(self, host: str) -> None:
        """A server for this machine alone, without a key, must not answer pages that call themselves by its address."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.key is None and self.local and not _is_loopback(name.lower().strip("[]")):
            raise ClientError(
                403, f"this server is for this machine alone: expected Host: localhost, got {host[:100]!r}; "
                "set a key, or --host, to serve others",
            )  # fmt: skip

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Without a key, a page of another place must not have a browser ask in its name."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if self.key is None and origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise ClientError(
                403, f"a page of {origin[:100]!r} asks {host[:100]!r}, which answers its own pages alone; set a key, "
                "and let a proxy pass the header Host on",
            )  # fmt: skip

    def _check_type(self, method: str, headers: Mapping[str, str]) -> None:
        """What browsers send to other places without asking them first is no JSON."""
        kind = headers.get("content-type", "")
        if method == "POST" and kind.partition(";")[0].strip().lower() != "application/json":
            raise ClientError(415, f"got Content-Type: {kind[:100] or 'none'}; expected application/json")

    def _check_key(self, path: str, headers: Mapping[str, str]) -> None:
        if self.key is None or not path.startswith("/v1"):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip(" \t").encode("latin-1"), self.key.encode()):
            raise ClientError(401, "this server asks for a key: Authorization: Bearer KEY", code="invalid_api_key")

    async def _pass(self, request: Request, send: Any) -> None:
        """Take in the body and give the request to the application; ClientError where it is refused."""
        if not request.scope["path"].startswith("/v1"):  # nothing there reads a body, or asks for a key
            await self.app(request.scope, request.receive, send)
            return
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self.settings.max_seconds):
                    await self._receive(request, body)
            except TimeoutError as error:
                raise ClientError(408, "the request took too long to arrive", code="timeout") from error
            except ClientDisconnect:
                return
            self._check_type(request.method, request.headers)
            whole = bytes(body)
            await asyncio.to_thread(self._check_parts, whole)
            await self.app(request.scope, _replayed(whole, request.receive), send)
        finally:
            self.held -= _counted(len(body))

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Receive a body; ClientDisconnect where the client goes before all of it has come."""
        most = self.settings.max_body_bytes
        told = request.headers.get("content-length", "0")
        size = int(told) if told.isdecimal() else 0
        too_large = ClientError(
            413, f"the body is larger than {most:,} bytes (--max-body-bytes); send less", code="too_large"
        )
        if size > most:
            await _drain(request.receive, size, most)
            raise too_large
        async for part in request.stream():
            if len(body) + len(part) > most:
                await _drain(request.receive, most, most)
                raise too_large
            self.held += _counted(len(body) + len(part)) - _counted(len(body))
            body += part
            if self.held > AT_ONCE * max(most, SMALL):
                raise ClientError(429, "too many large requests arrive at once; come back later", code="busy")

    def _check_parts(self, body: bytes) -> None:
        """Refuse what would take seconds to parse, from the marks that stand outside of texts."""
        if b"\0" in body:
            raise ClientError(400, "the body holds a zero byte; expected JSON in UTF-8")
        bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        strings = bare.count(b'"') // 2
        marks = b"".join(bare.split(b'"')[::2]) if strings <= STRINGS else b""
        containers, values = marks.count(b"[") + marks.count(b"{"), marks.count(b",")
        most = 2 * STRINGS + self.settings.max_prompt_tokens
        if strings > STRINGS or containers > CONTAINERS or values > most:
            raise ClientError(
                400, f"the body has too many parts; expected at most {STRINGS:,} texts, {CONTAINERS:,} lists and "
                f"objects, and {most:,} values in them", code="too_many_parts",
            )  # fmt: skip


def retry_header(error: ClientError) -> dict[str, str]:
    """The header by which OpenAI's clients know whether to repeat a request, as they do by themselves after 408, 409,
    429 and 5xx: what takes too long would be sent and read three times."""
    return {"x-should-retry": str(error.code == "busy").lower()}


async def _drain(receive: Any, size: int, most: int) -> None:
    """Receive what a client still sends, within bounds: many hear an answer only after they have sent everything."""
    if size > DRAINED * most:
        return
    left = DRAINED * most
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAINING):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _counted(size: int) -> int:
    """How much of a body counts as large."""
    return max(size - SMALL, 0)


def _address(host: str) -> str:
    """The address that a name to listen on means."""
    try:
        return host if ":" in host else socket.gethostbyname(host)
    except OSError:
        return host


def _is_loopback(name: str) -> bool:
    """Whether a name or address is this machine's for itself."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _replayed(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body, and after it what comes."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again
