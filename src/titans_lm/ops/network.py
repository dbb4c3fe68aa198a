"""The memory's small network: its forward pass, and reading it with gradients by hand.

The weights M = (W_1 … W_L) are the memory; everything here is a function of them. Row vectors, weights from the right:

    z_1 = x W_1,   h_l = φ(z_l),   z_{l+1} = h_l W_{l+1}
    M(x) = [x +] [LN](z_L)

Tensors are head-first in here: x is (…, H, C, D) or a single (D,), a weight is (…, H, D_{l-1}, D_l) or (D_{l-1}, D_l).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from titans_lm.config import Activation, ForgetTo, Objective, check_choice, check_switch
from titans_lm.ops.matmul import bmm, once_differentiable
from titans_lm.ops.polynomial import polynomial

ReadAt = Literal["token", "anchor"]

LAYER_NORM_EPS = 1e-5
_WORDS = get_args(Activation), get_args(Objective), get_args(ForgetTo), get_args(ReadAt)
_FORMS = set(itertools.product(*_WORDS, (True, False)))


@dataclass(frozen=True)
class MemoryNetwork:
    """What a memory is besides its weights: form of the network, inner objective, and where forgetting leads.

    The depth follows from the weights. `norm_weight` and `norm_bias` (H, D) are the LayerNorm's; they belong to the
    outer model and the inner loop never changes them; without a norm_weight there is no LayerNorm. `initial` holds
    M_init (H, D_{l-1}, D_l), needed when forgetting leads there (D13). A token reads what it has just written, or with
    read_at="anchor" the memory at the end of the previous chunk (D54). With `coefficients` a_0 … a_p above 0,
    (H, p + 1), queries and keys stand for φ(q) and φ(k), all their monomials up to degree p (polynomial.py), and the
    memory has as many inputs.
    """

    activation: Activation = "gelu"
    residual: bool = True
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    objective: Objective = "l2"
    forget_to: ForgetTo = "zero"
    initial: tuple[Tensor, ...] | None = None
    read_at: ReadAt = "token"
    coefficients: Tensor | None = None

    def __post_init__(self) -> None:
        form = self.activation, self.objective, self.forget_to, self.read_at, self.residual
        if form not in _FORMS:  # made at every call of a layer
            check_choice("activation", self.activation, get_args(Activation))
            check_choice("objective", self.objective, get_args(Objective))
            check_choice("forget_to", self.forget_to, get_args(ForgetTo))
            check_choice("read_at", self.read_at, get_args(ReadAt))
            check_switch("residual", self.residual)
        if self.norm_bias is not None and self.norm_weight is None:
            raise ValueError("got norm_bias without norm_weight; expected both, norm_weight alone, or neither")
        if self.forget_to == "init" and self.initial is None:
            raise ValueError('got forget_to="init" without initial; expected the tuple of weights it forgets to')

    @property
    def decay_target(self) -> tuple[Tensor, ...]:
        """M_init where forgetting leads there, else nothing."""
        return () if self.forget_to == "zero" or self.initial is None else self.initial

    def make_keys(self, *x: Tensor) -> tuple["MemoryNetwork", tuple[Tensor, ...]]:
        """The polynomials of queries or keys (B, T, H, D), and the network that takes them; as given if it has none."""
        if self.coefficients is None:
            return self, x
        a = self.coefficients.to(x[0].dtype)
        return replace(self, coefficients=None), tuple([polynomial(y, a) for y in x])


def activate(z: Float[Tensor, "*s D"], activation: Activation) -> Float[Tensor, "*s D"]:
    """Apply φ; GELU is the exact (erf) form."""
    if activation == "gelu":
        return F.gelu(z)
    return F.silu(z) if activation == "silu" else F.relu(z)


def activate_into(z: Tensor, out: Tensor, activation: Activation) -> Tensor:
    """Write φ(z) into `out` and return it."""
    if activation == "gelu":
        return torch.ops.aten.gelu.out(z, out=out)
    if activation == "silu":
        return torch.ops.aten.silu.out(z, out=out)
    return torch.clamp_min(z, 0.0, out=out)


def activation_grad(grad: Tensor, z: Tensor, out: Tensor, activation: Activation) -> Tensor:
    """Write grad ∘ φ'(z) into `out` and return it."""
    if activation == "gelu":
        return torch.ops.aten.gelu_backward.grad_input(grad, z, grad_input=out)
    if activation == "silu":
        return torch.ops.aten.silu_backward.grad_input(grad, z, grad_input=out)
    return torch.ops.aten.threshold_backward.grad_input(grad, z, 0.0, grad_input=out)


def second_derivative(z: Tensor, activation: Activation) -> Tensor | None:
    """φ''(z); None where it is zero."""
    if activation == "gelu":
        square = z * z
        return torch.exp(-0.5 * square).mul_(2.0 - square).mul_(1.0 / math.sqrt(2.0 * math.pi))
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))
    return None


