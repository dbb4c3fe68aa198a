"""Nothing is reported of an op that is wrong: the fast path against the definition, before anything is measured."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from titans_lm.bench.subjects_op import Call, make_call
from titans_lm.ops import MemoryState

TOLERANCE = 1e-9
KERNELS = 1e-3
"""Largest difference of kernels in float32, as a share of the largest number of a tensor."""
BASE = {"rows": 2, "tokens": 21, "heads": 2, "width": 6, "depth": 2, "expansion": 2, "chunk": 4, "forget_to": "zero"}
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"forget_to": "init"},
    {"depth": 1},
    {"depth": 1, "forget_to": "init"},
    {"depth": 3},
    {"chunk": 1},
    {"chunk": 16},
    {"chunk": 64},
    {"heads": 1, "rows": 1, "expansion": 4},
)
"""What differs from the base in each: the families that are measured, small."""
PIECES = (slice(0, 9), slice(9, None))
"""A text in two calls, cut in the middle of a chunk."""


def check_op(device: torch.device) -> dict[str, Any]:
    """Compare values, final state and gradients of the two backends in float64; ValueError where any differs."""
    largest = 0.0
    for change in CASES:
        case = {**BASE, **change}
        call, weights = drawn(case, torch.float64, device)
        expected, got = (results(call, read(call, case, of, PIECES), weights, 2) for of in ("reference", "auto"))
        with torch.no_grad():  # as decoding reads it
            decoded = read(call, case, "auto", [slice(t, t + 1) for t in range(case["tokens"])])
        for name, x in decoded.items():
            expected[f"{name}, token by token,"], got[f"{name}, token by token,"] = expected[name], x
        error = worst(expected, got, TOLERANCE, "the op is", f"reference ({case})", " before `make test` passes")
        largest = max(largest, error)
    return {"cases": len(CASES), "tolerance": TOLERANCE, "largest_difference": largest}


def check_kernels(cases: list[dict[str, Any]], device: str, tokens: int = 534) -> float:
    """Compare values and gradients of the two in float32 for every form of memory, on two memories.

    Of 534 tokens, chunks of 16, 32 and 64 have segments of whole chunks and a last one that is not: both forms run.
    """
    largest = 0.0
    forms = {tuple((k, v) for k, v in case.items() if k not in ("rows", "tokens")): case for case in cases}
    for form in forms.values():
        case = {**form, "rows": 2, "tokens": tokens}
        call, weights = drawn(case, torch.float32, torch.device(device))
        both = [read(call, case, backend, [slice(None)], ("M",)) for backend in ("chunked", "triton")]
        expected, got = (results(call, values, weights, 1) for values in both)
        largest = max(largest, worst(expected, got, KERNELS, "the kernels are", f"chunked backend ({case})"))
    return largest


def drawn(case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Call, Tensor]:
    """Draw a call, and what its outputs are weighed with."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        call = make_call(case, dtype, device)
        return call, torch.randn_like(call.tensors[2])


def read(
    call: Call, case: dict[str, Any], backend: str, pieces: Iterable[slice], kept: Iterable[str] = ("M", "S", "anchor")
) -> dict[str, Tensor]:
    """Read a text in pieces with the state carried: its outputs, and the parts of the final state that are kept."""
    state, outputs = MemoryState.initial(call.weights, case["rows"]), []
    for tokens in pieces:
        o, state = call(state, case["chunk"], backend, tokens)
        outputs.append(o)
    parts = {f"{name}[{i}]": w for name in kept for i, w in enumerate(getattr(state, name))}
    return {"o": torch.cat(outputs, 1), **parts}


def results(call: Call, values: dict[str, Tensor], weights: Tensor, power: int) -> dict[str, Tensor]:
    """Add to values the gradients of their mix: of weighed outputs, and of the numbers of the state to a power."""
    mix = (values["o"] * weights).sum() + sum((x**power).sum() for name, x in values.items() if name != "o")
    names = ["q", "k", "v", "theta", "eta", "alpha"]
    names += [f"M_init[{i}]" for i in range(len(call.weights))] + ["norm weight", "norm bias"]
    gradients = zip(names, torch.autograd.grad(mix, call.leaves, allow_unused=True), strict=False)
    return {n: x.detach() for n, x in values.items()} | {f"gradient of {n}": g for n, g in gradients if g is not None}


def worst(
    expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float, what: str, other: str, until: str = ""
) -> float:
    """Give the largest difference of tensors of one name; ValueError for one above the tolerance.

    A difference is a share of the tensor's largest value, counted from 1e-6 of all tensors' largest on.
    """
    assert expected.keys() == got.keys(), "both have gradients of the same tensors"
    scale, largest = max(float(x.abs().max()) for x in expected.values()), 0.0
    for name, x in expected.items():
        error = float((x - got[name]).abs().max()) / max(float(x.abs().max()), 1e-6 * scale, 1e-30)
        if not error <= tolerance:
            raise ValueError(
                f"{what} wrong: {name} differs by a share of {error:.1e} from the {other}; expected at most "
                f"{tolerance:.0e}; nothing is measured{until}"
            )
        largest = max(largest, error)
    return largest
