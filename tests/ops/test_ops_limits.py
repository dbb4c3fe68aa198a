"""Where the gates end, and the family: other published memories are settings of the same op.

The relatives are written out here by hand, for one row and one head.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import Case, make_call
from ops.memory_oracle import inner_loss, predict
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read

pytestmark = pytest.mark.parametrize("backend", ["reference", "chunked"])

D, T = 5, 23
LINEAR = MemoryNetwork(residual=False)
DOT = MemoryNetwork(residual=False, objective="dot")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    return draw(T, D), F.normalize(draw(T, D), dim=-1), draw(T, D)


def run(
    W_0: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    *,
    backend: str,
    network: MemoryNetwork = LINEAR,
    chunk_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Outputs (T, D) and final weight of a memory of one layer that starts at W_0."""
    state = MemoryState.initial((W_0[None],), 1)
    q, k, v, *gates = (x[None, :, None] for x in (q, k, v, *gates))
    o, state = neural_memory(q, k, v, *gates, state, network=network, chunk_size=chunk_size, backend=backend)
    return o[0, :, 0], state.M[0][0, 0]


def assert_same(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def constant(value: float) -> Tensor:
    return torch.full((T,), value, dtype=torch.float64)


# the ends of the gates


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_without_theta_nothing_new_is_taken_in(chunk: int, backend: str) -> None:
    """θ = 0: whatever k and v are, the same outputs and state, and without momentum and forgetting M stays."""
    call = make_call(Case(chunk=chunk, offsets=(0,), edges=("theta",), edge_share=1.0))
    o, state, surprise = call(backend)
    q, k, v, *rest = call.arguments
    settings = {**call.settings, "return_surprise": True, "backend": backend}
    o_other, state_other, surprise_other = neural_memory(q, 3 * k.flip(1), v - 7, *rest, **settings)
    assert torch.equal(o, o_other)
    for W, W_other in zip(state.M + state.S, state_other.M + state_other.S, strict=True):
        assert torch.equal(W, W_other)
    assert (surprise != surprise_other).any()
    theta, _, alpha, before = rest
    none = torch.zeros_like(alpha)
    before = MemoryState(before.M, tuple(map(torch.zeros_like, before.S)), before.M, before.offset)
    o, state = neural_memory(q, k, v, theta, none, none, before, **call.settings, backend=backend)
    assert all(torch.equal(W, W_0) for W, W_0 in zip(state.M, before.M, strict=True))
    assert_same(o, read(before.M, q, call.settings["network"]))


@pytest.mark.parametrize("forget_to", ["zero", "init"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_full_forgetting_leaves_the_surprise_alone(chunk: int, forget_to: str, backend: str) -> None:
    """α = 1: M_t = S_t (+ M_init), at every token and bit by bit."""
    case = Case(chunk=chunk, offsets=(chunk - 1,), edges=("alpha",), edge_share=1.0, forget_to=forget_to)
    call = make_call(case)
    *inputs, state = call.arguments
    for t in range(case.tokens):
        now = [x[:, t : t + 1] for x in inputs]
        _, state = neural_memory(*now, state, **call.settings, backend=backend)
        for i, (M, S) in enumerate(zip(state.M, state.S, strict=True)):
            assert_same(M, S + call.settings["network"].initial[i] if forget_to == "init" else S)


@pytest.mark.parametrize("forget_to", ["zero", "init"])
def test_full_forgetting_without_momentum_leaves_the_last_step(forget_to: str, backend: str) -> None:
    """α = 1 and η = 0: M_t = −θ_t u_t (+ M_init), so o_t knows M_a and token t only."""
    case = Case(chunk=4, offsets=(1,), edges=("eta", "alpha"), edge_share=1.0, forget_to=forget_to)
    call = make_call(case)
    q, k, v, theta, *_, state = call.arguments
    network = call.settings["network"]
    o, after, _ = call(backend)
    anchor, last = [[W[row] for W in state.anchor] for row in range(case.rows)], {}
    for row in range(case.rows):
        for t in range(case.tokens):
            u = torch.autograd.grad(inner_loss(anchor[row], k[row, t], v[row, t], network), anchor[row])
            M = [-theta[row, t, :, i, None, None] * g for i, g in enumerate(u)]
            if forget_to == "init":
                M = [W + W_init for W, W_init in zip(M, network.initial, strict=True)]
            assert_same(o[row, t], predict(M, q[row, t], network))
            if (1 + t + 1) % case.chunk == 0:
                anchor[row] = M
        last[row] = M
    for i, W in enumerate(after.M):
        assert_same(W, torch.stack([last[row][i] for row in range(case.rows)]))


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_forgetting_to_init_without_steps_goes_there(chunk: int, backend: str) -> None:
    """θ = 0, constant α: M_t − M_init = (1 − α)^t (M_0 − M_init)."""
    W_0, W_init = draw(D, D), draw(1, D, D)
    network = MemoryNetwork(residual=False, forget_to="init", initial=(W_init,))
    gates = (constant(0), constant(0.5), constant(0.3))
    _, W = run(W_0, *tokens(), gates, backend=backend, network=network, chunk_size=chunk)
    assert_same(W, W_init[0] + 0.7**T * (W_0 - W_init[0]))


# the family


def test_delta_rule(backend: str) -> None:
    """Linear, η = α = 0, C = 1, θ = β/2: S ← S + β k ⊗ (v − k S)."""
    q, k, v = tokens()
    beta = torch.rand(T, dtype=torch.float64)
    S = W_0 = draw(D, D)
    o, W = run(W_0, q, k, v, (beta / 2, constant(0), constant(0)), backend=backend)
    for t in range(T):
        S = S + beta[t] * torch.outer(k[t], v[t] - k[t] @ S)
        assert_same(o[t], q[t] @ S)
    assert_same(W, S)


def test_gated_delta_rule(backend: str) -> None:
    """It takes its gradient at the decayed memory: θ = (1 − α) β / 2 and v / (1 − α) are the same thing."""
    q, k, v = tokens()
    beta, alpha = torch.rand(2, T, dtype=torch.float64) * 0.9
    S = W_0 = draw(D, D)
    gates = ((1 - alpha) * beta / 2, constant(0), alpha)
    o, W = run(W_0, q, k, v / (1 - alpha)[:, None], gates, backend=backend)
    for t in range(T):
        S = (1 - alpha[t]) * S
        S = S + beta[t] * torch.outer(k[t], v[t] - k[t] @ S)
        assert_same(o[t], q[t] @ S)
    assert_same(W, S)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_linear_attention(chunk: int, backend: str) -> None:
    """Dot product, η = α = 0: o_t = q_t W_0 + Σ_{j≤t} θ_j ⟨q_t, k_j⟩ v_j, for every chunk size."""
    q, k, v = tokens()
    W_0, theta = draw(D, D), torch.rand(T, dtype=torch.float64)
    gates = (theta, constant(0), constant(0))
    o, _ = run(W_0, q, k, v, gates, backend=backend, network=DOT, chunk_size=chunk)
    assert_same(o, q @ W_0 + torch.tril(q @ k.T) @ (theta[:, None] * v))


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_constant_decay_is_retention(chunk: int, backend: str) -> None:
    """Dot product, η = 0, constant α: o_t = Σ_{j≤t} γ^{t−j} ⟨q_t, k_j⟩ v_j with γ = 1 − α."""
    q, k, v = tokens()
    gates = (constant(1), constant(0), constant(0.1))
    W_0 = torch.zeros(D, D, dtype=torch.float64)
    o, _ = run(W_0, q, k, v, gates, backend=backend, network=DOT, chunk_size=chunk)
    age = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    assert_same(o, torch.tril((q @ k.T) * 0.9 ** age.double()) @ v)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_data_dependent_decay_on_the_keys_is_gated_linear_attention(chunk: int, backend: str) -> None:
    """Dot product, channel-wise α: W ← diag(1 − α_t) W + k_t ⊗ v_t."""
    q, k, v = tokens()
    alpha = torch.rand(T, D, dtype=torch.float64)
    one = constant(1)[None, :, None]
    state = MemoryState.initial((torch.zeros(1, D, D, dtype=torch.float64),), 1)
    o, _ = neural_memory(
        *(x[None, :, None] for x in (q, k, v)),
        one,
        0 * one,
        (alpha[None, :, None],),
        state,
        network=DOT,
        chunk_size=chunk,
        backend=backend,
    )
    W = torch.zeros(D, D, dtype=torch.float64)
    for t in range(T):
        W = (1 - alpha[t])[:, None] * W + torch.outer(k[t], v[t])
        assert_same(o[0, t, 0], q[t] @ W)


@pytest.mark.parametrize("depth", [1, 2])
def test_ttt(depth: int, backend: str) -> None:
    """η = α = 0: mini-batch descent, W_t = W_{t'} − Σ_{t'<j≤t} θ_j ∇ℓ(W_{t'}; k_j, v_j)."""
    case = Case(tokens=T, rows=1, depth=depth, chunk=16, gates=("head", "head", "head"))
    call = make_call(case)
    q, k, v, theta, eta, alpha, state = call.arguments
    network = call.settings["network"]
    settings = {**call.settings, "backend": backend}
    o, after = neural_memory(q, k, v, theta, 0 * eta, 0 * alpha, state, **settings)
    anchor = [W[0] for W in state.M]
    for start in (0, 16):
        end = min(start + 16, T)
        for t in range(start, end):
            batch = sum(
                (theta[0, j] * ((predict(anchor, k[0, j], network) - v[0, j]) ** 2).sum(-1)).sum()
                for j in range(start, t + 1)
            )
            u = torch.autograd.grad(batch, anchor)
            W = [W_0 - g for W_0, g in zip(anchor, u, strict=True)]
            assert_same(o[0, t], predict(W, q[0, t], network))
        anchor = W
    assert_same([W[0] for W in after.M], anchor)


def test_chunk_size_is_part_of_the_model(backend: str) -> None:
    """A larger chunk is another model: outputs differ from the second token of a chunk on."""
    q, k, v = tokens()
    W_0, gates = draw(D, D), (constant(0.3), constant(0.5), constant(0.1))
    o_1, _ = run(W_0, q, k, v, gates, backend=backend)
    o_4, _ = run(W_0, q, k, v, gates, backend=backend, chunk_size=4)
    assert_same(o_1[0], o_4[0])
    assert (o_1[1:] - o_4[1:]).abs().amax(-1).min() > 1e-4
