"""What a request passes before anything looks into it: whom it is for, its key, and the size of its body."""

import asyncio
import hmac
from typing import Any

from starlette.responses import JSONResponse

from titans_lm.serve.errors import ClientError
from titans_lm.serve.settings import ServeSettings

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Gate:
    """ASGI middleware: 401 without the key, 413 for a body that is too large, 408 for one that does not arrive.

    The body is taken in whole before the application sees the request, so nothing is computed for a part of one.
    """

    def __init__(self, app: Any, settings: ServeSettings, api_key: str | None) -> None:
        self.app, self.settings, self.key = app, settings, api_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_host(headers.get("host", ""))
            self._check_key(scope["path"], headers)
            async with asyncio.timeout(self.settings.max_seconds):
                body = await self._body(headers, receive)
        except TimeoutError:
            refusal = ClientError(408, "the request took too long to arrive", code="timeout")
        except ClientError as error:
            refusal = error
        else:
            if body is not None:  # else the client has gone
                await self.app(scope, _replayed(body, receive), send)
            return
        # What the client still sends is not waited for, so the connection cannot be used again.
        response = JSONResponse(refusal.body(), refusal.status, {"connection": "close"})
        await response(scope, receive, send)

    def _check_host(self, host: str) -> None:
        """A server for this machine alone, without a key, must not answer pages that call themselves by its address."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.key is None and self.settings.host in LOOPBACK and name.lower().strip("[]") not in LOOPBACK:
            raise ClientError(
                403, f"this server is for this machine alone: expected Host: localhost, got {host[:100]!r}; "
                "set a key, or --host, to serve others",
            )  # fmt: skip

    def _check_key(self, path: str, headers: dict[str, str]) -> None:
        if self.key is None or not path.startswith("/v1"):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.key.encode()):
            raise ClientError(401, "this server asks for a key: Authorization: Bearer KEY", code="invalid_api_key")

    async def _body(self, headers: dict[str, str], receive: Any) -> bytes | None:
        most = self.settings.max_body_bytes
        told = headers.get("content-length", "0")
        parts, size = [], int(told) if told.isdigit() else 0
        too_large = ClientError(413, f"the body is larger than {most:,} bytes, which is the most", code="too_large")
        if size > most:
            raise too_large
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(parts)


def _replayed(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body, and after it what comes."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again
