"""What `titans bench` runs: the check of the op first, then one kind of measurement or all of them.

Cases run one after the other (`processes.py`); comparisons take turns, and their ratios are by round.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from titans_lm.bench import gate
from titans_lm.bench.processes import Worker, ask
from titans_lm.bench.registry import Benchmark, Case, Cases, Comparison, Place, Repeated, benchmarks
from titans_lm.bench.settings import ALLOCATORS, BenchSettings
from titans_lm.report.section import FORMAT
from titans_lm.train.device import asked_threads, choose_device, hardware, machine_memory, usable_cores
from titans_lm.train.files import write_json
from titans_lm.train.options import plain_settings, written_command

WARMUP, WARMUP_SECONDS, GPU_WARMUP_SECONDS = 8, 3.0, 1.0
"""Runs of a warm-up, and the time after which it ends in any case: at least one run, and with the tuned allocator a few
more until the heap has its size."""
MATMUL, GPU_MATMUL, QUICK_MATMUL = 2048, 8192, 128
"""Rows of the square matrices beside every case: on a GPU smaller products measure how long it takes to start one."""
MEDIANS = {
    "tokens_per_second", "milliseconds_per_call", "flops_per_second", "share_of_matmul", "matmul_flops_per_second",
    "page_faults_per_run", "preempted_per_run",
}  # fmt: skip
"""Numbers of a side that are the medians of its rounds."""
Say = Callable[[str], None]
Row = dict[str, Any]


def run_bench(settings: BenchSettings, say: Say) -> dict[str, Any]:
    """Check the op, measure, and write one JSON file per kind into the folder; returns what was written.

    Raises ValueError for settings that will not do and for an op that is wrong; nothing is written then. Settings that
    are no kind's own mean every kind: each with its defaults, and with what was set for all.
    """
    parts, known = kinds(settings), benchmarks()
    device = choose_device(settings.device)
    for name in parts:
        if known[name].needs_gpu and device.type != "cuda":
            raise ValueError(
                f"got device {device.type} for titans bench {name}; expected a CUDA device: kernels are measured where "
                "they run, and Triton's interpreter says nothing about speed"
            )
    check = gate.check_op(device)
    settings.out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made fails now, not after the work
    say(f"the op agrees with its definition in {check['cases']} cases, within {check['largest_difference']:.0e}")
    done = {
        name: Bench(part, str(device), say, alone=len(parts) == 1).run(name, known[name], check)
        for name, part in parts.items()
    }
    return done if len(done) > 1 else next(iter(done.values()))


def kinds(settings: BenchSettings) -> dict[str, BenchSettings]:
    """Give the benchmarks that settings mean, each with its own."""
    known = benchmarks()
    own = next((name for name, one in known.items() if type(settings) is one.settings), None)
    if own is not None:
        return {own: settings}
    changed = {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default}
    changed |= {"repeats": settings.repeats, "rounds": settings.rounds}
    return {
        name: one.settings(**{f.name: changed[f.name] for f in fields(one.settings) if f.name in changed})
        for name, one in known.items()
        if not one.needs_gpu
    }


class Bench:
    """One run of a benchmark: its settings, where progress goes, and whether it is the only one.

    On a CPU every case has a process of its own: its peak of memory is one of the process, and its allocator is told by
    the environment. On a GPU torch counts the memory, and cases of ours share a process, which takes seconds to start.
    """

    def __init__(self, settings: BenchSettings, device: str, say: Say, *, alone: bool = True) -> None:
        self.settings, self.device, self.say, self.alone = settings, device, say, alone
        self.threads = settings.threads or asked_threads() or usable_cores()
        self.shared, self.worker = device.partition(":")[0] == "cuda", Worker(self.threads)
        self.started = time.perf_counter()

    def measure(self, case: Case, where: str = "") -> dict[str, Any]:
        """Let a worker run it; the row has its numbers, or the reason why there are none."""
        row = {"label": case.label, "side": case.side, "kind": case.kind, "mode": case.mode, "case": case.case}
        found = self._run(case) if case.missing is None else {"error": case.missing}
        name = f"{case.label}{f', {case.mode}' if case.mode else ''}{'' if where else _allocator(case)}"
        self.say(f"{where}{name}: {told(found)}")
        return {**row, "allocator": case.allocator, **found}

    def compare(self, title: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Let the sides take turns; each row has the numbers of all rounds, and its ratio to every other side."""
        rounds: list[list[dict[str, Any]]] = []
        for number in range(self.settings.rounds):
            self.say(f"{title}{_allocator(cases[0])}, round {number + 1} of {self.settings.rounds}")
            rounds.append([self.measure(case, "    ") for case in cases])
        rows = [dict(merged([turn[i] for turn in rounds])) for i in range(len(cases))]
        for i, row in enumerate(rows):
            row["against"] = {
                other["label"]: ratio(rounds, i, j)
                for j, other in enumerate(rows)
                if j != i and "error" not in row and "error" not in other
            }
        return [{"comparison": title, **row} for row in rows]

    def repeat(self, asked: Repeated) -> Row:
        """Run a case once a round; numbers are medians, and of every round it keeps what was asked for."""
        rounds = [self.measure(asked.case) for _ in range(self.settings.rounds)]
        failed = next((row for row in rounds if "error" in row), None)
        if failed is not None:
            return failed
        medians = {name: statistics.median(row[name] for row in rounds) for name in asked.medians}
        return {**rounds[0], **medians, "rounds": [{name: row[name] for name in asked.kept} for row in rounds]}

    def run(self, name: str, benchmark: Benchmark, check: dict[str, Any]) -> dict[str, Any]:
        """Give a benchmark the rows of its cases one after another, and write its file."""
        with self.worker:
            rows, own = self.measured(benchmark.cases(self.settings, Place(self.device, self.say, self.alone)))
        result = {
            "format": FORMAT,
            "what": name,
            "command": written_command("bench", name, settings=self.settings),
            "quick": self.settings.quick,
            "device": self.device,
            "dtype": self.settings.dtype,
            "threads": self.threads,
            "wall_seconds": time.perf_counter() - self.started,
            "hardware": {**hardware(), "allocators": ALLOCATORS},
            "check": {**check, **own.pop("check", {})},
            "settings": plain_settings(self.settings),
            **own,
            "rows": rows,
        }
        path = self.settings.out / file_name(result["what"], self.device, self.settings.dtype)
        write_json(path, result)
        self.say(f"{result['what']}: {path}")
        return result

    def measured(self, cases: Cases) -> tuple[list[Row], dict[str, Any]]:
        """Give the rows of all cases, and what the benchmark changes in the header."""
        rows, found = [], None
        while True:
            try:
                asked = cases.send(found)
            except StopIteration as end:
                return rows, end.value or {}
            found = self.rows(asked)
            rows += found if isinstance(found, list) else [found]

    def rows(self, asked: Case | list[Case] | Comparison | Repeated) -> Row | list[Row]:
        if isinstance(asked, Comparison):
            return self.compare(asked.title, asked.cases)
        if isinstance(asked, Repeated):
            return self.repeat(asked)
        return self.measure(asked) if isinstance(asked, Case) else [self.measure(case) for case in asked]

    def _run(self, case: Case) -> dict[str, Any]:
        s = self.settings
        limit = 0.85 * machine_memory() if s.memory_limit is None else 1e9 * s.memory_limit
        request = {
            "kind": case.kind,
            "mode": case.mode,
            "case": case.case,
            "device": self.device,
            "dtype": {"bf16": "bfloat16"}.get(s.dtype, s.dtype),
            "threads": self.threads,
            "memory_limit": int(limit),
            "repeats": s.repeats,
            "warmup": 2 if s.quick else WARMUP,
            "warmup_seconds": GPU_WARMUP_SECONDS if self.shared else WARMUP_SECONDS,
            "matmul": QUICK_MATMUL if s.quick else GPU_MATMUL if self.shared else MATMUL,
            **case.settings,
        }
        if self.shared and case.python is None:
            return self.worker.ask(request, s.timeout)
        return ask(request, case, s.timeout, self.threads)


def merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one row of the rounds: medians of what was measured, the largest memory, the first error if any."""
    failed = next((row for row in rows if "error" in row), None)
    if failed is not None:
        return failed
    times = [t for row in rows for t in row["seconds"]["all"]]
    typical = statistics.median(row["seconds"]["median"] for row in rows)
    merged = {**rows[0], "seconds": {"median": typical, "min": min(times), "max": max(times), "all": times}}
    for name in MEDIANS & merged.keys():
        merged[name] = statistics.median(row[name] for row in rows)
    merged["peak_memory_bytes"] = max(row["peak_memory_bytes"] for row in rows)
    return {**merged, "rounds": len(rows)}


def ratio(rounds: list[list[dict[str, Any]]], i: int, j: int) -> dict[str, Any]:
    """Tokens per second of side i over those of side j, round by round, and their median."""
    found = [turn[i]["tokens_per_second"] / turn[j]["tokens_per_second"] for turn in rounds]
    return {"median": statistics.median(found), "rounds": found}


def told(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    parts = [f"{row['tokens_per_second']:,.0f} tokens/s"]
    if "share_of_matmul" in row:
        parts.append(f"{100 * row['share_of_matmul']:.0f} % of matmul")
    if "peak_memory_bytes" in row:
        parts.append(f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB")
    if "memory_ratio" in row:
        parts.append(f"memory × {row['memory_ratio']:.3f}, throughput × {row['throughput_ratio']:.3f}")
    return ", ".join(parts)


def file_name(what: str, device: str, dtype: str) -> str:
    """Name the file of a kind: what.json for float32 on the CPU, what-cuda-bf16.json and the like for the others."""
    base = device.partition(":")[0]
    return f"{what}.json" if (base, dtype) == ("cpu", "float32") else f"{what}-{base}-{dtype}.json"


def _allocator(case: Case) -> str:
    return "" if case.allocator == "default" else f", {case.allocator} allocator"
