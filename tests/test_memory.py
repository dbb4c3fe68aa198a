"""The memory layer: its equations by hand, its gates and their bounds, and its state as a value."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import MemoryByHand
from model_cases import MEMORY_ONLY, VARIANTS, assert_close, assert_same_state, named_tensors, small_config, wake
from titans_lm.backbone import Backbone
from titans_lm.config import THRESHOLDS, BackboneConfig, MemoryConfig
from titans_lm.layers import Diagnostics, length_mask
from titans_lm.memory import NeuralMemory
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read
from titans_lm.ops.state import take_rows

T = 11
LAYERS = {name: settings for name, settings in VARIANTS.items() if name not in MEMORY_ONLY - {"default"}}
BACKENDS = ["chunked", "reference"]


def make(dtype: torch.dtype = torch.float64, awake: bool = True, **settings: Any) -> NeuralMemory:
    torch.manual_seed(0)  # layers of one shape get the same weights
    layer = NeuralMemory(small_config("lmm", **settings)).to(dtype)
    if awake:
        wake(layer)
    return layer


def tokens(rows: int = 2, length: int = T, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, length, 8, dtype=dtype)


def no_keys(config: MemoryConfig, length: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys of one row for gates that do not see them."""
    return torch.full((1, length, config.num_attention_heads, config.head_dim), torch.nan, dtype=dtype)


def normed_streams(layer: NeuralMemory, x: Tensor, tails: tuple[Tensor, ...]) -> list[Tensor]:
    """q, k and v as the op is given them."""
    return [layer.normed(i, y) for i, y in enumerate(layer.streams(x, tails, None)[:3])]


