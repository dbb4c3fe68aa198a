"""An answer as it is written: tokens become text, stop texts end it, and nothing of a stop text is shown or kept."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titans_lm.generate import RunningText
from titans_lm.streaming import Memory

Held = Callable[[], Memory]
"""Gives a memory: one that is a row among others is taken out of them when it is asked for."""
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
