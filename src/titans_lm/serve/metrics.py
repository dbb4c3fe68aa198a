"""What a server counts, in the text form that Prometheus reads."""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histogram of latencies."""
OTHER, NOT_ALLOWED = "other", 405
"""Path of requests for addresses that there are not: clients could name any number."""


class Metrics:
    """Requests, their latency from the first byte to the last of the answer, and tokens; used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(SECONDS) + 1))
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[str] = Counter(prompt=0, completion=0)

    def count_request(self, method: str, path: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[method, path, status] += 1
            self._seconds[path][bisect_left(SECONDS, seconds)] += 1
            self._sums[path] += seconds

    def count_tokens(self, **tokens: int) -> None:
        with self._lock:
            self._tokens.update(tokens)

    def text(self, gauges: Mapping[str, tuple[str, Mapping[str, int]]]) -> str:
        """Write everything; `gauges` are names with what they mean, and values of now by their labels."""
        with self._lock:
            return "\n".join([*self._counters(), *_gauges(gauges), ""])

    def _counters(self) -> Iterator[str]:
        yield from _head("titans_requests_total", "counter", "Requests that were answered.")
        for (method, path, status), count in sorted(self._requests.items()):
            yield f'titans_requests_total{{method="{method}",path="{path}",status="{status}"}} {count}'
        yield from _head("titans_request_seconds", "histogram", "Time to the last byte of the answer.")
        for path, counts in sorted(self._seconds.items()):
            total = 0
            for bound, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
                total += count
                yield f'titans_request_seconds_bucket{{path="{path}",le="{bound}"}} {total}'
            yield f'titans_request_seconds_sum{{path="{path}"}} {self._sums[path]:.6f}'
            yield f'titans_request_seconds_count{{path="{path}"}} {total}'
        yield from _head("titans_tokens_total", "counter", "Tokens read (prompt) and written (completion).")
        for kind, count in sorted(self._tokens.items()):
            yield f'titans_tokens_total{{kind="{kind}"}} {count}'


def _gauges(gauges: Mapping[str, tuple[str, Mapping[str, int]]]) -> Iterator[str]:
    for name, (meaning, values) in gauges.items():
        yield from _head(name, "gauge", meaning)
        for labels, value in values.items():
            yield f"{name}{labels} {value}"


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


class Counted:
    """ASGI middleware that counts every request, refused ones too."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 500, time.monotonic()

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", OTHER)
            # a client may make methods up, and each would have a line of its own
            method = scope["method"] if path != OTHER and status != NOT_ALLOWED else "any"
            self.metrics.count_request(method, path, status, time.monotonic() - began)
