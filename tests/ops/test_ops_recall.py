"""Reading alone: its gradients by hand are autograd's of the network's forward pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ops.memory_cases import Case, make_call
from titans_lm.ops import read
from titans_lm.ops.network import forward, norm_parameters

FORMS: dict[str, dict[str, Any]] = {
    "norm": {"norm": "weight and bias"},
    "no norm": {"norm": "none"},
    "norm without bias, depth 3": {"norm": "weight", "depth": 3},
    "linear": {"depth": 1},
    "no residual": {"residual": False},
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu"},
}


@pytest.mark.parametrize("asked", ["all", "q", "M", "norm"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_read(form: str, asked: str) -> None:
    call = make_call(Case(tokens=5, **FORMS[form]))
    q, M, network = call.arguments[0].detach(), call.arguments[6].M, call.settings["network"]
    found = []
    for by_hand in (True, False):
        x = q.clone().requires_grad_(asked in ("all", "q"))
        weights = tuple(w.detach().clone().requires_grad_(asked in ("all", "M")) for w in M)
        norm = [
            None if p is None else p.detach().clone().requires_grad_(asked in ("all", "norm"))
            for p in (network.norm_weight, network.norm_bias)
        ]
        made = replace(network, norm_weight=norm[0], norm_bias=norm[1])
        if by_hand:
            o = read(weights, x, made)
        else:
            o = forward(weights, x.transpose(1, 2), made, *norm_parameters(made, x.dtype)).transpose(1, 2)
        leaves = [p for p in (x, *weights, *norm) if p is not None and p.requires_grad]
        grad = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
        found.append((o.detach(), *(torch.autograd.grad(o, leaves, grad) if leaves else ())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-11)
