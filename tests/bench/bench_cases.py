"""Small requests and small results for the tests of `titans bench`."""

import json
from functools import cache
from typing import Any

import pytest
import torch

from titans_lm.bench import gate, run
from titans_lm.bench.measure import answer
from titans_lm.bench.processes import work
from titans_lm.bench.registry import Case

REQUEST: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": None,
    "memory_limit": None,
    "warmup": 1,
    "warmup_seconds": 1.0,
    "repeats": 2,
    "matmul": 32,
}
OP = {"rows": 2, "tokens": 20, "heads": 2, "width": 4, "depth": 2, "expansion": 2, "chunk": 8, "forget_to": "zero"}
MODEL = {
    "rows": 2, "tokens": 20, "prompt": 5, "context": 9, "width": 16, "layers": 1, "heads": 2, "ffn": 16, "depth": 2,
    "expansion": 1, "chunk": 4, "segment": 8, "persistent": 2, "vocab": 32,
}  # fmt: skip


def measured(speed: float, **more: Any) -> dict[str, Any]:
    """Make up what a worker answers."""
    return {
        "seconds": {"median": 1.0 / speed, "min": 0.9 / speed, "max": 1.1 / speed, "all": [1.0 / speed]},
        "tokens": 1,
        "tokens_per_second": speed,
        "milliseconds_per_call": 1e3 / speed,
        "peak_memory_bytes": int(1e6 * speed),
        "page_faults_per_run": 3,
        "preempted_per_run": 0,
        "matmul_flops_per_second": 1e9,
        "warmup_runs": 1,
        "threads": 1,
        **more,
    }


def streamed(memory: float, throughput: float) -> dict[str, Any]:
    """Make up what a worker answers of a model that reads on."""
    windows = [{"tokens": 1, "tokens_per_second": 1.0, "memory_bytes": 1}]
    return measured(1.0, memory_ratio=memory, throughput_ratio=throughput, windows=windows)


CHECK_OP = gate.check_op


@cache
def checked() -> dict[str, Any]:
    """Check the op, once for all tests of what comes after it."""
    return CHECK_OP(torch.device("cpu"))


def check_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `titans bench` take the check that was made before."""
    monkeypatch.setattr(gate, "check_op", lambda _: checked())


def work_here(monkeypatch: pytest.MonkeyPatch, *modes: str) -> None:
    """Let workers work in this process, which has imported everything; those of `modes` have one of their own."""
    ask = run.ask

    def here(request: dict[str, Any], case: Case, timeout: float, threads: int) -> dict[str, Any]:
        if case.mode in modes:
            return ask(request, case, timeout, threads)
        sent = json.loads(json.dumps(request)) | {"memory_limit": None, "threads": 1}
        return json.loads(json.dumps(answer(sent, work)))

    monkeypatch.setattr(run, "ask", here)
