"""Count what one MAC block's forward costs besides arithmetic: Python calls of the package, and tensor operations.

    python tests/count_calls.py

B = 2, T = 64, two segments, gradients asked for, on a CPU. tests/test_calls.py keeps both below a bound.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import titans_lm
from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig

PACKAGE = str(Path(titans_lm.__file__).parent)


class Operations(TorchDispatchMode):
    """Counts every operation that reaches ATen, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_forward(architecture: str = "mac", tokens: int = 64) -> tuple[Counter[str], Counter[str]]:
    """Calls of the package's functions by file and name, and ATen operations by name, of one forward pass."""
    torch.manual_seed(0)
    stack = Backbone(BackboneConfig(architecture=architecture, num_hidden_layers=1, segment_len=32))
    x, calls, operations = torch.randn(2, tokens, stack.config.hidden_size), Counter(), Operations()
    stack(x)  # what is looked up once per process

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            calls[f"{path.removeprefix(PACKAGE)}:{frame.f_code.co_qualname}"] += 1

    with operations:
        stack(x)
    sys.setprofile(profile)
    try:
        stack(x)
    finally:
        sys.setprofile(None)
    return calls, operations.counts


if __name__ == "__main__":
    for title, counts in zip(("Python calls", "ATen operations"), count_forward(*sys.argv[1:2]), strict=True):
        lines = [f"{counts.total():6} {title}", *(f"{count:6} {name}" for name, count in counts.most_common(40))]
        sys.stdout.write("\n".join(lines) + "\n")
