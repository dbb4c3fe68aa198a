"""Fused kernels in Triton behind the signature of every backend: a linear memory, and one of two layers.

Triton is imported when the first call asks for it by name, never before. What the kernels do
not do is refused with a ValueError that says what they do (support.py). Design and numbers: docs/kernels.md.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.state import MemoryState
from titans_lm.ops.triton.support import check_supported, import_triton

__all__ = ["fused"]


def fused(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T H D"],
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
    precision: str = "ieee",
) -> tuple[Float[Tensor, "B T H D"], MemoryState, Float[Tensor, "B T H L"] | None]:
    """Write and read by kernels; the same values and gradients as `chunked`.

    The loop over chunks runs inside one kernel, with one program per row and head; see docs/kernels.md. `precision`
    is that of products: "ieee" for float32 throughout, "tf32" where tokens came in 16 bits.

    Raises ValueError where triton is not installed, where there is neither a GPU nor Triton's interpreter, and for what
    the kernels do not do: channel-wise gates, more than two layers, large heads or chunks, the parts of the surprise.
    """
    import_triton()
    check_supported(q, (theta, eta, alpha), state, chunk_size, return_surprise)
    from titans_lm.ops.triton.backend import run

    return run(
        q, k, v, (theta, eta, alpha), state,
        network=network, chunk_size=chunk_size, valid=valid, return_surprise=return_surprise, precision=precision,
    )  # fmt: skip
