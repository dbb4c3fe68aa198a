"""Fused kernels in Triton behind the signature of every backend: a linear memory, and one of two layers.

Triton is known by name only, and imported when the first call asks for it. What the kernels do not do is refused with a
ValueError that says what they do. Experimental. Design, and what ran on a GPU: docs/kernels.md.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.checks import load_library
from titans_lm.config import SurpriseSizes
from titans_lm.ops.gates import have_channels
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.state import PLAIN, MemoryState, PerToken

__all__ = ["fused"]

LARGEST_HEAD = 128
LARGEST_CHUNK = 64
LARGEST_DEEP_CHUNK = 32
"""Tokens of a chunk of a memory of two layers. With 64 its gradients spilled every register, took minutes to compile,
and ended in an illegal access to memory on an H200 (triton 3.6)."""
LARGEST_TILE = 4096
"""Numbers of a chunk of one head, both sizes rounded up to a power of two: more does not fit in shared memory."""
ELSEWHERE = 'backend="chunked" does everything'


def import_triton() -> Any:
    """Import triton, or say how to get it."""
    install = f'pip install "titans-lm[kernels]" (Linux); {ELSEWHERE}'
    return load_library("triton", 'backend="triton" needs', install)


def check_supported(
    q: Tensor,
    gates: tuple[tuple[Tensor, ...], ...],
    state: MemoryState,
    chunk_size: int,
    return_surprise: SurpriseSizes,
    network: MemoryNetwork,
    extra: PerToken,
) -> None:
    """Refuse what no kernel does."""
    got = unsupported([tuple(w.shape[2:]) for w in state.M], chunk_size)
    if got is None and have_channels(gates):
        got = "channel-wise gates"
    if got is None and network.objective not in ("l2", "dot"):
        got = f"objective={network.objective!r}"
    if got is None and network.read_at != "token":
        got = f"read_at={network.read_at!r}"
    if got is None and extra.window is not None:
        got = "a window"
    if got is None and return_surprise == "parts":
        got = 'return_surprise="parts"'
    if got is not None:
        raise ValueError(
            f'got backend="triton" with {got}; expected a linear memory or one of two layers, heads of at most '
            f"{LARGEST_HEAD} channels, chunks of at most {LARGEST_CHUNK} tokens, {LARGEST_DEEP_CHUNK} with two layers "
            f"({LARGEST_TILE:,} numbers of a chunk together), gates per head or per head and layer, objective l2 or "
            f"dot, read_at token, no window, return_surprise False or True; {ELSEWHERE}"
        )
    check_device(q.device, q.dtype)


def unsupported(shapes: list[tuple[int, ...]], chunk_size: int) -> str | None:
    """Name what the kernels do not do about a memory of these layers (D_in, D_out); None where they do it all."""
    width = shapes[0][0]
    if len(shapes) > 2:
        return f"a memory of {len(shapes)} layers"
    if shapes[-1][1] != width:
        return f"keys of {width} channels and values of {shapes[-1][1]}"
    if width > LARGEST_HEAD:
        return f"heads of {width} channels"
    if chunk_size > LARGEST_CHUNK:
        return f"chunk_size={chunk_size}"
    if power_of_two(width) * power_of_two(chunk_size) > LARGEST_TILE:
        return f"heads of {width} channels and chunk_size={chunk_size}"
    if len(shapes) == 2 and chunk_size > LARGEST_DEEP_CHUNK:
        return f"a memory of two layers and chunk_size={chunk_size}"
    return None


def power_of_two(size: int) -> int:
    """The least power of two from 16 on that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a CPU without the interpreter, and double precision without it."""
    if interpreted():
        return
    if device.type != "cuda":
        raise ValueError(
            f'got backend="triton" with tensors on {device.type}; expected a CUDA device, or TRITON_INTERPRET=1 in the '
            f"environment before triton is imported, which runs kernels slowly on the CPU; or {ELSEWHERE}"
        )
    if dtype == torch.float64:
        raise ValueError(
            f'got backend="triton" with a state in float64; expected float32: kernels compute in float64 in Triton\'s '
            f"interpreter only; {ELSEWHERE}"
        )


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which is decided when they are first imported."""
    from titans_lm.ops.triton.kernels.pieces import matmul

    return not isinstance(matmul, import_triton().JITFunction)


def fused(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H D"],
    theta: tuple[Tensor, ...],
    eta: tuple[Tensor, ...],
    alpha: tuple[Tensor, ...],
    state: MemoryState,
    *,
    network: MemoryNetwork,
    chunk_size: int,
    valid: Bool[Tensor, "B T"] | None = None,
    return_surprise: SurpriseSizes = False,
    extra: PerToken = PLAIN,
    precision: str = "ieee",
) -> tuple[Float[Tensor, "B T H D"], MemoryState, Float[Tensor, "B T H L"] | None]:
    """Write and read by kernels; the same values and gradients as `chunked`.

    The loop over chunks runs inside one kernel, with one program per row and head; see docs/kernels.md. `precision`
    is that of products: "ieee" for float32 throughout, "tf32" where tokens came in 16 bits.

    Raises ValueError where triton is not installed, where there is neither a GPU nor Triton's interpreter, and for what
    the kernels do not do: channel-wise gates, more than two layers, large heads or chunks, objectives other than l2 and
    dot, windows, the parts of the surprise.
    """
    import_triton()
    check_supported(q, (theta, eta, alpha), state, chunk_size, return_surprise, network, extra)
    from titans_lm.ops.triton.operators import run

    return run(
        q, k, v, (theta, eta, alpha), state,
        network=network, chunk_size=chunk_size, valid=valid, return_surprise=return_surprise, precision=precision,
    )  # fmt: skip
