"""titans serve: a model over HTTP, with one memory per conversation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import say
from titans_lm.serve.settings import ServeSettings


@dataclass(frozen=True, kw_only=True)
class Serve(ServeSettings):
    """Serve a model over HTTP: OpenAI's completions and chat, one memory per conversation, and a page to chat on."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Run folder, checkpoint, or folder of a saved model."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    quiet: bool = False
    """Say nothing but what goes wrong."""


def run_serve(command: Serve) -> None:
    if command.model is None:
        raise ValueError("got no model; expected a run folder or a saved model: titans serve MODEL")
    try:
        from titans_lm.serve.server import serve_model
    except ImportError as error:
        raise ValueError(
            f"got no {error.name}, which serving needs; install it with: pip install 'titans-lm[serve]'"
        ) from error
    serve_model(command.model, command, device=command.device, say=None if command.quiet else say)
