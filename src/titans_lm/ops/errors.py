"""The error of the inner loss: what a token's key and value pull the answer M(k) by, and how that changes with it.

With e = M(k) − v, and the threshold τ of a token where the objective has one:

    l2                 g(e) = 2 e
    dot                g    = −v
    huber              g(e) = 2 e min(1, τ / ‖e‖)                 ℓ2 up to τ, beyond it a pull of constant size
    huber_coordinate   g(e) = 2 clip(e, −τ, τ)                    the same for every channel on its own
    lp                 g(e) = p tanh(a e) ∘ (e² + ε)^((p − 1)/2)  ‖e‖_p^p, p = 3, with a smooth sign

A memory takes part in this by g alone: all else in here and in the closed form is the network's.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from titans_lm.config import Objective

P, SHARPNESS, EPS = 3, 10.0, 1e-6
"""p, a and ε of lp."""


def loss_error(
    prediction: Float[Tensor, "*s D"], v: Float[Tensor, "*s D"], objective: Objective, threshold: Tensor | None
) -> Float[Tensor, "*s D"]:
    """∂ℓ / ∂M(k), with a threshold (…, 1) where the objective has one."""
    return -v if objective == "dot" else pull(prediction - v, objective, threshold)


def pull(e: Float[Tensor, "*s D"], objective: Objective, threshold: Tensor | None) -> Float[Tensor, "*s D"]:
    """g(e)."""
    if threshold is None:
        return 2.0 * e if objective == "l2" else P * torch.tanh(SHARPNESS * e) * (e * e + EPS) ** ((P - 1) / 2)
    if objective == "huber_coordinate":
        return 2.0 * torch.minimum(torch.maximum(e, -threshold), threshold)
    beyond, size = _beyond(e, threshold)
    return 2.0 * e * torch.where(beyond, threshold / size, 1.0)


def pull_backward(
    d_g: Float[Tensor, "*s D"], e: Float[Tensor, "*s D"], objective: Objective, threshold: Tensor | None
) -> tuple[Float[Tensor, "*s D"], Tensor | None]:
    """From the gradient by g(e) to those by e and by the threshold.

    Beyond its threshold huber has (2 τ / ‖e‖) (I − ê êᵀ), and 2 ⟨ḡ, ê⟩ by τ; e stands at a distance there.
    """
    if threshold is None:
        if objective == "l2":
            return 2.0 * d_g, None
        sign, square = torch.tanh(SHARPNESS * e), e * e + EPS
        slope = SHARPNESS * (1.0 - sign * sign) * square ** ((P - 1) / 2)
        return P * d_g * (slope + (P - 1) * sign * e * square ** ((P - 3) / 2)), None
    if objective == "huber_coordinate":
        beyond = e.abs() > threshold
        outside = torch.where(beyond, d_g, 0.0)
        return 2.0 * (d_g - outside), 2.0 * (outside * e.sign()).sum(-1, keepdim=True)
    beyond, size = _beyond(e, threshold)
    unit = e / size
    along = (d_g * unit).sum(-1, keepdim=True)
    d_e = torch.where(beyond, (threshold / size) * (d_g - along * unit), d_g)
    return 2.0 * d_e, 2.0 * torch.where(beyond, along, 0.0)


def _beyond(e: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Whether ‖e‖ is above the threshold, and ‖e‖ there; 1 elsewhere, where it is not looked at and may be 0."""
    square = (e * e).sum(-1, keepdim=True)
    beyond = square > threshold * threshold
    return beyond, torch.where(beyond, square, 1.0).sqrt()
