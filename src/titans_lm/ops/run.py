"""A call that has been checked, on the backend of its name; and the same as one operator of torch for compilers.

`run` empties padding, and computes in the state's precision and without autocast. Which products a call makes depends
on where its rows stand in their chunks, and its gradients are written by hand: neither can be traced. So a graph has
the operator `titans_lm::neural_memory` in their place (`run_opaque`), with known shapes and a gradient, and all around
it is compiled. The gradient runs the call again, since nothing of its inside can cross the border of an operator.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from titans_lm.config import THRESHOLDS, Backend, SurpriseSizes
from titans_lm.ops.chunkwise import chunked
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.reference import reference
from titans_lm.ops.state import PLAIN, Call, MemoryState, Outcome, PerToken
from titans_lm.ops.triton import fused

BACKENDS: dict[Backend, Callable[..., Outcome]] = {
    "reference": lambda call: reference(**vars(call)), "chunked": chunked, "auto": chunked, "triton": fused,
}  # fmt: skip
MAKING_KEYS = "chunked", "auto"
"""Backends that make polynomial keys themselves; for others they are made before."""
SURPRISE: tuple[SurpriseSizes, ...] = (False, True, "parts")


def run(call: Call, backend: Backend) -> Outcome:
    """`neural_memory` of a checked call."""
    state, valid, network, extra = call.state, call.valid, call.network, call.extra
    dtype = state.M[0].dtype
    tokens = [x.to(dtype) for x in (call.q, call.k, call.v)]
    gates = [tuple([g.to(dtype) for g in gate]) for gate in (call.theta, call.eta, call.alpha)]
    if valid is not None:  # whatever stands in the padding, a NaN too, must not reach a product
        tokens = [filled(x, valid, 0.0) for x in tokens]
        gates = [tuple([filled(g, valid, 0.0) for g in gate]) for gate in gates]
    if network.coefficients is not None and backend not in MAKING_KEYS:
        with full_precision(call.q.device.type):
            network, keys = network.make_keys(*tokens[:2])
        tokens[:2] = [filled(x, valid, 0.0) for x in keys]
    if extra is not PLAIN:  # padding has no threshold: any above 0 will do
        both = zip(extra, (1.0, 0.0), strict=True)
        extra = PerToken(*[None if x is None else filled(x.to(dtype), valid, value) for x, value in both])
    state = state._replace(offset=state.offset.long())
    made = Call(*tokens, *gates, state, network, call.chunk_size, valid, call.return_surprise, extra)
    with full_precision(call.q.device.type):
        o, state, surprise = BACKENDS[backend](made, *([_precision(call.q.dtype)] if backend == "triton" else []))
    return o.to(call.q.dtype), state, surprise


def filled(x: Tensor, valid: Tensor | None, value: float) -> Tensor:
    """(B, T, …) with a value wherever no token is."""
    return x if valid is None else x.masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 2)), value)


def _precision(dtype: torch.dtype) -> str:
    """How exact a kernel's products must be: what came in 16 bits has no more digits than tf32 keeps."""
    return "tf32" if dtype in (torch.bfloat16, torch.float16) else "ieee"


