"""A wish to stop that is heard between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Turn the first Ctrl-C or SIGTERM into a wish that a loop reads between steps; the second stops at once.

    Truthy once asked to stop. Outside of the main thread, which alone receives signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
