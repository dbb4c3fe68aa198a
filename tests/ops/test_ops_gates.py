"""Numerics of the gates: interval products exact at 0, at 1 and at tiny numbers, and a memory that stays bounded."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titans_lm.config import MemoryConfig
from titans_lm.ops import MemoryNetwork, MemoryState, gates, neural_memory
from titans_lm.ops.gates import ChunkGates, channel_gates, interval_products, token_gates, token_gates_backward

LINEAR = MemoryNetwork(residual=False)


@pytest.fixture(params=["one after another", "doubled"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interval products as those of a small call are made, and as those of a large one."""
    if request.param == "doubled":
        monkeypatch.setattr(gates, "FEW_PRODUCTS", 0)


def products_by_hand(d: Tensor) -> Tensor:
    """P(t, j) = ∏_{j<i≤t} d_i, entry by entry."""
    C = d.shape[-1]
    P = torch.zeros(*d.shape[:-1], C, C + 1, dtype=d.dtype)
    for t, j in product(range(1, C + 1), range(C + 1)):
        if j <= t:
            P[..., t - 1, j] = d[..., j:t].prod(-1)
    return P


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("C", [1, 2, 5, 16])
def test_interval_products(C: int) -> None:
    d = torch.rand(3, 2, C, dtype=torch.float64)
    torch.testing.assert_close(interval_products(d), products_by_hand(d), rtol=1e-14, atol=0)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_interval_products_are_exact_at_the_ends(value: float) -> None:
    """Powers of two multiply without rounding, so zeros and ones among them must leave no trace of rounding either."""
    d = torch.tensor([0.5, value, 0.25, 2.0, value, value, 0.5, 1.0])
    assert torch.equal(interval_products(d), products_by_hand(d))


@pytest.mark.usefixtures("both_ways")
def test_interval_products_have_exact_gradients_at_zero() -> None:
    """∂P/∂d_i is the product of the others: finite, and not zero, where d_i is the only zero."""
    d = torch.tensor([0.5, 0.0, 0.25, 0.5], dtype=torch.float64, requires_grad=True)
    whole = interval_products(d)[-1, 0]
    (found,) = torch.autograd.grad(whole, d)
    assert whole == 0
    assert torch.equal(found, torch.tensor([0.0, 0.5 * 0.25 * 0.5, 0.0, 0.0], dtype=torch.float64))
    d = torch.tensor([0.0, 0.5, 0.0], requires_grad=True)
    (found,) = torch.autograd.grad(interval_products(d).sum(), d)
    assert torch.equal(found, torch.tensor([1.5, 1.0, 1.5]))


@pytest.mark.usefixtures("both_ways")
def test_interval_products_of_tiny_factors() -> None:
    """1 − α = 1e-30 in float32: long products become 0, short ones stay what they are, no NaN in any gradient."""
    d = torch.full((6,), 1e-30, requires_grad=True)
    P = interval_products(d)
    assert torch.equal(P, products_by_hand(d.detach()))
    assert P[1, 1] == d[1]
    assert P[1, 0] == 0
    (found,) = torch.autograd.grad(P.sum(), d)
    assert torch.isfinite(found).all()
    assert torch.equal(found, torch.ones(6))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("channelwise", [False, True])
