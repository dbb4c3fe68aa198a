"""Requests as OpenAI's clients send them, what is not done here refused by name, and what a client did wrong."""

import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from titans_lm.config import nearest


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


NAME_LENGTH = 200


def plain_name(name: str) -> str:
    """Refuse "." and "..", and line breaks and other control characters: no address could name it again."""
    if name in (".", ".."):
        raise ValueError(f"got the name {name!r}, which addresses leave out; expected another one")
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in name):
        raise ValueError("expected a name without line breaks and other control characters")
    return name


Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH), AfterValidator(plain_name)]
"""Names of conversations and memories: anything short in one line; they reach the file system as hashes."""
Stop = Annotated[str, Field(min_length=1, max_length=100)]

NOT_DONE: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "modalities": (["text"],), "reasoning_effort": ("none",),
}  # fmt: skip
"""Fields that are refused, and the values that ask for nothing."""
HARMLESS = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
"""Fields that change nothing about the text."""


class Strict(BaseModel):
    """A request of which every field is known. One error is enough: a large body may have very many."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _nothing_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, value in given.items():
                nothing = any(
                    value == of and isinstance(value, bool) == isinstance(of, bool) for of in NOT_DONE.get(name, ())
                )
                if name in cls.model_fields or name in HARMLESS or value is None or nothing:
                    continue
                if name in NOT_DONE:
                    raise ValueError(f"{name} is not done by this server; leave it out")
                raise ValueError(f"got the field {str(name)[:60]!r}; {nearest(str(name)[:60], cls.model_fields)}")
        return given


class StreamOptions(Strict):
    """What a stream says beside its text; padding against listeners (`include_obfuscation`) is never sent."""

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class Asked(Strict):
    """What completions and chat have in common."""

    model: str = ""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0.0, le=2.0)] = None
    top_p: Annotated[float | None, Field(ge=1e-6, le=1.0)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    conversation: Name | None = None
    """Conversation whose memory reads and writes this; made where there is none of that name."""
    memory: Name | None = None
    """Memory to start from: of a new conversation, or of this request alone."""

    @field_validator("temperature")
    @classmethod
    def _a_temperature_that_divides(cls, value: float | None) -> float | None:
        if value is not None and 0.0 < value < 1e-3:
            raise ValueError("expected 0, which takes the likeliest token every time, or 0.001 to 2")
        return value

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Completion(Asked):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[int], Field(fail_fast=True)] = ""


class Part(BaseModel):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat; what clients send beside it says nothing to read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Chat(Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]


class NewMemory(Strict):
    """POST /v1/memories."""

    text: str
    name: Name | None = None
    """Name of the memory; a new one by default."""
    source: Name | None = None
    """Name of the document, to be listed among what the memory has read."""
    onto: Name | None = None
    """Memory to read it onto; that one stays as it is."""


class Look(Strict):
    """POST /v1/surprise."""

    text: Annotated[str, Field(min_length=1)]
    memory: Name | None = None
    conversation: Name | None = None
