"""What `titans bench` measures of ours: the op by its sizes and by backends, layers and models, long texts."""

import dataclasses
from dataclasses import replace
from itertools import product
from typing import Any, get_args

from titans_lm.bench.registry import Case, Cases, Comparison, Place, Repeated, allocators, benchmark
from titans_lm.bench.settings import (
    ONE_HEAD,
    PAPER,
    QUICK,
    KernelsSettings,
    ModelSettings,
    OpsSettings,
    ScalingSettings,
    TNTSettings,
    TrainingSettings,
)
from titans_lm.config import Architecture
from titans_lm.experiments.models import model_settings
from titans_lm.experiments.settings import small_training

MODEL_WIDTH = 384


@benchmark("ops", OpsSettings)
def ops(settings: OpsSettings, at: Place) -> Cases:
    """Measure every case of the settings."""
    yield op_cases(settings, at.device)


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
    """List the grid without what no kernel does."""
    from titans_lm.ops.triton import unsupported

    found = []
    grid = product(settings.widths, settings.expansions, settings.chunks, settings.memories, settings.modes)
    for D, expansion, C, memories, mode in grid:
        widths = [(D, D)] if expansion == 0 else [(D, expansion * D), (expansion * D, D)]
        if unsupported(widths, C) is None:
            case = {
                "rows": memories, "heads": 1, "width": D, "depth": len(widths), "expansion": max(1, expansion),
                "chunk": C, "tokens": settings.tokens, "forget_to": "zero",
            }  # fmt: skip
            found.append({"mode": mode, "case": case})
    return found


def label(shape: dict[str, Any]) -> str:
    case = shape["case"]
    form = "linear" if case["depth"] == 1 else f"expansion {case['expansion']}"
    return f"{shape['mode']}: {case['rows']} memories of {case['width']}, {form}, C {case['chunk']}"


SIZES = {
    "width": 256, "layers": 4, "heads": 4, "ffn": 1024, "depth": 2, "expansion": 4, "chunk": 16, "segment": 128,
    "persistent": 4, "vocab": 256,
}  # fmt: skip
"""The model that is measured: MAC as titans-pytorch's README has it, and the same sizes for all others."""
QUICK_MODEL = {"width": 32, "layers": 2, "heads": 2, "ffn": 32, "expansion": 1, "chunk": 8, "segment": 16}
LONG_CHUNK = 64
"""Tokens of a chunk that is long for a plain memory."""


def model_case(name: str, quick: bool) -> dict[str, Any]:
    return {"model": name, **SIZES, **(QUICK_MODEL if quick else {})}


@benchmark("model", ModelSettings)
def model(settings: ModelSettings, _: Place) -> Cases:
    yield model_cases(settings)


def model_cases(s: ModelSettings) -> list[Case]:
    """List a training step, a prompt, and tokens after each context for every model; ValueError for sizes of none."""
    from titans_lm.bench.subjects_model import stack_config

    cases = []
    for name in s.models:
        sizes = model_case(name, s.quick) | ({} if s.quick else {"width": s.width, "layers": s.layers})
        stack_config(sizes, name if name in get_args(Architecture) else "attention")  # now, not when its turn comes
        train, prompt = (64, 64) if s.quick else (1024, s.prefill)
        cases.append(Case(label=name, kind="model", mode="train", case={**sizes, "rows": 4, "tokens": train}))
        cases.append(Case(label=name, kind="model", mode="prefill", case={**sizes, "rows": 1, "tokens": prompt}))
        cases += [
            Case(label=name, kind="model", mode="decode", case={**sizes, "rows": 1, "context": context})
            for context in (tuple(min(c, 50) for c in s.contexts[:1]) if s.quick else s.contexts)
        ]
    return cases


