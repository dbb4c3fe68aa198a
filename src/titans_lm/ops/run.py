"""A call that has been checked, on the backend of its name: padding emptied, in the state's precision, no autocast."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from titans_lm.config import Backend, SurpriseSizes
from titans_lm.ops.chunkwise import chunked
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.reference import reference
from titans_lm.ops.state import PLAIN, MemoryState, PerToken
from titans_lm.ops.triton import fused

BACKENDS = {"reference": reference, "chunked": chunked, "auto": chunked, "triton": fused}
MAKING_KEYS = "chunked", "auto"
"""Backends that make polynomial keys themselves; for others they are made before."""


def run(
    tokens: tuple[Tensor, Tensor, Tensor],
    gates: Sequence[tuple[Tensor, ...]],
    state: MemoryState,
    network: MemoryNetwork,
    chunk_size: int,
    valid: Tensor | None,
    return_surprise: SurpriseSizes,
    backend: Backend,
    extra: PerToken = PLAIN,
) -> tuple[Tensor, MemoryState, Tensor | None]:
    """`neural_memory` of q, k, v and of θ, η, α by layers; norms of surprise, or None."""
    q = tokens[0]
    state = state._replace(offset=state.offset.long())
    dtype = state.M[0].dtype
    tensors = [x.to(dtype) for x in tokens]
    gates = [tuple([g.to(dtype) for g in gate]) for gate in gates]
    if valid is not None:  # whatever stands in the padding, a NaN too, must not reach a product
        tensors = [filled(x, valid, 0.0) for x in tensors]
        gates = [tuple([filled(g, valid, 0.0) for g in gate]) for gate in gates]
    if network.coefficients is not None and backend not in MAKING_KEYS:
        with full_precision(q.device.type):
            network, keys = network.make_keys(*tensors[:2])
        tensors[:2] = [filled(x, valid, 0.0) for x in keys]
    if extra is not PLAIN:  # padding has no threshold: any above 0 will do
        both = zip(extra, (1.0, 0.0), strict=True)
        extra = PerToken(*[None if x is None else filled(x.to(dtype), valid, value) for x, value in both])
    with full_precision(q.device.type):
        o, state, surprise = BACKENDS[backend](
            *tensors,
            *gates,
            state,
            network=network,
            chunk_size=chunk_size,
            valid=valid,
            return_surprise=return_surprise,
            extra=extra,
            **({"precision": _precision(q.dtype)} if backend == "triton" else {}),
        )
    return o.to(q.dtype), state, surprise


def filled(x: Tensor, valid: Tensor | None, value: float) -> Tensor:
    """(B, T, …) with a value wherever no token is."""
    return x if valid is None else x.masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 2)), value)


def _precision(dtype: torch.dtype) -> str:
    """How exact a kernel's products must be: what came in 16 bits has no more digits than tf32 keeps."""
    return "tf32" if dtype in (torch.bfloat16, torch.float16) else "ieee"


def full_precision(device: str) -> AbstractContextManager[Any]:
    """Keep autocast out; where it is off already, entering a context would cost more than a small product."""
    return torch.autocast(device_type=device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
