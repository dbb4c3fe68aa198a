"""`titans bench kernels`: the experimental kernels and the chunked backend in turn, shape by shape."""

from itertools import product
from typing import Any

from titans_lm.bench.registry import Case, Cases, Comparison, Place, benchmark
from titans_lm.bench.settings import KernelsSettings

BACKENDS = ("chunked", "triton")


@benchmark("kernels", KernelsSettings, needs_gpu=True)
def kernels(settings: KernelsSettings, at: Place) -> Cases:
    """Measure every shape by both backends. Raises ValueError where they differ; nothing is written then."""
    from titans_lm.bench.gate import check_kernels

    shapes = kernel_shapes(settings)
    largest = check_kernels([shape["case"] for shape in shapes], at.device)
    at.say(f"the kernels agree with the chunked backend within {largest:.0e}")
    for shape in shapes:
        cases = [
            Case(label=backend, kind="op", mode=shape["mode"], case={**shape["case"], "backend": backend})
            for backend in BACKENDS
        ]
        yield Comparison(label(shape), cases)
    return {"check": {"kernels_largest_difference": largest}}


def kernel_shapes(settings: KernelsSettings) -> list[dict[str, Any]]:
    """List the grid without what no kernel does; decoding knows no length."""
    from titans_lm.ops.triton import unsupported

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
