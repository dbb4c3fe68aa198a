"""TNT against loops over shards and tokens, values and gradients, and what it is made of taken away."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from model_cases import assert_close, assert_same_state, close, named_tensors, small_backbone, small_config, wake
from ops.memory_oracle import oracle
from titans_lm.config import BackboneConfig, MemoryConfig
from titans_lm.memory import LayerState, NeuralMemory
from titans_lm.ops import MemoryState
from titans_lm.ops.state import state_bytes
from titans_lm.shards import project
from titans_lm.tnt import TNTMemory

T = 21
CASES: dict[str, dict[str, Any]] = {
    "one local memory": {},
    "two": {"tnt_local_chunks": (2, 4)},
    "of single tokens": {"tnt_local_chunks": (1,)},
    "not projected": {"tnt_projection": False},
    "linear": {"memory_depth": 1, "forget_to": "zero", "tnt_local_chunks": (1, 8)},
    "without momentum and decay": {"momentum": False, "decay": False, "tnt_global_chunk": 8},
    "gates by channel": {"gates": "channel", "gate_rank": 3, "gates_see_keys": True},
    "huber": {"memory_objective": "huber"},
}
FEW = ["one local memory", "two", "linear"]


def layer(**settings: Any) -> TNTMemory:
    torch.manual_seed(0)
    made = TNTMemory(small_config("tnt", **settings)).double()
    wake(made)
    return made


def tokens(length: int = T, rows: int = 2) -> Tensor:
    return torch.randn(rows, length, 8, dtype=torch.float64)


def by_tokens(memory: TNTMemory, x: Tensor) -> Tensor:
    """The layer's output from loops of plain autograd over tokens: the global memory, and every shard on its own."""
    c = memory.config
    state = memory.init_state(x.shape[0])
    q, k, v = (memory.normed(i, y) for i, y in enumerate(memory.streams(x, state.conv, None)[:3]))
    settings = {"network": memory.network, "chunk_size": c.tnt_global_chunk, "extra": memory.per_token(x, k)}
    o, *_ = oracle(q, k, v, *memory.gates(x, k, False), state.memory, **settings)
    answers = []
    for begin in range(0, x.shape[1], c.tnt_shard):
        here = slice(begin, begin + c.tnt_shard)
        ask, key, value, hidden = (y[:, here] for y in (q, k, v, x))
        if c.tnt_projection:
            sums = torch.einsum("bthi,bthj->bthij", key, key).cumsum(1)
            ask = torch.einsum("bthi,bthij->bthj", ask, sums)
            ask = ask / ask.norm(dim=-1, keepdim=True).clamp(min=1.0)
        answers.append(torch.zeros_like(ask))
        for rule, chunk in zip(memory.local, c.tnt_local_chunks, strict=True):
            start = MemoryState.initial(rule.initial_weights, x.shape[0])
            settings = {"network": rule.network, "chunk_size": chunk, "extra": rule.per_token(hidden, key)}
            answers[-1] += oracle(ask, key, value, *rule.gates(hidden, key, False), start, **settings)[0]
    return memory.project_output(o + torch.cat(answers, 1), memory.gate_proj(x))


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_it_is_a_loop_over_shards_and_tokens_in_values_and_gradients(settings: dict[str, Any]) -> None:
    memory, found = layer(**settings), []
    x = tokens().requires_grad_()
    for y in (memory(x)[0], by_tokens(memory, x)):
        memory.zero_grad()
        x.grad = None
        y.square().sum().backward()
        found.append((y, x.grad, {name: p.grad for name, p in memory.named_parameters()}))
    assert all(grad is not None for grad in found[0][2].values())
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("settings", [CASES[name] for name in FEW], ids=FEW)
def test_a_text_may_be_cut_anywhere(settings: dict[str, Any]) -> None:
    memory = layer(**settings)
    x = tokens()
    expected, after = memory(x)
    size = state_bytes(after)
    for cuts in ([4, 1, 5, 11], [8, 8, 5], [20, 1], [1] * T):
        for recorded in (True, False):  # single tokens have a way of their own
            state, outputs = None, []
            with torch.set_grad_enabled(recorded):
                for part in x.split(cuts, 1):
                    y, state = memory(part, state)
                    outputs.append(y)
                    assert state_bytes(state) == size == state_bytes(memory.init_state(2))
            assert_close(torch.cat(outputs, 1), expected, 1e-10)
            assert_same_state(state, after, 1e-10)


