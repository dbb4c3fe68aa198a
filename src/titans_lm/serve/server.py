"""A model behind an address: load it, open its store, and serve until somebody asks to stop."""

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from titans_lm.serve.app import create_app
from titans_lm.serve.engine import Engine
from titans_lm.serve.settings import ServeSettings, check_key
from titans_lm.serve.store import Store
from titans_lm.streaming.reader import check_readable
from titans_lm.train.run import load_model, load_tokenizer
from titans_lm.train.shipped import PREFIX

KEY = "TITANS_API_KEY"
GRACE = 10
"""Seconds that running requests are given when the server is asked to stop."""
KEPT_FREE = 128
"""Files that are for other things than connections."""


class Connection(H11Protocol):
    """HTTP by h11, closed where no request's header has come whole in time.

    Where there are too many connections the one that has waited longest for a request makes room, so that clients who
    send nothing keep out nobody.
    """

    most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - KEPT_FREE))
    """Most connections at once."""
    seconds = 20.0
    """Most time that a header may take to arrive."""
    late: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether there is no request that is being received or answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin()
        if len(self.connections) > self.most:
            idle = [other for other in self.connections if isinstance(other, Connection) and other.late is not None]
            oldest = min(idle, key=lambda other: other.late.when() if other.late is not None else 0.0)
            oldest.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits:
            self._end()
        elif self.late is None:
            self._begin()

    def close(self) -> None:
        """Close it at once: nobody is told anything."""
        self._end()
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
    model, tokenizer = load_model(folder, device), load_tokenizer(folder)
    check_readable(model)
    name = settings.name or folder.resolve().name.removeprefix(PREFIX)
    key = os.environ.get(KEY) if settings.api_key is None else settings.api_key
    check_key(KEY, key)
    listening, store, app = _listen(settings.host, settings.port), None, None
    try:
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
