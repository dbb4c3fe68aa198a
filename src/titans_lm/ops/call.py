"""A checked call of `neural_memory` as a value, which every backend takes."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.state import PLAIN, MemoryState, PerToken

Outcome = tuple[Tensor, MemoryState, Tensor | None]
"""o (B, T, H, D), the state after the call, and on request the sizes of surprise, (B, T, H, L) or of three parts."""


@dataclass
class Call:
    """What `neural_memory` is given: gates come as one tensor per memory layer, (B, T, H) or (B, T, H, D_{l-1})."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T H D"]
    theta: tuple[Tensor, ...]
    eta: tuple[Tensor, ...]
    alpha: tuple[Tensor, ...]
    state: MemoryState
    network: MemoryNetwork
    chunk_size: int
    valid: Bool[Tensor, "B T"] | None = None
    return_surprise: SurpriseSizes = False
    extra: PerToken = PLAIN

    @property
    def gates(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """θ, η and α."""
        return self.theta, self.eta, self.alpha

    def with_keys(self) -> "Call":
        """The same call of the polynomials that its queries and keys stand for."""
        network, (q, k) = self.network.make_keys(self.q, self.k)
        return replace(self, q=q, k=k, network=network)
