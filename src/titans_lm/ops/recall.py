"""Reading alone, with gradients by hand: it keeps the queries and the weights, and makes everything else again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titans_lm.ops.network import LAYER_NORM_EPS, MemoryNetwork, activate, slope_times
from titans_lm.ops.products import bmm
from titans_lm.ops.segment import layer_norm_adjoint


def recall(
    M: tuple[Tensor, ...], q: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """M(q) for q (B, H, T, D), M (B, H, D_in, D_out) and the LayerNorm's parameters (H, 1, D)."""
    return _Recall.apply(network, weight, bias, q, *M)


class _Recall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None, q: Tensor, *M: Tensor
    ) -> Tensor:
        ctx.network = network
        ctx.save_for_backward(weight, bias, q, *M)
        *_, o = _layers(q, M, network)
        if weight is not None:
            unit = torch.native_layer_norm(o, (o.shape[-1],), None, None, LAYER_NORM_EPS)[0]
            o = unit.view(q.shape).mul_(weight)
            o = o if bias is None else o.add_(bias)
        return o.view(q.shape).add_(q) if network.residual else o.view(q.shape)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        weight, bias, q, *M = ctx.saved_tensors
        network, needed = ctx.network, ctx.needs_input_grad[4:]
        pre = _layers(q, M, network)
        grad, d_weight, d_bias = grads[0].flatten(0, 1), None, None
        dz = grad
        if weight is not None:
            unit, _, rstd = torch.native_layer_norm(pre[-1], (q.shape[-1],), None, None, LAYER_NORM_EPS)
            d_weight = (grad * unit).view(q.shape).sum((0, 2)).unsqueeze(1)
            d_bias = None if bias is None else grads[0].sum((0, 2)).unsqueeze(1)
            dz = layer_norm_adjoint((grads[0] * weight).flatten(0, 1), unit, rstd)
        d_M: list[Tensor | None] = []
        for layer in range(len(M) - 1, -1, -1):
            h = q.flatten(0, 1) if layer == 0 else activate(pre[layer - 1], network.activation)
            d_M.insert(0, bmm(h.transpose(1, 2), dz).view(M[layer].shape) if needed[layer] else None)
            d_h = bmm(dz, M[layer].flatten(0, 1).transpose(1, 2))
            dz = d_h if layer == 0 else slope_times(d_h, pre[layer - 1], d_h, network.activation)
        d_q = dz.add_(grad) if network.residual else dz
        return None, d_weight, d_bias, d_q.view(q.shape), *d_M


def _layers(q: Tensor, M: Sequence[Tensor], network: MemoryNetwork) -> list[Tensor]:
    """z_1 … z_L, each (B · H, T, D_l)."""
    pre: list[Tensor] = []
    for layer, W in enumerate(M):
        h = q.flatten(0, 1) if layer == 0 else activate(pre[-1], network.activation)
        pre.append(bmm(h, W.flatten(0, 1)))
    return pre