def norm_parameters(network: MemoryNetwork, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The LayerNorm's weight and bias as (H, 1, D), so that they broadcast over (B, H, C, D)."""
    weight = None if network.norm_weight is None else network.norm_weight.to(dtype).unsqueeze(-2)
    bias = None if network.norm_bias is None else network.norm_bias.to(dtype).unsqueeze(-2)
    return weight, bias


def output(
    x: Float[Tensor, "*s K"],
    z: Float[Tensor, "*s D"],
    network: MemoryNetwork,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Float[Tensor, "*s D"]:
    """Finish the network: [x +] [LN](z_L), LN by mean and biased variance."""
    if weight is not None:
        z = z - z.mean(-1, keepdim=True)
        z = z * torch.rsqrt((z * z).mean(-1, keepdim=True) + LAYER_NORM_EPS) * weight
        if bias is not None:
            z = z + bias
    return x + z if network.residual else z


def fast_output(x: Tensor, z: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`output` by torch's kernel, where gradients are made by hand or not at all."""
    if weight is not None:
        z = torch.native_layer_norm(z, (z.shape[-1],), None, None, LAYER_NORM_EPS)[0]
        z = z * weight if bias is None else torch.addcmul(bias, z, weight)
    return z + x if network.residual else z


def forward(
    M: tuple[Tensor, ...], x: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """M(x), for one vector or for (B, H, C, D) at once."""
    h, z = x, x
    for layer, W in enumerate(M):
        h = x if layer == 0 else activate(z, network.activation)
        z = h @ W
    return output(x, z, network, weight, bias)


def layer_norm_backward(
    grad: Tensor,
    unit: Tensor,
    rstd: Tensor,
    neutral: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Backward of the LayerNorm without parameters: r (g − ⟨g⟩ − u ⟨g u⟩) for its output u and r = 1 / std.

    torch's kernel is given u in place of the input, with mean 0 and deviation 1 (`neutral`, like r): from the input it
    would subtract terms that grow with the mean, and lose digits.
    """
    mean, ones = neutral or (torch.zeros_like(rstd), torch.ones_like(rstd))
    gradient = torch.ops.aten.native_layer_norm_backward(
        grad, unit, (unit.shape[-1],), mean, ones, None, None, (True, False, False)
    )[0]
    return torch.mul(gradient, rstd, out=gradient if out is None else out)


def recall(
    M: tuple[Tensor, ...], q: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """M(q) for q (B, H, T, D), M (B, H, D_in, D_out) and the LayerNorm's parameters (H, 1, D); gradients by hand.

    It keeps the queries and the weights, and makes everything else again.
    """
    return _Recall.apply(network, weight, bias, q, *M)


class _Recall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None, q: Tensor, *M: Tensor
    ) -> Tensor:
        ctx.network = network
        ctx.save_for_backward(weight, bias, q, *M)
        *_, o = _layers(q, M, network)
        return fast_output(q, o.view(*q.shape[:3], o.shape[-1]), network, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (d_out,), (weight, bias, q, *M), network = grads, ctx.saved_tensors, ctx.network
        grad, d_weight, d_bias = d_out.flatten(0, 1), None, None
        d_M: list[Tensor | None] = []
        with torch.autocast(device_type=d_out.device.type, enabled=False):  # for a backward() inside autocast
            pre, dz = _layers(q, M, network), grad
            if weight is not None:
                unit, _, rstd = torch.native_layer_norm(pre[-1], (grad.shape[-1],), None, None, LAYER_NORM_EPS)
                d_weight = (grad * unit).view(d_out.shape).sum((0, 2)).unsqueeze(1)
                d_bias = None if bias is None else d_out.sum((0, 2)).unsqueeze(1)
                dz = layer_norm_backward((d_out * weight).flatten(0, 1), unit, rstd)
            for layer in range(len(M) - 1, -1, -1):
                h = q.flatten(0, 1) if layer == 0 else activate(pre[layer - 1], network.activation)
                needed = ctx.needs_input_grad[4 + layer]
                d_M.insert(0, bmm(h.transpose(1, 2), dz).view(M[layer].shape) if needed else None)
                d_h = bmm(dz, M[layer].flatten(0, 1).transpose(1, 2))
                dz = d_h if layer == 0 else activation_grad(d_h, pre[layer - 1], d_h, network.activation)
        d_q = dz.add_(grad) if network.residual else dz
        return None, d_weight, d_bias, d_q.view(q.shape), *d_M


def _layers(q: Tensor, M: Sequence[Tensor], network: MemoryNetwork) -> list[Tensor]:
    """z_1 … z_L, each (B · H, T, D_l)."""
    pre: list[Tensor] = []
    for layer, W in enumerate(M):
        h = q.flatten(0, 1) if layer == 0 else activate(pre[-1], network.activation)
        pre.append(bmm(h, W.flatten(0, 1)))
    return pre
