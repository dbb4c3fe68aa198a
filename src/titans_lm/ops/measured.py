"""Where a kernel was measured to be faster than the chunked backend: the table that `backend="auto"` asks.

The table ships with the package, `measured.json`, and `titans bench kernels --write-table` writes it on the GPU at
hand. As long as nothing was measured it is empty, and `auto` is the chunked backend everywhere.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from titans_lm.config import SurpriseSizes, check_at_least, check_choice, check_positive
from titans_lm.ops.state import MemoryState
from titans_lm.ops.triton.support import unsupported

TABLE = Path(__file__).with_name("measured.json")
FORMAT = "titans-lm kernels 1"
Mode = Literal["forward", "forward+backward", "decode"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One shape on one device, run by both backends."""

    device: str
    """Name of the GPU as torch gives it."""
    dtype: str
    """Type of q, k and v: float32, bfloat16, float16."""
    width: int
    """Channels D of a head."""
    hidden: int
    """Hidden channels of the memory; 0 for a linear one."""
    chunk_size: int
    """Tokens of a chunk."""
    mode: Mode
    """forward, forward+backward, or decode: a token on its own without gradients."""
    memories: int
    """Rows times heads."""
    tokens: int
    """Tokens of a row."""
    chunked_seconds: float
    """A call of the chunked backend, median."""
    triton_seconds: float
    """The same call by kernels."""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        for name in ("width", "chunk_size", "memories", "tokens"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("hidden", self.hidden, 0)
        for name in ("chunked_seconds", "triton_seconds"):
            check_positive(name, getattr(self, name))

    @property
    def faster(self) -> bool:
        """Whether the kernels won."""
        return self.triton_seconds < self.chunked_seconds


def table_text(measurements: list[Measurement]) -> str:
    """Write measurements as the table's JSON, in one order whatever theirs is."""
    rows = sorted((asdict(m) for m in measurements), key=lambda row: [str(x) for x in row.values()])
    return json.dumps({"format": FORMAT, "measurements": rows}, indent=1) + "\n"


def read_table(path: Path = TABLE) -> tuple[Measurement, ...]:
    """Read a table; raises ValueError for a file that is none."""
    found = json.loads(path.read_text(encoding="utf-8"))
    known = {field.name for field in fields(Measurement)}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"got {path}; expected a table of kernels with the format {FORMAT!r}")
    for row in found["measurements"]:
        if set(row) != known:
            raise ValueError(f"got a measurement with {sorted(row)} in {path}; expected {sorted(known)}")
    return tuple(Measurement(**row) for row in found["measurements"])


@functools.cache
def shipped() -> tuple[Measurement, ...]:
    """The package's own table, read once."""
    return read_table()


def device_name(x: Tensor) -> str | None:
    """Name of the GPU that a tensor is on; None on a CPU, where no kernel is chosen."""
    return torch.cuda.get_device_name(x.device) if x.is_cuda else None


def kernels_win(
    tokens: tuple[Tensor, Tensor, Tensor],
    gates: Sequence[tuple[Tensor, ...]],
    state: MemoryState,
    chunk_size: int,
    return_surprise: SurpriseSizes,
) -> bool:
    """Whether `auto` takes the kernels: they do what is asked, and were measured to be faster at it on this device."""
    device = device_name(tokens[0])
    if device is None or not shipped():
        return False
    flat = [g for gate in gates for g in gate]
    if unsupported([tuple(w.shape[2:]) for w in state.M], chunk_size) or return_surprise == "parts":
        return False
    if any(g.dim() > 3 for g in flat) or state.M[0].dtype != torch.float32 or find_spec("triton") is None:
        return False
    followed = (*tokens, *flat, *state.M, *state.S, *state.anchor)
    return look_up(shipped(), device, tokens[0], mode_of(tokens[0], followed), state, chunk_size)


def look_up(
    table: tuple[Measurement, ...], device: str, q: Tensor, mode: Mode, state: MemoryState, chunk_size: int
) -> bool:
    """Whether a table has the kernels as the faster ones for a call.

    Device, type, sizes, chunk and mode must be those of a measurement. Of several numbers of memories the largest that
    the call reaches decides, and of those the longest text; a call that reaches none was not measured.
    """
    B, T, H, D = q.shape
    hidden = state.M[0].shape[-1] if len(state.M) == 2 else 0
    said = (device, str(q.dtype).removeprefix("torch."), D, hidden, chunk_size, mode)
    reached = [
        m
        for m in table
        if (m.device, m.dtype, m.width, m.hidden, m.chunk_size, m.mode) == said
        and m.memories <= B * H
        and m.tokens <= T
    ]
    return bool(reached) and max(reached, key=lambda m: (m.memories, m.tokens)).faster


def mode_of(q: Tensor, followed: tuple[Tensor, ...]) -> Mode:
    """How a call runs: with gradients, as a single token, or forward alone."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in followed):
        return "forward+backward"
    return "decode" if q.shape[1] == 1 else "forward"
