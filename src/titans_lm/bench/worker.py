"""Cases in a process beside `titans bench`: a request as a line of JSON comes in, a row of numbers goes out as another.

python -m titans_lm.bench.worker < request.json
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
