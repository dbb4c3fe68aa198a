"""The application, which address does what and how answers look; and a model behind it, until somebody asks to stop."""

import asyncio
import logging
import os
import resource
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from titans_lm.checks import nearest
from titans_lm.data.tasks.vocabulary import is_word_tokenizer
from titans_lm.serve.auth import Auth, retry_header
from titans_lm.serve.batching import Runner
from titans_lm.serve.engine import Engine
from titans_lm.serve.metrics import Counted
from titans_lm.serve.responses import Responses, events
from titans_lm.serve.schema import (
    NAME_LENGTH,
    Asked,
    Cancelled,
    Chat,
    ClientError,
    Completion,
    Look,
    NewMemory,
    Strict,
    bad_request,
    failure,
    not_found,
    plain_name,
)
from titans_lm.serve.settings import ServeSettings, check_key
from titans_lm.serve.store import Kind, Store
from titans_lm.streaming.reader import check_readable
from titans_lm.train.run import load_model, load_tokenizer
from titans_lm.train.shipped import PREFIX

log = logging.getLogger("titans_lm.serve")
Given = TypeVar("Given", bound=Strict)
PAGE = {"": ("page.html", "text/html"), "page.js": ("page.js", "text/javascript"), "page.css": ("page.css", "text/css")}
ANSWERS, WRITES = 0.0, 0.8
"""Temperatures that the page begins with: of a model that was taught to answer, and of any other."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def create_app(engine: Engine, name: str, api_key: str | None) -> FastAPI:
    """Build the application for one engine, whose model clients know as `name`."""
    settings = engine.settings
    # Those that write wait for the batch, not for a core: there is a thread for each, and for some that read meanwhile.
    runner = Runner(settings.max_batch + settings.workers, settings.max_batch + settings.max_waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await runner.close()
        engine.close()

    app = FastAPI(title="titans serve", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.stop = runner.stop
    app.add_middleware(Auth, settings=settings, api_key=api_key)
    app.add_middleware(Counted, metrics=engine.metrics)  # the outer one
    _handle_errors(app)
    _pages(app, engine, runner)
    _models(app, name, engine)
    _answers(app, engine, runner, name)
    _memories(app, engine, runner)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ClientError)
    async def _client(_: Request, error: ClientError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, retry_header(error))

    @app.exception_handler(Cancelled)
    async def _cancelled(_: Request, __: Cancelled) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail, path = str(error.detail), request.url.path[:100]
        if error.status_code == 404:
            known = {str(getattr(route, "path", "/")) for route in app.routes}
            detail = f"there is nothing at {path!r}; {nearest(path, known)}"
        return JSONResponse(ClientError(error.status_code, detail).body(), error.status_code)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return JSONResponse(failure().body(), 500, retry_header(failure()))


async def _parsed(kind: type[Given], request: Request) -> Given:
    """Read a body in a thread: a large one takes a while, and others are answered meanwhile."""
    body = await request.body()
    try:
        return await asyncio.to_thread(kind.model_validate_json, body)
    except ValidationError as error:
        # What was sent is not sent back: it may hold anything.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # where several kinds are allowed, what was sent is taken for the one that it comes nearest to
        closest = max(errors, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
        kinds = ("str", "int")  # that are allowed there, as others such as list[str] are: they name no field
        named = [part for part in closest["loc"] if not isinstance(part, str) or part.isidentifier()]
        parts = [str(part) for part in named if part not in kinds]
        place = ".".join(parts)[:200]
        said = closest["msg"].removeprefix("Value error, ")
        raise bad_request(f"{place}: {said}" if place else said, place or None) from None


def _pages(app: FastAPI, engine: Engine, runner: Runner) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "active": runner.active, **engine.store.counts()}

    @app.get("/metrics")
    async def prometheus() -> Response:
        gauges = {
            "titans_active_requests": ("Requests that are computed or wait.", {"": runner.active}),
            "titans_batch_rows": ("Answers that are being written.", {"": engine.batcher.rows}),
            "titans_memories": (
                "Conversations and memories of documents, all of them on disk, some of them in RAM too.",
                {
                    f'{{kind="{kind}",where="{where}"}}': count
                    for kind in ("conversation", "memory")
                    for where, count in zip(("disk", "ram"), engine.store.counts(kind).values(), strict=True)
                },
            ),
        }
        return Response(engine.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    for path, (file, kind) in PAGE.items():
        content = resources.files("titans_lm.serve").joinpath("page", file).read_bytes()
        app.add_api_route(f"/{path}", _file(content, kind), response_class=Response)


def _file(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    """An answer that is always the same; arguments of the inner function would be the client's to set."""
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def page() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return page


