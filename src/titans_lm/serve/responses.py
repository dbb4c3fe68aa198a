"""Answers as OpenAI's clients expect them, whole or as a stream of events."""

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from titans_lm.serve.engine import Answer
from titans_lm.serve.schema import Asked, Cancelled, Chat, ClientError, failure

log = logging.getLogger("titans_lm.serve")


class Responses:
    """An answer as OpenAI's clients expect it, whole or in pieces."""

    def __init__(self, asked: Asked, model: str) -> None:
        self.asked, self.chat = asked, isinstance(asked, Chat)
        self.kind, self.part = ("chat.completion", "chat.completion.chunk") if self.chat else ("text_completion",) * 2
        ident = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": ident, "created": int(time.time()), "model": model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = self._choice(answer, {"message": message} if self.chat else {"text": answer.text})
        return {**self.head, "object": self.kind, **choice, "usage": answer.usage, **self._memory(answer)}

    def piece(self, text: str | None = None, answer: Answer | None = None, first: bool = False) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})
        choice = self._choice(answer, {"delta": delta} if self.chat else {"text": text or ""})
        return {**self.head, "object": self.part, **choice, **({} if answer is None else self._memory(answer))}

    def usage(self, answer: Answer) -> dict[str, Any]:
        return {**self.head, "object": self.part, "choices": [], "usage": answer.usage}

    def _choice(self, answer: Answer | None, said: dict[str, Any]) -> dict[str, Any]:
        finish = None if answer is None else answer.finish
        return {"choices": [{"index": 0, "finish_reason": finish, "logprobs": None, **said}]}

    def _memory(self, answer: Answer) -> dict[str, Any]:
        spelled = {"split_words": answer.split_words} if answer.split_words else {}
        return {"conversation": self.asked.conversation, "memory_tokens": answer.memory_tokens} | spelled


async def events(responses: Responses, first: Any, items: AsyncGenerator[Any, None]) -> AsyncIterator[str]:
    """The answer as server-sent events; the one that says why it ended comes when the memory is kept."""

    def event(value: Any) -> str:
        return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"

    async with aclosing(items):
        try:
            yield event(responses.piece("", first=True))
            item = first
            while isinstance(item, str):
                yield event(responses.piece(item))
                item = await anext(items)
            yield event(responses.piece(None, item))
            if responses.asked.with_usage:
                yield event(responses.usage(item))
            yield event("[DONE]")
        except Cancelled:
            return
        except ClientError as error:
            yield event(error.body())
        except Exception as error:  # the status is sent already; the client hears of it here
            log.error("a stream failed", exc_info=error)
            yield event(failure().body())