def full_precision(device: str) -> AbstractContextManager[Any]:
    """Keep autocast out; where it is off already, entering a context would cost more than a small product."""
    return torch.autocast(device_type=device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


WAITS = (torch.Tag.cudagraph_unsafe,)
"""Where rows stand in their chunks is looked up on the CPU, which no CUDA graph can hold."""


@torch.library.custom_op("titans_lm::neural_memory", mutates_args=(), tags=WAITS)
def memory_operator(
    tokens: Sequence[Tensor], gates: Sequence[Tensor], weights: Sequence[Tensor], constants: Sequence[Tensor],
    offset: Tensor, valid: Tensor | None, sizes: Sequence[int], words: str,
) -> list[Tensor]:  # fmt: skip
    """o, then M, S and anchor by layers, the offset, the tail, and the norms of surprise if they are asked for.

    `tokens` are q, k, v and the threshold or the window, if there is one; `weights` end in the tail. `sizes` are L,
    whether an anchor is given, whether the LayerNorm has a weight and a bias, whether there is a residual, the chunk
    size, and which surprise; `words` activation, objective, where forgetting leads, what is read, backend.
    """
    with torch.no_grad():
        found = _outputs(tokens, gates, weights, constants, offset, valid, sizes, words)
        return _apart(found, (*tokens, *weights, offset))


@torch.library.custom_op("titans_lm::neural_memory_gradients", mutates_args=(), tags=WAITS)
def memory_gradients(
    tokens: Sequence[Tensor], gates: Sequence[Tensor], weights: Sequence[Tensor], constants: Sequence[Tensor],
    offset: Tensor, valid: Tensor | None, sizes: Sequence[int], words: str,
    of: Sequence[int], grads: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients by tokens, gates, weights and constants, from those of the outputs at the places `of`."""
    with torch.inference_mode(False):  # inside an operator nothing is recorded; this is torch's way back in
        groups = [[x.detach().requires_grad_() for x in group] for group in (tokens, gates, weights, constants)]
        outputs = _outputs(*groups, offset, valid, sizes, words)
        found = [(outputs[i], grad) for i, grad in zip(of, grads, strict=True) if outputs[i].requires_grad]
        leaves = [x for group in groups for x in group]
        by_leaf: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if found:
            by_leaf = torch.autograd.grad([y for y, _ in found], leaves, [grad for _, grad in found], allow_unused=True)
    return _apart([torch.zeros_like(x) if d is None else d for x, d in zip(leaves, by_leaf, strict=True)], grads)


def _outputs(
    tokens: Sequence[Tensor], gates: Sequence[Tensor], weights: Sequence[Tensor], constants: Sequence[Tensor],
    offset: Tensor, valid: Tensor | None, sizes: Sequence[int], words: str,
) -> list[Tensor]:  # fmt: skip
    L, anchored, has_weight, has_bias, residual, chunk_size, which = sizes
    activation, objective, forget_to, read_at, backend = words.split()
    parts = [tuple(weights[i : i + L]) for i in range(0, len(weights), L)]
    M, S = parts[:2]
    rest = iter(constants)
    norm_weight, norm_bias = (next(rest) if there else None for there in (has_weight, has_bias))
    initial = tuple(rest) or None
    network = MemoryNetwork(  # pyrefly: ignore
        activation, bool(residual), norm_weight, norm_bias, objective, forget_to, initial, read_at
    )
    tail = tuple(weights[(2 + anchored) * L :])
    state = MemoryState(M, S, parts[2] if anchored else M, offset, tail)
    by_name = tuple(tuple(gates[i : i + L]) for i in range(0, 3 * L, L))
    q, k, v, *others = tokens
    extra = PerToken(*others) if objective in THRESHOLDS else PerToken(None, *others)
    call = Call(q, k, v, *by_name, state, network, chunk_size, valid, SURPRISE[which], extra)
    o, state, surprise = run(call, backend)
    return [o, *state.M, *state.S, *state.anchor, state.offset, *state.tail, *(() if surprise is None else (surprise,))]


def _apart(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, each the whole of a storage that no input and no other output has, as operators promise."""
    taken, found = {x.untyped_storage().data_ptr() for x in inputs}, []
    for x in outputs:
        x = x.contiguous()
        storage = x.untyped_storage()
        if storage.data_ptr() in taken or x.numel() * x.element_size() != storage.nbytes():
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        found.append(x)
    return found


@memory_operator.register_fake
def _(tokens: Any, gates: Any, weights: Any, constants: Any, offset: Any, valid: Any, sizes: Any, words: Any) -> Any:
    L, anchored, which, q, v = sizes[0], sizes[1], sizes[-1], tokens[0], tokens[2]
    M = [x.new_empty(x.shape) for _ in range(3) for x in weights[:L]]
    after = torch.empty(offset.shape, dtype=torch.int64, device=offset.device)
    norms = [weights[0].new_empty(*q.shape[:3], L, *([3] if which == 2 else []))] if which else []
    tail = [x.new_empty(x.shape) for x in weights[(2 + anchored) * L :]]
    return [v.new_empty(v.shape), *M, after, *tail, *norms]


@memory_gradients.register_fake
def _(tokens: Any, gates: Any, weights: Any, constants: Any, *_: Any) -> Any:
    return [x.new_empty(x.shape) for group in (tokens, gates, weights, constants) for x in group]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *groups, offset, valid, sizes, words = inputs
    ctx.counts, ctx.has_valid, ctx.settings = [len(group) for group in groups], valid is not None, (sizes, words)
    ctx.save_for_backward(*(x for group in groups for x in group), offset, *(() if valid is None else (valid,)))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    groups = [[next(saved) for _ in range(count)] for count in ctx.counts]
    offset, valid = next(saved), next(saved) if ctx.has_valid else None
    of = [i for i, grad in enumerate(grads) if grad is not None and grad.dtype.is_floating_point]
    found = iter(memory_gradients(*groups, offset, valid, *ctx.settings, of, [grads[i] for i in of]))
    return *([next(found) for _ in range(count)] for count in ctx.counts), None, None, None, None


memory_operator.register_autograd(_backward, setup_context=_setup_context)


def run_opaque(call: Call, backend: str) -> Outcome:
    """`run`, by the operator."""
    state, network, L = call.state, call.network, len(call.state.M)
    norm = network.norm_weight, network.norm_bias
    anchored = not all([a is w for a, w in zip(state.anchor, state.M, strict=True)])
    which = SURPRISE.index(call.return_surprise)
    sizes = [L, anchored, *(x is not None for x in norm), network.residual, call.chunk_size, which]
    o, *others = torch.ops.titans_lm.neural_memory(
        [call.q, call.k, call.v, *call.extra.given()],
        [x for gate in call.gates for x in gate],
        [*state.M, *state.S, *(state.anchor if anchored else ()), *state.tail],
        [*(x for x in norm if x is not None), *network.decay_target],
        state.offset,
        call.valid,
        [int(x) for x in sizes],
        " ".join((network.activation, network.objective, network.forget_to, network.read_at, backend)),
    )
    M, S, anchor = (tuple(others[i : i + L]) for i in range(0, 3 * L, L))
    tail = tuple(others[3 * L + 1 : 3 * L + 1 + len(state.tail)])
    surprise = others[-1].detach() if which else None
    return o, MemoryState(M, S, anchor, others[3 * L], tail), surprise
