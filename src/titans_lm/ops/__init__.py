"""The mathematics of the neural memory: pure functions on tensors, no nn.Module.

`neural_memory` writes and reads, `read` only reads. Every backend takes the same call and gives the same results;
`reference.py` is the definition, `chunkwise.py` the closed form of a chunk, which "auto" is; `triton/` is the same in
fused kernels, experimental: it was never measured on a GPU.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.config import THRESHOLDS, Backend, SurpriseSizes, check_choice
from titans_lm.ops.matmul import needs_grad
from titans_lm.ops.network import MemoryNetwork, forward, norm_parameters, recall
from titans_lm.ops.recurrent import can_step, recall_one
from titans_lm.ops.run import BACKENDS, filled, full_precision, run, run_opaque
from titans_lm.ops.state import PLAIN, Call, MemoryState, PerToken, state_dtype
from titans_lm.ops.validate import (
    check_call,
    check_coefficients,
    check_extra,
    check_read,
    check_surprise,
    layer_gates,
)

__all__ = ["MemoryNetwork", "MemoryState", "PerToken", "neural_memory", "read"]

Gate = Tensor | tuple[Tensor, ...]


def neural_memory(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H D"],
    theta: Gate,
    eta: Gate,
    alpha: Gate,
    state: MemoryState,
    *,
    network: MemoryNetwork,
    chunk_size: int,
    valid: Bool[Tensor, "B T"] | None = None,
    return_surprise: SurpriseSizes = False,
    backend: Backend = "auto",
    extra: PerToken = PLAIN,
) -> tuple[Tensor, MemoryState] | tuple[Tensor, MemoryState, Tensor]:
    """Write each token into the memory, then read with its query; one memory per row and head.

        S_t = η_t S_{t−1} − θ_t ∇ℓ(M_a; k_t, v_t)      surprise                      (eq. 14)
        M_t = (1 − α_t) M_{t−1} + S_t                  forgetting                    (eq. 13)
        o_t = M_t(q_t)                                 reading, after the write      (eq. 15)

    ℓ = ‖M(k) − v‖² (eq. 12) or the network's other objective; M_a is the memory at the end of the previous chunk of
    `chunk_size` tokens, which is part of the model: 1 is the exact recurrence, more is a cheaper, different model.
    `extra` is what other than Titans' own memories ask of a token. Keys have K = D channels, or without a residual any;
    with `network.coefficients` the memory is one of their polynomials.

    Gates are per head (B, T, H), per head and memory layer (B, T, H, L), or channel-wise on the input rows of each
    weight: a tuple of L tensors (B, T, H, D_{l−1}). `valid` marks real tokens: the others change neither M, S, anchor
    nor offset, and their output is undefined. Computed and kept in the state's precision, at least float32, also under
    autocast; o has the dtype of q.

    With `return_surprise` a third value (B, T, H, L) gives ‖∇_{W_l} ℓ‖ of every token. With "parts" it has three sizes,
    (B, T, H, L, 3): the momentary surprise ‖∇_{W_l} ℓ‖, the past one ‖η_t S_{t−1}‖, and what is forgotten,
    ‖α_t (M_{t−1} − B)‖ with B = 0 or M_init, where forgetting leads. No gradient flows through them.

    Raises ValueError when shapes, dtypes, the state, or the backend's name do not fit.
    """
    if backend not in BACKENDS:
        check_choice("backend", backend, BACKENDS)
    check_surprise("return_surprise", return_surprise)
    wide_q, wide_k = check_coefficients(q, k, network)
    check_call(wide_q, wide_k, v, state, network, chunk_size, valid)
    gates = [
        layer_gates(name, gate, wide_q, state) for name, gate in (("theta", theta), ("eta", eta), ("alpha", alpha))
    ]
    if extra is not PLAIN or state.tail or network.objective in THRESHOLDS:
        check_extra(extra, wide_q, v, gates, state, network, valid)
    if 0 in q.shape[:2]:  # no token to read, or no row to read it
        parts = (3,) if return_surprise == "parts" else ()
        surprise = q.new_zeros(*q.shape[:3], len(state.M), *parts, dtype=state.M[0].dtype)
        return (torch.zeros_like(v), state, surprise) if return_surprise else (torch.zeros_like(v), state)
    call = Call(q, k, v, *gates, state, network, chunk_size, valid, return_surprise, extra)
    if not torch.compiler.is_compiling():
        o, state, surprise = run(call, backend)
    elif backend != "reference" and can_step(call):  # all others do the same; a compiler may look into it
        o, state, surprise = run(call, "chunked")
    else:
        o, state, surprise = run_opaque(_prepared(call), backend)
    o = o.to(q.dtype)
    return (o, state, surprise) if return_surprise else (o, state)


def _prepared(call: Call) -> Call:
    """The call with its polynomial keys made, since the operator is not told of them."""
    if call.network.coefficients is None:
        return call
    q, k, v = (x.to(call.state.M[0].dtype) for x in (call.q, call.k, call.v))
    return replace(call, q=filled(q, call.valid, 0.0), k=filled(k, call.valid, 0.0), v=v).with_keys()


def read(
    M: tuple[Float[Tensor, "B H _ _"], ...], q: Float[Tensor, "B T H K"], network: MemoryNetwork
) -> Float[Tensor, "B T H D"]:
    """Recall M*(q) without writing: every query meets the same memory (the recall of eq. 15 and 21).

    Raises ValueError when the weights are not those of a memory for these queries.
    """
    check_read(M, check_coefficients(q, q, network)[0], network)
    dtype = state_dtype(q.dtype if q.dtype == M[0].dtype else torch.promote_types(q.dtype, M[0].dtype))
    with full_precision(q.device.type):
        network, (keys,) = network.make_keys(q.to(dtype))
        weights = tuple([w.to(dtype) for w in M])
        parameters = norm_parameters(network, dtype)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            how = recall if needs_grad(keys, *weights, *parameters) else forward
        else:
            how = recall_one if q.shape[1] == 1 and not torch.is_grad_enabled() else forward
        return how(weights, keys.transpose(1, 2), network, *parameters).transpose(1, 2).to(q.dtype)
