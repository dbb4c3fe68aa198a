"""The definition: one token at a time, straight from the paper. Everything faster is tested against this file."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.func import vjp

from titans_lm.config import SurpriseSizes
from titans_lm.ops.errors import loss_error
from titans_lm.ops.network import MemoryNetwork, forward, norm_parameters
from titans_lm.ops.state import PLAIN, MemoryState, PerToken, select_rows


def _spread(gate: Tensor, t: int) -> Tensor:
    """One token's gate, (B, H) or (B, H, D_in), shaped to scale the rows of a weight (B, H, D_in, D_out)."""
    gate = gate[:, t]
    return gate[..., None] if gate.dim() == 3 else gate[..., None, None]


def _gradient(
    network: MemoryNetwork,
    M: tuple[Tensor, ...],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H D"],
    threshold: Float[Tensor, "B H 1"] | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """∇ℓ(M; k, v) of one token: the error of the loss at M(k), led back to the weights, which heads and rows own."""
    if torch.is_inference_mode_enabled():  # there torch.func of torch 2.9 gives zeros
        with torch.inference_mode(False), torch.no_grad():
            return _gradient(network, M, k, v, threshold, weight, bias)
    prediction, back = vjp(lambda M: forward(M, k.unsqueeze(-2), network, weight, bias), M)
    limit = None if threshold is None else threshold.unsqueeze(-2)
    return back(loss_error(prediction, v.unsqueeze(-2), network.objective, limit))[0]


def _sizes(weights: tuple[Tensor, ...]) -> Tensor:
    """The norm of every layer's weight (B, H, D_in, D_out), (B, H, L)."""
    return torch.stack([w.detach().flatten(-2).norm(dim=-1) for w in weights], dim=-1)


def reference(
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
) -> tuple[Float[Tensor, "B T H D"], MemoryState, Float[Tensor, "B T H L *parts"] | None]:
    """Write each token into the memory, then read with its query.

        S_t = η_t S_{t−1} − θ_t ∇ℓ(M_a; k_t, v_t)     past and momentary surprise    (eq. 14, ℓ of eq. 12)
        M_t = (1 − α_t) M_{t−1} + S_t                 forgetting                     (eq. 13)
        o_t = M_t(q_t)                                reading, after the write       (eq. 15, D1)

    M_a, the anchor, is the memory at the end of the previous chunk; chunk_size = 1 is the exact recurrence. Forgetting
    to M_init adds α_t M_init (D13). Gates come as one tensor per memory layer, (B, T, H) or (B, T, H, D_{l-1}). The
    third value, on request, is the size of the momentary surprise, ‖∇_{W_l} ℓ‖; with "parts" of three,

        ‖∇_{W_l} ℓ‖      ‖η_t S_{t−1}‖      ‖α_t (M_{t−1} − B)‖ with B = 0, or M_init

    With network.read_at="anchor" it is o_t = M_a(q_t).
    With a window Σ_i ω_ti ∇ℓ(M_a; k_{t−i}, v_{t−i}) of the last c tokens, at the anchor of t, is in the place of ∇ℓ.

    Gradients come from torch.func, which torch cannot run inside a non-reentrant checkpoint (a RuntimeError).
    """
    L = len(state.M)
    weight, bias = norm_parameters(network, q.dtype)
    decay_target = (0.0,) * L if network.forget_to == "zero" else tuple(w.to(q.dtype) for w in network.initial or ())

    outputs, surprise = [], []
    for t in range(q.shape[1]):
        M, S, anchor, offset, tail = state
        limit = None if extra.threshold is None else extra.threshold[:, t, :, None]
        u = pulls = _gradient(network, anchor, k[:, t], v[:, t], limit, weight, bias)
        if extra.window is not None:
            old_k, old_v = state.earlier(k, v)
            near_k, near_v = torch.cat((old_k, k[:, t : t + 1]), dim=1), torch.cat((old_v, v[:, t : t + 1]), dim=1)
            shares = extra.window[:, t, ..., None, None].unbind(2)
            lags = [(near_k[:, -1 - i], near_v[:, -1 - i]) for i in range(len(shares))]
            several = [_gradient(network, anchor, *lag, limit, weight, bias) for lag in lags]
            pulls = tuple(sum(share * g[i] for share, g in zip(shares, several, strict=True)) for i in range(L))
            tail = (near_k[:, 1:], near_v[:, 1:]) if tail else ()
        past = tuple(_spread(eta[i], t) * S[i] for i in range(L))
        if return_surprise == "parts":
            forgotten = tuple(_spread(alpha[i], t) * (M[i] - decay_target[i]) for i in range(L))
            surprise.append(torch.stack([_sizes(part) for part in (u, past, forgotten)], dim=-1))
        elif return_surprise:
            surprise.append(_sizes(u))
        S = tuple(past[i] - _spread(theta[i], t) * pulls[i] for i in range(L))
        keep = tuple(1.0 - _spread(alpha[i], t) for i in range(L))
        M = tuple(keep[i] * M[i] + (1.0 - keep[i]) * decay_target[i] + S[i] for i in range(L))
        at = M if network.read_at == "token" else anchor
        offset = offset + 1
        complete = offset == chunk_size
        anchor = select_rows(complete, M, anchor)
        offset = torch.where(complete, 0, offset)
        new = MemoryState(M, S, anchor, offset, tail)
        state = new if valid is None else select_rows(valid[:, t], new, state)
        outputs.append(forward(at, q[:, t].unsqueeze(-2), network, weight, bias).squeeze(-2))
    return torch.stack(outputs, dim=1), state, torch.stack(surprise, dim=1) if return_surprise else None
