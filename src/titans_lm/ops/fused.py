"""Norms, gates and taps, each a plain expression with a fast path inside, whose gradients are written by hand.

Autograd keeps every intermediate and goes back through each; of what a training step holds and does besides matrix
products, that was about half (D27). What is here keeps what it was given or gives, σ of the gates and the two hidden
halves of an MLP, and gives what the expression in its docstring gives. Layers call these functions unconditionally.
Maps and norms are passed as the modules that they are: PEFT wraps them and users put hooks on them, and then they are
called.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from titans_lm.ops.matmul import PLAIN, linear, needs_grad, once_differentiable, outer, times
from titans_lm.ops.state import state_dtype

How = Literal["memory", "mutual"]
SHORTEST = 1e-12
"""Length from which on a vector has a direction."""


def is_plain(*modules: Any) -> bool:
    """Whether these are our own linear maps and norms and nothing else, so that their weights say what they do.

    Quantised weights are tensors of another type; accelerate puts a forward of its own on a module whose weights are
    elsewhere until it is called.
    """
    for m in modules:
        hooked = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        if hooked or "forward" in vars(m) or "is_plain" not in vars(type(m)) or type(m.weight) not in PLAIN:
            return False
    return True


def _can_fuse(x: Tensor, maps: tuple[Any, ...], norms: tuple[Any, ...] = ()) -> bool:
    """Whether a fast path is for this call: several tokens, gradients asked for, all plain and of one precision."""
    if x.shape[1] == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not is_plain(*maps, *norms) or (norms and norms[0].eps != norms[-1].eps):
        return False
    asked = x.requires_grad
    for module in (*maps, *norms):
        if module.weight.dtype != x.dtype:
            return False
        asked = asked or module.weight.requires_grad
    return asked and not torch.is_autocast_enabled(x.device.type)


def joined_weight(*projs: Any) -> Tensor | None:
    """The weights of several linear maps in one matrix; None for a single one, and where they are to be called."""
    if len(projs) == 1 or not is_plain(*projs):
        return None
    weights = []
    for proj in projs:
        if proj.bias is not None:
            return None
        weights.append(proj.weight)
    return torch.cat(weights)


def rms_norm(x: Float[Tensor, "*s E"], weight: Float[Tensor, " E"] | None, eps: float) -> Float[Tensor, "*s E"]:
    """x / √(mean(x²) + ε) · weight, computed in at least float32."""
    precise = state_dtype(x.dtype)
    if x.dtype != precise or (weight is not None and weight.dtype != precise):
        y = F.rms_norm(x.to(precise), x.shape[-1:], eps=eps)
        return (y if weight is None else y * weight.to(precise)).to(x.dtype)
    if not needs_grad(x, weight):
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
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        kept, weight, rstd = ctx.saved_tensors
        if weight is not None:
            return *_rms_adjoint(grads[0], kept, weight, rstd), None
        along = (grads[0] * kept).mean(-1, keepdim=True)
        return torch.addcmul(grads[0], kept, along, value=-1).mul_(rstd), None, None


def _rstd(x: Tensor, eps: float) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(size.new_full((), eps), size, size, value=1.0 / x.shape[-1], out=size).rsqrt_()


def _scaled(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    y = x * rstd
    return y if weight is None else y.mul_(weight)


def _rms_adjoint(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by x, r (g − u ⟨g u⟩) with u = x r and ⟨·⟩ the mean, and by the weight."""
    d_weight = (grad * x).mul_(rstd).sum(dim=tuple(range(x.dim() - 1)))
    grad = grad * weight
    along = (grad * x).mean(-1, keepdim=True).mul_(rstd.pow(3))
    return grad.mul_(rstd).addcmul_(x, along, value=-1), d_weight


def unit_norm(x: Float[Tensor, "*s D"]) -> Float[Tensor, "*s D"]:
    """x / ‖x‖.

    A vector shorter than 1e-12, as the zeros of padded embeddings are, is divided by that and has no gradient: times
    its inverse in block after block it would be more than float32 holds.
    """
    if needs_grad(x):
        return _UnitNorm.apply(x)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if torch.is_grad_enabled():
        x = torch.where(size < SHORTEST, x.detach(), x)
    return x / size.clamp_min(SHORTEST)


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit = x / size.clamp_min(SHORTEST)
        ctx.save_for_backward(unit, size)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (unit, size) = grads, ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True)
        d_x = torch.addcmul(grad, unit, along, value=-1).div_(size.clamp_min(SHORTEST))
        return d_x.masked_fill_(size < SHORTEST, 0.0)


