"""One token: the recurrence itself, a few products with each weight and no layout of chunks.

For a single token eq. 13 and 14 are cheaper than their closed form: u is an outer product, so the new surprise and the
new memory are one pass each over the old ones, and the read is a product with the new memory.
"""

import math

import torch
from torch import Tensor

from titans_lm.config import Activation
from titans_lm.ops.errors import loss_error
from titans_lm.ops.network import LAYER_NORM_EPS, MemoryNetwork, fast_output, layer_norm_backward, norm_parameters
from titans_lm.ops.state import Call, MemoryState, Outcome, Weights, select_rows


def can_step(call: Call) -> bool:
    """Whether the call is one token that every row has, and nobody asks for gradients."""
    if call.q.shape[1] != 1 or call.valid is not None:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in followed(call)))


def followed(call: Call) -> list[Tensor]:
    """All that gradients may be asked of."""
    (M, S, anchor, _, tail), network = call.state, call.network
    given = (
        call.q, call.k, call.v, *call.theta, *call.eta, *call.alpha, *M, *S, *anchor, *tail, *call.extra.given(),
        network.norm_weight, network.norm_bias, network.coefficients, *network.decay_target,
    )  # fmt: skip
    return [x for x in given if x is not None]


def step(call: Call) -> Outcome:
    """Write one token, (B, 1, H, D), then read with its query; no gradients.

    S ← η S − θ h ⊗ δ,   M ← (1 − α) M [+ α M_init] + S,   o = M(q)                               (eq. 13–15)
    """
    q, k, v, state, network, extra = call.q, call.k, call.v, call.state, call.network, call.extra
    tail = state.tail
    if extra.window is not None:  # c tokens in place of one, the last of which is new
        k, v = (torch.cat(pair, dim=1) for pair in zip(state.earlier(k, v), (k, v), strict=True))
        tail = (k[:, 1:].contiguous(), v[:, 1:].contiguous()) if tail else ()  # one layout, one graph
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, 1, D)
    weight, bias = norm_parameters(network, q.dtype)
    threshold = None if extra.threshold is None else extra.threshold.transpose(1, 2).unsqueeze(-1)
    inputs, deltas = _errors(state.anchor, k, v, network, weight, bias, threshold)
    M, S, others, gates, target = [], [], [], call.gates, network.decay_target
    for layer, (W, past) in enumerate(zip(state.M, state.S, strict=True)):
        th, et, al = (_spread(gate[layer]) for gate in gates)
        written = inputs[layer] * th.transpose(-1, -2)
        if extra.window is not None:
            written = written * extra.window[:, 0].flip(-1).unsqueeze(-1)
        base = target[layer].to(W.dtype) if target else None
        new = (past * et).contiguous()  # of a state in another order too, since it is written into by rows
        if call.return_surprise == "parts":
            others.append(torch.stack((_size(new), _size(al * (W if base is None else W - base))), dim=-1))
        new.flatten(0, 1).baddbmm_(written.flatten(0, 1).transpose(1, 2), deltas[layer].flatten(0, 1), alpha=-1)
        S.append(new)
        memory = torch.addcmul(new, W, 1.0 - al)
        if base is not None:
            memory.addcmul_(base, al)
        M.append(memory)
    at = tuple(M) if network.read_at == "token" else state.anchor
    o = recall_one(at, q, network, weight, bias).transpose(1, 2)
    after = close(MemoryState(tuple(M), tuple(S), state.anchor, state.offset + 1, tail), call.chunk_size)
    if not call.return_surprise:
        return o, after, None
    sizes = [h[..., -1:, :].norm(dim=-1) * d[..., -1:, :].norm(dim=-1) for h, d in zip(inputs, deltas, strict=True)]
    surprise = torch.stack(sizes, dim=-1).transpose(1, 2)  # (B, 1, H, L)
    if call.return_surprise == "parts":
        surprise = torch.cat((surprise.unsqueeze(-1), torch.stack(others, dim=-2).unsqueeze(1)), dim=-1)
    return o, after, surprise


def _size(weight: Tensor) -> Tensor:
    """‖W‖ of every row and head."""
    return weight.flatten(-2).norm(dim=-1)


def times(x: Tensor, W: Tensor) -> Tensor:
    """x W for every row and head, (B, H, C, D_in) and (B, H, D_in, D_out)."""
    return torch.bmm(x.flatten(0, 1), W.flatten(0, 1)).unflatten(0, W.shape[:2])


def activate_few(z: Tensor, activation: Activation, slope: bool = False) -> tuple[Tensor, Tensor | None]:
    """φ(z) and, on request, φ'(z).

    For the few numbers of one token plain arithmetic takes a third of the time that torch's GELU needs to begin.
    """
    if activation == "gelu":
        cdf = torch.erf(z * math.sqrt(0.5)).add_(1.0).mul_(0.5)
        if not slope:
            return cdf.mul_(z), None
        pdf = (z * z).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
        return cdf * z, pdf.mul_(z).add_(cdf)
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * z, (s * (1.0 + z * (1.0 - s)) if slope else None)
    return z.relu(), ((z > 0).to(z.dtype) if slope else None)


def recall_one(M: Weights, q: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """M(q) for one token, (B, H, 1, D): [q +] [LN](z_L)."""
    z = times(q, M[0])
    for W in M[1:]:
        z = times(activate_few(z, network.activation)[0], W)
    return fast_output(q, z, network, weight, bias)


def _spread(gate: Tensor) -> Tensor:
    """A gate of one token, (B, 1, H) or (B, 1, H, D_in), shaped to scale the rows of a weight (B, H, D_in, D_out)."""
    gate = gate.squeeze(1)
    return gate[..., None] if gate.dim() == 3 else gate[..., None, None]


def close(state: MemoryState, chunk_size: int) -> MemoryState:
    """Take the memory as the anchor where a row's chunk is complete.

    Where offsets lie on the host and agree nothing is copied; on a device they are not looked at, which would wait.
    """
    if state.offset.is_cpu and not torch.compiler.is_compiling():
        reached = set(state.offset.tolist())
        if len(reached) == 1:
            if reached == {chunk_size}:
                return state._replace(anchor=state.M, offset=torch.zeros_like(state.offset))
            return state
    complete = state.offset == chunk_size
    anchor = select_rows(complete, state.M, state.anchor)
    return state._replace(anchor=anchor, offset=torch.where(complete, 0, state.offset))


def _errors(
    M: Weights,
    k: Tensor,
    v: Tensor,
    network: MemoryNetwork,
    weight: Tensor | None,
    bias: Tensor | None,
    threshold: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs h_{l−1} and errors δ_l of every layer; the gradient is ∇_{W_l} ℓ = h_{l−1} ⊗ δ_l with h_0 = k."""
    inputs, slopes = [k], []
    z = times(k, M[0])
    for W in M[1:]:
        h, slope = activate_few(z, network.activation, slope=True)
        inputs.append(h)
        slopes.append(slope)
        z = times(h, W)
    unit = rstd = None
    if weight is not None:
        unit, _, rstd = torch.native_layer_norm(z, (z.shape[-1],), None, None, LAYER_NORM_EPS)
        z = unit * weight if bias is None else torch.addcmul(bias, unit, weight)
    delta = loss_error(z + k if network.residual else z, v, network.objective, threshold)
    if weight is not None:
        delta = layer_norm_backward(delta * weight, unit, rstd)
    deltas = [delta]
    for layer in range(len(M) - 1, 0, -1):
        delta = times(delta, M[layer].transpose(-1, -2)).mul_(slopes[layer - 1])
        deltas.insert(0, delta)
    return inputs, deltas
