"""Requests as OpenAI's clients send them, and what is not done here refused by name.

Fields that change nothing about the text (user, metadata, …) are let through; those that would change it and cannot be
followed are an error, since a client would take the answer for something it is not.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(min_length=1, max_length=200)]
"""Names of conversations and memories: anything short; they reach the file system as hashes."""

Stop = Annotated[str, Field(min_length=1, max_length=200)]

NOT_DONE: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "logprobs": (False, 0), "top_logprobs": (0,), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "audio": (), "modalities": (["text"],), "reasoning_effort": ("none",), "prediction": (), "web_search_options": (),
}  # fmt: skip
"""Fields that are refused, and the values that ask for nothing."""


class Asked(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0.0, le=2.0)] = None
    top_p: Annotated[float | None, Field(gt=0.0, le=1.0)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**63)] = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: Literal[1] | None = None
    conversation: Name | None = None
    """Conversation whose memory reads and writes this; made where there is none of that name."""
    memory: Name | None = None
    """Memory to start from: of a new conversation, or of this request alone."""

    @model_validator(mode="after")
    def _nothing_that_is_not_done(self) -> "Asked":
        for name, value in (self.model_extra or {}).items():
            if name in NOT_DONE and value is not None and value not in NOT_DONE[name]:
                raise ValueError(f"{name} is not done by this server; leave it out")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def with_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class Completion(Asked):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] = ""


class Part(BaseModel):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Chat(Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]


class NewMemory(BaseModel):
    """POST /v1/memories."""

    model_config = ConfigDict(extra="forbid")

    text: str
    name: Name | None = None
    """Name of the memory; a new one by default."""
    source: Name | None = None
    """Name of the document, to be listed among what the memory has read."""
    onto: Name | None = None
    """Memory to read it onto; that one stays as it is."""


class Look(BaseModel):
    """POST /v1/surprise."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1)]
    memory: Name | None = None
    conversation: Name | None = None
