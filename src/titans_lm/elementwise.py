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

from titans_lm.ops.products import linear, outer, times

Gating = Literal["silu", "sigmoid"]
SHORTEST = 1e-12
"""Length from which on a vector has a direction."""


def followed(*tensors: Tensor | None) -> bool:
    """Whether gradients will be asked for; elsewhere the plain expression does, which compilers also understand."""
    return (
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in tensors)
        and not torch.compiler.is_compiling()
    )


def rms_norm(x: Float[Tensor, "*s E"], weight: Float[Tensor, " E"] | None, eps: float) -> Float[Tensor, "*s E"]:
    """x / √(mean(x²) + ε) · weight."""
    if not followed(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        rstd = _rstd(x, eps)
        y = _scaled(x, rstd, weight)
        ctx.save_for_backward(y if weight is None else x, weight, rstd)  # without a weight the next one keeps y anyway
        return y

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        kept, weight, rstd = ctx.saved_tensors
        if weight is not None:
            return *_rms_adjoint(grads[0], kept, weight, rstd), None
        along = (grads[0] * kept).mean(-1, keepdim=True)
        return torch.addcmul(grads[0], kept, along, value=-1).mul_(rstd), None, None


def _rstd(x: Tensor, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt_(size.square_().div_(x.shape[-1]).add_(eps))


def _scaled(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    y = x * rstd
    return y if weight is None else y.mul_(weight)


def _rms_adjoint(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by x, r (g − u ⟨g u⟩) with u = x r and ⟨·⟩ the mean, and by the weight."""
    d_weight = (grad * x).mul_(rstd).sum(dim=tuple(range(x.dim() - 1)))
    grad = grad * weight
    along = (grad * x).mean(-1, keepdim=True).mul_(rstd.pow(3))
    return grad.mul_(rstd).addcmul_(x, along, value=-1), d_weight


def unit_norm(x: Float[Tensor, "*s D"], eps: float | None = None) -> Float[Tensor, "*s D"]:
    """x / max(‖x‖, ε).

    Without ε it is 1e-12, and a vector that is shorter, as the zeros of padded embeddings are, has no gradient: times
    1 / ε in block after block it would be more than float32 holds.
    """
    if not followed(x):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if eps is None and torch.is_grad_enabled():
            x = torch.where(size < SHORTEST, x.detach(), x)
        return x / size.clamp_min(SHORTEST if eps is None else eps)
    return _UnitNorm.apply(x, eps)


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float | None) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        ctx.short, ctx.eps = eps is None, SHORTEST if eps is None else eps
        unit = x / size.clamp_min(ctx.eps)
        ctx.save_for_backward(unit, size)
        return unit

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (unit, size) = grads, ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True).masked_fill_(size < ctx.eps, 0.0)  # below ε it is a plain quotient
        d_x = torch.addcmul(grad, unit, along, value=-1).div_(size.clamp_min(ctx.eps))
        return d_x.masked_fill_(size < ctx.eps, 0.0) if ctx.short else d_x, None


def gated_linear(
    gate: Float[Tensor, "*s E"], x: Float[Tensor, "*s E"], weight: Float[Tensor, "O E"], activation: Gating
) -> Float[Tensor, "*s O"]:
    """(φ(gate) ∘ x) Wᵀ, φ being SiLU or the sigmoid."""
    if not followed(gate, x, weight) or torch.is_autocast_enabled(gate.device.type):
        return linear(_open(gate, activation) * x, weight)
    return _GatedLinear.apply(gate, x, weight, activation)


def _open(gate: Tensor, activation: Gating) -> Tensor:
    return F.silu(gate) if activation == "silu" else torch.sigmoid(gate)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor, weight: Tensor, activation: Gating) -> Tensor:
        ctx.save_for_backward(gate, x, weight)
        ctx.activation = activation
        return linear(_open(gate, activation).mul_(x), weight)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (gate, x, weight) = grads, ctx.saved_tensors
        opened, d_weight = _open(gate, ctx.activation), None
        if ctx.needs_input_grad[2]:
            d_weight = outer(grad, opened * x)
        d_product = times(grad, weight)
        d_opened = d_product * x
        if ctx.activation == "silu":
            d_gate = torch.ops.aten.silu_backward(d_opened, gate)
        else:
            d_gate = torch.ops.aten.sigmoid_backward(d_opened, opened)
        return d_gate, d_product.mul_(opened), d_weight, None


def swiglu(
    x: Float[Tensor, "*s E"], gate: Float[Tensor, "F E"], up: Float[Tensor, "F E"], down: Float[Tensor, "O F"]
) -> Float[Tensor, "*s O"]:
    """(SiLU(x W_gateᵀ) ∘ x W_upᵀ) W_downᵀ, on a CPU some rows at a time: a hidden layer of all outgrows caches."""
    return _SwiGLU.apply(x, gate, up, down)


BLOCK = 2**19
"""Numbers of one hidden layer in a block of rows; about five such layers are at work."""


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both, blocks = torch.cat((gate, up)), _blocks(x, len(gate))
        hidden = [linear(rows, both) for rows in blocks]
        ctx.save_for_backward(x, both, down, *hidden)
        y = x.new_empty(*x.shape[:-1], len(down))
        for part, out in zip(hidden, _blocks(y, len(gate)), strict=True):
            opened, raised = part.chunk(2, dim=-1)
            out.copy_(linear(F.silu(opened).mul_(raised), down))
        return y

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (x, both, down, *hidden) = grads, ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_x = x.new_empty(x.shape) if wanted[0] else None  # contiguous, so that its blocks are views of it
        d_both = torch.zeros_like(both) if wanted[1] or wanted[2] else None
        d_down = torch.zeros_like(down) if wanted[3] else None
        width = len(both) // 2
        d_rows = [None] * len(hidden) if d_x is None else _blocks(d_x, width)
        for rows, out, d_out, part in zip(_blocks(x, width), d_rows, _blocks(grad, width), hidden, strict=True):
            opened, raised = part.chunk(2, dim=-1)
            gated = F.silu(opened)
            if d_down is not None:
                d_down += outer(d_out, gated * raised)
            d_product = times(d_out, down)
            d_part = torch.empty_like(part)
            d_opened, d_raised = d_part.chunk(2, dim=-1)
            torch.mul(d_product, gated, out=d_raised)
            d_opened.copy_(torch.ops.aten.silu_backward(d_product.mul_(raised), opened))
            if d_both is not None:
                d_both += outer(d_part, rows)
            if out is not None:
                out.copy_(times(d_part, both))
        d_gate, d_up = (None, None) if d_both is None else d_both.chunk(2)
        return d_x, d_gate, d_up, d_down


def _blocks(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """The rows of (*s, E), on a CPU in blocks of which a hidden layer of this width stays in the caches."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.split(max(64, BLOCK // width)) if x.is_cpu else (rows,)


def normed_gated_linear(
    gate: Float[Tensor, "*s E"],
    x: Float[Tensor, "..."],
    weight: Float[Tensor, "O E"],
    x_weight: Float[Tensor, " D"],
    gate_weight: Float[Tensor, " E"] | None,
    eps: float,
) -> Float[Tensor, "*s O"]:
    """(σ(gate) ∘ RMSNorm(x)) Wᵀ for x (*s, E) or (*s, H, D); with a `gate_weight` of RMSNorm(gate) instead of gate."""
    return _NormedGatedLinear.apply(gate, x, weight, x_weight, gate_weight, eps)


class _NormedGatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, x: Tensor, weight: Tensor, x_weight: Tensor, gate_weight: Tensor | None, eps: float
    ) -> Tensor:
        x_rstd, gate_rstd = _rstd(x, eps), None if gate_weight is None else _rstd(gate, eps)
        ctx.save_for_backward(gate, x, weight, x_weight, gate_weight, x_rstd, gate_rstd)
        opened = torch.sigmoid(gate if gate_rstd is None else _scaled(gate, gate_rstd, gate_weight))
        return linear(opened.mul_(_scaled(x, x_rstd, x_weight).reshape(gate.shape)), weight)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (gate, x, weight, x_weight, gate_weight, x_rstd, gate_rstd) = grads, ctx.saved_tensors
        normed = _scaled(x, x_rstd, x_weight).reshape(gate.shape)
        opened = torch.sigmoid(gate if gate_rstd is None else _scaled(gate, gate_rstd, gate_weight))
        d_weight = outer(grad, opened * normed)
        d_product = times(grad, weight)
        d_gate = torch.ops.aten.sigmoid_backward(normed.mul_(d_product), opened)
        d_x, d_x_weight = _rms_adjoint(d_product.mul_(opened).view(x.shape), x, x_weight, x_rstd)
        d_gate_weight = None
        if gate_rstd is not None:
            d_gate, d_gate_weight = _rms_adjoint(d_gate, gate, gate_weight, gate_rstd)
        return d_gate, d_x, d_weight, d_x_weight, d_gate_weight, None


def mutually_gated_linear(
    y: Float[Tensor, "*s E"],
    m: Float[Tensor, "*s E"],
    weight: Float[Tensor, "O E"],
    y_weight: Float[Tensor, " E"],
    m_weight: Float[Tensor, " E"],
    eps: float,
) -> Float[Tensor, "*s O"]:
    """(ŷ ∘ σ(m̂) + m̂ ∘ σ(ŷ)) Wᵀ with ŷ = RMSNorm(y) and m̂ = RMSNorm(m)."""
    return _MutuallyGatedLinear.apply(y, m, weight, y_weight, m_weight, eps)


class _MutuallyGatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, m: Tensor, weight: Tensor, y_weight: Tensor, m_weight: Tensor, eps: float
    ) -> Tensor:
        y_rstd, m_rstd = _rstd(y, eps), _rstd(m, eps)
        ctx.save_for_backward(y, m, weight, y_weight, m_weight, y_rstd, m_rstd)
        a, c = _scaled(y, y_rstd, y_weight), _scaled(m, m_rstd, m_weight)
        product = torch.sigmoid(c).mul_(a).addcmul_(c, torch.sigmoid(a))
        return linear(product, weight)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (y, m, weight, y_weight, m_weight, y_rstd, m_rstd) = grads, ctx.saved_tensors
        a, c = _scaled(y, y_rstd, y_weight), _scaled(m, m_rstd, m_weight)
        open_a, open_c = torch.sigmoid(a), torch.sigmoid(c)
        d_weight = outer(grad, (a * open_c).addcmul_(c, open_a))
        d_product = times(grad, weight)
        d_a = torch.ops.aten.sigmoid_backward(c.mul_(d_product), open_a).addcmul_(d_product, open_c)
        d_c = torch.ops.aten.sigmoid_backward(a.mul_(d_product), open_c).addcmul_(d_product, open_a)
        d_y, d_y_weight = _rms_adjoint(d_a, y, y_weight, y_rstd)
        d_m, d_m_weight = _rms_adjoint(d_c, m, m_weight, m_rstd)
        return d_y, d_m, d_weight, d_y_weight, d_m_weight, None


def mixed_linear(
    y: Float[Tensor, "*s E"],
    m: Float[Tensor, "*s E"],
    weight: Float[Tensor, "O E"],
    gate_weight: Float[Tensor, "E E"],
    gate_bias: Float[Tensor, " E"],
    y_weight: Float[Tensor, " E"],
    m_weight: Float[Tensor, " E"],
    eps: float,
) -> Float[Tensor, "*s O"]:
    """(g ∘ ŷ + (1 − g) ∘ m̂) Wᵀ, g = σ((ŷ + m̂) W_gᵀ + b), with ŷ = RMSNorm(y) and m̂ = RMSNorm(m)."""
    return _MixedLinear.apply(y, m, weight, gate_weight, gate_bias, y_weight, m_weight, eps)


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        m: Tensor,
        weight: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor,
        y_weight: Tensor,
        m_weight: Tensor,
        eps: float,
    ) -> Tensor:
        y_rstd, m_rstd = _rstd(y, eps), _rstd(m, eps)
        a, c = _scaled(y, y_rstd, y_weight), _scaled(m, m_rstd, m_weight)
        g = linear(a + c, gate_weight, gate_bias).sigmoid_()  # kept: a product of matrices is not made twice
        ctx.save_for_backward(y, m, g, weight, gate_weight, y_weight, m_weight, y_rstd, m_rstd)
        return linear(torch.lerp(c, a, g), weight)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (y, m, g, weight, gate_weight, y_weight, m_weight, y_rstd, m_rstd) = grads, ctx.saved_tensors
        a, c = _scaled(y, y_rstd, y_weight), _scaled(m, m_rstd, m_weight)
        d_weight = outer(grad, torch.lerp(c, a, g))
        d_product = times(grad, weight)
        d_logits = torch.ops.aten.sigmoid_backward((a - c).mul_(d_product), g)
        d_gate_weight, d_gate_bias = outer(d_logits, a.add_(c)), d_logits.flatten(0, -2).sum(0)
        d_both = times(d_logits, gate_weight)
        d_a = d_product * g
        d_c = d_product.sub_(d_a).add_(d_both)
        d_y, d_y_weight = _rms_adjoint(d_a.add_(d_both), y, y_weight, y_rstd)
        d_m, d_m_weight = _rms_adjoint(d_c, m, m_weight, m_rstd)
        return d_y, d_m, d_weight, d_gate_weight, d_gate_bias, d_y_weight, d_m_weight, None


def causal_taps(padded: Float[Tensor, "B T_K1 E"], weight: Float[Tensor, "K E"]) -> Float[Tensor, "B T E"]:
    """SiLU(Σ_i w_i ∘ padded_{t+i}), a depthwise convolution over the K rows that end with a token's own."""
    if not followed(padded, weight):
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
