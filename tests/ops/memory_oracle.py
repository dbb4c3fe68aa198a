"""A second opinion on the definition: plain loops over rows and tokens, gradients by torch.autograd, nothing of ops/.

Padding is skipped by Python, offsets are Python integers, LayerNorm and the non-linearity are torch's own. Only the
containers (MemoryState, MemoryNetwork) are shared with the package.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_lm.ops import MemoryNetwork, MemoryState, PerToken
from titans_lm.ops.state import PLAIN

PHI = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


def predict(M: list[Tensor], x: Tensor, network: MemoryNetwork) -> Tensor:
    """M(x) for one token of every head: x is (H, D), a weight (H, D_in, D_out)."""
    z = torch.einsum("hi,hio->ho", x, M[0])
    for W in M[1:]:
        z = torch.einsum("hi,hio->ho", PHI[network.activation](z), W)
    if network.norm_weight is not None:
        z = F.layer_norm(z, z.shape[-1:], eps=1e-5) * network.norm_weight
        z = z if network.norm_bias is None else z + network.norm_bias
    return x + z if network.residual else z


def inner_loss(
    M: list[Tensor], k: Tensor, v: Tensor, network: MemoryNetwork, threshold: Tensor | None = None
) -> Tensor:
    """The loss of one token of every head; of huber with thresholds (H,)."""
    prediction = predict(M, k, network)
    e = prediction - v
    match network.objective:
        case "dot":
            return -(prediction * v).sum()
        case "l2":
            return (e**2).sum()
        case "huber":
            size = e.norm(dim=-1)
            return torch.where(size <= threshold, size**2, 2 * threshold * size - threshold**2).sum()
        case "huber_coordinate":
            limit = threshold[:, None]
            return torch.where(e.abs() <= limit, e**2, 2 * limit * e.abs() - limit**2).sum()
    raise ValueError(network.objective)


def inner_gradient(
    M: list[Tensor], k: Tensor, v: Tensor, network: MemoryNetwork, threshold: Tensor | None
) -> tuple[Tensor, ...]:
    """∇ℓ by the weights; lp is known by the error that it leads back, p tanh(a e) |e|^(p − 1), smoothed."""
    if network.objective != "lp":
        return torch.autograd.grad(inner_loss(M, k, v, network, threshold), M, create_graph=True)
    prediction = predict(M, k, network)
    e = prediction - v
    return torch.autograd.grad(prediction, M, 3 * torch.tanh(10 * e) * (e**2 + 1e-6), create_graph=True)


def gate_of(gate: Tensor | tuple[Tensor, ...], row: int, t: int, layer: int) -> Tensor:
    """One token's gate for one layer, shaped to scale the rows of (H, D_in, D_out)."""
    if isinstance(gate, tuple):
        return gate[layer][row, t].unsqueeze(-1)
    return (gate[row, t] if gate.dim() == 3 else gate[row, t, :, layer])[:, None, None]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | tuple[Tensor, ...],
    eta: Tensor | tuple[Tensor, ...],
    alpha: Tensor | tuple[Tensor, ...],
    state: MemoryState,
    *,
    network: MemoryNetwork,
    chunk_size: int,
    valid: Tensor | None = None,
    extra: PerToken = PLAIN,
) -> tuple[Tensor, MemoryState, Tensor]:
    """The same call as `neural_memory`, one row after another; outputs of padding are zero."""
    layers = range(len(state.M))
    rows = []
    for row in range(q.shape[0]):
        M, S, anchor = ([w[row] for w in part] for part in state[:3])
        old = [list(x[row]) for x in state.tail] or [[], []]
        read = [(k_i, v_i) for k_i, v_i in zip(*old, strict=True)]
        offset = int(state.offset[row])
        outputs, surprise = [], []
        for t in range(q.shape[1]):
            if valid is not None and not valid[row, t]:
                outputs.append(torch.zeros_like(v[row, t]))
                surprise.append(q.new_zeros(q.shape[2], len(M)))
                continue
            anchor = [w if w.requires_grad else w.clone().requires_grad_() for w in anchor]
            limit = None if extra.threshold is None else extra.threshold[row, t]
            u = pulls = inner_gradient(anchor, k[row, t], v[row, t], network, limit)
            if extra.window is not None:
                read.append((k[row, t], v[row, t]))
                pulls = [0.0 * g for g in u]
                for i, share in enumerate(extra.window[row, t].unbind(-1)):
                    again = inner_gradient(anchor, *read[-1 - i], network, limit)
                    pulls = [total + share[:, None, None] * g for total, g in zip(pulls, again, strict=True)]
            for i in layers:
                S[i] = gate_of(eta, row, t, i) * S[i] - gate_of(theta, row, t, i) * pulls[i]
                forget = gate_of(alpha, row, t, i)
                M[i] = (1 - forget) * M[i] + S[i]
                if network.forget_to == "init":
                    M[i] = M[i] + forget * network.initial[i]
            at = M if network.read_at == "token" else list(anchor)
            outputs.append(predict(at, q[row, t], network))
            offset += 1
            if offset == chunk_size:
                anchor, offset = list(M), 0
            surprise.append(torch.stack([(g * g).sum((1, 2)).sqrt() for g in u], dim=-1))
        kept = [torch.stack(x) for x in list(zip(*read, strict=True))] if state.tail else []
        W = state.tail[0].shape[1] if state.tail else 0
        tail = tuple(x[len(x) - W :] for x in kept)
        rows.append((torch.stack(outputs), torch.stack(surprise), M, S, anchor, torch.tensor(offset), tail))
    o, surprise = (torch.stack([r[i] for r in rows]) for i in (0, 1))
    parts = [tuple(torch.stack([r[i][layer] for r in rows]) for layer in layers) for i in (2, 3, 4)]
    tail = tuple(torch.stack(x) for x in zip(*(r[6] for r in rows), strict=True))
    return o, MemoryState(*parts, torch.stack([r[5] for r in rows]), tail), surprise.detach()
