"""One test per numbered equation of the memory (V1 section 3), in float64, for both backends.

The right-hand sides are written out here by hand for one row and one head; nothing of ops/ computes them. Eq. 21 to 31
are tested with the blocks, eq. 19 and 20 with the backbone.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read

D, HIDDEN = 4, 6
pytestmark = pytest.mark.parametrize("backend", ["reference", "chunked"])

Weights = tuple[Tensor, ...]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_deep() -> Weights:
    return draw(D, HIDDEN) / D**0.5, draw(HIDDEN, D) / HIDDEN**0.5


def deep(M: Weights, x: Tensor) -> Tensor:
    """M(x) = x + LN(GELU(x W_1) W_2), without affine parameters."""
    W_1, W_2 = M
    z = F.gelu(x @ W_1) @ W_2
    return x + (z - z.mean(-1, keepdim=True)) / torch.sqrt(z.var(-1, unbiased=False, keepdim=True) + 1e-5)


DEEP = MemoryNetwork(norm_weight=torch.ones(1, D, dtype=torch.float64))
LINEAR = MemoryNetwork(residual=False)


def gradient(M: Weights, k: Tensor, v: Tensor) -> Weights:
    """∇ℓ(M; k, v) of the deep memory by plain autograd."""
    M = tuple(W.detach().requires_grad_() for W in M)
    return torch.autograd.grad(((deep(M, k) - v) ** 2).sum(), M)


def batched(M: Weights) -> Weights:
    return tuple(W[None, None] for W in M)


class Memory:
    """One memory that reads token after token, and shows M and S as plain matrices."""

    def __init__(self, backend: str, M: Weights, network: MemoryNetwork, chunk_size: int = 1) -> None:
        offset = torch.zeros(1, dtype=torch.int64)
        S = tuple(torch.zeros_like(W) for W in M)
        self.state = MemoryState(batched(M), batched(S), batched(M), offset)
        self.backend, self.network, self.chunk_size = backend, network, chunk_size

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read T tokens: q, k, v are (T, D), gates (T,). Outputs, and the size of every token's surprise (T, L)."""
        q, k, v = (x[None, :, None] for x in (q, k, v))
        gates = (x[None, :, None] for x in (theta, eta, alpha))
        settings = {"network": self.network, "chunk_size": self.chunk_size, "backend": self.backend}
        o, self.state, surprise = neural_memory(q, k, v, *gates, self.state, **settings, return_surprise=True)
        return o[0, :, 0], surprise[0, :, 0]

    @property
    def M(self) -> Weights:
        return tuple(W[0, 0] for W in self.state.M)

    @property
    def S(self) -> Weights:
        return tuple(W[0, 0] for W in self.state.S)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(count, D), F.normalize(draw(count, D), dim=-1), draw(count, D)