def _models(app: FastAPI, name: str, engine: Engine) -> None:
    card = {
        "id": name, "object": "model", "created": int(time.time()), "owned_by": "titans-lm",
        "temperature": ANSWERS if is_word_tokenizer(engine.tokenizer) else WRITES, "surprise": engine.shows_surprise,
    }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != name:
            raise not_found("model", model)
        return card


def _answers(app: FastAPI, engine: Engine, runner: Runner, name: str) -> None:
    async def answer(asked: Chat | Completion, request: Request) -> Response:
        _check(asked, request, name, engine.settings.max_new_tokens)
        own = None if asked.conversation is None else f"conversation {asked.conversation}"
        responses = Responses(asked, name)
        if asked.stream:
            items = runner.stream(own, partial(engine.answer, asked), request)
            first = await anext(items)  # what is wrong with the request shows before there is an answer
            parts = events(responses, first, items)
            return StreamingResponse(parts, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        found = await runner.run(own, lambda _, cancel: engine.answer(asked, lambda _: None, cancel), request)
        return JSONResponse(responses.whole(found))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(await _parsed(Completion, request), request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(await _parsed(Chat, request), request)


def _check(asked: Asked, request: Request, name: str, most: int) -> None:
    """What can be said of a request before anything is computed; a conversation may be named by a header too."""
    if asked.model not in ("", name):
        raise not_found("model", asked.model)
    try:
        given = plain_name(request.headers.get("x-conversation", "").encode("latin-1").decode())
    except ValueError as error:
        raise bad_request(f"x-conversation: {error}") from error
    if len(given) > NAME_LENGTH:
        raise bad_request(f"x-conversation: expected at most {NAME_LENGTH} characters")
    if given and asked.conversation not in (None, given):
        raise bad_request("x-conversation names another conversation than the body; send one of them", "conversation")
    asked.conversation = given or asked.conversation
    if max(asked.max_tokens or 0, asked.max_completion_tokens or 0) > most:
        raise bad_request(f"this server writes at most {most:,} tokens at once", "max_tokens")


def _memories(app: FastAPI, engine: Engine, runner: Runner) -> None:
    @app.post("/v1/memories")
    async def ingest(request: Request) -> dict[str, Any]:
        asked = await _parsed(NewMemory, request)
        if asked.name is None:
            asked.name = f"mem-{uuid.uuid4().hex}"
        return await runner.run(f"memory {asked.name}", lambda _, cancel: engine.ingest(asked, cancel), request)

    @app.post("/v1/surprise")
    async def surprise(request: Request) -> dict[str, Any]:
        asked = await _parsed(Look, request)
        return await runner.run(None, lambda _, cancel: engine.look(asked, cancel), request)

    def serve(kind: Kind, path: str) -> None:
        async def every() -> dict[str, Any]:
            return {"object": "list", "data": engine.store.entries(kind)}

        async def one(name: str) -> dict[str, Any]:
            found = engine.store.describe(kind, name)
            if found is None:
                raise not_found(kind, name)
            return found

        async def delete(name: str, request: Request) -> dict[str, Any]:
            if not await runner.run(f"{kind} {name}", lambda *_: engine.store.delete(kind, name), request):
                raise not_found(kind, name)
            return {"id": name, "object": f"{kind}.deleted", "deleted": True}

        app.add_api_route(path, every)
        app.add_api_route(f"{path}/{{name:path}}", one)
        app.add_api_route(f"{path}/{{name:path}}", delete, methods=["DELETE"])

    serve("conversation", "/v1/conversations")
    serve("memory", "/v1/memories")


KEY = "TITANS_API_KEY"
GRACE = 10
"""Seconds that running requests are given when the server is asked to stop."""
KEPT_FREE = 128
"""Files that are for other things than connections."""


class Connection(H11Protocol):
    """HTTP by h11, closed where no request's header has come whole in time, or an answer has been stuck.

    Where there are too many connections the one that has waited longest for a request makes room, those that have had
    an answer before others, so that clients who send nothing keep out nobody.
    """

    most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - KEPT_FREE))
    """Most connections at once."""
    seconds = 20.0
    """Most time that a header may take to arrive."""
    late: asyncio.TimerHandle | None = None
    patience = 60.0
    """Most time in which an answer is stuck: its client reads too little of it."""
    stuck: asyncio.TimerHandle | None = None
    ahead = 2**20
    """Most bytes that may be sent while a request is answered."""

    @property
    def waits(self) -> bool:
        """Whether there is no request that is being received or answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin()
        if len(self.connections) > self.most:
            others = [one for one in self.connections if isinstance(one, Connection) and one.waits and one is not self]
            min(others or [self], key=Connection.turn).close()

    def turn(self) -> tuple[bool, float]:
        """Its place among those that make room: last where an answer is still on its way."""
        return self.transport.get_write_buffer_size() > 0, 0.0 if self.late is None else self.late.when()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.call_later(self.patience, self.close)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stuck is not None:
            self.stuck.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self.stuck is not None:
            self.stuck.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.conn.trailing_data[0]) > self.ahead:  # kept until the answer is there
            self.close()
        if not self.waits:
            self._end()
        elif self.late is None:
            self._begin()

    def close(self) -> None:
        """Close it at once: nobody is told anything."""
        self._end()
        self.connections.discard(self)  # several may come before it is gone
        self.transport.abort()

    def _begin(self) -> None:
        self.late = self.loop.call_later(self.seconds, self._late)

    def _late(self) -> None:
        if self.waits:
            self.close()

    def _end(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


def serve_model(
    folder: Path, settings: ServeSettings, *, device: str = "auto", say: Callable[[str], None] | None = None
) -> None:
    """Serve the model of a folder until SIGINT or SIGTERM.

    Every answer that a client has received is in the store by then; requests that still run may finish within 10
    seconds. Raises ValueError for a model whose state grows with the text, a store in use, or an address that is taken.
    """
    name = settings.name or folder.resolve().name.removeprefix(PREFIX)
    key = os.environ.get(KEY) if settings.api_key is None else settings.api_key
    check_key(KEY, key)
    listening, store, app = _listen(settings.host, settings.port), None, None
    try:
        model, tokenizer = load_model(folder, device), load_tokenizer(folder)
        check_readable(model)
        if torch.device(model.device).type == "cpu":  # threads of one request would wait for those of another
            torch.set_num_threads(max(1, torch.get_num_threads() // settings.workers))
        store = Store(settings.out, model, in_memory=settings.in_memory, most=settings.max_stored)
        app = create_app(Engine(model, tokenizer, store, settings), name, key)
        if say is not None:
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            say(f"{name} at http://{shown}:{port}, {store.counts()['stored']} memories in {store.folder}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE, server_header=False,
            http=Connection,
        )  # fmt: skip
        uvicorn.Server(config).run([listening])
    finally:
        listening.close()
        if app is not None:
            app.state.stop()  # a second Ctrl-C leaves no time for a proper end
        if store is not None:
            store.close()


def _listen(host: str, port: int) -> socket.socket:
    """Take an address; whoever connects from now on waits until the server is there."""
    six = ":" in host
    family = socket.AF_INET6 if six else socket.AF_INET
    both = six and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"got the address {host}:{port}, which cannot be had ({error}); expected a free port, or 0 for any"
        ) from error
