"""The sizes of surprise at every token of a group, without building any S_t or M_t.

    momentary   ‖∇ℓ(M_a; k_t, v_t)‖      what token t brings                                    (eq. 8, 12)
    past        ‖η_t S_{t−1}‖            what earlier tokens still push                         (eq. 10, 14)
    forgotten   ‖α_t (M_{t−1} − B)‖      what is given up; B = 0, or M_init if it leads there   (eq. 13, D13)

With S_0 and D_0 = M_0 − B at the start of a chunk and u_j = h_j ⊗ δ_j (docs/derivation.md, section 5)

    S_t = H(t, 0) S_0 − Σ_{j≤t} H(t, j) θ_j u_j      M_t − B = a_t D_0 + f_t S_0 − Σ_{j≤t} G(t, j) u_j

so the square of either norm is c Q cᵀ: Q holds the inner products of D_0, S_0, u_1 … u_C, and c is what each weighs.
A gate per channel d scales row d of the weights: then there is a Q and a c for each of K = D_in rows, otherwise K = 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titans_lm.ops.chunk_forward import BatchedNetwork, ChunkStates, WriteCache, halves
from titans_lm.ops.gates import ChunkGates, band, interval_products

Given = tuple[Tensor, Tensor, Tensor]
"""θ, η and α of one layer as a call has them, (n, B, C, H) or (n, B, C, H, D_in). Below, X is n R = n B H."""


def momentary_norms(written: WriteCache, tokens: int) -> Tensor:
    """‖∇_{W_l} ℓ‖ of every token, (X, C, L): the gradient of a token is h ⊗ δ; those of a window stand last."""
    sizes = [h.norm(dim=-1) * d.norm(dim=-1) for h, d in zip(written.inputs, written.deltas, strict=True)]
    return torch.stack(sizes, dim=-1)[:, -tokens:]


@torch.no_grad()
def surprise_norms(
    rows: BatchedNetwork,
    states: ChunkStates,
    written: WriteCache,
    gates: Sequence[ChunkGates],
    given: Sequence[Given],
    present: Tensor | None,
    window: Tensor | None = None,
) -> Tensor:
    """Momentary, past and forgotten of every token and memory layer, (X, C, L, 3).

    Computed in float64: the terms of a square may cancel, and its root would show what rounding leaves of them.
    """
    X, C, _ = gates[0].a.shape
    Omega = None if window is None else band(window.double().transpose(2, 3).flatten(0, 2)).unsqueeze(1)
    if present is not None:
        present = present.expand(-1, rows.batch, rows.heads, -1).flatten(0, 2).unsqueeze(1)
    found = []
    for layer, (g, gate) in enumerate(zip(gates, given, strict=True)):
        theta, eta, alpha = (_by_channel(x.double()) for x in gate)
        if present is not None:  # where no token stands, nothing may decay
            eta = torch.where(present, eta, 1.0)
        c = _weights(g, theta, eta, Omega)
        Q = _inner_products(_start(rows, states, layer, X), written, layer, by_row=c.shape[2] > 1)
        past, kept = ((c @ Q) * c).sum(-1).clamp_(min=0.0)  # (X, K, C): squares of rows or of whole weights
        squares = (past * eta.square()).sum(1), (kept * alpha.square()).sum(1)
        found.append(torch.stack(squares, dim=-1).sqrt_())
    others = torch.stack(found, dim=2)
    return torch.cat((momentary_norms(written, C).unsqueeze(-1).to(others.dtype), others), dim=-1)


def _by_channel(gate: Tensor) -> Tensor:
    """A gate (n, B, C, H) or (n, B, C, H, D_in) as (X, K, C)."""
    gate = gate.unsqueeze(-1) if gate.dim() == 4 else gate
    return gate.permute(0, 1, 3, 4, 2).flatten(0, 2)


def _start(rows: BatchedNetwork, states: ChunkStates, layer: int, X: int) -> Tensor:
    """D_0 and S_0 of every chunk, one above the other: (X, 2 D_in, D_out)."""
    both = states.both[layer][:X].to(torch.float64, copy=True)
    if rows.wide:
        both = torch.cat(halves(both, wide=True), dim=-2)
    if rows.decay_target is not None:
        D_0, _ = halves(both)
        D_0.unflatten(0, (-1, rows.heads)).sub_(rows.decay_target[layer])
    return both


def _weights(g: ChunkGates, theta: Tensor, eta: Tensor, Omega: Tensor | None) -> Tensor:
    """What D_0, S_0, u_1 … u_C weigh in S_{t−1} and in M_{t−1} − B: (2, X, K, C, C + 2) for t = 1 … C."""
    H = interval_products(eta)
    G = g.G.unsqueeze(1) if g.G.dim() == 3 else g.G
    X, K, C = len(theta), max(x.shape[1] for x in (theta, eta, g.a.mT, g.f.mT, G)), theta.shape[-1]
    c = theta.new_zeros(2, X, K, C, G.shape[-1] + 2)
    surprise, memory = c.unbind(0)
    surprise[..., 0, 1] = 1.0
    surprise[..., 1:, 1] = H[..., :-1, 0]
    pulls = H[..., 1:] * theta.unsqueeze(-2)
    surprise[..., 1:, 2:] = -(pulls if Omega is None else pulls @ Omega)[..., :-1, :]
    memory[..., 0, 0] = 1.0
    memory[..., 1:, 0] = g.a.mT[..., :-1]
    memory[..., 1:, 1] = g.f.mT[..., :-1]
    memory[..., 1:, 2:] = -G[..., :-1, :]
    return c


def _inner_products(both: Tensor, written: WriteCache, layer: int, *, by_row: bool) -> Tensor:
    """⟨x, y⟩ for all x and y of D_0, S_0, u_1 … u_C, (X, K, C + 2, C + 2): of each row of the weights, or of all.

    ⟨u_i, u_j⟩ = ⟨h_i, h_j⟩ ⟨δ_i, δ_j⟩      ⟨W, u_j⟩ = h_j W δ_jᵀ
    of row d:    h_id h_jd ⟨δ_i, δ_j⟩                  h_jd (W δ_jᵀ)_d
    """
    h, delta = written.inputs[layer].double(), written.deltas[layer].double()
    starts = both.unflatten(1, (2, -1))  # (X, 2, D_in, D_out)
    mixed = (delta @ both.mT).unflatten(-1, (2, -1)) * h.unsqueeze(2)  # (X, C, 2, D_in)
    if by_row:
        similar = torch.einsum("xid,xjd->xdij", h, h)
        starts, mixed = starts.transpose(1, 2), mixed.permute(0, 3, 2, 1)
    else:
        similar = (h @ h.mT).unsqueeze(1)
        starts, mixed = starts.flatten(2).unsqueeze(1), mixed.sum(-1).mT.unsqueeze(1)
    X, K, C, _ = similar.shape
    Q = h.new_empty(X, K, C + 2, C + 2)
    Q[..., 2:, 2:] = similar * (delta @ delta.mT).unsqueeze(1)
    Q[..., :2, 2:] = mixed
    Q[..., 2:, :2] = mixed.mT
    Q[..., :2, :2] = starts @ starts.mT
    return Q
