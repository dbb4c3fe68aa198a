"""A model that reads on and on: tokens per second and resident memory as the text grows."""

import gc
import time
from typing import Any

import torch

from titans_lm.bench.measure import matmul_times, resident
from titans_lm.bench.subjects_model import draw, load, make_model, read


def stream(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Read `tokens` in pieces with the state carried; a record for every `window` of them.

    The ratios say whether a long text costs more than a short one: resident memory (all of it, imports too) at the
    end against that after the first window, throughput of the last window against the second (the first one warms up).
    """
    load()
    case = request["case"]
    start = resident(device)
    model = make_model(case).to(device).eval()
    carried, records, seen = None, [], 0
    with torch.no_grad():
        while seen < case["tokens"]:
            piece = min(case["window"], case["tokens"] - seen)
            seconds, carried = read_window(model, case, piece, carried, device)
            seen += piece
            gc.collect()
            memory = resident(device)
            speed = piece / seconds
            records.append({"tokens": seen, "tokens_per_second": speed, "memory_bytes": memory})
    second = records[min(1, len(records) - 1)]
    return {
        "tokens": seen,
        "parameters": sum(p.numel() for p in model.parameters()),
        "windows": records,
        "memory_before_bytes": start,
        "memory_ratio": records[-1]["memory_bytes"] / records[0]["memory_bytes"],
        "throughput_ratio": records[-1]["tokens_per_second"] / second["tokens_per_second"],
        "tokens_per_second": seen * case["rows"] / sum(case["window"] / r["tokens_per_second"] for r in records),
        "matmul_flops_per_second": 2 * request["matmul"] ** 3
        / min(matmul_times(request["matmul"], getattr(torch, request["dtype"]), device)),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def read_window(
    model: torch.nn.Module, case: dict[str, Any], tokens: int, carried: Any, device: torch.device
) -> tuple[float, Any]:
    """Read some tokens in pieces; how long it took, and the state after them."""
    pieces = [draw(case, min(case["piece"], tokens - i), device) for i in range(0, tokens, case["piece"])]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for ids in pieces:
        _, carried = read(model, ids, carried)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, carried