@pytest.mark.parametrize("settings", [CASES[name] for name in FEW], ids=FEW)
def test_rows_of_other_lengths_and_places_are_rows_alone(settings: dict[str, Any]) -> None:
    memory = layer(**settings)
    lengths = torch.tensor([T - 5, 3, 11, 0])  # the first ends a shard
    x, more = tokens(rows=4), tokens(20, rows=4)
    _, state = memory(x, lengths=lengths)
    mask = torch.rand(4, 20, generator=torch.Generator().manual_seed(2)) < 0.7
    got, after = memory(more, state, valid=mask)
    for row, length in enumerate(lengths.tolist()):
        own = memory(x[row : row + 1, :length])[1] if length else None
        expected, own = memory(more[row, mask[row]][None], own)
        assert_close(got[row, mask[row]][None], expected, 1e-10)
        assert_same_state([t[row : row + 1] for _, t in named_tensors(after)], own, 1e-10)


def test_padding_alone_or_no_token_at_all_changes_nothing() -> None:
    memory = layer()
    x = tokens(7)
    _, state = memory(x)
    for y, after in (memory(x, state, lengths=torch.zeros(2, dtype=torch.long)), memory(x[:, :0], state)):
        assert bool(y.isfinite().all())
        assert_same_state(after, state, 1e-10)


def test_a_shard_longer_than_the_text_and_no_global_memory_is_the_plain_memory() -> None:
    memory = layer(tnt_shard=32, tnt_projection=False)
    plain = NeuralMemory(small_config("lmm", chunk_size=2)).double()
    own = memory.state_dict()
    local = {name.removeprefix("local.0."): x for name, x in own.items() if name.startswith("local.0.")}
    plain.load_state_dict({name: own[name] for name in plain.state_dict()} | local)
    x = tokens()
    o, state, _ = memory.write(x, memory.init_state(2))
    alone = NeuralMemory.learn
    memory.learn = lambda *given: alone(memory, *given)  # the global memory alone
    everything, *_ = memory.write(x, memory.init_state(2)._replace(local=None))
    expected, after, _ = plain.write(x, plain.init_state(2))
    assert_close(o - everything, expected, 1e-10)
    assert_same_state(state.local.memories[0], after.memory, 1e-10)


def test_queries_projected_by_the_op_are_projected_by_a_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 70, 2, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    P = torch.einsum("bthi,bthj->bthij", k, k).cumsum(1)
    expected = torch.einsum("bthi,bthij->bthj", q, P)
    expected = expected / expected.norm(dim=-1, keepdim=True).clamp(min=1.0)
    got, after = project(q, k, torch.zeros(2, 2, 4, 4, dtype=torch.float64), None, "auto")
    assert_close(got, expected, 1e-12)
    assert_close(after, P[:, -1], 1e-12)
    axes = torch.eye(4, dtype=torch.float64)[None, :3, None]  # of three of four axes it is the projection itself
    at_last, _ = project(q[:1, :3, :1], axes, torch.zeros(1, 1, 4, 4, dtype=torch.float64), None, "auto")
    assert_close(at_last[:, 2], q[:1, 2, :1] * torch.tensor([1.0, 1.0, 1.0, 0.0]), 1e-12)


def test_local_memories_know_nothing_of_earlier_shards_and_the_global_one_nothing_of_its_chunk() -> None:
    memory = layer(conv_size=1)
    x = tokens()
    changed = x.clone()
    changed[:, 9] += 1.0  # in the second shard of 8, the third chunk of 4
    _, state = memory(x)
    y, z = memory(x)[0], memory(changed)[0]
    assert close(y[:, :9], z[:, :9], 1e-12)
    assert not close(y[:, 9:12], z[:, 9:12], 1e-3)
    whole, shorter = memory(x)[1].local, memory(changed)[1].local  # the third shard has not seen it
    assert_same_state(whole, shorter, 1e-10)
    assert not close(state.memory.M[0], memory(changed)[1].memory.M[0], 1e-6)


@pytest.mark.parametrize("architecture", ["tnt", "tnt+lmm+tnt", "sliding+tnt"])
def test_a_stack_carries_it(architecture: str) -> None:
    backbone = small_backbone(architecture)
    x = tokens(24)
    expected, after = backbone(x)
    y, state = backbone(x[:, :13])
    size = state_bytes(state)
    z, state = backbone(x[:, 13:], state)
    assert_close(torch.cat([y, z], 1), expected, 1e-9)
    assert state_bytes(state) == size == state_bytes(after)


def test_a_state_is_saved_and_loaded(tmp_path: Any) -> None:
    memory = layer()
    x = tokens()
    _, state = memory(x)
    state.save(tmp_path / "state")
    y, _ = memory(x, LayerState.load(tmp_path / "state"))
    assert_close(y, memory(x, state)[0], 1e-12)


def test_what_is_frozen_answers_from_its_start() -> None:
    memory = layer()
    x = tokens()
    _, state = memory(x, frozen=True)
    start = memory.init_state(2)
    assert_same_state(state.memory.M + state.local.memories[0].M, start.memory.M + start.local.memories[0].M, 1e-10)


