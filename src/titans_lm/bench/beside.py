"""`titans bench ops --backend triton`: the kernels beside the chunked backend, other layers' kernels and two limits."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from titans_lm.bench.kernels import check_kernels
from titans_lm.bench.ops import PAPER, QUICK
from titans_lm.bench.run import Bench, Case, report
from titans_lm.bench.settings import OpsSettings

LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
"""Tokens of a row on a GPU, where none are asked for."""
CPU = "left out: needs a CUDA device"


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
    modes: tuple[str, ...] = ("forward", "forward+backward")


SIDES = (
    Side("triton", {"backend": "triton"}, "op", "triton", 'pip install "titans-lm[kernels]"'),
    Side("chunked", {"backend": "chunked"}, "op", gpu=False),
    Side("chunked, torch.compile", {"backend": "chunked", "compiled": True}, "op", gpu=False),
    Side(
        "Gated DeltaNet (flash-linear-attention)", {"peer": "gated-delta-rule"}, needs="fla",
        install="pip install flash-linear-attention",
    ),
    Side(
        "TTT-linear (flash-linear-attention)", {"peer": "ttt-linear"}, needs="fla",
        install="pip install flash-linear-attention",
    ),
    Side("Mamba2 (mamba-ssm)", {"peer": "mamba2"}, needs="mamba_ssm", install="pip install mamba-ssm"),
    Side("FlashAttention (torch)", {"peer": "flash-attention"}, gpu=False),
    Side("copy of q, k, v, o", {"peer": "copy"}, gpu=False, modes=("forward",)),
)  # fmt: skip


def run_beside(settings: OpsSettings, bench: Bench, command: str, check: dict[str, Any]) -> dict[str, Any]:
    """Measure every side at every length, and write ops-triton.json; what is left out is a row that says why."""
    if bench.device != "cpu":
        case = {**PAPER, "rows": settings.rows}
        check = {**check, "kernels_largest_difference": check_kernels([{"case": case}], torch.device(bench.device))}
    rows = [bench.measure(case) for case in beside_cases(settings, bench.device)]
    return report("ops-triton", bench, command, check, rows)


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
            missing=left_out(side, device),
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


def left_out(side: Side, device: str) -> str | None:
    """Why a side cannot be measured here; None where it can."""
    if side.gpu and device == "cpu":
        return CPU
    if side.needs is not None and find_spec(side.needs) is None:
        return f"left out: {side.needs} is not installed ({side.install})"
    return None
