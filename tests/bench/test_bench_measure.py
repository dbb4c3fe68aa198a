import os
import platform
import subprocess
import sys

import pytest
import torch

from bench.bench_cases import REQUEST
from cli_cases import environment
from titans_lm.bench.measure import SETTLING, Runnable, answer, measure, warm_up
from titans_lm.bench.settings import ALLOCATORS

CPU = torch.device("cpu")


def test_a_row_says_what_was_measured():
    ran = []
    row = measure(REQUEST, lambda *_: Runnable(lambda: ran.append(0), 10, flops=100, calls=5, facts={"a": 1}), CPU)
    assert len(ran) == row["warmup_runs"] + 2 == 3
    typical = row["seconds"]["median"]
    assert row["seconds"]["min"] <= typical <= row["seconds"]["max"]
    assert row["tokens_per_second"] == pytest.approx(10 / typical)
    assert row["milliseconds_per_call"] == pytest.approx(200 * typical)
    assert row["flops_per_second"] == pytest.approx(100 / typical)
    assert row["share_of_matmul"] == pytest.approx(row["flops_per_second"] / row["matmul_flops_per_second"])
    assert row["a"] == 1


def test_without_a_formula_there_are_no_operations():
    row = measure(REQUEST, lambda *_: Runnable(lambda: None, 1), CPU)
    assert "flops_per_second" not in row
    assert "share_of_matmul" not in row


def test_a_warm_up_runs_at_least_once_and_ends_by_number_or_by_time():
    ran = []
    assert warm_up(lambda: ran.append(0), 3, 60.0, CPU) == 3
    assert warm_up(lambda: ran.append(0), 1, 60.0, CPU) == 1
    assert warm_up(lambda: ran.append(0), 3, -1.0, CPU) == 2  # one run alone would not say whether times still fall
    assert len(ran) == 6


def test_memory_that_is_gone_again_is_seen_before_a_reset_and_after():
    """In a process of its own, as cases are: of one that holds much the kernel may take unused pages back meanwhile."""
    code = (
        "import torch\n"
        "from titans_lm.bench.measure import PeakMemory\n"
        "for reset in (False, True):\n"
        "    memory = PeakMemory(torch.device('cpu'))\n"
        "    block = torch.ones(2**24)\n"
        "    if reset: memory.look()\n"
        "    del block\n"
        "    if reset: memory.reset()\n"
        "    memory.look()\n"
        "    print(memory.growth)"
    )
    told = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    before, after = (int(line) for line in told.stdout.split())
    assert 60 << 20 < before < 200 << 20
    assert after > 60 << 20


def test_a_warm_up_goes_on_while_times_fall(monkeypatch: pytest.MonkeyPatch):
    times = iter([12.0, 8.0, 6.0, 5.0, 4.8, 1.0])
    monkeypatch.setattr("titans_lm.bench.measure.seconds", lambda *_: next(times))
    assert warm_up(lambda: None, 2, 0.0, CPU) == 5
    falling = iter(2.0**-i * 100 for i in range(100))
    monkeypatch.setattr("titans_lm.bench.measure.seconds", lambda *_: next(falling))
    assert warm_up(lambda: None, 2, 0.0, CPU) == 2 + SETTLING


def test_what_goes_wrong_is_told_in_a_line():
    def broken(*_):
        raise ValueError("first line\nsecond line")

    assert answer(REQUEST, broken) == {"error": "ValueError: first line"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_the_tuned_allocator_keeps_what_is_freed():
    """Blocks of 16 MiB are 4096 pages: faulted in again at every turn by default, and not at all once tuned."""
    code = (
        "import resource\n"
        "for _ in range(12):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for size in (64, 96): block = b'x' * (size * 2**20)\n"
        "    del block\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = {}
    for name, setting in ALLOCATORS.items():
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], env={**os.environ, **setting}, capture_output=True, text=True,
            check=True, timeout=60,
        )  # fmt: skip
        faults[name] = int(done.stdout)
    assert faults["default"] > 20_000
    assert faults["tuned"] < 1000