@pytest.mark.parametrize("surprise", [True, "parts"])
def test_sizes_of_surprise_are_those_of_all_its_memories(surprise: Any) -> None:
    """The root of the sum of their squares, of the local ones shard by shard."""
    memory = layer(tnt_local_chunks=(2, 4))
    x = tokens()
    state = memory.init_state(2)
    q, k, v = memory.norm_streams(memory.streams(x, state.conv, None))
    with torch.no_grad():
        prepared = memory.prepare(T, surprise)
        *_, alone = NeuralMemory.learn(memory, x, (q, k, v), state, None, surprise, False, prepared)
        squares = alone.square()
        for begin, rule in product(range(0, T, memory.config.tnt_shard), memory.local):
            here = slice(begin, begin + memory.config.tnt_shard)
            hidden, ask, key, value = (y[:, here] for y in (x, q, k, v))
            start, extra = rule.initial_memory(2), rule.per_token(hidden, key)
            *_, found = rule.op(surprise)(ask, key, value, *rule.gates(hidden, key, False), start, extra=extra)
            squares[:, here] += found.square()
        _, _, norms = memory.write(x, state, surprise=surprise)
        pieces, now = [], state
        for part in x.split([5, 1, 15], 1):
            _, now, found = memory.write(part, now, surprise=surprise)
            pieces.append(found)
    assert norms.shape == (2, T, 2, 2) + ((3,) if surprise == "parts" else ())
    assert_close(norms, squares.sqrt(), 1e-10)
    assert_close(torch.cat(pieces, 1), norms, 1e-9)


def test_a_hundred_thousand_equal_keys_leave_it_finite() -> None:
    memory = TNTMemory(small_config("tnt", tnt_global_chunk=1000, tnt_local_chunks=(100,), tnt_shard=5000)).float()
    for rule in (memory, *memory.local):
        torch.nn.init.constant_(rule.theta_proj.proj.bias, 20.0)
        torch.nn.init.constant_(rule.alpha_proj.proj.bias, -20.0)
    with torch.no_grad():
        x, state = torch.ones(1, 10_000, 8), None
        for _ in range(10):
            y, state = memory(x, state)
    assert bool(y.isfinite().all())
    assert all(bool(t.isfinite().all()) and float(t.abs().max()) < 5000.0 for _, t in named_tensors(state))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tnt_shard": 1000}, "got tnt_global_chunk=256 and tnt_shard=1000; expected a shard that is a multiple"),
        ({"tnt_local_chunks": (8, 12)}, r"got tnt_local_chunks=\(8, 12\) and tnt_shard=512; expected a shard"),
        ({"tnt_local_chunks": ()}, r"got tnt_local_chunks=\(\); expected the chunk size of at least one"),
        ({"tnt_local_chunks": 8}, "got tnt_local_chunks=8; expected the chunk size of at least one"),
        ({"tnt_local_chunks": (0,)}, "got tnt_local_chunks=0; expected an integer of at least 1"),
        ({"tnt_global_chunk": 0}, "got tnt_global_chunk=0"),
        ({"tnt_projection": "no"}, "got tnt_projection='no'"),
        ({"omega_window": 2}, "got omega_window=2 with tnt; expected omega_window=1"),
        ({"memory_backend": "triton"}, "with tnt, which no kernel does"),
        ({"memory_caching": "grm"}, "expected lmm, mag, mal"),
        ({"shared_qkv": True}, "expected a block of mac, mag"),
        (
            {"decay_first": True, "memory_depth": 1, "chunk_size": 1, "forget_to": "zero"},
            "got decay_first=True with tnt; expected decay_first=False",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BackboneConfig(architecture="tnt", **settings)


def test_a_layer_alone_refuses_too() -> None:
    with pytest.raises(ValueError, match="got omega_window=2 with tnt"):
        TNTMemory(MemoryConfig(hidden_size=8, num_attention_heads=1, omega_window=2))
    with pytest.raises(ValueError, match="got memory_caching='grm' with tnt"):
        TNTMemory(MemoryConfig(hidden_size=8, num_attention_heads=1, memory_caching="grm"))


def test_a_state_of_another_form_is_refused() -> None:
    sizes, x = {"hidden_size": 8, "num_attention_heads": 1, "chunk_size": 2}, torch.randn(1, 5, 8)
    layers = [
        NeuralMemory(**sizes),
        NeuralMemory(**sizes, memory_caching="residual", caching_segment=2),
        NeuralMemory(**sizes, memory_caching="residual", caching_segment=2, caching_slots=3),
        TNTMemory(**sizes, tnt_local_chunks=(2,)),
        TNTMemory(**sizes, tnt_local_chunks=(2, 1)),
        TNTMemory(**sizes, tnt_local_chunks=(2,), tnt_projection=False),
    ]
    states = [layer(x)[1] for layer in layers]
    for i, layer in enumerate(layers):
        for j, state in enumerate(states):
            if i == j:
                layer(x, state)
            else:
                with pytest.raises(ValueError, match="got a state of another form"):
                    layer(x, state)