def recall(
    layer: NeuralMemory, x: Tensor, M: tuple[Tensor, ...], tails: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Eq. 21: only read."""
    q, gate, tails = layer.project_query(x, tails)
    return layer.retrieve(M, q, gate), tails


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_the_layer_is_its_equations(settings: dict[str, Any], backend: str) -> None:
    layer, x = make(memory_backend=backend, **settings), tokens()
    y, state = layer(x)
    hand = MemoryByHand(layer)
    for row in range(2):
        expected, memory = hand.write(x[row])
        assert_close(y[row], expected)
        assert_same_state(take_rows(state.memory, torch.tensor([row])), memory)


@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_recall_is_reading_and_changes_nothing(settings: dict[str, Any]) -> None:
    layer, x = make(**settings), tokens(rows=1)
    _, state = layer(tokens(rows=1))
    before = [t.clone() for _, t in named_tensors(state)]
    h, tails = recall(layer, x, state.memory.M, layer.init_tails(1))
    assert_close(h[0], MemoryByHand(layer).recall(x[0], state.memory.M))
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, named_tensors(state), strict=True))
    first, middle = recall(layer, x[:, :4], state.memory.M, layer.init_tails(1))
    second, end = recall(layer, x[:, 4:], state.memory.M, middle)
    assert_close(torch.cat([first, second], dim=1), h)
    assert_same_state(end, tails)


@pytest.mark.parametrize("cut", [1, 3, 4, 10])
def test_a_cut_changes_nothing(cut: int) -> None:
    layer, x = make(), tokens()
    whole, end = layer(x)
    first, middle = layer(x[:, :cut])
    second, state = layer(x[:, cut:], middle)
    assert_close(torch.cat([first, second], dim=1), whole)
    assert_same_state(state, end)


def test_lengths_leave_padding_out() -> None:
    layer, x, lengths = make(), tokens(rows=3), torch.tensor([T, 5, 0])
    noisy = x.masked_fill(~length_mask(lengths, T)[..., None], torch.nan)
    y, state = layer(noisy, None, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, end = layer(x[row : row + 1, :length])
        assert_close(y[row, :length], alone[0])
        assert_same_state(take_rows(state, torch.tensor([row])), end)


@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_backends_give_the_same_gradients(settings: dict[str, Any]) -> None:
    x = tokens()
    found = []
    for backend in BACKENDS:
        layer = make(memory_backend=backend, **settings)
        y, state = layer(x)
        (y.pow(2).sum() + sum(w.pow(2).sum() for w in state.memory.M)).backward()
        found.append([p.grad for p in layer.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_no_token_is_no_change() -> None:
    layer = make()
    _, state = layer(tokens())
    y, same = layer(tokens(length=0), state)
    assert y.shape == (2, 0, 8)
    assert_same_state(same, state, 0.0)


def extreme_gates(config: MemoryConfig, push: float) -> dict[str, list[Tensor]]:
    """The gates of a layer whose logits are all driven to ±∞, by name and memory layer."""
    layer = NeuralMemory(config)
    gates = {"theta": layer.theta_proj, "eta": layer.eta_proj, "alpha": layer.alpha_proj}
    found = {}
    for name, gate in gates.items():
        if gate is not None:
            torch.nn.init.constant_(gate.proj.bias, push)
            values = gate(torch.randn(1, 3, config.hidden_size), no_keys(config, 3))
            found[name] = list(values) if isinstance(values, tuple) else list(values.unbind(-1))
    return found


@pytest.mark.parametrize("kind", ["head", "layer", "channel"])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"momentum": False}, {"memory_depth": 3}, {"memory_depth": 3, "memory_norm": False},
        {"chunk_size": 1}, {"eta_max": 0.99},
    ],
)  # fmt: skip
def test_no_token_can_leave_the_bounds(kind: str, settings: dict[str, Any]) -> None:
    """θ_1 ≤ theta_max, θ_l too, or that over its fan-in where no norm ends the memory; η ≤ η_max, α ≤ 1."""
    config = MemoryConfig(hidden_size=16, num_attention_heads=2, gates=kind, **settings)  # type: ignore[arg-type]
    eta_max = config.eta_max if config.momentum else 0.0
    most, least = extreme_gates(config, 1e6), extreme_gates(config, -1e6)
    by_fan_in = settings.get("memory_norm") is False
    for i in range(config.memory_depth):
        chunk = config.chunk_size + 2 * eta_max / (1 - eta_max)
        step = config.theta_bound * (1 - eta_max) / chunk / (config.memory_widths[i] if by_fan_in and i else 1)
        limits = {"theta": step, "alpha": 1.0} | ({"eta": eta_max} if config.momentum else {})
        for name, limit in limits.items():
            assert_close(most[name][i], torch.full_like(most[name][i], limit), 1e-7)
            assert_close(least[name][i], torch.zeros_like(least[name][i]), 0.0)
    assert ("eta" in most) == config.momentum


@pytest.mark.parametrize("kind", ["head", "layer", "channel"])
def test_gates_start_where_the_settings_say(kind: str) -> None:
    config = MemoryConfig(gates=kind, alpha_init=0.01)  # type: ignore[arg-type]
    layer = NeuralMemory(config)
    zero, k = torch.zeros(1, 1, config.hidden_size), no_keys(config)
    for gate, start in ((layer.theta_proj, config.theta_max / 2), (layer.eta_proj, config.eta_max / 2)):
        assert gate is not None
        first = gate(zero, k)[0] if kind == "channel" else gate(zero, k)[..., 0]
        assert_close(first, torch.full_like(first, start), 1e-6)
    assert layer.alpha_proj is not None
    for part in layer.alpha_proj(zero, k):
        assert_close(part, torch.full_like(part, 0.01), 1e-6)


@pytest.mark.parametrize("kind", ["head", "layer", "channel"])
def test_theta_starts_at_its_share_of_the_bound_of_each_layer(kind: str) -> None:
    """Layers after the first have a start of their own, where there is a gate for each (D14)."""
    config = MemoryConfig(gates=kind, memory_depth=3, theta_init=0.7, theta_later_init=0.2, memory_norm=False)  # type: ignore[arg-type]
    layer = NeuralMemory(config)
    found = layer.theta_proj(torch.zeros(1, 2, config.hidden_size), no_keys(config, 2))
    shares = [0.7, 0.7, 0.7] if kind == "head" else [0.7, 0.2, 0.2]
    parts = found if kind == "channel" else found.unbind(-1)
    for part, share, scale in zip(parts, shares, config.theta_scales, strict=True):
        assert_close(part, torch.full_like(part, share * scale * config.theta_max), 1e-7)


@pytest.mark.parametrize("parts", [False, True])
def test_surprise_is_that_at_the_memory_that_has_forgotten_where_it_forgets_first(parts: bool) -> None:
    """‖∇ℓ‖ = 2 ‖k‖ ‖k (1 − α) M − v‖ with ‖k‖ = 1, whatever the op is given in place of v."""
    config = small_config("lmm", **VARIANTS["forgets first"])
    layer = NeuralMemory(config).double()
    wake(layer)
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.float64)
    _, k, v = normed_streams(layer, x, layer.init_state(2).conv)
    assert layer.alpha_proj is not None
    kept = 1.0 - layer.alpha_proj(x, k)
    state = layer.init_state(2)
    for t in range(5):
        M, told = state.memory.M[0], Diagnostics("parts" if parts else True)
        _, state = layer(x[:, t : t + 1], state, diagnostics=told)
        error = kept[:, t] * torch.einsum("bhd,bhde->bhe", k[:, t], M) - v[:, t]
        [norms] = told.surprise_norms
        momentary = norms[..., 0] if parts else norms
        assert_close(momentary[:, 0, :, 0], 2.0 * error.norm(dim=-1), 1e-10)


@pytest.mark.parametrize("kind", ["head", "layer", "channel"])
@pytest.mark.parametrize("name", ["theta", "eta", "alpha"])
def test_the_gates_of_heads_start_apart_where_a_pair_is_given(kind: str, name: str) -> None:
    """Log-spaced over the heads, for every layer and channel of a head alike; the blocks of a stack may take turns."""
    config = BackboneConfig(
        architecture="lmm", num_hidden_layers=2, num_attention_heads=4, gates=kind, time_scales="shifted",  # type: ignore[arg-type]
        **{f"{name}_init": (0.01, 0.5)},
    )  # fmt: skip
    limit = {"theta": config.theta_max, "eta": config.eta_max, "alpha": 1.0}[name]
    zero, k = torch.zeros(1, 1, config.hidden_size), no_keys(config)
    found = [getattr(block.memory, f"{name}_proj")(zero, k) for block in Backbone(config).layers]
    if kind == "channel":
        of_blocks = [gate[0][0, 0, :, 0] for gate in found]
        assert all(bool((gate[0] == gate[0][..., :1]).all()) for gate in found)
    else:
        of_blocks = [gate[0, 0, :, 0] for gate in found]
    expected = 0.01 * 50.0 ** (torch.arange(8) / 7)
    assert_close(torch.stack(of_blocks, dim=1).flatten() / limit, expected, 1e-5)


@pytest.mark.parametrize("kind", ["head", "layer", "channel"])
@pytest.mark.parametrize("name", ["theta", "alpha"])
def test_a_token_can_write_or_forget_nothing_and_learn_to(kind: str, name: str) -> None:
    """θ and α are exactly zero and exactly their bounds well before a sigmoid is, and have a gradient there (D33)."""
    config = MemoryConfig(gates=kind, theta_stretch=0.2, alpha_stretch=0.2)  # type: ignore[arg-type]
    gate, limit = getattr(NeuralMemory(config), f"{name}_proj"), config.theta_max if name == "theta" else 1.0
    for logit, expected in ((-3.0, 0.0), (3.0, limit), (0.0, limit / 2)):
        torch.nn.init.constant_(gate.proj.bias, logit)
        found = gate(torch.zeros(1, 1, config.hidden_size), no_keys(config))
        first = found[0] if kind == "channel" else found[..., 0]
        assert_close(first, torch.full_like(first, expected), 1e-8)
        gate.zero_grad()
        first.sum().backward()
        assert gate.proj.bias.grad is not None
        assert gate.proj.bias.grad.max().item() > 0.01 * limit


@pytest.mark.parametrize("settings", [{"decay": False}, {"decay": False, "memory_depth": 1}, {}, {"memory_depth": 1}])
def test_what_writes_nothing_may_go_on_forever(settings: dict[str, Any]) -> None:
    layer, x = make(momentum=False, **settings), tokens(rows=1, length=64)
    _, before = layer(x)
    for gate in (layer.theta_proj, layer.alpha_proj):
        if gate is not None:
            torch.nn.init.constant_(gate.proj.weight, 0.0)
            torch.nn.init.constant_(gate.proj.bias, -6.0)
    _, after = layer(tokens(rows=1, length=64), before)
    for M, kept in zip(after.memory.M, before.memory.M, strict=True):
        assert torch.equal(M, kept), "not nearly the same: the same"


def test_gates_side_by_side_are_gates() -> None:
    """One product for θ, η and α; where somebody watches a gate, each is called."""
    layer, x = make(gates="layer"), tokens()
    k = torch.zeros(2, T, 2, 4, dtype=torch.float64)
    together = layer.gates(x, k, frozen=False)
    grads = torch.autograd.grad(sum((g * g).sum() for g in together), layer.theta_proj.proj.weight)
    seen: list[Any] = []
    layer.theta_proj.register_forward_hook(lambda *_: seen.append(1))
    alone = layer.gates(x, k, frozen=False)
    assert seen == [1]
    own, layer.alpha_proj.forward = layer.alpha_proj.forward, lambda *given: seen.append(2) or own(*given)
    layer.theta_proj._forward_hooks.clear()
    layer.gates(x, k, frozen=False)
    assert seen == [1, 2], "nor is one left out whose forward is somebody else's"
    for a, b in zip(together, alone, strict=True):
        assert_close(a, b, 1e-14)
    expected = torch.autograd.grad(sum((g * g).sum() for g in alone), layer.theta_proj.proj.weight)
    assert_close(grads[0], expected[0], 1e-14)


def test_gates_differ_by_token_head_and_layer() -> None:
    layer = make(gates="layer")
    k = no_keys(layer.config, 2, torch.float64)
    gate = layer.theta_proj(tokens(rows=1, length=2), k)
    assert isinstance(gate, Tensor)
    assert gate.unique().numel() == gate.numel() == 2 * 2 * 2
    per_head = make(gates="head").eta_proj
    assert per_head is not None
    share = per_head(tokens(rows=1, length=2), k)
    assert isinstance(share, Tensor)
    assert torch.equal(share[..., 0], share[..., 1]), "one gate for all layers of a head"


def test_without_momentum_and_decay_nothing_is_kept_or_forgotten() -> None:
    layer, x = make(momentum=False, decay=False, memory_depth=1, chunk_size=1), tokens(rows=1, length=2)
    assert (layer.eta_proj, layer.alpha_proj) == (None, None)
    _, one = layer(x[:, :1])
    _, two = layer(x[:, 1:], one)
    for M, S, before in zip(two.memory.M, two.memory.S, one.memory.M, strict=True):
        assert_close(M, before + S)


def test_queries_and_keys_have_norm_one_and_values_unit_size() -> None:
    # maps that add up tokens: with one token alone, SiLU leaves nothing of a head whose channels are all far below 0
    layer, x = make(awake=False, induction_init=False), 100.0 * tokens()
    q, k, v = normed_streams(layer, x, layer.init_state(2).conv)
    for y in (q, k):
        assert_close(y.norm(dim=-1), torch.ones(2, T, 2, dtype=torch.float64))
    assert_close(v.pow(2).mean(-1), torch.ones(2, T, 2, dtype=torch.float64), 1e-2)


@pytest.mark.parametrize(
    "own", [{"memory_depth": 1}, {"memory_depth": 2, "theta_later_init": 0.1 / 128, "theta_stretch": 0.0}]
)
def test_a_fresh_memory_recalls_what_followed_a_token(own: dict[str, Any]) -> None:
    """With a small θ of the second layer: else a deep memory writes so much at first that 32 tokens are too many."""
    torch.manual_seed(1)
    x = torch.randn(1, 32, 64, dtype=torch.float64)
    x[:, 31] = x[:, 7]

    def nearest(**settings: Any) -> int:
        """Which token's value is most like the answer to the last query, in both heads together."""
        torch.manual_seed(2)
        config = MemoryConfig(hidden_size=64, num_attention_heads=2, chunk_size=8, **own, **settings)
        layer = NeuralMemory(config).double()
        start = layer.init_state(1)
        q, _, v = normed_streams(layer, x, start.conv)
        o, *_ = layer.write(x, start)
        learned = (o - read(start.memory.M, q, layer.network))[0, 31]
        return int((learned * v[0, :31]).sum((1, 2)).argmax())

    assert nearest() == 8, "keys start one token behind queries (D32)"
    assert nearest(induction_init=False) != 8


def test_with_lookahead_a_key_never_sees_its_own_token() -> None:
    """The layer is that whose tap on the own token is zero: outputs, gradients of the rest, single tokens (D53)."""
    ahead, plain, x = make(lookahead_values=True), make(), tokens()
    with torch.no_grad():
        plain.convs[1].weight[-1] = 0.0
    other = x.clone()
    other[:, 5] += 1.0
    keys = [normed_streams(ahead, y, ahead.init_state(2).conv)[1] for y in (x, other)]
    assert torch.equal(keys[0][:, :6], keys[1][:, :6])
    assert not torch.equal(keys[0][:, 6], keys[1][:, 6])
    (y, _), (expected, _) = ahead(x), plain(x)
    assert_close(y, expected)
    weights = dict(plain.named_parameters())
    gradients = torch.autograd.grad(y.square().sum(), list(ahead.parameters()))
    wanted = torch.autograd.grad(expected.square().sum(), list(weights.values()))
    for name, a, b in zip(weights, gradients, wanted, strict=True):
        same = slice(None, -1) if name == "convs.1.weight" else slice(None)
        assert_close(a[same], b[same])
    assert not dict(zip(weights, gradients, strict=True))["convs.1.weight"][-1].any()
    state, answers = None, []
    for t in range(T):
        one, state = ahead(x[:, t : t + 1], state)
        answers.append(one)
    assert_close(torch.cat(answers, 1), y, 1e-9)


def test_the_decay_of_hope_is_a_memory_of_half_the_values() -> None:
    """M ← M (1 − α − θ kᵀk) − θ kᵀ (k M − v), token by token, is what this memory does with v / 2 at chunk 1 (D53).

    With the whole gradient, 2 θ kᵀ (k M − v), it is what it does with 2 v / 3 and 3 θ / 2.
    """
    torch.manual_seed(5)
    k = F.normalize(torch.randn(T, 4, dtype=torch.float64), dim=-1)
    v, theta, alpha = torch.randn_like(k), torch.rand(T).double() / 2, torch.rand(T).double() / 4
    network, identity = MemoryNetwork(residual=False, forget_to="zero"), torch.eye(4, dtype=torch.float64)
    for factor, values, steps in ((1.0, 1 / 2, 1.0), (2.0, 2 / 3, 3 / 2)):
        M = torch.zeros(4, 4, dtype=torch.float64)
        for t in range(T):
            pull = factor * theta[t] * torch.outer(k[t], k[t] @ M - v[t])
            M = ((1 - alpha[t]) * identity - theta[t] * torch.outer(k[t], k[t])) @ M - pull
        state = MemoryState.initial((torch.zeros(1, 4, 4, dtype=torch.float64),), 1)
        tokenwise = k[None, :, None], k[None, :, None], v[None, :, None] * values
        gates = [gate[None, :, None, None] for gate in (theta * steps, 0 * theta, alpha)]
        _, after = neural_memory(*tokenwise, *gates, state, network=network, chunk_size=1)
        assert_close(after.M[0][0, 0], M)


def test_the_memory_starts_at_its_scale() -> None:
    layer = NeuralMemory(MemoryConfig(hidden_size=256, num_attention_heads=4))
    first, second = layer.initial_weights
    assert first.std().item() == pytest.approx(1.0, rel=0.05)
    assert second.std().item() == pytest.approx(256**-0.5, rel=0.05)
    linear = NeuralMemory(MemoryConfig(memory_depth=1))
    assert not linear.initial_weights[0].any(), "before it has read anything, a linear memory answers nothing"


def test_surprise_is_the_norm_of_the_momentary_gradient() -> None:
    layer, x = make(), tokens()
    told, by_reference = Diagnostics(surprise=True), Diagnostics(surprise=True)
    layer(x, None, None, told)
    [size] = told.surprise_norms
    assert size.shape == (2, T, 2, 2)
    assert bool((size > 0).all())
    other = NeuralMemory(dataclasses.replace(layer.config, memory_backend="reference")).double()
    other.load_state_dict(layer.state_dict())
    other(x, None, None, by_reference)
    assert_close(size, by_reference.surprise_norms[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_state_is_at_least_float32(dtype: torch.dtype) -> None:
    layer = make(dtype)
    y, state = layer(tokens(dtype=dtype))
    assert y.dtype == dtype
    expected = torch.promote_types(dtype, torch.float32)
    kinds = {x.dtype for _, x in named_tensors(state) if x.is_floating_point()}
    assert kinds == {expected}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = layer.float()(tokens(dtype=torch.float32))
    assert {x.dtype for _, x in named_tensors(state) if x.is_floating_point()} == {torch.float32}


def test_what_is_written_can_be_read_back() -> None:
    """A memory that has seen one pair often answers its key with its value."""
    layer = make(awake=False, memory_depth=1, conv_size=1, chunk_size=1, decay=False)
    x = tokens(rows=1, length=1).expand(1, 200, 8)
    _, state = layer(x)
    _, k, v = normed_streams(layer, x[:, :1], ())
    assert_close(read(state.memory.M, k, layer.network), v, 1e-6)


@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_parameters_are_counted_by_a_formula(settings: dict[str, Any]) -> None:
    layer = make(**settings)
    c = layer.config
    E, H, D, widths = c.hidden_size, c.num_attention_heads, c.head_dim, c.memory_widths
    memory = H * sum(a * b for a, b in pairwise(widths))
    norm = 2 * H * D if c.use_norm else 0
    convs = 3 * E * c.conv_size if c.conv_size > 1 else 0
    inputs = 2 * E if c.gates_see_keys else E
    per_gate = {
        "head": (inputs + 1) * H,
        "layer": (inputs + 1) * H * c.memory_depth,
        "channel": inputs * c.gate_rank + (c.gate_rank + 1) * H * sum(widths[:-1]),
    }[c.gates]
    gates = (1 + c.momentum + c.decay) * per_gate
    thresholds = (inputs + 1) * H if c.memory_objective in THRESHOLDS else 0
    shares = (E + 1) * H * c.omega_window if c.omega_window > 1 else 0
    powers = H * (c.key_degree + 1) if c.key_degree > 1 else 0
    beyond = thresholds + shares + powers
    assert sum(p.numel() for p in layer.parameters()) == 5 * E * E + memory + norm + convs + gates + D + beyond


def test_the_start_of_the_deep_memory_is_not_the_identity() -> None:
    layer = make(awake=False)
    q = torch.nn.functional.normalize(tokens().unflatten(-1, (2, 4)), dim=-1)
    answer = read(layer.init_state(2).memory.M, q, layer.network)
    assert (answer - q).pow(2).mean().item() == pytest.approx(1.0, rel=0.01), "LN gives unit size"
    assert math.isfinite(answer.sum().item())
