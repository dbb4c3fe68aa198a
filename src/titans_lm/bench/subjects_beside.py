"""What stands beside the kernels of the memory: other layers' kernels of the same width, attention, and a plain copy.

Nothing but tensors goes in: (rows, tokens, heads, width), without projections, as for the op itself.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from titans_lm.bench.measure import Runnable

MAMBA_STATE = 128
"""Numbers of state for each channel of Mamba2, its own default."""
MAMBA_CHUNK = 256
Run = Callable[[], Tensor]
Leaves = list[Tensor]


class Draw:
    """Tensors of a case: `leaf` are those that gradients are asked for."""

    def __init__(self, case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.size = tuple(case[name] for name in ("rows", "tokens", "heads", "width"))
        self.dtype, self.device = dtype, device
        self.leaves: Leaves = []

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of normal numbers."""
        x = torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)
        self.leaves.append(x.requires_grad_())
        return x

    def tokens(self, unit: bool = False) -> Tensor:
        """q, k or v, of norm 1 where asked for."""
        x = torch.randn(*self.size, device=self.device)
        self.leaves.append((F.normalize(x, dim=-1) if unit else x).to(self.dtype).requires_grad_())
        return self.leaves[-1]

    def share(self, *shape: int) -> Tensor:
        """Numbers between 0 and 1 in float32, as gates have them."""
        self.leaves.append(torch.rand(*shape, device=self.device).requires_grad_())
        return self.leaves[-1]


def gated_delta_rule(draw: Draw) -> Run:
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v = draw.tokens(unit=True), draw.tokens(unit=True), draw.tokens()
    beta, decay = draw.share(*draw.size[:3]), draw.share(*draw.size[:3])
    return lambda: rule(q, k, v, F.logsigmoid(decay), beta)[0]


def ttt_linear(draw: Draw) -> Run:
    ttt = import_module("fla.ops.ttt").chunk_ttt_linear
    q, k, v = draw.tokens(unit=True), draw.tokens(unit=True), draw.tokens()
    B, T, H, D = draw.size
    weight, bias, eta = draw.leaf(H, D), draw.leaf(H, D), draw.leaf(B, T, H, 1)
    return lambda: ttt(q, k, v, weight, bias, eta, chunk_size=16)[0]


def mamba2(draw: Draw) -> Run:
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    B, T, H, _ = draw.size
    x, dt = draw.tokens(), draw.share(B, T, H)
    A = draw.share(H)
    into, out = draw.leaf(B, T, 1, MAMBA_STATE), draw.leaf(B, T, 1, MAMBA_STATE)
    return lambda: scan(x, dt, -A, into, out, MAMBA_CHUNK)


def flash_attention(draw: Draw) -> Run:
    q, k, v = (draw.tokens() for _ in range(3))

    def run() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*heads_first, is_causal=True)

    return run


def copy(draw: Draw) -> Run:
    """Bytes of q, k, v and o: two tensors of tokens read, and two written."""
    x = torch.stack([draw.tokens().detach(), draw.tokens().detach()])
    out = torch.empty_like(x)
    draw.leaves.clear()
    return lambda: out.copy_(x)


PEERS: dict[str, Callable[[Draw], Run]] = {
    "gated-delta-rule": gated_delta_rule,
    "ttt-linear": ttt_linear,
    "mamba2": mamba2,
    "flash-attention": flash_attention,
    "copy": copy,
}


def build(request: dict[str, Any], device: torch.device) -> Runnable:
    """Make a peer ready to run, forward or with its gradients."""
    case, mode = request["case"], request["mode"]
    draw = Draw(case, getattr(torch, request["dtype"]), device)
    run = PEERS[case["peer"]](draw)
    tokens = case["rows"] * case["tokens"]
    if mode == "forward":

        @torch.no_grad()
        def step() -> None:
            run()
    else:
        towards = torch.randn_like(run())

        def step() -> None:
            torch.autograd.grad(run(), draw.leaves, towards)

    return Runnable(step, tokens)
