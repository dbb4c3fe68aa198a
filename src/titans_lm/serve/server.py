"""A model behind an address: load it, open its store, and serve until somebody asks to stop."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import uvicorn

from titans_lm.serve.app import create_app
from titans_lm.serve.connection import Connection
from titans_lm.serve.engine import Engine
from titans_lm.serve.settings import ServeSettings, check_key
from titans_lm.serve.store import Store
from titans_lm.streaming.reader import check_readable
from titans_lm.train.run import load_model, load_tokenizer

KEY = "TITANS_API_KEY"
GRACE = 10
"""Seconds that running requests are given when the server is asked to stop."""


def serve_model(
    folder: Path, settings: ServeSettings, *, device: str = "auto", say: Callable[[str], None] | None = None
) -> None:
    """Serve the model of a folder until SIGINT or SIGTERM.

    Every answer that a client has received is in the store by then; requests that still run may finish within 10
    seconds. Raises ValueError for a model whose state grows with the text, a store in use, or an address that is taken.
    """
    model, tokenizer = load_model(folder, device), load_tokenizer(folder)
    check_readable(model)
    name = settings.name or folder.resolve().name
    key = os.environ.get(KEY) if settings.api_key is None else settings.api_key
    check_key(KEY, key)
    listening, store, app = _listen(settings.host, settings.port), None, None
    try:
        if torch.device(model.device).type == "cpu":  # threads of one request would wait for those of another
            torch.set_num_threads(max(1, torch.get_num_threads() // settings.workers))
        store = Store(settings.store, model, in_memory=settings.in_memory, most=settings.max_stored)
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(
            f"got the address {host}:{port}, which cannot be had ({error}); expected a free port, or 0 for any"
        ) from error
    return listening
