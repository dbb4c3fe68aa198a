"""Nothing is reported of an op that is wrong: the fast path against the definition, before anything is measured."""

from collections.abc import Iterable
from contextlib import nullcontext
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
Pairs = dict[str, tuple[Tensor, Tensor]]
"""What must agree, by name."""
PIECES = (slice(0, 9), slice(9, None))
"""A text in two calls, cut in the middle of a chunk."""


def check_op(device: torch.device) -> dict[str, Any]:
    """Compare values, final state and gradients of the two backends in float64.

    Raises ValueError, so that nothing is written, when any of them differs by more than a share of 1e-9.
    """
    largest = 0.0
    for change in CASES:
        case = {**BASE, **change}
        expected, got = (results(case, backend, device) for backend in ("reference", "auto"))
        pairs = {**paired(expected, got), **decoded(case, expected, device)}
        error = worst(pairs, TOLERANCE, "the op is", f"reference ({case})", " before `make test` passes")
        largest = max(largest, error)
    return {"cases": len(CASES), "tolerance": TOLERANCE, "largest_difference": largest}


def results(case: dict[str, Any], backend: str, device: torch.device) -> dict[str, Tensor]:
    """Everything that comes out of a text read in two pieces: outputs, the state, and all gradients."""
    call, weights = drawn(case, device)
    values = read(call, case, backend, PIECES)
    mix = (values["o"] * weights).sum() + sum((x * x).sum() for name, x in values.items() if name != "o")
    gradients = torch.autograd.grad(mix, call.leaves, allow_unused=True)
    return {**{n: x.detach() for n, x in values.items()}, **named_gradients(call, gradients)}


def decoded(case: dict[str, Any], expected: dict[str, Tensor], device: torch.device) -> Pairs:
    """Read the same text token by token, as decoding does, without gradients: pairs of values that must agree."""
    call, _ = drawn(case, device)
    with torch.no_grad():
        values = read(call, case, "auto", [slice(t, t + 1) for t in range(case["tokens"])])
    return {f"{name}, token by token,": (expected[name], x) for name, x in values.items()}


def drawn(case: dict[str, Any], device: torch.device) -> tuple[Call, Tensor]:
    """Draw the same call for every backend, and what its outputs are weighed with."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        call = make_call(case, torch.float64, device)
        return call, torch.randn(case["tokens"], device=device, dtype=torch.float64)[:, None, None]


def read(call: Call, case: dict[str, Any], backend: str, pieces: Iterable[slice]) -> dict[str, Tensor]:
    """Read a text in pieces with the state carried: its outputs and the final state."""
    state, outputs = MemoryState.initial(call.weights, case["rows"]), []
    for tokens in pieces:
        o, state = call(state, case["chunk"], backend, tokens)
        outputs.append(o)
    return {"o": torch.cat(outputs, 1), **named(state)}


def named(state: MemoryState) -> dict[str, Tensor]:
    return {f"{name}[{i}]": w for name in ("M", "S", "anchor") for i, w in enumerate(getattr(state, name))}


def named_gradients(call: Call, gradients: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    names = ["q", "k", "v", "theta", "eta", "alpha"]
    names += [f"M_init[{i}]" for i in range(len(call.weights))] + ["norm weight", "norm bias"]
    return {f"gradient of {n}": g for n, g in zip(names, gradients, strict=False) if g is not None}


def paired(expected: dict[str, Tensor], got: dict[str, Tensor]) -> Pairs:
    return {name: (x, got[name]) for name, x in expected.items()}


def worst(pairs: Pairs, tolerance: float, what: str, other: str, until: str = "") -> float:
    """Give the largest difference of pairs; ValueError for one above the tolerance.

    A difference is a share of the tensor's largest value, counted from 1e-6 of all tensors' largest on.
    """
    scale, largest = max(float(x.abs().max()) for x, _ in pairs.values()), 0.0
    for name, (x, y) in pairs.items():
        error = float((x - y).abs().max()) / max(float(x.abs().max()), 1e-6 * scale, 1e-30)
        if not error <= tolerance:
            raise ValueError(
                f"{what} wrong: {name} differs by a share of {error:.1e} from the {other}; expected at most "
                f"{tolerance:.0e}; nothing is measured{until}"
            )
        largest = max(largest, error)
    return largest


def check_kernels(cases: list[dict[str, Any]], device: str, tokens: int = 150) -> float:
    """Compare values and gradients of the two in float32 for every form of memory, on two memories."""
    largest = 0.0
    forms = {tuple((k, v) for k, v in case.items() if k not in ("rows", "tokens")): case for case in cases}
    for form in forms.values():
        case = {**form, "rows": 2, "tokens": tokens}
        with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():  # where Triton launches
            expected, got = (_outcome(case, backend, torch.device(device)) for backend in ("chunked", "triton"))
        largest = max(largest, worst(paired(expected, got), KERNELS, "the kernels are", f"chunked backend ({case})"))
    return largest


def _outcome(case: dict[str, Any], backend: str, device: torch.device) -> dict[str, Tensor]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        call = make_call(case, torch.float32, device)
        o, state = call(MemoryState.initial(call.weights, case["rows"]), case["chunk"], backend)
        towards = torch.randn_like(o)
    found = torch.autograd.grad((o * towards).sum() + sum(w.sum() for w in state.M), call.leaves)
    values = {"o": o, **{f"M[{i}]": w for i, w in enumerate(state.M)}}
    return {**{n: x.detach() for n, x in values.items()}, **named_gradients(call, found)}
