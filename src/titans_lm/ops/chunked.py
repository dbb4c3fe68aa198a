"""One chunk in closed form: the memory as a short sequence of matrix products, exact against `reference.py`."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.ops.gates import ChunkGates, chunk_gates, weighted_similarity
from titans_lm.ops.grid import Grid, make_grid
from titans_lm.ops.network import MemoryNetwork, activate, errors, norm_parameters, output
from titans_lm.ops.state import MemoryState, select_rows


def _lay_out_gates(
    grid: Grid, theta: tuple[Tensor, ...], eta: tuple[Tensor, ...], alpha: tuple[Tensor, ...]
) -> list[ChunkGates]:
    """Gates of every layer on the grid, for all chunks of the call at once: they do not depend on the state."""
    present = grid.mask()
    gates = []
    for layer in zip(theta, eta, alpha, strict=True):
        widest = max(gate.dim() for gate in layer)
        th, et, al = (
            grid.place(gate if gate.dim() == widest else gate.unsqueeze(-1)).transpose(2, 3) for gate in layer
        )
        if present is not None:  # where no token stands, nothing may decay
            et = torch.where(present if widest == 3 else present.unsqueeze(-1), et, 1.0)
        gates.append(chunk_gates(th, et, al, present))
    return gates


def _read_chunk(
    q: Tensor,
    state: MemoryState,
    gates: list[ChunkGates],
    inputs: list[Tensor],
    deltas: list[Tensor],
    network: MemoryNetwork,
    initial: tuple[Tensor, ...] | None,
) -> Tensor:
    """Read M_t(q_t) at every position t of the chunk without building any M_t.

    z_l = (a x) W_l + (f x) S_l + ((1 − a) x) W_init − ((x h_{l−1}ᵀ) ∘ G_l) Δ_l      x = q, then φ(z_{l−1})
    """
    x, z = q, q
    for layer, (W, S, g) in enumerate(zip(state.M, state.S, gates, strict=True)):
        if layer > 0:
            x = activate(z, network.activation)
        kept = x * g.a
        z = kept @ W + (x * g.f) @ S - weighted_similarity(x, inputs[layer], g.G) @ deltas[layer]
        if initial is not None:
            z = z + (x - kept) @ initial[layer]
    return output(q, z, network, *norm_parameters(network, q.dtype))


def _write_chunk(
    state: MemoryState,
    gates: list[ChunkGates],
    inputs: list[Tensor],
    deltas: list[Tensor],
    initial: tuple[Tensor, ...] | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Memory and surprise at the end of the chunk (MATH §3, with t = C)."""
    M, S = [], []
    for layer, (W0, S0, g) in enumerate(zip(state.M, state.S, gates, strict=True)):
        h, delta = inputs[layer], deltas[layer]
        a, f = g.a[..., -1:, :].transpose(-1, -2), g.f[..., -1:, :].transpose(-1, -2)
        W = a * W0 + f * S0 - (h * g.memory_end).transpose(-1, -2) @ delta
        if initial is not None:
            W = W + (1.0 - a) * initial[layer]
        M.append(W)
        S.append(g.eta_end.transpose(-1, -2) * S0 - (h * g.surprise_end).transpose(-1, -2) @ delta)
    return tuple(M), tuple(S)


def chunked(
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
    return_surprise: bool = False,
) -> tuple[Float[Tensor, "B T H D"], MemoryState, Float[Tensor, "B T H L"] | None]:
    """Write and read a chunk at a time; the same values and gradients as `reference`.

    All gradients of a chunk are taken at the anchor, so they come from one batched forward and backward pass as outer
    products h ⊗ δ, and a read at every token is a masked attention per memory layer (MATH §3, docs/derivation.md).
    Chunks follow one another; batch, heads and the positions of a chunk run side by side.
    """
    grid = make_grid(state.offset, q.shape[1], chunk_size, valid)
    # Chunks are unbound once: indexing them one by one would make the backward pass quadratic in their number.
    Q, K, V = (grid.place(x).transpose(2, 3).unbind(0) for x in (q, k, v))  # N times (B, H, C, D)
    gates = [[x.unbind(0) for x in layer] for layer in _lay_out_gates(grid, theta, eta, alpha)]
    initial = None
    if network.forget_to == "init" and network.initial is not None:
        initial = tuple(w.to(q.dtype) for w in network.initial)

    outputs, surprise = [], []
    for n in range(grid.chunks):
        here = [ChunkGates(*(x[n] for x in layer)) for layer in gates]
        inputs, deltas = errors(state.anchor, K[n], V[n], network)
        outputs.append(_read_chunk(Q[n], state, here, inputs, deltas, network, initial))
        M, S = _write_chunk(state, here, inputs, deltas, initial)
        complete = grid.complete[n]
        anchor = state.anchor
        if isinstance(complete, Tensor):
            anchor = select_rows(complete, M, anchor)
        elif complete:
            anchor = M
        state = MemoryState(M, S, anchor, state.offset)
        if return_surprise:
            sizes = [h.detach().norm(dim=-1) * d.detach().norm(dim=-1) for h, d in zip(inputs, deltas, strict=True)]
            surprise.append(torch.stack(sizes, dim=-1))
    o = grid.restore(torch.stack(outputs).transpose(2, 3))
    sizes = grid.restore(torch.stack(surprise).transpose(2, 3)) if return_surprise else None
    return o, state._replace(offset=grid.offset), sizes