def test_chunk_gates_are_the_sums_they_stand_for(channelwise: bool) -> None:
    """a, f, G and what is left at the end, against sums over intervals written out, with zeros among the gates."""
    C = 5
    shape = (2, 1, 2, C, 3) if channelwise else (2, 1, 2, C)
    theta, eta, alpha = (torch.rand(shape, dtype=torch.float64) for _ in range(3))
    alpha[..., 2:3] = 1.0
    eta = torch.where(eta < 0.3, 0.0, eta)
    if channelwise:
        found = channel_gates(theta, eta, alpha, None)
    else:
        theta, eta, alpha = (x.flatten(0, 2).unsqueeze(1) for x in (theta, eta, alpha))
        found = token_gates(theta, eta, alpha, None)[0]
        theta, eta, alpha = (x.mT for x in (theta, eta, alpha))

    def interval(d: Tensor, j: int, t: int) -> Tensor:
        return d[..., j:t, :].prod(-2)

    for t in range(1, C + 1):
        torch.testing.assert_close(found.a[..., t - 1, :], interval(1 - alpha, 0, t))
        f = sum(interval(1 - alpha, i, t) * interval(eta, 0, i) for i in range(1, t + 1))
        torch.testing.assert_close(found.f[..., t - 1, :], f)
        for j in range(1, C + 1):
            terms = [interval(1 - alpha, i, t) * interval(eta, j, i) for i in range(j, t + 1)]
            expected = theta[..., j - 1, :] * sum(terms) if terms else torch.zeros_like(theta[..., 0, :])
            G = found.G[..., t - 1, j - 1] if channelwise else found.G[..., t - 1, j - 1].unsqueeze(-1)
            torch.testing.assert_close(G, expected)
            if t == C:
                torch.testing.assert_close(found.memory_end[..., j - 1, :], expected)
                left = theta[..., j - 1, :] * interval(eta, j, C)
                torch.testing.assert_close(found.surprise_end[..., j - 1, :], left)
    torch.testing.assert_close(found.eta_end[..., 0, :], interval(eta, 0, C))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("C", [1, 4, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_the_way_back_by_hand_is_that_of_autograd(C: int, masked: bool) -> None:
    theta, eta, alpha = (torch.rand(2, 3, 2, C, dtype=torch.float64).requires_grad_() for _ in range(3))
    present = torch.rand(2, 3, 1, C) < 0.7 if masked else None
    as_channels = channel_gates(*(x.unsqueeze(-1) for x in (theta, eta, alpha)), present)
    as_channels = as_channels._replace(G=as_channels.G.squeeze(-3))
    rows = [x.detach().flatten(0, 2).unsqueeze(1) for x in (theta, eta, alpha)]
    weights, kept = token_gates(*rows, None if present is None else present.expand(2, 3, 2, C).reshape(-1, 1, C))
    for found, expected in zip(weights, as_channels, strict=True):
        torch.testing.assert_close(found, expected.flatten(0, 2))
    grads = ChunkGates(*(torch.randn_like(x) for x in as_channels))
    expected = torch.autograd.grad(as_channels, (theta, eta, alpha), grads)
    found = token_gates_backward(kept, ChunkGates(*(x.flatten(0, 2) for x in grads)))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.view_as(e), e)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("keep", [1e-30, 1e-7, 0.0])
def test_forgetting_nearly_everything_in_float32(keep: float, backend: str) -> None:
    """Ratios of running products would divide 0 by 0 here."""
    T, D = 40, 4
    tokens = F.normalize(torch.randn(3, 1, T, 1, D), dim=-1)
    theta, eta = torch.full((1, T, 1), 0.01), torch.full((1, T, 1), keep)
    alpha = torch.full((1, T, 1), 1.0 - keep, requires_grad=True)
    state = MemoryState.initial((torch.randn(1, D, D),), 1)
    q, k, v = (x.requires_grad_() for x in tokens)
    o, after = neural_memory(q, k, v, theta, eta, alpha, state, network=LINEAR, chunk_size=16, backend=backend)
    found = torch.autograd.grad(o.sum() + after.S[0].sum(), (q, k, v, alpha))
    assert all(torch.isfinite(x).all() for x in (o, after.M[0], after.S[0], *found))
    assert o.abs().max() < 1.0


# Stability (docs/derivation.md, section 12): all steps of a chunk are taken at one stale place, and momentum goes on.


def stream(theta: Tensor, eta: Tensor, k: Tensor, v: Tensor, *, chunk_size: int, network: MemoryNetwork) -> Tensor:
    """Largest |W| on the way of a float32 memory of one layer that starts at 0; no forgetting, T tokens."""
    T, D = k.shape
    state = MemoryState.initial((torch.zeros(1, D, D),), 1)
    largest = torch.zeros(())
    piece = 64 * chunk_size
    with torch.no_grad():
        for start in range(0, T, piece):
            now = slice(start, start + piece)
            th, et = (x[None, now, None] for x in (theta, eta))
            keys, values = (x[None, now, None] for x in (k, v))
            _, state = neural_memory(keys, keys, values, th, et, 0 * th, state, network=network, chunk_size=chunk_size)
            largest = torch.fmax(largest, state.M[0].abs().max())
            if not torch.isfinite(state.M[0]).all():
                return torch.tensor(torch.inf)
    return largest


def texts(T: int, D: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Keys of norm 1 and values of unit RMS that make steps add up."""
    one = F.normalize(torch.ones(D), dim=0).expand(T, D)
    sign = torch.where(torch.arange(T) // 16 % 2 == 0, 1.0, -1.0).unsqueeze(-1)
    return {
        "equal": (one, torch.ones(T, D)),
        "alternating values": (one, sign.expand(T, D)),
        "alternating keys": (one * sign, torch.ones(T, D)),
        "random": (F.normalize(torch.randn(T, D), dim=-1), torch.randn(T, D)),
    }


@pytest.mark.parametrize("text", ["equal", "alternating values", "alternating keys", "random"])
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_the_bounded_gates_keep_repeated_keys_stable(chunk_size: int, text: str) -> None:
    """θ and η at the config's bounds for thousands of equal keys: the memory stays near what it should learn."""
    T, D = (2_000 if chunk_size == 1 else 20_000), 8
    config = MemoryConfig(chunk_size=chunk_size)
    k, v = texts(T, D)[text]
    theta, eta = torch.full((T,), config.theta_max), torch.full((T,), config.eta_max)
    # What it should learn has entries of 0.35 for the repeated keys, and a stable step overshoots by less than it had
    # to go: below twice that. Random tokens have no such limit.
    assert stream(theta, eta, k, v, chunk_size=chunk_size, network=LINEAR) < (20 if text == "random" else 0.707)


def test_far_above_the_bound_it_explodes() -> None:
    """The test above can fail."""
    T, D = 20_000, 8
    config = MemoryConfig()
    k, v = texts(T, D)["equal"]
    theta, eta = torch.full((T,), 10 * config.theta_max), torch.full((T,), config.eta_max)
    assert stream(theta, eta, k, v, chunk_size=config.chunk_size, network=LINEAR) > 1e6


def chunk_map(theta: list[float], eta: list[float]) -> Tensor:
    """What one chunk of equal unit keys (v = 0, D = 1) does to (M, S), as a matrix, measured on the op itself."""
    C = len(theta)
    one, zero = torch.ones(2, 1, 1, 1, dtype=torch.float64), torch.zeros(2, 1, 1, 1, dtype=torch.float64)
    start = torch.eye(2, dtype=torch.float64)
    M, S = ((start[:, i, None, None, None],) for i in (0, 1))
    state = MemoryState(M, S, M, torch.zeros(2, dtype=torch.int64))
    th, et = (torch.tensor(x, dtype=torch.float64).expand(2, C).unsqueeze(-1) for x in (theta, eta))
    k, v = (x.expand(2, C, 1, 1) for x in (one, zero))
    with torch.no_grad():
        _, state = neural_memory(k, k, v, th, et, 0 * th, state, network=LINEAR, chunk_size=C)
    return torch.cat((state.M[0].flatten()[None], state.S[0].flatten()[None]))


def growth(theta: float, eta: float, C: int) -> float:
    """Factor by which the error of a memory that reads the same key forever grows per chunk."""
    return float(torch.linalg.eigvals(chunk_map([theta] * C, [eta] * C)).abs().max())


@pytest.mark.parametrize(("eta", "first_unstable"), [(0.0, 0.0625), (0.5, 0.036), (0.9, 0.0093), (0.99, 0.0007)])
def test_the_known_limits_of_stability(eta: float, first_unstable: float) -> None:
    """The first unstable θ at C = 16 that the bound was made from."""
    assert growth(0.95 * first_unstable, eta, 16) < 1.0
    assert growth(1.05 * first_unstable, eta, 16) > 1.0


@pytest.mark.parametrize("C", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("eta_max", [0.0, 0.5, 0.8, 0.99])
def test_the_bound_is_stable_for_every_chunk_size(eta_max: float, C: int) -> None:
    """At the largest θ of the config, with every constant η up to its own bound."""
    theta = MemoryConfig(chunk_size=C, eta_max=eta_max).theta_max
    for share in (0.0, 0.5, 0.9, 1.0):
        assert growth(theta, share * eta_max, C) < 1.0
    assert growth(4 * MemoryConfig(chunk_size=C, eta_max=0.0).theta_max, 0.0, C) > 1.0


def worst_gates(C: int, theta_max: float, eta_max: float, chunks: int) -> float:
    """Growth per chunk when an adversary chooses each chunk's gates: the best of a beam over extreme patterns."""
    halves = [(a, b) for a in (0.0, theta_max) for b in (0.0, theta_max)]
    patterns = [
        chunk_map([a] * (C // 2) + [b] * (C - C // 2), [e] * C) for (a, b) in halves for e in (0.5 * eta_max, eta_max)
    ]
    maps = torch.stack(patterns)
    beam, log_size = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for _ in range(chunks):
        ends = torch.einsum("pij,bj->pbi", maps, beam).flatten(0, 1)
        size = ends.norm(dim=-1)
        log_size = log_size.repeat(len(maps)) + size.log()
        ends = ends / size[:, None]
        # the far leader in every direction survives: directions are what differs, sizes only add up
        angle = (torch.atan2(ends[:, 1], ends[:, 0]) % torch.pi / torch.pi * 180).long()
        order = torch.argsort(log_size, descending=True)
        keep = order[np.unique(angle[order].numpy(), return_index=True)[1]]
        beam, log_size = ends[keep], log_size[keep]
    return float(torch.exp(log_size.max() / chunks))


@pytest.mark.parametrize("C", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("eta_max", [0.3, 0.5, 0.6, 0.8, 0.95, 0.99])
def test_gates_chosen_by_an_adversary_do_not_pump_the_memory(eta_max: float, C: int) -> None:
    """Gates depend on the text: θ on while the error shrinks and off while momentum carries it away adds energy.

    A unit of surprise may move the memory by 1 / (1 − η_max) all in all; no choice of gates may make it more than twice
    that, however long it goes on.
    """
    theta_max = MemoryConfig(chunk_size=C, eta_max=eta_max).theta_max
    assert worst_gates(C, theta_max, eta_max, 300) ** 300 < 2 / (1 - eta_max)


@pytest.mark.parametrize(("C", "eta_max"), [(1, 0.8), (4, 0.8), (16, 0.95)])
def test_the_bound_for_constant_gates_alone_would_be_pumped(C: int, eta_max: float) -> None:
    """Why the bound of D10 has a second term."""
    assert worst_gates(C, 0.9 * (1 - eta_max) / C, eta_max, 300) > 1.03
