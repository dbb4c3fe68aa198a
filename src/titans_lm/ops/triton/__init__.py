"""Fused kernels in Triton for the call that every backend takes: of a linear memory, and of one of two layers.

Triton is known by name only, and imported when the first call asks for it. What the kernels do not do is refused with a
ValueError that says what they do. Experimental. Design, and what ran on a GPU: docs/kernels.md.
"""

from typing import Any

import torch

from titans_lm.checks import load_library
from titans_lm.ops.gates import have_channels
from titans_lm.ops.state import Call, Outcome
from titans_lm.ops.triton.kernels import power_of_two

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


def check_supported(call: Call) -> None:
    """Refuse what no kernel does."""
    network = call.network
    others = {
        "channel-wise gates": have_channels(call.gates),
        f"objective={network.objective!r}": network.objective not in ("l2", "dot"),
        f"read_at={network.read_at!r}": network.read_at != "token",
        "a window": call.extra.window is not None,
        'return_surprise="parts"': call.return_surprise == "parts",
    }
    got = unsupported([tuple(w.shape[2:]) for w in call.state.M], call.chunk_size)
    got = got or next((what for what, asked in others.items() if asked), None)
    if got is not None:
        raise ValueError(
            f'got backend="triton" with {got}; expected a linear memory or one of two layers, heads of at most '
            f"{LARGEST_HEAD} channels, chunks of at most {LARGEST_CHUNK} tokens, {LARGEST_DEEP_CHUNK} with two layers "
            f"({LARGEST_TILE:,} numbers of a chunk together), gates per head or per head and layer, objective l2 or "
            f"dot, read_at token, no window, return_surprise False or True; {ELSEWHERE}"
        )
    check_device(call.q.device, call.q.dtype)


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


def fused(call: Call, precision: str) -> Outcome:
    """Write and read by kernels; the same values and gradients as `chunked`.

    The loop over chunks runs inside one kernel, with one program per row and head; see docs/kernels.md. `precision`
    is that of products: "ieee" for float32 throughout, "tf32" where tokens came in 16 bits.

    Raises ValueError where triton is not installed, where there is neither a GPU nor Triton's interpreter, and for what
    the kernels do not do: channel-wise gates, more than two layers, large heads or chunks, objectives other than l2 and
    dot, windows, the parts of the surprise.
    """
    import_triton()
    check_supported(call)
    from titans_lm.ops.triton.operators import run

    return run(call, precision)
