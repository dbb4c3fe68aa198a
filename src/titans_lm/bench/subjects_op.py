"""The op alone, as a case: its tensors, and one forward, one forward with backward, or a run of single tokens."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_lm.bench.flops import memory_flops, memory_widths
from titans_lm.bench.measure import Runnable, one_pass, seconds
from titans_lm.bench.registry import subject
from titans_lm.config import MemoryConfig
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory
from titans_lm.ops.matmul import has_faster_products, linear

DECODED = 64
"""Tokens that a run of decoding writes, or one chunk if that is longer: whole chunks, so every place counts alike."""


class Call(NamedTuple):
    """The arguments of one call of the op, and those of them that gradients are asked for."""

    tensors: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    network: MemoryNetwork
    leaves: tuple[Tensor, ...]

    def __call__(
        self, state: MemoryState, chunk_size: int, backend: str = "auto", tokens: slice = slice(None)
    ) -> tuple[Tensor, MemoryState]:
        parts = (x[:, tokens] for x in self.tensors)
        return neural_memory(*parts, state, network=self.network, chunk_size=chunk_size, backend=backend)


def make_call(case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Call:
    """Draw a call as a fresh `NeuralMemory` would make it: keys of norm 1, gates around where training starts.

    A gate per head and memory layer, θ below its bound with 1 / fan-in for the later layers, M_init at its scale.
    """
    B, T, H, D, L = (case[name] for name in ("rows", "tokens", "heads", "width", "depth"))
    config = MemoryConfig(
        hidden_size=H * D,
        num_attention_heads=H,
        memory_depth=L,
        memory_expansion=case["expansion"],
        chunk_size=case["chunk"],
    )
    widths = config.memory_widths
    state = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=state)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(B, T, H, L, device=device, dtype=state)

    q, k = (F.normalize(normal(B, T, H, D), dim=-1).to(dtype).requires_grad_() for _ in range(2))
    v = normal(B, T, H, D).to(dtype).requires_grad_()
    fan_in = torch.tensor([1.0, *widths[1:-1]], device=device, dtype=state)
    theta = (uniform(0.3, 0.7) * config.theta_max / fan_in).requires_grad_()
    eta = uniform(0.2, config.eta_max).requires_grad_()
    alpha = uniform(0.0, 0.004).requires_grad_()
    scales = [1.0, *[w**-0.5 for w in widths[1:-1]]] if L > 1 else [1.0 / D]
    weights = tuple(
        (normal(H, a, b) * scale).requires_grad_() for (a, b), scale in zip(pairwise(widths), scales, strict=True)
    )
    norm: tuple[Tensor, ...] = ()
    if config.use_norm:
        norm = ((1.0 + 0.1 * normal(H, D)).requires_grad_(), (0.1 * normal(H, D)).requires_grad_())
    network = MemoryNetwork(
        residual=config.use_residual,
        norm_weight=norm[0] if norm else None,
        norm_bias=norm[1] if norm else None,
        forget_to=case["forget_to"],
        initial=weights if case["forget_to"] == "init" else None,
    )
    tensors = (q, k, v, theta, eta, alpha)
    return Call(tensors, weights, network, (*tensors, *weights, *norm))


@subject("op")
def build(request: dict[str, Any], device: torch.device) -> Runnable:
    case, mode = request["case"], request["mode"]
    decodes = mode == "decode"
    if decodes:
        case = {**case, "tokens": max(DECODED, case["chunk"])}
    call = make_call(case, getattr(torch, request["dtype"]), device)
    widths = memory_widths(case["width"], case["depth"], case["expansion"])
    passes = 3 if mode == "forward+backward" else 1
    per_token = passes * memory_flops(widths, case["chunk"], forget_to_init=case["forget_to"] == "init")
    tokens = case["rows"] * case["tokens"]
    return Runnable(
        decode(call, case) if decodes else one_pass(lambda: run(call, case), call.leaves, mode, call.tensors[0]),
        tokens,
        None if decodes else tokens * case["heads"] * per_token,
        case["tokens"] if decodes else 1,
        one_dnn_rate(request, device),
    )


def one_dnn_rate(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Operations per second of the same square product as beside every case, where oneDNN does it and is faster."""
    if device.type != "cpu" or request["dtype"] != "float32" or not has_faster_products():
        return {}
    size = request["matmul"]
    a, b = (torch.randn(size, size) for _ in range(2))
    linear(a, b)
    return {"one_dnn_flops_per_second": 2 * size**3 / median(seconds(lambda: linear(a, b), device) for _ in range(5))}


def run(call: Call, case: dict[str, Any]) -> Tensor:
    """Read the whole case from a fresh state by the backend it names."""
    return call(MemoryState.initial(call.weights, case["rows"]), case["chunk"], case.get("backend", "auto"))[0]


def decode(call: Call, case: dict[str, Any]) -> Callable[[], Any]:
    """Single tokens, each from the state that the last one left; the text goes on from run to run."""
    with torch.no_grad():
        state = MemoryState.initial(call.weights, case["rows"])

    @torch.no_grad()
    def step() -> None:
        nonlocal state
        for t in range(case["tokens"]):
            _, state = call(state, case["chunk"], case.get("backend", "auto"), slice(t, t + 1))

    return step
