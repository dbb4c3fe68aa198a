"""Messages as text for the memory, which holds all but what is new; and its answer as text, as it is written."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titans_lm.ask import has_template, templated
from titans_lm.data.tasks.vocabulary import as_taught
from titans_lm.generate import RunningText
from titans_lm.serve.schema import Message, bad_request
from titans_lm.streaming import Memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Held = Callable[[], Memory]
"""Gives a memory: one that is a row among others is taken out of them when it is asked for."""
TURNS = ["\nuser:", "\nsystem:", "\ndeveloper:", "\ntool:"]
"""Where a model without a chat template begins to speak for others."""
REMEMBERED = 1000
"""Messages that a conversation can tell from new ones, the last of it."""
QUESTION, ANSWER = "titans-question", "titans-answer"


def mark(role: str, text: str) -> str:
    """A short name for a message, so that it is known again without being kept; clients may trim what they show."""
    return hashlib.sha256(json.dumps([role, text.strip()]).encode()).hexdigest()[:20]


def divide(messages: list[Message], known: list[str], instructions: list[str]) -> int:
    """Count the messages, from the first, that a conversation has read already.

    Clients send the whole history every time, its last part, or only what is new, and before it perhaps the same
    instructions (system, developer) as always. After those, the longest run that is the end of what is known is taken
    for known, and everything after it is new. What stands before such a run was read only where a conversation no
    longer knows its beginning: else it is new, and with it all that follows.
    """
    start = 0
    while start < len(messages) and messages[start].role in ("system", "developer"):
        if mark(messages[start].role, messages[start].text) not in instructions:
            break
        start += 1
    marks = [mark(message.role, message.text) for message in messages[start:]]
    for stop in range(len(marks), 0, -1):
        length = min(stop, len(known))
        is_whole = length == stop or len(known) >= REMEMBERED
        if length and is_whole and known[-length:] == marks[stop - length : stop]:
            return start + stop
    return start


def remembered(known: list[str], instructions: list[str], new: list[Message], answer: str) -> dict[str, list[str]]:
    """What the conversation knows its messages by after another turn."""
    marks = [mark(message.role, message.text) for message in new]
    told = [m for m, message in zip(marks, new, strict=True) if message.role in ("system", "developer")]
    everything = [*known, *marks, mark("assistant", answer)]
    return {"messages": everything[-REMEMBERED:], "instructions": [*instructions, *told][-REMEMBERED:]}


def render(
    tokenizer: "PreTrainedTokenizerBase", new: list[Message], turns: int, begun: bool, opened: bool = False
) -> str:
    """The text of the new messages, up to where the answer begins.

    `turns` were answered before, the last of which ended where the model or a limit ended it; `begun` says whether
    anything at all stands before, `opened` whether inside a document. With a chat template, what it writes between an
    answer and what follows comes first.
    """
    if not has_template(tokenizer):
        lines = "".join(f"{message.role}: {message.text}\n" for message in new)
        return ("\n" if begun else "") + lines + "assistant:"
    messages = [{"role": message.role, "content": said(message, tokenizer)} for message in new]
    if not turns:
        return _templated(tokenizer, messages, opened)
    before = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    text = _templated(tokenizer, before + messages)
    place = text.find(ANSWER)
    if place < 0:
        raise bad_request("the model's chat template leaves out earlier answers; send one message at a time without it")
    return text[place + len(ANSWER) :]


def said(message: Message, tokenizer: "PreTrainedTokenizerBase") -> str:
    """What a message says, a user's question as the model was taught to be asked."""
    return as_taught(message.text, tokenizer) if message.role == "user" else message.text


def _templated(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]], opened: bool = False) -> str:
    try:
        return templated(tokenizer, messages, opened)
    except ValueError as error:
        raise bad_request(str(error), "messages") from error


class Writing:
    """The text of one answer; `emit` receives what can be no part of a stop text any more.

    A stop text has been read like all that is written, so for every place that may turn out to be the start of one the
    memory before it is held: a conversation goes on as if the stop text had never been there. No more memories are held
    than a stop text has bytes. Where it begins inside a token, `unread` is what was shown and that memory has not.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stops: Sequence[str], emit: Callable[[str], None], memory: Held
    ) -> None:
        self.stops, self.emit = list(stops), emit
        self.shown, self.stopped = 0, False
        self.tokens = RunningText(tokenizer)
        self._end: int | None = None
        self._memories = [(0, memory)]  # length of the text, and the memory there

    @property
    def text(self) -> str:
        return self.tokens.text[: self._end]

    @property
    def memory(self) -> Held:
        """What is known after the text, but for what is unread."""
        return self._memories[-1][1]

    @property
    def unread(self) -> str:
        """The end of the text that was part of the stop text's first token."""
        return self.text[self._memories[-1][0] :]

    def put(self, token: int, memory: Held) -> None:
        """Take the next token, and the memory that has it; `stopped` says whether the text has come to its end."""
        self.tokens.put(token)
        self._memories.append((len(self.tokens.text) + self.tokens.held, memory))
        self._look_for_stops()

    def finish(self) -> None:
        """Show what was held back."""
        if not self.stopped:
            self.tokens.finish()
            self._look_for_stops()
        self._show(len(self.text))

    def _look_for_stops(self) -> None:
        found = [at for stop in self.stops if (at := self.text.find(stop, self.shown)) >= 0]
        if found:
            self.stopped, self._end = True, min(found)
            # the last memory that has nothing of what was cut
            self._memories = [[held for held in self._memories if held[0] <= self._end][-1]]
            self._show(self._end)
            return
        self._show(len(self.text) - self._possible_start())
        if not self.stops:
            del self._memories[:-1]
            return
        # what is shown will not be taken back: of the memories up to there only the last may be needed
        while len(self._memories) > 1 and self._memories[1][0] <= self.shown:
            del self._memories[0]

    def _possible_start(self) -> int:
        """How many of the last characters may be the start of a stop text."""
        most = max(map(len, self.stops), default=1) - 1
        for count in range(min(most, len(self.text) - self.shown), 0, -1):
            end = self.text[len(self.text) - count :]
            if any(stop.startswith(end) for stop in self.stops):
                return count
        return 0

    def _show(self, place: int) -> None:
        if place > self.shown:
            self.emit(self.text[self.shown : place])
            self.shown = place
