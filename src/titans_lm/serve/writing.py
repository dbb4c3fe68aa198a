"""An answer as it is written: tokens become text, stop texts end it, and nothing of a stop text is shown or kept."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.generate import ByteStream, WordStream
from titans_lm.streaming import Memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Writing:
    """The text of one answer; `emit` receives what can be no part of a stop text any more.

    A stop text has been read like all that is written, so for every place that may turn out to be the start of one the
    memory before it is held: a conversation goes on as if the stop text had never been there.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stops: Sequence[str], emit: Callable[[str], None], memory: Memory
    ) -> None:
        self.stops, self.emit = [stop for stop in stops if stop], emit
        self.text, self.shown, self.stopped = "", 0, False
        self._memories = [(0, memory)]  # length of the text, and the memory there
        self._stream: ByteStream | WordStream = (
            ByteStream(self._more) if is_byte_tokenizer(tokenizer) else WordStream(tokenizer, self._more)
        )
        self._stream.put(torch.empty(0, dtype=torch.int64))  # the prompt, which is not shown

    @property
    def memory(self) -> Memory:
        """What is known after the text."""
        return self._memories[-1][1]

    def put(self, token: int, memory: Memory) -> None:
        """Take the next token, and the memory that has it; `stopped` says whether the text has come to its end."""
        self._stream.put(torch.tensor([token]))
        self._memories.append((self._length(), memory))
        self._look_for_stops()

    def finish(self) -> None:
        """Show what was held back."""
        self._stream.end()
        if not self.stopped:
            self._look_for_stops()
        self._show(len(self.text))

    def _more(self, text: str) -> None:
        if not self.stopped:
            self.text += text

    def _length(self) -> int:
        """How long the text of all tokens is, with what the stream still holds back."""
        if isinstance(self._stream, ByteStream):
            return len(self.text) + bool(self._stream.decoder.getstate()[0])
        held = self._stream.tokenizer.decode(self._stream.token_cache, **self._stream.decode_kwargs)
        return len(self.text) - self._stream.print_len + len(held)

    def _look_for_stops(self) -> None:
        found = [at for stop in self.stops if (at := self.text.find(stop, self.shown)) >= 0]
        if found:
            self.stopped = True
            self._end_at(min(found))
            return
        safe = len(self.text) - self._possible_start()
        self._show(safe)
        # what is shown will not be taken back: of the memories up to there only the last may be needed
        while len(self._memories) > 1 and self._memories[1][0] <= self.shown:
            del self._memories[0]

    def _end_at(self, place: int) -> None:
        """Cut the text, and go back to the last memory that has nothing of what was cut."""
        self._memories = [[held for held in self._memories if held[0] <= place][-1]]
        self.text = self.text[:place]
        self._show(place)

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
