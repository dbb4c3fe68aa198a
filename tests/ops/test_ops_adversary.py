"""D10 at C = 1: what is left of a linear memory's bound when somebody chooses every key and every gate.

With v = 0 the columns of a linear memory go each its own way: s ← η s − 2 θ k (k · m), m ← (1 − α) m + s. The search
is over texts whose keys, in two channels, come back turned by an angle after a few tokens, so that what grows over one
round grows for ever: by the spectral radius of a round's map.
"""

import math

import pytest
import torch
from torch import Tensor

from titans_lm.config import MemoryConfig
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory


def limit(eta_max: float, decay: bool = True) -> float:
    """The bound of D10 at C = 1 with c = 1: (1 − η_max) min((1 − η_max) / (1 + η_max), 1 − α_max / 2)."""
    return MemoryConfig(memory_depth=1, chunk_size=1, eta_max=eta_max, theta_bound=1.0, decay=decay).theta_max


def rounds(x: Tensor, theta_max: float, eta_max: float, alpha_max: float = 1.0) -> Tensor:
    """Growth per token of texts x (N, 4 p + 1) in [0, 1]: angles of p keys, p of each gate, and the turn of a round."""
    *parts, turn = (*x[:, :-1].chunk(4, dim=1), x[:, -1])
    angle, theta, eta, alpha = parts[0] * math.pi, parts[1] * theta_max, parts[2] * eta_max, parts[3] * alpha_max
    key = torch.stack((angle.cos(), angle.sin()), dim=-1)
    one = torch.eye(2, dtype=x.dtype)
    pull = -2.0 * theta[..., None, None] * key[..., :, None] * key[..., None, :]
    eta, keep = eta[..., None, None] * one, (1.0 - alpha)[..., None, None] * one
    maps = torch.cat((torch.cat((keep + pull, eta), -1), torch.cat((pull, eta), -1)), -2)  # of (m, s)
    back = -2.0 * math.pi * turn
    cos, sin = back.cos(), back.sin()
    rotation = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    whole = torch.block_diag(one, one).expand(len(x), 4, 4)
    for i in range(maps.shape[1]):
        whole = maps[:, i] @ whole
    whole = torch.cat((torch.cat((rotation, 0 * rotation), -1), torch.cat((0 * rotation, rotation), -1)), -2) @ whole
    return torch.linalg.eigvals(whole).abs().amax(-1) ** (1.0 / maps.shape[1])


def worst_text(theta_max: float, eta_max: float, tokens: int, alpha_max: float = 1.0) -> float:
    """The largest growth per token found: random texts, gates often at their ends, then small changes that help."""
    draw, tries, steps = torch.Generator().manual_seed(0), 128, 150

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    x = uniform(tries, 4 * tokens + 1)
    gates = x[:, tokens:-1]
    gates.copy_(torch.where(uniform(*gates.shape) < 0.7, gates.round(), gates))
    x[::2, 3 * tokens : -1] = 0.0  # nothing forgotten
    x[1::4, tokens : 3 * tokens] = 1.0  # both other gates wide open
    found = rounds(x, theta_max, eta_max, alpha_max)
    for step in range(steps):
        size = 0.5 * 0.02 ** (step / steps)
        hit = uniform(*x.shape) < 2.0 / x.shape[1]
        moved = (x + hit * size * (2.0 * uniform(*x.shape) - 1.0)).clamp(0.0, 1.0)
        got = rounds(moved, theta_max, eta_max, alpha_max)
        better = got > found
        x, found = torch.where(better[:, None], moved, x), torch.where(better, got, found)
    return float(found.max())


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("eta_max", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_no_text_that_a_search_finds_makes_a_memory_grow_at_the_bound(eta_max: float, decay: bool) -> None:
    for tokens in (1, 2, 4):
        assert worst_text(limit(eta_max, decay), eta_max, tokens, float(decay)) < 1.0 + 1e-6


@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("eta_max", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_the_bound_has_nothing_to_spare(eta_max: float, decay: bool) -> None:
    """A fifth above it rounds of two tokens pump the memory, by turning keys or by momentum and forgetting."""
    assert worst_text(1.2 * limit(eta_max, decay), eta_max, 2, float(decay)) > 1.0 + 1e-5


def test_the_maps_of_the_search_are_those_of_the_op() -> None:
    """300 tokens of a text that pumps, by the op's own float64: 1.2 times the bound grows, the bound does not."""
    eta, T, size = 0.6, 300, {}
    for share in (1.0, 1.2):
        theta = share * limit(eta)
        turns = torch.linspace(0.02, 0.6, 30, dtype=torch.float64)[:, None] * torch.arange(T, dtype=torch.float64)
        k = torch.stack((turns.cos(), turns.sin()), -1).unsqueeze(2)
        M = torch.eye(2, dtype=torch.float64).expand(30, 1, 2, 2)
        state = MemoryState((M,), (torch.zeros_like(M),), (M,), torch.zeros(30, dtype=torch.int64))
        gate, network = torch.ones(30, T, 1, dtype=torch.float64), MemoryNetwork(residual=False)
        told = {"network": network, "chunk_size": 1}
        _, state = neural_memory(k, k, 0 * k, theta * gate, eta * gate, 0 * gate, state, **told)
        size[share] = float(state.M[0].norm(dim=(-2, -1)).max())
    assert size[1.0] < 2.0
    assert size[1.2] > 2.0 * size[1.0]
