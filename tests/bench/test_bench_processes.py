"""The process that all cases share on a GPU, here on the CPU."""

import os
import sys
from contextlib import nullcontext

import pytest

from bench.bench_cases import OP, REQUEST, measured
from titans_lm.bench import run
from titans_lm.bench.processes import Worker
from titans_lm.bench.registry import Benchmark, Case
from titans_lm.bench.run import Bench
from titans_lm.bench.settings import BenchSettings

TOY = """
import os, sys, time
from titans_lm.bench.measure import serve
def work(request, device):
    print("a library says hello")
    os.system("echo and so does a program")
    if request["do"] == "die":
        print("the driver is gone", file=sys.stderr)
    if request["do"] in ("die", "die in silence"):
        os._exit(9)
    time.sleep(60.0 if request["do"] == "sleep" else 0.0)
    return {"did": request["do"]}
serve(work)
"""
"""A worker that does what it is told, and prints meanwhile."""


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_cases_share_a_process_until_one_fails():
    request = {**REQUEST, "threads": 1, "kind": "op", "mode": "forward", "case": OP}
    with Worker(1) as worker:
        rows, pids = [], []
        for case in (OP, OP, {**OP, "depth": 9}, OP):
            rows.append(worker.ask({**request, "case": case}, 120.0))
            pids.append(worker.process and worker.process.pid)
        assert [row.get("tokens") for row in rows] == [40, 40, None, 40]
        assert rows[2]["error"].startswith("ValueError: got memory_depth=9")
        assert pids[0] == pids[1] != pids[3]
        assert pids[2] is None
    assert all(ended(pid) for pid in pids if pid)


def test_a_worker_that_dies_or_takes_too_long_is_replaced_and_what_is_printed_is_no_row():
    def do(what, timeout=120.0):
        return worker.ask({**REQUEST, "do": what}, timeout)

    with Worker(1, [sys.executable, "-c", TOY]) as worker:
        assert do("work") == {"did": "work"}
        assert do("die") == {"error": "the worker ended with code 9: the driver is gone"}
        assert do("work") == {"did": "work"}
        assert do("sleep", 0.3) == {"error": "stopped after 0 seconds"}
        assert do("work") == {"did": "work"}
        assert do("die in silence")["error"].startswith("the worker ended with code 9: ")


def test_a_worker_that_never_comes_up_says_why():
    with Worker(1, [sys.executable, "-S", "-c", "import nothing_of_this_name"]) as worker:
        assert worker.ask({}, 60.0)["error"] == (
            "the worker ended with code 1: ModuleNotFoundError: No module named 'nothing_of_this_name'"
        )


def test_on_a_gpu_our_cases_go_to_the_shared_process_and_a_peers_do_not(tmp_path, monkeypatch):
    asked, alone = [], []
    monkeypatch.setattr(Worker, "ask", lambda self, request, timeout: (asked.append(request), measured(1.0))[1])
    monkeypatch.setattr(run, "ask", lambda request, *_: (alone.append(request), measured(1.0))[1])
    for device in ("cpu", "cuda:0"):
        bench = Bench(BenchSettings(), device, lambda _: None)
        bench.measure(Case(label="ours", kind="op", case={}))
        bench.measure(Case(label="theirs", kind="peer_layer", case={}, python=tmp_path))
    assert [(request["kind"], request["device"]) for request in asked] == [("op", "cuda:0")]
    assert [(request["kind"], request["device"]) for request in alone] == [
        ("op", "cpu"), ("peer_layer", "cpu"), ("peer_layer", "cuda:0"),
    ]  # fmt: skip
    assert (asked[0]["matmul"], alone[0]["matmul"]) == (8192, 2048)


ECHO = "while input(): print('{\"tokens_per_second\": 1}', flush=True)"
"""A worker that answers the same to everything."""


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_ends_with_the_benchmark(fails, tmp_path):
    bench, pids = Bench(BenchSettings(out=tmp_path), "cuda", lambda _: None), []
    bench.worker = Worker(1, [sys.executable, "-S", "-c", ECHO])

    def cases(settings, at):
        yield Case(label="ours", kind="op", case={})
        pids.append(bench.worker.process.pid)
        if fails:
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") if fails else nullcontext():
        bench.run("ops", Benchmark(BenchSettings, cases, needs_gpu=True), {})
    assert ended(pids[0])
