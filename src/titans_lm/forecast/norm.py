"""Instance normalisation: a window by its own statistics, and a forecast brought back with them."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.forecast.settings import Normalisation


class Statistics(NamedTuple):
    """What a window was normalised with."""

    centre: Float[Tensor, "B 1 C"]
    scale: Float[Tensor, "B 1 C"]


class InstanceNorm(nn.Module):
    """Normalise each window and channel by itself, z = (x − centre) / scale; `inverse` is the way back.

        "mean"   centre = mean over time, scale = √(variance + ε)      (RevIN: Kim et al., ICLR 2022)
        "last"   centre = the last value, scale = 1                    (NLinear: Zeng et al., arXiv 2205.13504)
        "none"   centre = 0, scale = 1

    With `affine` the normalised values are scaled and shifted by learned numbers per channel.
    """

    def __init__(self, kind: Normalisation, channels: int, *, affine: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def statistics(self, x: Float[Tensor, "B L C"]) -> Statistics:
        """Find what a window is normalised with."""
        one = torch.ones_like(x[:, :1])
        if self.kind == "mean":
            variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
            return Statistics(mean, torch.sqrt(variance + self.eps))
        return Statistics(x[:, -1:] if self.kind == "last" else torch.zeros_like(one), one)

    def forward(self, x: Float[Tensor, "B L C"]) -> tuple[Float[Tensor, "B L C"], Statistics]:
        """Normalise windows; what they were normalised with is what `inverse` needs."""
        found = self.statistics(x)
        z = (x - found.centre) / found.scale
        if self.weight is not None and self.bias is not None:
            z = z * self.weight + self.bias
        return z, found

    def inverse(self, z: Float[Tensor, "B H C"], found: Statistics) -> Float[Tensor, "B H C"]:
        """Bring normalised values back."""
        if self.weight is not None and self.bias is not None:
            # as RevIN does it: a weight near zero must not divide
            z = (z - self.bias) / (self.weight + self.eps**2)
        return z * found.scale + found.centre