def gates(count: int, theta: float = 0.05, eta: float = 0.9, alpha: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """Random gates up to the given sizes; 0 switches one off."""
    return tuple(largest * torch.rand(count, dtype=torch.float64) for largest in (theta, eta, alpha))


def assert_same(got: Tensor | Weights, expected: Tensor | Weights) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_eq8_momentary_surprise(backend: str) -> None:
    """M_t = M_{t−1} − θ_t ∇ℓ(M_{t−1}; x_t)"""
    q, k, v = tokens(5)
    theta, eta, alpha = gates(5, eta=0.0, alpha=0.0)
    M = draw_deep()
    memory = Memory(backend, M, DEEP)
    memory(q, k, v, theta, eta, alpha)
    for t in range(5):
        M = tuple(W - theta[t] * u for W, u in zip(M, gradient(M, k[t], v[t]), strict=True))
    assert_same(memory.M, M)


def test_eq9_past_surprise(backend: str) -> None:
    """M_t = M_{t−1} + S_t"""
    q, k, v = tokens(5)
    theta, eta, alpha = gates(5, alpha=0.0)
    memory = Memory(backend, draw_deep(), DEEP)
    for t in range(5):
        before = memory.M
        now = slice(t, t + 1)
        memory(q[now], k[now], v[now], theta[now], eta[now], alpha[now])
        assert_same(memory.M, tuple(W + S for W, S in zip(before, memory.S, strict=True)))


def test_eq10_surprise_with_momentum(backend: str) -> None:
    """S_t = η_t S_{t−1} − θ_t ∇ℓ(M_{t−1}; x_t), no forgetting"""
    q, k, v = tokens(5)
    theta, eta, alpha = gates(5, alpha=0.0)
    M = draw_deep()
    S = tuple(torch.zeros_like(W) for W in M)
    memory = Memory(backend, M, DEEP)
    memory(q, k, v, theta, eta, alpha)
    for t in range(5):
        u = gradient(M, k[t], v[t])
        S = tuple(eta[t] * s - theta[t] * g for s, g in zip(S, u, strict=True))
        M = tuple(W + s for W, s in zip(M, S, strict=True))
    assert_same(memory.S, S)
    assert_same(memory.M, M)


def test_eq11_keys_and_values_are_learned(backend: str) -> None:
    """k_t = x_t W_K, v_t = x_t W_V: a later read trains both, as finite differences say."""
    x, q = draw(3, D), draw(3, D)
    theta, eta, alpha = gates(3, theta=0.3)
    M, W_K, W_V = draw_deep(), draw(D, D) / D, draw(D, D) / D

    def later_read(W_K: Tensor, W_V: Tensor) -> Tensor:
        memory = Memory(backend, M, DEEP)
        o, _ = memory(q, x @ W_K, x @ W_V, theta, eta, alpha)
        return o[-1].square().sum()

    W_K.requires_grad_()
    W_V.requires_grad_()
    found = torch.autograd.grad(later_read(W_K, W_V), (W_K, W_V))
    way_K, way_V, step = draw(D, D), draw(D, D), 1e-5
    with torch.no_grad():
        for gradient_of, ways in zip(found, ((way_K, 0 * way_V), (0 * way_K, way_V)), strict=True):
            up, down = (later_read(W_K + s * ways[0], W_V + s * ways[1]) for s in (step, -step))
            slope = (gradient_of * (ways[0] + ways[1])).sum()
            assert abs(slope) > 1e-4
            torch.testing.assert_close(slope, (up - down) / (2 * step), rtol=1e-6, atol=1e-9)


def test_eq12_inner_loss(backend: str) -> None:
    """ℓ(M; k, v) = ‖M(k) − v‖²: the write is its gradient, as finite differences of ℓ say."""
    q, k, v = tokens(1)
    M = draw_deep()
    memory = Memory(backend, M, DEEP)
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    _, surprise = memory(q, k, v, one, none, none)
    u = tuple(before - after for before, after in zip(M, memory.M, strict=True))

    def loss(step: float) -> Tensor:
        return ((deep(tuple(W + step * w for W, w in zip(M, way, strict=True)), k) - v) ** 2).sum()

    way = (draw(D, HIDDEN), draw(HIDDEN, D))
    slope = sum((g * w).sum() for g, w in zip(u, way, strict=True))
    torch.testing.assert_close(slope, (loss(1e-5) - loss(-1e-5)) / 2e-5, rtol=1e-7, atol=1e-9)
    assert_same(surprise[0], torch.stack([g.norm() for g in u]))


def test_eq12_inner_loss_of_a_linear_memory(backend: str) -> None:
    """∇ℓ = 2 k ⊗ (k W − v)"""
    q, k, v = tokens(1)
    W = draw(D, D)
    memory = Memory(backend, (W,), LINEAR)
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    memory(q, k, v, one, none, none)
    assert_same(memory.M[0], W - 2 * torch.outer(k[0], k[0] @ W - v[0]))


def test_eq13_forgetting(backend: str) -> None:
    """M_t = (1 − α_t) M_{t−1} + S_t"""
    q, k, v = tokens(5)
    theta, eta, alpha = gates(5, alpha=1.0)
    memory = Memory(backend, draw_deep(), DEEP, chunk_size=3)
    for t in range(5):
        before = memory.M
        now = slice(t, t + 1)
        memory(q[now], k[now], v[now], theta[now], eta[now], alpha[now])
        expected = tuple((1 - alpha[t]) * W + S for W, S in zip(before, memory.S, strict=True))
        assert_same(memory.M, expected)


def test_eq13_forgetting_to_the_initial_memory(backend: str) -> None:
    """M_t = (1 − α_t) M_{t−1} + α_t M_init + S_t (D13)"""
    q, k, v = tokens(5)
    theta, eta, alpha = gates(5, alpha=1.0)
    initial = draw_deep()
    norm = torch.ones(1, D, dtype=torch.float64)
    network = MemoryNetwork(norm_weight=norm, forget_to="init", initial=tuple(W[None] for W in initial))
    start = draw_deep()
    memory = Memory(backend, start, network, chunk_size=3)
    memory(q, k, v, theta, eta, alpha)
    M, S = start, tuple(torch.zeros_like(W) for W in start)
    for t in range(5):
        anchor = start if t == 0 else M if t == 3 else anchor
        u = gradient(anchor, k[t], v[t])
        S = tuple(eta[t] * s - theta[t] * g for s, g in zip(S, u, strict=True))
        M = tuple((1 - alpha[t]) * W + alpha[t] * W_0 + s for W, W_0, s in zip(M, initial, S, strict=True))
    assert_same(memory.S, S)
    assert_same(memory.M, M)


def test_eq14_surprise(backend: str) -> None:
    """S_t = η_t S_{t−1} − θ_t ∇ℓ(M_{t−1}; x_t), with forgetting"""
    q, k, v = tokens(5)
    theta, eta, alpha = gates(5)
    memory = Memory(backend, draw_deep(), DEEP)
    for t in range(5):
        M, S = memory.M, memory.S
        now = slice(t, t + 1)
        _, size = memory(q[now], k[now], v[now], theta[now], eta[now], alpha[now])
        u = gradient(M, k[t], v[t])
        assert_same(memory.S, tuple(eta[t] * s - theta[t] * g for s, g in zip(S, u, strict=True)))
        assert_same(size[0], torch.stack([g.norm() for g in u]))


def test_eq15_read_after_the_write(backend: str) -> None:
    """o_t = M_t(q_t), and not M_{t−1}(q_t) (D1)"""
    q, k, v = tokens(5)
    rates = gates(5)
    before = M = draw_deep()
    o, _ = Memory(backend, M, DEEP)(q, k, v, *rates)
    for t in range(5):
        memory = Memory(backend, M, DEEP)
        memory(q[: t + 1], k[: t + 1], v[: t + 1], *(g[: t + 1] for g in rates))
        assert_same(o[t], deep(memory.M, q[t]))
        assert_same(read(batched(memory.M), q[None, t : t + 1, None], DEEP)[0, 0, 0], deep(memory.M, q[t]))
        assert (o[t] - deep(before, q[t])).abs().max() > 1e-6
        before = memory.M


def test_eq16_gradients_at_the_chunk_start(backend: str) -> None:
    """M_t = β_t M_0 − Σ_{i≤t} θ_i (β_t / β_i) ∇ℓ(M_{t'}; x_i), β_t = ∏(1 − α_j), t' the end of the last chunk"""
    C, count = 3, 7
    q, k, v = tokens(count)
    theta, eta, alpha = gates(count, eta=0.0)
    M_0 = draw_deep()
    memory = Memory(backend, M_0, DEEP, chunk_size=C)
    o, _ = memory(q, k, v, theta, eta, alpha)
    for start in range(0, count, C):
        for t in range(start, min(start + C, count)):
            beta = torch.cumprod(1 - alpha[start : t + 1], 0)
            M = [beta[-1] * W for W in M_0]
            for i in range(start, t + 1):
                u = gradient(M_0, k[i], v[i])
                M = [W - theta[i] * beta[-1] / beta[i - start] * g for W, g in zip(M, u, strict=True)]
            assert_same(o[t], deep(tuple(M), q[t]))
        M_0 = tuple(M)
    assert_same(memory.M, M_0)


def test_eq17_a_chunk_of_the_linear_memory_is_a_product(backend: str) -> None:
    """Σ_i θ_i (β_b / β_i) ∇ℓ(W_0; x_i) = 2 Kᵀ Θ_b B_b (K W_0 − V), with diagonal Θ_b and B_b"""
    C = 6
    q, k, v = tokens(C)
    theta, eta, alpha = gates(C, eta=0.0)
    W_0 = draw(D, D)
    memory = Memory(backend, (W_0,), LINEAR, chunk_size=C)
    memory(q, k, v, theta, eta, alpha)
    beta = torch.cumprod(1 - alpha, 0)
    expected = beta[-1] * W_0 - 2 * k.T @ torch.diag(theta * beta[-1] / beta) @ (k @ W_0 - v)
    assert_same(memory.M[0], expected)


def test_eq18_surprise_inside_a_chunk_is_a_linear_recurrence(backend: str) -> None:
    """S_t = η_t S_{t−1} − θ_t u_t, with all u_t taken at the chunk's start"""
    C, count = 4, 10
    q, k, v = tokens(count)
    theta, eta, alpha = gates(count)
    memory = Memory(backend, draw_deep(), DEEP, chunk_size=C)
    borders = [*range(0, count, C), count]
    for start, end in pairwise(borders):
        anchor, S = memory.M, memory.S
        part = slice(start, end)
        memory(q[part], k[part], v[part], theta[part], eta[part], alpha[part])
        for t in range(start, end):
            u = gradient(anchor, k[t], v[t])
            S = tuple(eta[t] * s - theta[t] * g for s, g in zip(S, u, strict=True))
        assert_same(memory.S, S)