@benchmark("tnt", TNTSettings)
def tnt(settings: TNTSettings, at: Place) -> Cases:
    """Set TNT layers beside plain memories of their local chunk and of long ones; ValueError for sizes of no layer."""
    from titans_lm.bench.subjects_model import layer_config, tnt_settings

    s = dataclasses.replace(settings, widths=(16,), tokens=64, shards=(32,)) if settings.quick else settings
    shared = {"heads": s.heads, "expansion": s.expansion, "forget_to": "init", "rows": s.rows, "tokens": s.tokens}
    for width, shard in product(s.widths, s.shards):  # now, and not when its turn comes
        layer_config({**shared, "width": width}, **tnt_settings(s.chunk, shard))
    for width in s.widths:
        title, base = f"{s.heads} heads of {width // s.heads}, {s.rows} × {s.tokens:,}", {**shared, "width": width}
        sides = [(f"LMM, chunk {chunk}", {"layer": "memory", "chunk": chunk}) for chunk in (s.chunk, LONG_CHUNK)]
        sides += [
            (f"TNT, local chunk {s.chunk}, shard {shard:,}", {"layer": "tnt", "chunk": s.chunk, "shard": shard})
            for shard in s.shards
        ]
        how = {"kind": "layer", "mode": "forward+backward", "allocator": allocators(at.device)[-1]}
        yield Comparison(title, [Case(label=label, case={**base, **own}, **how) for label, own in sides])


@benchmark("training", TrainingSettings)
def training(settings: TrainingSettings, at: Place) -> Cases:
    """Compare all models, by the names that `titans compare` takes; ValueError for a name that is none."""
    sizes = {"parameters": settings.parameters, "vocab": settings.vocab_size}
    sizes |= {"rows": settings.rows, "tokens": settings.tokens}
    if settings.quick:
        sizes |= {"parameters": 80_000, "vocab": 256, "tokens": 64}
    for name in settings.models:  # now, and not when its turn comes
        model_settings(small_training(), name, sizes["parameters"])
    title = f"{sizes['parameters']:,} parameters, {sizes['rows']} × {sizes['tokens']:,}"
    how = {"kind": "model", "mode": "train", "allocator": allocators(at.device)[-1]}
    yield Comparison(title, [Case(label=name, case={"sized": name, **sizes}, **how) for name in settings.models])


FORMS = ((2, 4096), (2, 16_384))
"""Rows and tokens that are measured beside one row of every length."""
STREAM = {**SIZES, "width": 64, "layers": 2, "heads": 1, "ffn": 128, "expansion": 2, "chunk": 64, "rows": 1}
"""The small model that streams."""
WINDOW, PIECE = 100_000, 4096
LONG = 65_536
"""Tokens from which on one run after one warm-up is enough: it takes half a minute."""


@benchmark("scaling", ScalingSettings)
def scaling(settings: ScalingSettings, at: Place) -> Cases:
    """Measure until a length does not fit; then let models read on.

    A window of a stream takes seconds, so one ratio of two of them says as much of the machine's neighbours as of the
    model: it runs `rounds` times.
    """
    allocator = allocators(at.device)[-1]
    for case in length_cases(settings, allocator):
        row = yield case
        if "error" in row:
            break
    ratios = ("memory_ratio", "throughput_ratio", "tokens_per_second")
    for case in stream_cases(settings):
        yield Repeated(replace(case, allocator=allocator), medians=ratios, kept=(*ratios, "windows"))


def length_cases(s: ScalingSettings, allocator: str) -> list[Case]:
    """The layer's form of the peers at every length, forward and backward; short ones first."""
    one = {**ONE_HEAD, **({"width": 16, "chunk": 8} if s.quick else {})}
    shapes = [(1, 32), (1, 64)] if s.quick else [*FORMS, *((1, T) for T in sorted(s.lengths))]
    return [
        Case(
            label=f"{rows} × {tokens:,}", kind="op", mode="forward+backward",
            case={**one, "rows": rows, "tokens": tokens}, allocator=allocator,
            settings={"repeats": 1, "warmup": 1} if tokens > LONG else {},
        )
        for rows, tokens in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    ]  # fmt: skip


def stream_cases(s: ScalingSettings) -> list[Case]:
    """Models that read on and on, state carried, nothing else kept."""
    if s.stream_tokens == 0:
        return []
    tokens, window, piece = (600, 200, 64) if s.quick else (s.stream_tokens, WINDOW, PIECE)
    sizes = STREAM | ({"width": 16, "chunk": 8, "segment": 16} if s.quick else {})
    return [
        Case(label=name, kind="stream", case={**sizes, "model": name, "tokens": tokens, "window": window,
                                              "piece": piece})
        for name in s.stream_models
    ]  # fmt: skip
