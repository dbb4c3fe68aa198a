"""Kernels at the sizes they are for, on a GPU; collected only where there is one (conftest.py)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.memory_cases import Case, make_call
from ops.triton_cases import moved
from titans_lm.ops import neural_memory

DEVICE = torch.device("cuda")
CASES = {
    "linear": Case(tokens=534, depth=1, residual=False, norm="none", width=64, chunk=64, heads=4),
    "deep-16": Case(tokens=300, width=64, expansion=4, chunk=16, heads=4),
    "deep-32": Case(tokens=300, width=64, expansion=4, chunk=32, heads=4, forget_to="init"),
    "deep-wide": Case(tokens=278, width=128, expansion=4, chunk=32, heads=2),
}
each = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def outcome(case: Case, backend: str, inputs: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Outputs, the last state and gradients, for q, k and v as `inputs` makes them."""
    call = moved(make_call(case), torch.float32, DEVICE)
    *given, state = call.arguments
    tokens = [inputs(x) for x in given[:3]]
    o, after = neural_memory(*tokens, *given[3:], state, **call.settings, backend=backend)
    values: dict[str, Any] = {"o": o, **{f"M{i}": w for i, w in enumerate(after.M)}}
    values |= {f"S{i}": w for i, w in enumerate(after.S)}
    generator = torch.Generator().manual_seed(1)
    mix = sum((x.float() * torch.randn(x.shape, generator=generator).to(DEVICE)).sum() for x in values.values())
    found = torch.autograd.grad(mix, list(call.leaves.values()))
    values |= {f"gradient of {name}": g for name, g in zip(call.leaves, found, strict=True)}
    return {name: x.detach().double().cpu() for name, x in values.items()}


def errors(exact: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """Root mean square errors, as a share of the tensor's own size."""
    return {name: float((got[name] - x).norm() / x.norm()) for name, x in exact.items()}


@each
def test_sixteen_bits_lose_at_most_twice_what_the_chunked_backend_loses(case: Case) -> None:
    """Both against float32 inputs; the smallest errors are those of rounding once."""
    exact = outcome(case, "chunked", lambda x: x)
    theirs, ours = (errors(exact, outcome(case, b, lambda x: x.bfloat16())) for b in ("chunked", "triton"))
    wrong = {name: (ours[name], error) for name, error in theirs.items() if not ours[name] <= 2 * error + 1e-6}
    assert not wrong


@each
def test_float32_is_float32(case: Case) -> None:
    """Against float64 on the CPU: no product is rounded to fewer digits on its way."""
    call = make_call(case)
    *given, state = call.arguments
    with torch.no_grad():
        exact, last = neural_memory(*given, state, **call.settings, backend="chunked")
        *given, state = moved(call, torch.float32, DEVICE).arguments
        settings = moved(call, torch.float32, DEVICE).settings
        o, after = neural_memory(*given, state, **settings, backend="triton")
    pairs = {"o": (exact, o), **{f"M{i}": p for i, p in enumerate(zip(last.M, after.M, strict=True))}}
    assert all((y.double().cpu() - x).norm() <= 1e-5 * x.norm() for x, y in pairs.values())


@each
def test_every_launch_gives_the_same(case: Case) -> None:
    """Whatever autotuning tries, and whichever program ends first."""
    first, second = (outcome(replace(case, seed=3), "triton", lambda x: x) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())
