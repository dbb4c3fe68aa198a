"""Connections: there are fewer of them than the process may open files, and none waits long for a request."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

KEPT_FREE = 128
"""Files that are for other things than connections."""


class Connection(H11Protocol):
    """HTTP by h11, closed where no request's header has come whole in time.

    Where there are too many connections the one that has waited longest for a request makes room, so that clients who
    send nothing keep out nobody.
    """

    most = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - KEPT_FREE))
    """Most connections at once."""
    seconds = 20.0
    """Most time that a header may take to arrive."""
    late: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether there is no request that is being received or answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin()
        if len(self.connections) > self.most:
            idle = [other for other in self.connections if isinstance(other, Connection) and other.late is not None]
            oldest = min(idle, key=lambda other: other.late.when() if other.late is not None else 0.0)
            oldest.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits:
            self._end()
        elif self.late is None:
            self._begin()

    def close(self) -> None:
        """Close it at once: nobody is told anything."""
        self._end()
        self.transport.abort()

    def _begin(self) -> None:
        self.late = self.loop.call_later(self.seconds, self._late)

    def _late(self) -> None:
        if self.waits:
            self.close()

    def _end(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None
