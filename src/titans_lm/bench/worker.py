"""Cases in a process beside `titans bench`: a request as a line of JSON comes in, a row of numbers goes out as another.

    python -m titans_lm.bench.worker < request.json

On a CPU peak memory is a property of a process, and so is what its allocator was told; hence one process per case. On a
GPU torch counts the memory, and one process serves all cases.
"""

from typing import Any

import torch

from titans_lm.bench.measure import measure, serve
from titans_lm.bench.registry import subjects


def work(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure what a request names. Everything heavy is imported before the memory is looked at."""
    subject = subjects()[request["kind"]]
    subject.load(request["case"])
    return measure(request, subject.build, device) if subject.timed else subject.build(request, device)


if __name__ == "__main__":
    serve(work)
