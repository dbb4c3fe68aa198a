"""Element-wise functions whose gradients are written by hand: they keep what they were given, not what they made of it.

Autograd keeps every intermediate and goes back through each; of what a training step holds and does besides matrix
products, that was about half. Each function here gives what the expression in its docstring gives, and its gradients.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Gating = Literal["silu", "sigmoid"]


def _followed(*tensors: Tensor) -> bool:
    """Whether gradients will be asked for; elsewhere the plain expression does, which compilers also understand."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors) and not torch.compiler.is_compiling()


def rms_norm(x: Float[Tensor, "*s E"], weight: Float[Tensor, " E"] | None, eps: float) -> Float[Tensor, "*s E"]:
    """x / √(mean(x²) + ε) · weight."""
    if not _followed(x, *(() if weight is None else (weight,))):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rstd = torch.rsqrt_(size.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, rstd)
        y = x * rstd
        return y if weight is None else y.mul_(weight)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (x, weight, rstd) = grads, ctx.saved_tensors
        d_weight = None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                d_weight = (grad * x).mul_(rstd).sum(dim=tuple(range(x.dim() - 1)))
            grad = grad * weight
        # r (g − u ⟨g u⟩) with u = x r and ⟨·⟩ the mean
        along = (grad * x).mean(-1, keepdim=True).mul_(rstd.pow(3))
        d_x = grad.mul_(rstd) if weight is not None else grad * rstd
        return d_x.addcmul_(x, along, value=-1), d_weight, None


def unit_norm(x: Float[Tensor, "*s D"], eps: float = 1e-12) -> Float[Tensor, "*s D"]:
    """x / max(‖x‖, ε)."""
    if not _followed(x):
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(eps)
    return _UnitNorm.apply(x, eps)


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit = x / size.clamp_min(eps)
        ctx.save_for_backward(unit, size)
        ctx.eps = eps
        return unit

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (unit, size) = grads, ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True).masked_fill_(size < ctx.eps, 0.0)  # below ε it is a plain quotient
        return torch.addcmul(grad, unit, along, value=-1).div_(size.clamp_min(ctx.eps)), None


def gated_linear(
    gate: Float[Tensor, "*s E"], x: Float[Tensor, "*s E"], weight: Float[Tensor, "O E"], activation: Gating
) -> Float[Tensor, "*s O"]:
    """(φ(gate) ∘ x) Wᵀ, φ being SiLU or the sigmoid."""
    if not _followed(gate, x, weight) or torch.is_autocast_enabled(gate.device.type):
        return F.linear(_open(gate, activation) * x, weight)
    return _GatedLinear.apply(gate, x, weight, activation)


def _open(gate: Tensor, activation: Gating) -> Tensor:
    return F.silu(gate) if activation == "silu" else torch.sigmoid(gate)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, weight: Tensor, activation: Gating) -> Tensor:
        ctx.save_for_backward(gate, x, weight)
        ctx.activation = activation
        return F.linear(_open(gate, activation).mul_(x), weight)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (gate, x, weight) = grads, ctx.saved_tensors
        opened, d_weight = _open(gate, ctx.activation), None
        if ctx.needs_input_grad[2]:
            d_weight = grad.flatten(0, -2).t() @ (opened * x).flatten(0, -2)
        d_product = grad @ weight
        d_opened = d_product * x
        if ctx.activation == "silu":
            d_gate = torch.ops.aten.silu_backward(d_opened, gate)
        else:
            d_gate = torch.ops.aten.sigmoid_backward(d_opened, opened)
        return d_gate, d_product.mul_(opened), d_weight, None


def causal_taps(padded: Float[Tensor, "B T_K1 E"], weight: Float[Tensor, "K E"]) -> Float[Tensor, "B T E"]:
    """SiLU(Σ_i w_i ∘ padded_{t+i}), a depthwise convolution over the K rows that end with a token's own."""
    if not _followed(padded, weight):
        return F.silu(_taps(padded, weight))
    return _CausalTaps.apply(padded, weight)


def _taps(padded: Tensor, weight: Tensor) -> Tensor:
    # a handful of shifted products: on CPU faster than a grouped convolution, and no transposes
    T = padded.shape[1] - len(weight) + 1
    first, *others = weight.unbind()
    y = padded[:, :T] * first
    for i, w in enumerate(others, 1):
        y.addcmul_(padded[:, i : i + T], w)
    return y


class _CausalTaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(padded, weight)
        return F.silu(_taps(padded, weight))

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (padded, weight) = grads, ctx.saved_tensors
        K, T = len(weight), grad.shape[1]
        d_y = torch.ops.aten.silu_backward(grad, _taps(padded, weight))
        d_padded, d_weight = torch.zeros_like(padded), torch.empty_like(weight)
        for i in range(K):
            d_padded[:, i : i + T].addcmul_(d_y, weight[i])
            torch.sum(d_y * padded[:, i : i + T], dim=(0, 1), out=d_weight[i])
        return d_padded, d_weight
