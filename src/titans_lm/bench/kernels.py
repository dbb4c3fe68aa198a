"""`titans bench kernels`: the experimental kernels and the chunked backend in turn, shape by shape."""

from itertools import product
from typing import Any

import torch

from titans_lm.bench.gate import difference, named_gradients
from titans_lm.bench.run import Bench, Case, report
from titans_lm.bench.settings import KernelsSettings
from titans_lm.bench.subjects_op import make_call
from titans_lm.ops.state import MemoryState
from titans_lm.ops.triton.support import unsupported

TOLERANCE = 1e-3
"""Largest difference of the two in float32, as a share of the largest number of a tensor."""
BACKENDS = ("chunked", "triton")


def require_gpu(device: torch.device) -> None:
    """Raise ValueError where there is no GPU: a kernel's time elsewhere says nothing."""
    if device.type != "cuda":
        raise ValueError(
            f"got device {device.type} for titans bench kernels; expected a CUDA device: kernels are measured where "
            "they run, and Triton's interpreter says nothing about speed"
        )


def run_kernels(settings: KernelsSettings, bench: Bench, command: str, check: dict[str, Any]) -> dict[str, Any]:
    """Measure every shape by both backends, and write kernels.json.

    Raises ValueError without a GPU, and where the kernels differ from the chunked backend; nothing is written then.
    """
    device = torch.device(bench.device)
    require_gpu(device)
    shapes = kernel_shapes(settings)
    largest = check_kernels(shapes, device)
    bench.say(f"the kernels agree with the chunked backend within {largest:.0e}")
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        title = label(shape)
        cases = [
            Case(label=backend, kind="op", mode=shape["mode"], case={**shape["case"], "backend": backend})
            for backend in BACKENDS
        ]
        rows += bench.compare(title, cases)
    return report("kernels", bench, command, {**check, "kernels_largest_difference": largest}, rows)


def kernel_shapes(settings: KernelsSettings) -> list[dict[str, Any]]:
    """List the grid without what no kernel does; decoding knows no length."""
    found = []
    grid = product(settings.widths, settings.expansions, settings.chunks, settings.memories, settings.modes)
    for D, expansion, C, memories, mode in grid:
        widths = [(D, D)] if expansion == 0 else [(D, expansion * D), (expansion * D, D)]
        if unsupported(widths, C) is None:
            case = {
                "rows": memories, "heads": 1, "width": D, "depth": len(widths), "expansion": max(1, expansion),
                "chunk": C, "tokens": 1 if mode == "decode" else settings.tokens, "forget_to": "zero",
            }  # fmt: skip
            found.append({"mode": mode, "case": case})
    return found


def label(shape: dict[str, Any]) -> str:
    """Name a shape."""
    case = shape["case"]
    form = "linear" if case["depth"] == 1 else f"expansion {case['expansion']}"
    return f"{shape['mode']}: {case['rows']} memories of {case['width']}, {form}, C {case['chunk']}"


def check_kernels(shapes: list[dict[str, Any]], device: torch.device, tokens: int = 150) -> float:
    """Compare values and gradients of the two in float32 for every form of memory, on two memories."""
    largest = 0.0
    forms = {tuple((k, v) for k, v in s["case"].items() if k not in ("rows", "tokens")): s["case"] for s in shapes}
    for form in forms.values():
        case = {**form, "rows": 2, "tokens": tokens}
        expected, got = (_outcome(case, backend, device) for backend in BACKENDS)
        scale = max(float(x.abs().max()) for x in expected.values())
        for name, x in expected.items():
            error = difference(x, got[name], scale)
            if not error <= TOLERANCE:
                raise ValueError(
                    f"the kernels are wrong: {name} differs by a share of {error:.1e} from the chunked backend "
                    f"({case}); expected at most {TOLERANCE:.0e}; nothing is measured"
                )
            largest = max(largest, error)
    return largest


def _outcome(case: dict[str, Any], backend: str, device: torch.device) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        call = make_call(case, torch.float32, device)
        o, state = call(MemoryState.initial(call.weights, case["rows"]), case["chunk"], backend)
        towards = torch.randn_like(o)
    found = torch.autograd.grad((o * towards).sum() + sum(w.sum() for w in state.M), call.leaves)
    values = {"o": o, **{f"M[{i}]": w for i, w in enumerate(state.M)}}
    return {**{n: x.detach() for n, x in values.items()}, **named_gradients(call, found)}
