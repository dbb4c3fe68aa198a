"""What a server can be told: where it listens, where memories go, and what it refuses."""

from dataclasses import dataclass
from pathlib import Path

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.config import check_between


@dataclass(frozen=True, kw_only=True)
class ServeSettings(KnownSettings):
    """Settings of `titans serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    name: str | None = None
    """Name of the model for clients; by default its folder's."""
    out: Path = Path("runs/serve")
    """Folder of the memories; what is there is served again after a restart."""
    api_key: str | None = None
    """Key that clients must send (Authorization: Bearer KEY); by default TITANS_API_KEY, else none is asked for."""
    max_batch: int = 16
    """Answers written side by side, a step of the model giving each of them a token; more wait for a place."""
    workers: int = 2
    """Prompts and documents read side by side; the cores are shared out among them."""
    in_memory: int = 16
    """Memories kept in RAM; those used least recently are read from the store again."""
    max_stored: int = 1000
    """Conversations, and as many memories of documents, that the store takes."""
    max_body_bytes: int = 2**24
    """Largest body of a request."""
    max_prompt_tokens: int = 1_000_000
    """Most tokens that a request may have read, a document or a prompt."""
    max_new_tokens: int = 4096
    """Most tokens that a request may have written."""
    max_seconds: float = 300.0
    """Most time that a request may compute, and that its body may take to arrive."""
    max_waiting: int = 256
    """Requests that may wait; more are told to come back."""

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("got an empty host; expected an address such as 127.0.0.1, or 0.0.0.0 for every one")
        check_between("port", self.port, 0, 65535)
        check_fields(self, zero=["port"])
        check_between("max_seconds", self.max_seconds, 1e-3, 1e9)
        check_key("api_key", self.api_key)


def check_key(where: str, key: str | None) -> None:
    """Refuse a key that no client could send."""
    if key is not None and (not key or key.strip() != key):
        raise ValueError(f"got {where} empty or with spaces around it; expected a key, or none at all")
