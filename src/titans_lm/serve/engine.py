"""What the server computes: answers, memories of documents, and surprise.

A request is a thread. Few of them read at a time (prompts, documents, looks at surprise), the others wait for that; and
all that write share one `Batcher`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.ask import has_template
from titans_lm.data.tasks.vocabulary import split_words
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.generate import Chooser
from titans_lm.report.surprise.text import by_piece, token_text
from titans_lm.serve.batching import Batcher
from titans_lm.serve.chat import TURNS, Writing, divide, remembered, render, said
from titans_lm.serve.metrics import Metrics
from titans_lm.serve.schema import (
    Cancelled,
    Chat,
    ClientError,
    Completion,
    Look,
    Message,
    NewMemory,
    bad_request,
    not_found,
)
from titans_lm.serve.settings import ServeSettings
from titans_lm.serve.store import Entry, Store
from titans_lm.streaming import Memory, Reader, TokenStream
from titans_lm.streaming.reader import document_marks, ending_tokens, opening_marks
from titans_lm.surprise import check_surprised, measure_surprise

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Emit = Callable[[str], None]
PIECE = 1024
"""Tokens that are read between two looks at whether anybody still waits."""
PATIENCE = 0.25
"""Seconds between two such looks of a request that waits its turn."""
DEFAULT_NEW_TOKENS = 256
LOOKED_AT = 20_000
"""Most tokens that a request may ask to see the surprise of."""


@dataclass(frozen=True)
class Answer:
    """What a request got: the text, why it ended ("stop" or "length"), and what was counted."""

    text: str
    finish: str
    prompt_tokens: int
    new_tokens: int
    memory_tokens: int
    """Tokens in the memory after it."""
    split_words: list[str]
    """Words of the messages that the model was not taught, where it was taught words."""

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}


class Watch:
    """Says when to leave off: nobody waits any more, or the time is up, of which waiting for a place takes none."""

    def __init__(self, cancel: threading.Event, most: float) -> None:
        self.cancel, self.most, self.end = cancel, most, time.monotonic() + most
        self()

    def __call__(self, *_: Any) -> None:
        self.check_heard()
        if self.late:
            raise ClientError(408, f"reading took more than {self.most:g} s; send less at once", code="timeout")

    def check_heard(self) -> None:
        """Leave off where nobody waits for the answer any more."""
        if self.cancel.is_set():
            raise Cancelled

    def forgive(self, since: float) -> None:
        """Do not count the time since then."""
        self.end += time.monotonic() - since

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end


class Engine:
    """Answers requests with one model and one store."""

    def __init__(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", store: Store, settings: ServeSettings
    ) -> None:
        self.model, self.tokenizer, self.store, self.settings = model.eval(), tokenizer, store, settings
        self.ends = ending_tokens(model, tokenizer)
        self.batcher = Batcher(self.model, tokenizer, settings.max_batch)
        self.metrics = Metrics()
        self._reading = threading.Semaphore(settings.workers)

    @property
    def shows_surprise(self) -> bool:
        """Whether the memory can be looked at by `look`."""
        try:
            check_surprised(self.model)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """End what is being written, and let another server have the store."""
        self.batcher.close()
        self.store.close()

    def answer(self, asked: Chat | Completion, emit: Emit, cancel: threading.Event) -> Answer:
        """Read what is new, write the answer, and keep the memory of both where it belongs to a conversation."""
        watch = Watch(cancel, self.settings.max_seconds)
        temperature = 1.0 if asked.temperature is None else asked.temperature
        chooser = Chooser(temperature, asked.top_k or 0, asked.top_p or 1.0, asked.seed, self.model.device)
        start, notes = self._begin(asked.conversation, asked.memory, grows=True)
        reader = Reader(self.model, self.tokenizer, memory=start, piece_len=PIECE)
        before = reader.tokens
        text, turn = self._chat(asked, notes, reader) if isinstance(asked, Chat) else (self._prompt(asked), None)
        follows = turn is not None and has_template(self.tokenizer) and bool(notes.get("turns"))
        self._read(reader, text, "prompt", watch, document=False if follows else None)
        if reader.tokens == 0:
            raise bad_request("there is nothing to go on from; send a prompt", "prompt")
        prompt_tokens = reader.tokens - before
        writing, memory, new, ended = self._write(asked, chooser, reader, emit, watch)
        # The conversation's own turns are not listed as sources: it may have any number of them.
        memory = replace(memory, sources=((),) if start is None else start.sources)
        if asked.conversation is not None:
            if turn is not None:
                known, instructions = notes.get("messages", []), notes.get("instructions", [])
                notes |= remembered(known, instructions, turn, writing.text)
            notes |= {"turns": notes.get("turns", 0) + 1, "ended": ended}
            watch.check_heard()  # what nobody has heard did not happen
            self.store.put(Entry("conversation", asked.conversation, memory, notes))
        self.metrics.count_tokens(prompt=prompt_tokens, completion=new)
        finish = "stop" if writing.stopped or ended is not None else "length"
        split = split_words(" ".join(said(message, self.tokenizer) for message in turn or ()), self.tokenizer)
        return Answer(writing.text, finish, prompt_tokens, new, memory.tokens[0], split)

    def _write(
        self, asked: Chat | Completion, chooser: Chooser, reader: Reader, emit: Emit, watch: Watch
    ) -> tuple[Writing, Memory, int, int | None]:
        """Write until something ends it: the answer and the memory after it, its number of tokens, and the token that
        ended it if one did."""
        stops = asked.stops if not isinstance(asked, Chat) or has_template(self.tokenizer) else [*asked.stops, *TURNS]
        most = asked.max_completion_tokens or asked.max_tokens or min(DEFAULT_NEW_TOKENS, self.settings.max_new_tokens)
        start, asked_at = reader.memory, time.monotonic()
        writing, new, ended = Writing(self.tokenizer, stops, emit, lambda: start), 0, None

        def take(token: int, memory: Callable[[], Memory]) -> bool:
            nonlocal new, ended
            watch.check_heard()
            if new == 0:
                watch.forgive(asked_at)
            new += 1
            writing.put(token, memory)
            ended = token if token in self.ends else None
            return not (writing.stopped or ended is not None or watch.late)

        with self.batcher.write(start, chooser, take, most):
            writing.finish()
            memory = writing.memory()
        if not writing.stopped:
            return writing, memory, new, ended
        if writing.unread:  # shown, and in a token of which the rest belongs to the stop text
            last = Reader(self.model, self.tokenizer, memory=memory, piece_len=PIECE)
            self._read(last, writing.unread, "answer", watch, document=False)
            memory = last.memory
        return writing, memory, new, None  # the token that would have ended it may be in the stop text

    def ingest(self, asked: NewMemory, cancel: threading.Event) -> dict[str, Any]:
        """Read a document into a memory of its own, from nothing or onto another one."""
        assert asked.name is not None, "the application names it"
        if self.store.describe("memory", asked.name) is not None:
            raise ClientError(409, f"there is a memory {asked.name[:100]!r} already; delete it, or take another name")
        self.store.check_room("memory", asked.name)
        reader = Reader(self.model, self.tokenizer, memory=self._given(asked.onto), piece_len=PIECE)
        before = reader.tokens
        watch = Watch(cancel, self.settings.max_seconds)
        self._read(reader, asked.text, asked.source or asked.name, watch, document=True)
        made = self.store.put(Entry("memory", asked.name, reader.memory, {"memory": asked.onto}))
        self.metrics.count_tokens(prompt=reader.tokens - before)
        return made

    def look(self, asked: Look, cancel: threading.Event) -> dict[str, Any]:
        """How surprising a text would be to a memory; nothing is changed by looking.

        The text is read as a completion would read it: after <bos> where it begins a document.
        """
        try:
            check_surprised(self.model)
        except ValueError as error:
            raise bad_request(str(error)) from error
        watch = Watch(cancel, self.settings.max_seconds)
        base, _ = self._begin(asked.conversation, asked.memory)
        begins = base is None or not base.open[0]
        marks = opening_marks(document_marks(self.tokenizer), after_open=False) if begins else []
        data = asked.text.encode()
        with self._reads(watch):
            count = len(marks) + self._count(data, LOOKED_AT, watch)
            if not 2 <= count <= LOOKED_AT:
                got = count if count < 2 else f"more than {LOOKED_AT:,}"
                raise bad_request(f"got {got} tokens to look at; expected 2 to {LOOKED_AT:,}", "text")
            text = token_text("text", data, self.tokenizer, marks)
            found = measure_surprise(self.model, text.ids, memory=base, on_piece=watch)
        bits = by_piece(np.nan_to_num(found.bits), text.starts, total=True)
        known = np.logical_or.reduceat(np.isfinite(found.bits), text.starts[:-1])  # the first token has none
        sizes = np.maximum.reduceat(found.summary(), text.starts[:-1])
        pieces = [
            {"text": piece, "bits": round(b, 4) if there else None, "surprise": round(size, 4)}
            for piece, b, there, size in zip(text.pieces, bits.tolist(), known, sizes.tolist(), strict=True)
        ]
        self.metrics.count_tokens(prompt=len(text.ids))
        return {"object": "surprise", "pieces": pieces[text.marks :]}

    @contextmanager
    def _reads(self, watch: Watch) -> Iterator[None]:
        """Wait for a place among those that read."""
        since = time.monotonic()
        while not self._reading.acquire(timeout=PATIENCE):
            watch.check_heard()
        watch.forgive(since)
        try:
            yield
        finally:
            self._reading.release()

    def _begin(
        self, conversation: str | None, memory: str | None, grows: bool = False
    ) -> tuple[Memory | None, dict[str, Any]]:
        """The memory that a request begins with, and the conversation's notes; `grows` asks for room in the store."""
        entry = None if conversation is None else self.store.get("conversation", conversation)
        if entry is not None:
            if memory not in (None, entry.notes.get("memory")):
                begun = entry.notes.get("memory")
                raise bad_request(f"this conversation has begun {f'from {begun!r}' if begun else 'from nothing'}; "
                                  "a memory can be given at its start only", "memory")  # fmt: skip
            return entry.memory, dict(entry.notes)
        if conversation is not None and grows:
            self.store.check_room("conversation", conversation)
        return self._given(memory), {"memory": memory}

    def _given(self, name: str | None) -> Memory | None:
        """The memory of a name that a request gives; None where it gives none."""
        if name is None:
            return None
        entry = self.store.get("memory", name)
        if entry is None:
            raise not_found("memory", name)
        return entry.memory

    def _chat(self, asked: Chat, notes: dict[str, Any], reader: Reader) -> tuple[str, list[Message]]:
        """The text of the messages that the conversation has not read yet, and these messages."""
        new = asked.messages[divide(asked.messages, notes.get("messages", []), notes.get("instructions", [])) :]
        opened, ended = reader.memory.open[0], notes.get("ended")
        text = render(self.tokenizer, new, notes.get("turns", 0), reader.tokens > 0, opened)
        if has_template(self.tokenizer) and ended is not None:  # the model has closed its answer itself
            text = text.removeprefix(str(self.tokenizer.decode([ended], skip_special_tokens=False)))
        return text, new

    def _prompt(self, asked: Completion) -> str | list[int]:
        prompt: Any = asked.prompt  # of one kind: text, texts or ids
        size = self.model.config.vocab_size
        if isinstance(prompt, str):
            return prompt
        if prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise bad_request(f"got {len(prompt)} prompts; send one in each request", "prompt")
            return prompt[0]
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            raise bad_request(f"got token ids outside of 0 to {size - 1}", "prompt")
        return prompt

    def _read(
        self, reader: Reader, text: str | list[int], name: str, watch: Watch, *, document: bool | None = None
    ) -> None:
        """Read text, or token ids as they are; too much of it is refused before the model has seen any.

        `document` says whether the text begins one; by default it does where none is open.
        """
        most = self.settings.max_prompt_tokens
        data = text.encode() if isinstance(text, str) else text
        begins = not isinstance(data, list) and (not reader.memory.open[0] if document is None else document)
        if not data and not begins:
            return
        with self._reads(watch):
            count = len(data)
            if count > most and isinstance(data, bytes):  # a token is at least a byte
                count = self._count(data, most, watch)
            if count > most:
                raise ClientError(413, f"got more than {most:,} tokens to read, which is the most", code="too_long")
            source = iter(data) if isinstance(data, list) else data
            reader.read(source, name=name, new_document=begins, on_piece=watch)

    def _count(self, data: bytes, most: int, watch: Watch) -> int:
        """How many tokens a text has; one more than `most`, or some more, where it has too many."""
        if is_byte_tokenizer(self.tokenizer):
            return len(data)
        stream = TokenStream(data, self.tokenizer, "text")
        while stream.tokens <= most and len(stream.take(PIECE)):
            watch()
        return stream.tokens
