"""Calls for the kernels: on the GPU where there is one, in Triton's interpreter elsewhere (see conftest.py)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ops import quick_interpreter
from ops.memory_cases import Call, Case, disagreement, make_call
from titans_lm.ops import MemoryState
from titans_lm.ops.state import map_state

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    quick_interpreter.install()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.float32 if ON_GPU else torch.float64
TOLERANCE = 2e-4 if ON_GPU else 1e-10
LINEAR = {"depth": 1, "residual": False, "norm": "none", "width": 5}
DEEP = {"rows": 1, "width": 5, "expansion": 4}
PER_HEAD = ("head", "head", "head")


class Moved(Call):
    """A call whose leaves stay where they are: what the op is given is cast and moved, what it gives comes back."""

    def __call__(self, backend: str) -> tuple[Tensor, MemoryState, Tensor]:
        valid = self.settings["valid"]
        o, state, surprise = Call({}, self.arguments, self.settings)(backend)
        assert valid is None or valid.device == o.device
        return o.cpu().double(), map_state(_back, state), surprise.cpu().double()


def _back(x: Tensor) -> Tensor:
    return x.cpu().double() if x.is_floating_point() else x.cpu()


def moved(call: Call, dtype: torch.dtype = DTYPE, device: torch.device = DEVICE) -> Moved:
    """The call in another type, on a device, with gradients that reach the leaves."""

    def cast(x: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, tuple):
            return tuple(cast(y) for y in x)
        return x.to(device, dtype if x.is_floating_point() else None)

    *inputs, (M, S, anchor, offset, _) = call.arguments
    weights = cast(M)
    same = all(a is w for a, w in zip(anchor, M, strict=True))
    state = MemoryState(weights, cast(S), weights if same else cast(anchor), offset.to(device))
    network = call.settings["network"]
    parts = {name: cast(getattr(network, name)) for name in ("norm_weight", "norm_bias", "initial")}
    valid = call.settings["valid"]
    settings = {
        **call.settings,
        "network": replace(network, **parts),
        "valid": None if valid is None else valid.to(device),
    }
    return Moved(call.leaves, (*map(cast, inputs), state), settings)


def assert_kernels_agree(case: Case, dtype: torch.dtype = DTYPE, tolerance: float = TOLERANCE) -> None:
    """The kernels give the definition's values and gradients; a NaN agrees with nothing."""
    call = make_call(case)
    for x, y in zip(call.results("reference"), moved(call, dtype).results("triton"), strict=True):
        wrong = {name: error for name, error in disagreement(x, y).items() if not error <= tolerance}
        assert not wrong, f"{case}: {wrong}"
