"""Messages as text for the memory: only what is new, since the memory holds the rest."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from titans_lm.serve.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = ["\nuser:", "\nsystem:", "\ndeveloper:", "\ntool:"]
"""Where a model without a chat template begins to speak for others."""
REMEMBERED = 1000
"""Messages that a conversation can tell from new ones."""


def mark(role: str, text: str) -> str:
    """A short name for a message, so that it is known again without being kept."""
    return hashlib.sha256(json.dumps([role, text]).encode()).hexdigest()[:20]


def divide(messages: list[Message], known: list[str]) -> int:
    """Count the messages, from the first, that a conversation has read already.

    Clients send the whole history every time, its last part, or only what is new. So the longest end of what is known
    that the messages begin with is taken for known, and everything after it is new.
    """
    marks = [mark(message.role, message.text) for message in messages]
    for count in range(min(len(known), len(marks)), 0, -1):
        if known[-count:] == marks[:count]:
            return count
    return 0


def render(tokenizer: "PreTrainedTokenizerBase", known: list[Message], new: list[Message], begun: bool) -> str:
    """The text of the new messages, up to where the answer begins; `begun` is whether something stands before them."""
    owner: Any = tokenizer
    if not getattr(owner, "chat_template", None):
        lines = "".join(f"{message.role}: {message.text}\n" for message in new)
        return ("\n" if begun else "") + lines + "assistant:"

    def text(messages: list[Message], ask: bool) -> str:
        plain = [{"role": message.role, "content": message.text} for message in messages]
        return owner.apply_chat_template(plain, tokenize=False, add_generation_prompt=ask)

    if known:
        whole, before = text([*known, *new], True), text(known, False)
        if whole.startswith(before):
            return whole[len(before) :]
    return text(new, True)
