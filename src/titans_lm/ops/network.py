"""The memory's small network: its forward pass, and the errors of its inner loss.

The weights M = (W_1 … W_L) are the memory; everything here is a function of them. Row vectors, weights from the right:

    z_1 = x W_1,   h_l = φ(z_l),   z_{l+1} = h_l W_{l+1}
    M(x) = [x +] [LN](z_L)

Tensors are head-first in here: x is (…, H, C, D) or a single (D,), a weight is (…, H, D_{l-1}, D_l) or (D_{l-1}, D_l).
"""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from titans_lm.config import Activation, ForgetTo, Objective, check_choice

LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class MemoryNetwork:
    """What a memory is besides its weights: form of the network, inner objective, and where forgetting leads.

    The depth follows from the weights. `norm_weight` and `norm_bias` (H, D) are the LayerNorm's; they belong to the
    outer model and the inner loop never changes them; without a norm_weight there is no LayerNorm. `initial` holds
    M_init (H, D_{l-1}, D_l), needed when forgetting leads there (D13).
    """

    activation: Activation = "gelu"
    residual: bool = True
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    objective: Objective = "l2"
    forget_to: ForgetTo = "zero"
    initial: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, get_args(Activation))
        check_choice("objective", self.objective, get_args(Objective))
        check_choice("forget_to", self.forget_to, get_args(ForgetTo))
        if self.norm_bias is not None and self.norm_weight is None:
            raise ValueError("got norm_bias without norm_weight; expected both, norm_weight alone, or neither")
        if self.forget_to == "init" and self.initial is None:
            raise ValueError('got forget_to="init" without initial; expected the tuple of weights it forgets to')


def activate(z: Float[Tensor, "*s D"], activation: Activation) -> Float[Tensor, "*s D"]:
    """Apply φ; GELU is the exact (erf) form."""
    if activation == "gelu":
        return F.gelu(z)
    return F.silu(z) if activation == "silu" else F.relu(z)


def slope(z: Float[Tensor, "*s D"], activation: Activation) -> Float[Tensor, "*s D"]:
    """φ'(z), itself differentiable: the outer model's gradients pass through the inner ones."""
    if activation == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5)))
        return cdf + z * torch.exp(-0.5 * z * z) * (0.5 * math.sqrt(2.0 / math.pi))
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    return (z > 0).to(z.dtype)


def norm_parameters(network: MemoryNetwork, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The LayerNorm's weight and bias as (H, 1, D), so that they broadcast over (B, H, C, D)."""
    weight = None if network.norm_weight is None else network.norm_weight.to(dtype).unsqueeze(-2)
    bias = None if network.norm_bias is None else network.norm_bias.to(dtype).unsqueeze(-2)
    return weight, bias


def standardise(z: Float[Tensor, "*s D"]) -> tuple[Float[Tensor, "*s D"], Float[Tensor, "*s 1"]]:
    """(z − mean) / std over the last dimension with biased variance, and 1 / std."""
    centred = z - z.mean(-1, keepdim=True)
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + LAYER_NORM_EPS)
    return centred * rstd, rstd


def output(
    x: Float[Tensor, "*s D"],
    z: Float[Tensor, "*s D"],
    network: MemoryNetwork,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Float[Tensor, "*s D"]:
    """Finish the network: [x +] [LN](z_L)."""
    if weight is not None:
        z = standardise(z)[0] * weight
        if bias is not None:
            z = z + bias
    return x + z if network.residual else z


def forward(
    M: tuple[Tensor, ...], x: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """M(x), for one vector or for (B, H, C, D) at once."""
    h, z = x, x
    for layer, W in enumerate(M):
        h = x if layer == 0 else activate(z, network.activation)
        z = h @ W
    return output(x, z, network, weight, bias)


def loss(
    M: tuple[Tensor, ...], k: Tensor, v: Tensor, network: MemoryNetwork, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The inner objective of one token: ℓ = ‖M(k) − v‖² (eq. 12), or −⟨M(k), v⟩ for the dot product."""
    prediction = forward(M, k, network, weight, bias)
    if network.objective == "dot":
        return -(prediction * v).sum()
    return ((prediction - v) ** 2).sum()


def errors(
    M: tuple[Float[Tensor, "B H _ _"], ...],
    k: Float[Tensor, "B H C D"],
    v: Float[Tensor, "B H C D"],
    network: MemoryNetwork,
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs h_{l-1} and errors δ_l of every layer, for all tokens of a chunk at the same weights.

    The gradient of token j is the outer product ∇_{W_l} ℓ = h_{l-1,j} ⊗ δ_{l,j} with h_0 = k, so a chunk of gradients
    is 2 L matrices of C rows and no per-token weights exist.
    """
    weight, bias = norm_parameters(network, k.dtype)
    inputs, pre = [k], []
    for layer, W in enumerate(M):
        if layer > 0:
            inputs.append(activate(pre[-1], network.activation))
        pre.append(inputs[-1] @ W)
    z = pre[-1]
    delta = -v if network.objective == "dot" else 2.0 * (output(k, z, network, weight, bias) - v)
    if weight is not None:
        # Backward of LayerNorm: the gradient loses its mean and its part along the normalised output.
        unit, rstd = standardise(z)
        delta = delta * weight
        delta = rstd * (delta - delta.mean(-1, keepdim=True) - unit * (delta * unit).mean(-1, keepdim=True))
    deltas = [delta]
    for layer in range(len(M) - 1, 0, -1):
        delta = (delta @ M[layer].transpose(-1, -2)) * slope(pre[layer - 1], network.activation)
        deltas.insert(0, delta)
    return inputs, deltas
