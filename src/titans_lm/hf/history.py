"""The last calls that were read, and states before some of them: enough to go back to any of the last tokens (D51)."""

from collections import deque
from typing import Any, NamedTuple

from titans_lm.config import check_at_least
from titans_lm.ops.state import map_state

KEEP = 256
"""How many tokens can be taken back where somebody asks for it without saying how many."""

Places = tuple[int, ...]
"""Tokens that every row has read; a cache counts its slots as one row."""


class Call(NamedTuple):
    """One call: where its rows stood, how many tokens each read, what these were, and what else is told of it."""

    start: Places
    count: Places
    inputs: Any
    told: Any = None

    @property
    def end(self) -> Places:
        return tuple(a + b for a, b in zip(self.start, self.count, strict=True))

    def until(self, target: Places) -> Places:
        """How many of its tokens stand before a place."""
        return tuple(min(n, max(0, t - s)) for s, n, t in zip(self.start, self.count, target, strict=True))


class History:
    """The calls of the last `keep` tokens at least, and the states before some of them.

    A state is a value, so nothing is copied to keep one. One is dropped where the next older is at most twice as far
    back as the next younger: at most about 2 log₂(keep) of them are left, and to take back r tokens at most r are read
    again, or the beginning of the one call that is cut.
    """

    def __init__(self, keep: int) -> None:
        check_at_least("keep", keep, 0)
        self.keep = keep
        self.calls: deque[Call] = deque()
        self.states: list[tuple[Places, Any]] = []

    def clear(self) -> None:
        """Keep nothing of what was."""
        self.calls, self.states = deque(), []

    def add(self, call: Call, before: Any) -> None:
        """Keep a call and the state before it; drop what lies further back than anybody may go."""
        while self.calls and self.calls[-1].start >= call.start:  # a call that was broken off
            self._drop_last()
        if self.calls and self.calls[-1].end != call.start:  # something was read that was not told
            self.clear()
        self.calls.append(call)
        self.states.append((call.start, before))
        ages = [max(e - s for e, s in zip(call.end, start, strict=True)) for start, _ in self.states]
        for place in range(len(ages) - 3, -1, -1):
            if ages[place] <= 2 * ages[place + 2]:
                del self.states[place + 1], ages[place + 1]
        while len(self.states) > 1 and self._stands_before(1, tuple(e - self.keep for e in call.end)):
            del self.states[0]
        while self.calls[0].start != self.states[0][0]:
            self.calls.popleft()

    def back(self, target: Places, now: Places) -> tuple[Places, Any, list[tuple[Call, Places]]] | None:
        """Forget what came after a place: a state, where it stands, and the calls to read again, each to how far.

        None where the place is no longer kept.
        """
        far = any(t < n - self.keep for t, n in zip(target, now, strict=True))
        if far or not self.calls or any(t > e for t, e in zip(target, self.calls[-1].end, strict=True)):
            return None
        place = len(self.states) - 1
        while place >= 0 and not self._stands_before(place, target):
            place -= 1
        if place < 0:
            return None
        start, state = self.states[place]
        again = [(call, call.until(target)) for call in self.calls if call.start >= start]
        while self.calls and self.calls[-1].start >= start:
            self._drop_last()
        return start, state, [(call, count) for call, count in again if any(count)]

    def map(self, fn: Any) -> None:
        """Apply a function to all tensors of states and inputs: other rows, another device."""
        self.states = [(start, map_state(fn, state)) for start, state in self.states]
        self.calls = deque(call._replace(inputs=map_state(fn, call.inputs)) for call in self.calls)

    def _stands_before(self, place: int, target: Places) -> bool:
        return all(s <= t for s, t in zip(self.states[place][0], target, strict=True))

    def _drop_last(self) -> None:
        call = self.calls.pop()
        if self.states and self.states[-1][0] == call.start:
            self.states.pop()
