"""How a case is measured: the same file on both sides of a comparison, so it knows torch and nothing of this package.

A worker imports what it needs, notes its memory, builds the case, warms up, and then takes the times between two
measurements of the machine's own limit: a large square matrix product in the same minute.
"""

import gc
import json
import logging
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Runnable:
    """A case that is ready: `step()` does it once; what a step processes, and what is worth telling beside it."""

    step: Callable[[], Any]
    tokens: int
    flops: int | None = None
    """Floating point operations of a step, where a formula for them is known."""
    calls: int = 1
    """Calls of a step that follow one another, such as the tokens that decoding writes."""
    facts: dict[str, Any] | None = None


def prepare(request: dict[str, Any]) -> torch.device:
    """Set threads, the limit on memory, the seed and the device as the request says."""
    device = torch.device(request["device"])
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and events go to the current one
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    if request.get("memory_limit") and device.type == "cpu":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = request["memory_limit"] if hard == resource.RLIM_INFINITY else min(request["memory_limit"], hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    torch.manual_seed(0)
    return device


def measure(
    request: dict[str, Any], build: Callable[[dict[str, Any], torch.device], Runnable], device: torch.device
) -> dict[str, Any]:
    """Build, warm up and time one case; everything that a row of the results holds."""
    load_backward(device)
    memory = PeakMemory(device)
    ready = build(request, device)
    warmed = warm_up(ready.step, request["warmup"], request["warmup_seconds"], device)
    if device.type != "cuda":  # there a warm-up also tunes kernels, in memory of its own
        memory.look()
    size, dtype = request["matmul"], getattr(torch, request["dtype"])
    yardstick = matmul_times(size, dtype, device)
    memory.reset()
    before = kernel_counts()
    times = [seconds(ready.step, device) for _ in range(request["repeats"])]
    faults, preempted = ((after - first) // len(times) for after, first in zip(kernel_counts(), before, strict=True))
    memory.look()
    yardstick += matmul_times(size, dtype, device)
    typical, limit = statistics.median(times), 2 * size**3 / statistics.median(yardstick)
    row = {
        "seconds": {"median": typical, "min": min(times), "max": max(times), "all": times},
        "warmup_runs": warmed,
        "tokens": ready.tokens,
        "tokens_per_second": ready.tokens / typical,
        "milliseconds_per_call": 1e3 * typical / ready.calls,
        "peak_memory_bytes": memory.growth,
        "page_faults_per_run": faults,
        "preempted_per_run": preempted,
        "matmul_flops_per_second": limit,
        "threads": torch.get_num_threads(),
        **(ready.facts or {}),
    }
    if ready.flops is not None:
        rate = ready.flops / typical
        row |= {"flops": ready.flops, "flops_per_second": rate, "share_of_matmul": rate / limit}
    return row


SETTLING = 8
"""Runs that a warm-up may take beyond those asked for, while times still fall."""


def one_pass(
    run: Callable[[], torch.Tensor],
    leaves: Iterable[torch.Tensor],
    mode: str,
    like: torch.Tensor | None = None,
    **how: Any,
) -> Callable[[], Any]:
    """Make a step of a run: forward alone, or the gradients of `leaves`, by outputs as `like` weighed at random."""
    if mode != "forward+backward":
        return torch.no_grad()(run)
    leaves, towards = list(leaves), torch.randn_like(run() if like is None else like)

    def step() -> None:
        y = run()
        torch.autograd.grad(y, leaves, towards.to(y.dtype), **how)

    return step


def training_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def load_backward(device: torch.device) -> None:
    """Let torch load what it imports at its first backward pass, so that it counts as imported."""
    x = torch.ones(2, 2, device=device, requires_grad=True)
    torch.autograd.grad(x @ x, x, torch.ones_like(x))


def warm_up(step: Callable[[], Any], most: int, enough: float, device: torch.device) -> int:
    """Run until a number of runs or of seconds is reached, at least twice if there may be two; returns the runs.

    Then go on while each run takes a tenth and 10 ms less than the one before: an allocator that learns what to keep
    takes longer to warm up than caches do.
    """
    started, took = time.perf_counter(), [seconds(step, device)]
    while len(took) < min(2, most) or (len(took) < most and time.perf_counter() - started < enough):
        took.append(seconds(step, device))
    while len(took) > 1 and len(took) < most + SETTLING and took[-2] - took[-1] > max(0.1 * took[-2], 0.01):
        took.append(seconds(step, device))
    return len(took)


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Time one run: on a GPU by events on its own clock, with nothing else in flight."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def matmul_times(size: int, dtype: torch.dtype, device: torch.device, repeats: int = 5) -> list[float]:
    """Time products of two square matrices: what this machine reaches in this minute, with these threads."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    return [seconds(lambda: torch.mm(a, b, out=out), device) for _ in range(repeats)]


class PeakMemory:
    """Largest memory since the imports: of the device on a GPU, else of the process.

    Where the kernel lets a process reset its own high-water mark, what a case takes is told from what the matrix
    product beside it took; elsewhere what the warm-up took counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.init()
        self.start = self.peak = resident(device)
        self.can_reset, self.looked = self.reset(), False

    def reset(self) -> bool:
        """Forget the peak so far; False where that cannot be done."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            CLEAR.write_text("5")
        except OSError:
            return False
        return True

    def look(self) -> None:
        """Take the peak since the last reset into account."""
        if self.can_reset or not self.looked:
            self.peak = max(self.peak, peak_resident(self.device))
        self.looked = True

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.start)


def resident(device: torch.device) -> int:
    """Bytes in use now, by the device's tensors or by this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    found = _status("VmRSS")
    return found if found is not None else peak_resident(device)


def peak_resident(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = _status("VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def kernel_counts() -> tuple[int, int]:
    """Count the pages that the kernel had to hand to this process, and how often it gave a core to somebody else."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_nivcsw


def _status(name: str) -> int | None:
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def answer(request: dict[str, Any], work: Callable[[dict[str, Any], torch.device], dict[str, Any]]) -> dict[str, Any]:
    """Do what is asked; what goes wrong becomes the last line of its error instead of a number."""
    try:
        return work(request, prepare(request))
    except Exception as error:  # noqa: BLE001 (a case that fails is a result too, whatever with)
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"error": f"{type(error).__name__}: {lines[0] if lines else 'no message'}"}


def serve(work: Callable[[dict[str, Any], torch.device], dict[str, Any]]) -> None:
    """Be a worker until the input ends or a case fails: a request is a line of JSON, and its answer another one.

    Nothing but answers goes out: what libraries print goes where their errors go.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Libraries say on import what they would do faster with other libraries; the rows say what was measured.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for number, line in enumerate(sys.stdin):
        if number:
            forget()
        result = answer(json.loads(line), work)
        answers.write(f"{json.dumps(result)}\n")
        answers.flush()
        if "error" in result:  # after an error a GPU's context may be of no use any more
            return


def forget() -> None:
    """Let go of what the case before left: memory, and code that was compiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
