"""Everything that stands beside the kernels: `titans bench ops --backend triton`.

The chunked backend, other layers' kernels of the same width, attention and a plain copy. Nothing but tensors goes in:
(rows, tokens, heads, width), without projections, as for the op itself.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from titans_lm.bench.gate import check_kernels
from titans_lm.bench.measure import Runnable, one_pass
from titans_lm.bench.registry import Case, Cases, Place, subject
from titans_lm.bench.settings import PAPER, QUICK, OpsSettings

LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
"""Tokens of a row on a GPU, where none are asked for."""
CPU = "left out: needs a CUDA device"
HALF = "left out: takes numbers of 16 bits only (--dtype bf16)"
MAMBA_STATE = 128
"""Numbers of state for each channel of Mamba2, its own default."""
MAMBA_CHUNK = 256
Run = Callable[[], Tensor]


class Side(NamedTuple):
    """One thing to measure at every length."""

    label: str
    case: dict[str, Any]
    kind: str = "beside"
    needs: str | None = None
    """Package that it comes from."""
    install: str = ""
    gpu: bool = True
    """Whether it runs on a GPU only."""
    half: bool = False
    """Whether on a GPU it takes numbers of 16 bits only."""
    modes: tuple[str, ...] = ("forward", "forward+backward")


SIDES = [
    Side("triton", {"backend": "triton"}, "op", "triton", 'pip install "titans-lm[kernels]"'),
    Side("chunked", {"backend": "chunked"}, "op", gpu=False),
    Side("chunked, torch.compile", {"backend": "chunked", "compiled": True}, "op", gpu=False),
]
PEERS: dict[str, Callable[["Draw"], Run]] = {}
FLA = {"needs": "fla", "install": "pip install flash-linear-attention"}


def side(label: str, name: str, **settings: Any) -> Callable[[Callable[["Draw"], Run]], Callable[["Draw"], Run]]:
    """Let a function that draws tensors and gives a run of them stand beside the kernels."""

    def register(run: Callable[["Draw"], Run]) -> Callable[["Draw"], Run]:
        SIDES.append(Side(label, {"peer": name}, **settings))
        PEERS[name] = run
        return run

    return register


class Draw:
    """Tensors of a case: `leaf` are those that gradients are asked for."""

    def __init__(self, case: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.size = tuple(case[name] for name in ("rows", "tokens", "heads", "width"))
        self.dtype, self.device = dtype, device
        self.leaves: list[Tensor] = []

    def leaf(self, x: Tensor) -> Tensor:
        self.leaves.append(x.requires_grad_())
        return x

    def normal(self, *shape: int) -> Tensor:
        return self.leaf(torch.randn(*shape, device=self.device, dtype=self.dtype))

    def tokens(self, unit: bool = False) -> Tensor:
        x = torch.randn(*self.size, device=self.device)
        return self.leaf((F.normalize(x, dim=-1) if unit else x).to(self.dtype))

    def share(self, *shape: int) -> Tensor:
        """Numbers between 0 and 1 in float32, as gates have them."""
        return self.leaf(torch.rand(*shape, device=self.device))


@side("Gated DeltaNet (flash-linear-attention)", "gated-delta-rule", **FLA)
def gated_delta_rule(draw: Draw) -> Run:
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v = draw.tokens(unit=True), draw.tokens(unit=True), draw.tokens()
    beta, decay = draw.share(*draw.size[:3]), draw.share(*draw.size[:3])
    return lambda: rule(q, k, v, F.logsigmoid(decay), beta)[0]


@side("TTT-linear (flash-linear-attention)", "ttt-linear", **FLA)
def ttt_linear(draw: Draw) -> Run:
    ttt = import_module("fla.ops.ttt").chunk_ttt_linear
    q, k, v = draw.tokens(unit=True), draw.tokens(unit=True), draw.tokens()
    B, T, H, D = draw.size
    weight, bias, eta = draw.normal(H, D), draw.normal(H, D), draw.normal(B, T, H, 1)
    return lambda: ttt(q, k, v, weight, bias, eta, chunk_size=16)[0]


@side("Mamba2 (mamba-ssm)", "mamba2", needs="mamba_ssm", install="pip install mamba-ssm")
def mamba2(draw: Draw) -> Run:
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    B, T, H, _ = draw.size
    x, dt = draw.tokens(), draw.share(B, T, H)
    A = draw.share(H)
    into, out = draw.normal(B, T, 1, MAMBA_STATE), draw.normal(B, T, 1, MAMBA_STATE)
    return lambda: scan(x, dt, -A, into, out, MAMBA_CHUNK)


@side("FlashAttention (torch)", "flash-attention", gpu=False, half=True)
def flash_attention(draw: Draw) -> Run:
    q, k, v = (draw.tokens() for _ in range(3))

    def run() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*heads_first, is_causal=True)

    return run


@side("copy of q, k, v, o", "copy", gpu=False, modes=("forward",))
def copy(draw: Draw) -> Run:
    """Bytes of q, k, v and o: two tensors of tokens read, and two written."""
    x = torch.stack([draw.tokens().detach(), draw.tokens().detach()])
    out = torch.empty_like(x)
    draw.leaves.clear()
    return lambda: out.copy_(x)


@subject("beside")
def build(request: dict[str, Any], device: torch.device) -> Runnable:
    """Make a peer ready to run, forward or with its gradients."""
    case = request["case"]
    draw = Draw(case, getattr(torch, request["dtype"]), device)
    run = PEERS[case["peer"]](draw)
    return Runnable(one_pass(run, draw.leaves, request["mode"]), case["rows"] * case["tokens"])


def beside(settings: OpsSettings, at: Place) -> Cases:
    """Measure every side at every length; what is left out is a row that says why."""
    check = {}
    if at.device != "cpu":
        check["kernels_largest_difference"] = check_kernels([{**PAPER, "rows": settings.rows}], at.device)
    yield beside_cases(settings, at.device)
    return {"what": "ops-triton", "check": check}


def beside_cases(settings: OpsSettings, device: str) -> list[Case]:
    """List the cases: the paper's form of the memory, and everything else at its heads and width."""
    base = {**PAPER, "rows": settings.rows, **({**QUICK, "chunk": 8} if settings.quick else {})}
    return [
        Case(
            label=f"{side.label}, T {T:,}",
            kind=side.kind,
            mode=mode,
            case={**base, **side.case, "tokens": T},
            side="ours" if side.kind == "op" else side.label,
            missing=left_out(side, device, settings.dtype),
        )
        for T in lengths(settings, device)
        for side in SIDES
        for mode in side.modes
        if mode in settings.modes
    ]


def lengths(settings: OpsSettings, device: str) -> tuple[int, ...]:
    """The lengths asked for; 2K to 64K on a GPU, and on a CPU those of `titans bench ops`, where none are."""
    if settings.quick:
        return (24,)
    asked = settings.lengths != OpsSettings().lengths
    return LENGTHS if device != "cpu" and not asked else settings.lengths


def left_out(side: Side, device: str, dtype: str = "bf16") -> str | None:
    if side.gpu and device == "cpu":
        return CPU
    if side.half and device != "cpu" and dtype == "float32":
        return HALF
    if side.needs is not None and find_spec(side.needs) is None:
        return f"left out: {side.needs} is not installed ({side.install})"
    return None
