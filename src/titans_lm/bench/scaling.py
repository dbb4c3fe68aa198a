"""`titans bench scaling`: the op over longer and longer texts, and models that read a million tokens."""

from dataclasses import replace

from titans_lm.bench.models import SIZES
from titans_lm.bench.registry import Case, Cases, Place, Repeated, allocators, benchmark
from titans_lm.bench.settings import ONE_HEAD, ScalingSettings

FORMS = ((2, 4096), (2, 16_384))
"""Rows and tokens that are measured beside one row of every length."""
STREAM = {**SIZES, "width": 64, "layers": 2, "heads": 1, "ffn": 128, "expansion": 2, "chunk": 64, "rows": 1}
"""The small model that streams."""
WINDOW, PIECE = 100_000, 4096
LONG = 65_536
"""Tokens from which on one run after one warm-up is enough: it takes half a minute."""


@benchmark("scaling", ScalingSettings)
def scaling(settings: ScalingSettings, at: Place) -> Cases:
    """Measure until a length does not fit; then let models read on.

    A window of a stream takes seconds, so one ratio of two of them says as much of the machine's neighbours as of the
    model: it runs `rounds` times.
    """
    allocator = allocators(at.device)[-1]
    for case in op_cases(settings, allocator):
        row = yield case
        if "error" in row:
            break
    ratios = ("memory_ratio", "throughput_ratio", "tokens_per_second")
    for case in stream_cases(settings):
        yield Repeated(replace(case, allocator=allocator), medians=ratios, kept=(*ratios, "windows"))


def op_cases(s: ScalingSettings, allocator: str) -> list[Case]:
    """The layer's form of the peers at every length, forward and backward; short ones first."""
    one = {**ONE_HEAD, **({"width": 16, "chunk": 8} if s.quick else {})}
    shapes = [(1, 32), (1, 64)] if s.quick else [*FORMS, *((1, T) for T in sorted(s.lengths))]
    return [
        Case(
            label=f"{rows} × {tokens:,}", kind="op", mode="forward+backward",
            case={**one, "rows": rows, "tokens": tokens}, allocator=allocator,
            settings={"repeats": 1, "warmup": 1} if tokens > LONG else {},
        )
        for rows, tokens in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    ]  # fmt: skip


def stream_cases(s: ScalingSettings) -> list[Case]:
    """Models that read on and on, state carried, nothing else kept."""
    if s.stream_tokens == 0:
        return []
    tokens, window, piece = (600, 200, 64) if s.quick else (s.stream_tokens, WINDOW, PIECE)
    sizes = STREAM | ({"width": 16, "chunk": 8, "segment": 16} if s.quick else {})
    return [
        Case(label=name, kind="stream", case={**sizes, "model": name, "tokens": tokens, "window": window,
                                              "piece": piece})
        for name in s.stream_models
    ]  # fmt: skip
