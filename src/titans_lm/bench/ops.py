"""`titans bench ops`: the op alone, by its sizes; `titans bench kernels`: two backends in turn, shape by shape."""

from itertools import product
from typing import Any

from titans_lm.bench.registry import Case, Cases, Comparison, Place, allocators, benchmark
from titans_lm.bench.settings import ONE_HEAD, PAPER, QUICK, KernelsSettings, OpsSettings

MODEL_WIDTH = 384


@benchmark("ops", OpsSettings)
def ops(settings: OpsSettings, at: Place) -> Cases:
    """Measure every case of the settings; with backend triton, the kernels beside everything that they compare with."""
    if settings.backend == "triton":
        from titans_lm.bench.sides import beside

        return (yield from beside(settings, at))
    yield op_cases(settings, at.device)
    return None


def op_cases(s: OpsSettings, device: str = "cpu") -> list[Case]:
    """List the cases: two base cases with both allocators, then one size varied at a time."""
    tokens, base = s.tokens, {**PAPER, "rows": s.rows}
    varied: list[tuple[str, dict[str, Any]]] = []
    if s.quick:
        tokens, base = 24, {**base, **QUICK, "chunk": 8}
    else:
        varied += [(f"T {T:,}", {**base, "tokens": T}) for T in s.lengths]
        # with tiny chunks fewer tokens: there the time per token does not depend on how many there are
        varied += [
            (f"C {C}", {**base, "chunk": C, "tokens": max(64, tokens // 8) if C <= 4 else tokens}) for C in s.chunks
        ]
        varied += [
            (f"D {D}", {**base, "width": D, "heads": max(1, MODEL_WIDTH // D), "tokens": tokens}) for D in s.widths
        ]
        varied += [(f"H {H}", {**base, "heads": H, "tokens": tokens}) for H in s.heads]
        varied += [(f"L {L}", {**base, "depth": L, "tokens": tokens}) for L in s.depths]
        varied += [(f"L 1, C {C}", {**base, "depth": 1, "chunk": C, "tokens": tokens}) for C in (1, 64)]  # by tiles
    varied.append(('forget_to="init"', {**base, "forget_to": "init", "tokens": tokens}))
    one = {**ONE_HEAD, **({"width": 16, "chunk": 8} if s.quick else {}), "rows": s.rows, "tokens": tokens}
    six = {**base, "tokens": tokens}
    cases = [
        Case(label=label, kind="op", mode=mode, case=case, allocator=allocator)
        for label, case in ((name_of(six), six), (name_of(one), one))
        for mode in s.modes
        for allocator in allocators(device)
        if mode != "decode" or allocator == "default"
    ]
    cases += [
        Case(label=label, kind="op", mode=mode, case=case)
        for label, case in varied
        for mode in s.modes
        if case != six  # measured above
        and (mode != "decode" or not label.startswith("T "))  # a token that is decoded knows no length
    ]
    if "decode" in s.modes:
        many = {**six, "rows": 8 * s.rows}
        cases.append(Case(label=f"{many['rows']} rows", kind="op", mode="decode", case=many))
    return cases


def name_of(case: dict[str, Any]) -> str:
    heads = f"{case['heads']} head{'s' if case['heads'] > 1 else ''} of {case['width']}"
    return f"{heads}, C {case['chunk']}, {case['rows']} × {case['tokens']:,}"


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
            for backend in ("chunked", "triton")
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
    case = shape["case"]
    form = "linear" if case["depth"] == 1 else f"expansion {case['expansion']}"
    return f"{shape['mode']}: {case['rows']} memories of {case['width']}, {form}, C {case['chunk']}"
