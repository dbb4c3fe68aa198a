"""What a client did wrong, in the form that OpenAI's clients read."""

from typing import Any


class ClientError(Exception):
    """A request that cannot be answered as it is: a status, a message, and what it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


def bad_request(message: str, param: str | None = None) -> ClientError:
    return ClientError(400, message, param=param)


def not_found(what: str, name: str) -> ClientError:
    return ClientError(404, f"there is no {what} {name[:100]!r}", code="not_found")


def failure() -> ClientError:
    """What a client is told of a fault of the server's own."""
    return ClientError(500, "something went wrong here; it is in the server's log")