def unit_qkv(y: Float[Tensor, "B T 3 H D"], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`unit_norm` of q and of k and `rms_norm` of v, (B, T, H, D), which stand side by side."""
    if needs_grad(y):
        return _UnitQKV.apply(y, eps)
    if torch.compiler.is_compiling():
        q, k, v = y.unbind(2)
        return unit_norm(q), unit_norm(k), rms_norm(v, None, eps)
    q, k, v = (y / _qkv_sizes(y, eps)).unbind(2)
    return q, k, v


def _qkv_sizes(y: Tensor, eps: float) -> Tensor:
    """‖q‖, ‖k‖ and √(mean(v²) + ε), (B, T, 3, H, 1)."""
    sizes = torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_min_(SHORTEST)
    v = sizes[:, :, 2]
    torch.addcmul(v.new_full((), eps), v, v, value=1.0 / y.shape[-1], out=v).sqrt_()
    return sizes


class _UnitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, eps: float) -> tuple[Tensor, ...]:
        sizes = _qkv_sizes(y, eps)
        unit = y / sizes
        ctx.save_for_backward(unit, sizes)
        return unit.unbind(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad, (unit, sizes) = torch.stack(grads, dim=2), ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True)
        along[:, :, 2].div_(unit.shape[-1])  # of v it is the mean
        d_y = grad.addcmul_(unit, along, value=-1).div_(sizes)
        d_y[:, :, :2].masked_fill_(sizes[:, :, :2] <= SHORTEST, 0.0)
        return d_y, None


def swiglu(x: Float[Tensor, "B T E"], gate_proj: Any, up_proj: Any, down_proj: Any) -> Float[Tensor, "B T O"]:
    """(SiLU(x W_gateᵀ) ∘ x W_upᵀ) W_downᵀ, on a CPU some rows at a time: a hidden layer of all outgrows caches."""
    projs = gate_proj, up_proj, down_proj
    if _can_fuse(x, projs) and all([proj.bias is None for proj in projs]):
        return _SwiGLU.apply(x, *[proj.weight for proj in projs])
    return down_proj(F.silu(gate_proj(x)) * up_proj(x))


BLOCK = 2**19
"""Numbers of one hidden layer in a block of rows; about five such layers are at work."""


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both, blocks = torch.cat((gate, up)), _blocks(x, len(gate))
        hidden = [linear(rows, both) for rows in blocks]
        ctx.save_for_backward(x, both, down, *hidden)
        pairs, shape = [part.chunk(2, dim=-1) for part in hidden], (*x.shape[:-1], len(down))
        made = (linear(F.silu(opened).mul_(raised), down) for opened, raised in pairs)
        if len(hidden) == 1:  # a plain view would be one that nobody may write into
            return torch.ops.aten._unsafe_view(next(made), shape)
        y = x.new_empty(shape)
        for out, product in zip(_blocks(y, len(gate)), made, strict=True):
            out.copy_(product)
        return y

    @staticmethod
    @once_differentiable
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
    rows, most = x.reshape(-1, x.shape[-1]), max(64, BLOCK // width)
    return rows.split(most) if x.is_cpu and len(rows) > most else (rows,)


def gated_linear(
    how: How,
    proj: Any,
    y: Tensor,
    m: Float[Tensor, "B T E"],
    y_norm: Any,
    m_norm: Any = None,
) -> Float[Tensor, "B T O"]:
    """Two streams in one, ŷ and m̂ being their norms, if any: y is (B, T, E), or (B, T, H, D) to be normed by head.

    "memory":  (ŷ ∘ σ(m̂)) Wᵀ
    "mutual":  (ŷ ∘ σ(m̂) + m̂ ∘ σ(ŷ)) Wᵀ
    """
    norms = (y_norm,) if m_norm is None else (y_norm, m_norm)
    precise = m.dtype == y.dtype == state_dtype(y.dtype)
    if precise and _can_fuse(y, (proj,), norms) and proj.bias is None:
        m_weight = None if m_norm is None else m_norm.weight
        return _GatedLinear.apply(how, y_norm.eps, y, m, proj.weight, y_norm.weight, m_weight)
    y, m = y_norm(y).flatten(2).to(m.dtype), m if m_norm is None else m_norm(m)
    opened = torch.sigmoid(m) * y
    return proj(opened if how == "memory" else opened + m * torch.sigmoid(y))


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: str,
        eps: float,
        y: Tensor,
        m: Tensor,
        weight: Tensor,
        y_weight: Tensor,
        m_weight: Tensor | None,
    ) -> Tensor:
        y_rstd, m_rstd = _rstd(y, eps), None if m_weight is None else _rstd(m, eps)
        a, c = _scaled(y, y_rstd, y_weight).reshape(m.shape), m if m_rstd is None else _scaled(m, m_rstd, m_weight)
        ctx.how = how
        ctx.save_for_backward(y, m, weight, y_weight, m_weight, y_rstd, m_rstd)
        both = torch.sigmoid(c) * a
        return linear(both.addcmul_(c, torch.sigmoid(a)) if how == "mutual" else both, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (y, m, weight, y_weight, m_weight, y_rstd, m_rstd) = grads, ctx.saved_tensors
        a, c = _scaled(y, y_rstd, y_weight).reshape(m.shape), m if m_rstd is None else _scaled(m, m_rstd, m_weight)
        d, by_sigmoid = times(grad, weight), torch.ops.aten.sigmoid_backward
        d_m_weight = None
        if ctx.how == "mutual":
            open_a, open_c = torch.sigmoid(a), torch.sigmoid(c)
            d_weight = outer(grad, (a * open_c).addcmul_(c, open_a))
            d_a = by_sigmoid(c * d, open_a).addcmul_(d, open_c)
            d_c = by_sigmoid(a.mul_(d), open_c).addcmul_(d, open_a)
        else:
            opened = torch.sigmoid(c)
            d_weight = outer(grad, opened * a)
            d_c, d_a = by_sigmoid(a.mul_(d), opened), d.mul_(opened)
        d_y, d_y_weight = _rms_adjoint(d_a.view(y.shape), y, y_weight, y_rstd)
        if m_rstd is not None:
            d_c, d_m_weight = _rms_adjoint(d_c, m, m_weight, m_rstd)
        return None, None, d_y, d_c, d_weight, d_y_weight, d_m_weight


GateForm = tuple[float, float]
"""How far a gate reaches beyond its ends (ε), and its largest value."""


def clipped_sigmoid(x: Float[Tensor, "*s"], stretch: float) -> Float[Tensor, "*s"]:
    """clip((1 + 2ε) σ(x) − ε, 0, 1), whose gradient is everywhere that of what is clipped (D33)."""
    return clipped_sigmoids(x.unsqueeze(2), ((stretch, 1.0),))[0]


def clipped_sigmoids(x: Float[Tensor, "B T G *s"], forms: tuple[GateForm, ...]) -> tuple[Tensor, ...]:
    """The same times a largest value, for G gates that stand side by side: each (B, T, *s)."""
    if needs_grad(x):
        return _ClippedSigmoids.apply(x, forms)
    found = []
    for part, (stretch, most) in zip(torch.sigmoid(x).unbind(2), forms, strict=True):
        y = part * ((1.0 + 2.0 * stretch) * most)
        if stretch:
            y = y - stretch * most
            clipped = y.clamp(0.0, most)
            y = y + (clipped - y).detach() if torch.is_grad_enabled() else clipped
        found.append(y)
    return tuple(found)


class _ClippedSigmoids(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: tuple[GateForm, ...]) -> tuple[Tensor, ...]:
        opened, found = torch.sigmoid(x), []
        ctx.save_for_backward(opened)
        ctx.forms = forms
        for part, (stretch, most) in zip(opened.unbind(2), forms, strict=True):
            y = part * ((1.0 + 2.0 * stretch) * most)
            found.append(y.sub_(stretch * most).clamp_(0.0, most) if stretch else y)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        several = []
        for grad, (stretch, most) in zip(grads, ctx.forms, strict=True):
            several.append(grad * ((1.0 + 2.0 * stretch) * most))
        return torch.ops.aten.sigmoid_backward(torch.stack(several, dim=2), ctx.saved_tensors[0]), None


def causal_taps(padded: Float[Tensor, "B T_K1 E"], weight: Float[Tensor, "K E"]) -> Float[Tensor, "B T E"]:
    """SiLU(Σ_i w_i ∘ padded_{t+i}), a depthwise convolution over the K rows that end with a token's own."""
    if not needs_grad(padded, weight):
        return F.silu(_taps(padded, weight))
    return _CausalTaps.apply(padded, weight)


def _taps(padded: Tensor, weight: Tensor) -> Tensor:
    # a handful of shifted products: on CPU faster than a grouped convolution, and no transposes
    T = padded.shape[1] - len(weight) + 1
    if torch.compiler.is_compiling():  # which fuses the gradients of slices, and would scatter those of strides
        shifted = [padded[:, i : i + T] for i in range(len(weight))]
    else:
        (B, _, E), (row, token, channel) = padded.shape, padded.stride()
        shifted = padded.as_strided((len(weight), B, T, E), (token, row, token, channel)).unbind()
    first, *weights = weight.unbind()
    y = shifted[0] * first
    for x, w in zip(shifted[1:], weights, strict=True):
        y.addcmul_(x, w)
    return y


class _CausalTaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(padded, weight)
        return F.silu(_taps(padded, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (padded, weight) = grads, ctx.saved_tensors
        K, T = len(weight), grad.shape[1]
        d_y = torch.ops.aten.silu_backward(grad, _taps(padded, weight))
        d_padded, d_weight = torch.zeros_like(padded), torch.empty_like(weight)
        for i in range(K):
            d_padded[:, i : i + T].addcmul_(d_y, weight[i])
            torch.sum(d_y * padded[:, i : i + T], dim=(0, 1), out=d_weight[i])
        return d_padded, d_weight
