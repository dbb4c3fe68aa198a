"""What blocks have in common, what each carries, and what each is made of; their mixing is test_block_equations.py."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from by_hand import rms
from model_cases import (
    ARCHITECTURES,
    MEMORIES,
    SHARED_VARIANTS,
    VARIANTS,
    VARIED,
    assert_close,
    named_tensors,
    small_config,
    wake,
)
from titans_lm.backbone import Backbone
from titans_lm.blocks import BLOCKS, Block, Gate, MACBlock
from titans_lm.config import BackboneConfig, Gating
from titans_lm.layers import Diagnostics, ForwardContext, rope_angles

T = 11


def make(architecture: str, **settings: Any) -> tuple[Any, BackboneConfig]:
    config = small_config(architecture, **settings)
    block: Block = BLOCKS[architecture](config).double()
    wake(block)
    return block, config


def fresh_call(config: BackboneConfig, rows: int, length: int) -> ForwardContext:
    places = torch.arange(length)[None]
    if config.architecture in ("mac", "segment"):
        places = places % config.segment_len
    rope = rope_angles(places, config.rotary_dim, config.rope_theta, torch.float64)
    return ForwardContext(torch.zeros(rows, dtype=torch.int64), None, rope, is_start=True)


def tokens(rows: int = 2, length: int = T) -> Tensor:
    return torch.randn(rows, length, 8, dtype=torch.float64)


def test_there_is_a_block_for_every_architecture() -> None:
    assert tuple(BLOCKS) == ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_block_is_two_residual_steps(architecture: str) -> None:
    """x + mix(norm(x)), then x + mlp(norm(x))"""
    block, config = make(architecture)
    x, call = tokens(), fresh_call(config, 2, T)
    y, _ = block(x, block.init_state(2), call)
    mixed, _ = block.mix(rms(x, block.mixer_norm), block.init_state(2), call, x)
    middle = x + mixed
    assert_close(y, middle + block.mlp(rms(middle, block.mlp_norm)))


@pytest.mark.parametrize("architecture", ["lmm", "mal", "tnt"])
def test_a_block_that_reads_embeddings_adds_them_to_what_it_mixes(architecture: str) -> None:
    """RMSNorm(x; a) + RMSNorm(x₀; b)"""
    block, config = make(architecture)
    block.read_embeddings()
    assert (block.mixer_norm.weight == 0.1).all()
    assert (block.embedding_norm.weight == 1.0).all()
    wake(block.double())
    x, embeddings = tokens(), tokens()
    call = fresh_call(config, 2, T)._replace(embeddings=embeddings)
    y, _ = block(x, block.init_state(2), call)
    read = rms(x, block.mixer_norm) + rms(embeddings, block.embedding_norm)
    middle = x + block.mix(read, block.init_state(2), call, x)[0]
    assert_close(y, middle + block.mlp(rms(middle, block.mlp_norm)))


@pytest.mark.parametrize("architecture", ["mac", "mag"])
def test_attention_beside_a_memory_that_reads_embeddings_reads_tokens_alone(architecture: str) -> None:
    """Its own norm is as before; what the memory reads starts at 0.1 (test_block_equations.py has what is mixed)."""
    block, config = make(architecture)
    block.read_embeddings()
    assert (block.mixer_norm.weight != 0.1).all()
    assert (block.memory_norm.weight == 0.1).all()
    wake(block.double())
    x = tokens()
    call = fresh_call(config, 2, T)._replace(embeddings=tokens())
    y, _ = block(x, block.init_state(2), call)
    middle = x + block.mix(rms(x, block.mixer_norm), block.init_state(2), call, x)[0]
    assert_close(y, middle + block.mlp(rms(middle, block.mlp_norm)))


@pytest.mark.parametrize("gating", get_args(Gating))
def test_the_gate_is_its_formula(gating: str) -> None:
    gate = Gate(small_config("mag", gating=gating)).double()
    y, m = tokens(), tokens()
    wake(gate)
    a, c = rms(y, gate.attention_norm), rms(m, gate.memory_norm)
    passed = {"mutual": a * torch.sigmoid(c) + c * torch.sigmoid(a), "memory": a * torch.sigmoid(c)}[gating]
    assert_close(gate(y, m), passed @ gate.o_proj.weight.T)
    with torch.no_grad():
        assert_close(gate(y, m), passed @ gate.o_proj.weight.T)


@pytest.mark.parametrize(
    ("gating", "attention", "memory"),
    [("mutual", 0.3, 1.0), ("memory", 1.0, 1.0)],
)
def test_how_loud_attention_and_memory_are_at_the_start(gating: str, attention: float, memory: float) -> None:
    """In a whole model, whose weights are drawn anew."""
    gate = Backbone(small_config("mag", gating=gating)).layers[0].gate
    assert_close(gate.attention_norm.weight, torch.full_like(gate.attention_norm.weight, attention))
    assert_close(gate.memory_norm.weight, torch.full_like(gate.memory_norm.weight, memory))


@pytest.mark.parametrize(("gating", "passes"), [("mutual", True), ("memory", False)])
def test_what_passes_the_gate_where_attention_has_nothing(gating: str, passes: bool) -> None:
    gate = Gate(small_config("mag", gating=gating)).double()
    wake(gate)
    m = tokens()[:1, :2]
    out = gate(torch.zeros_like(m), m)
    assert bool((out[:, 0] != out[:, 1]).any()) is passes


@pytest.mark.parametrize("architecture", ["lmm", "mag", "mal"])
def test_the_memory_reads_the_persistent_tokens_that_it_has(architecture: str) -> None:
    block, config = make(architecture)
    start = block.init_state(3)
    memory = start if architecture == "lmm" else start.memory
    assert memory.memory.offset.tolist() == [config.num_persistent % config.chunk_size] * 3
    unread, _ = make(architecture, num_persistent=0)
    start = unread.init_state(3)
    memory = start if architecture == "lmm" else start.memory
    for got, weight in zip(memory.memory.M, unread.memory.initial_weights, strict=True):
        assert_close(got, weight.expand_as(got), 0.0)


def test_persistent_tokens_that_nothing_reads_do_not_exist() -> None:
    assert make("lmm", num_persistent=0)[0].persistent is None
    assert make("lmm")[0].persistent.shape == make("mag")[0].persistent.shape == (3, 8)


def test_the_memory_of_mac_starts_unwritten() -> None:
    block, _ = make("mac")
    start = block.init_state(2)
    assert start.memory.memory.offset.tolist() == [0, 0]
    for got, weight in zip(start.at_segment_start, block.memory.initial_weights, strict=True):
        assert_close(got, weight.expand_as(got), 0.0)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17])
def test_mac_recalls_from_the_last_border_of_a_segment(length: int) -> None:
    block, config = make("mac")
    assert isinstance(block, MACBlock)
    x = tokens(length=length)
    _, state = block.mix(x, block.init_state(2), fresh_call(config, 2, length), x)
    border = length - length % config.segment_len
    at_border = block.init_state(2)
    if border:
        _, at_border = block.mix(x[:, :border], at_border, fresh_call(config, 2, border), x[:, :border])
    for got, expected in zip(state.at_segment_start, at_border.memory.memory.M, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("architecture", MEMORIES)
def test_surprise_comes_once_per_token_and_block(architecture: str) -> None:
    """MAC reads its segments one after another; their numbers are one tensor in the end."""
    block, config = make(architecture)
    told = Diagnostics(surprise=True)
    x, call = tokens(length=21), fresh_call(config, 2, 21)._replace(diagnostics=told)
    block.mix(x, block.init_state(2), call, x)
    [size] = told.surprise_norms
    assert size.shape == (2, 21, config.num_attention_heads, config.memory_depth)
    assert bool((size > 0).all())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_a_state_come_first_and_keep_their_size(architecture: str) -> None:
    block, config = make(architecture, attention_conv_size=4)
    start, x = block.init_state(3), tokens(rows=3)
    _, state = block.mix(x, start, fresh_call(config, 3, T), x)
    for (name, before), (_, after) in zip(named_tensors(start), named_tensors(state), strict=True):
        assert before.shape[0] == after.shape[0] == 3, name
        assert before.dtype == after.dtype, name
        if architecture != "attention":
            assert before.shape == after.shape, name


@pytest.mark.parametrize("architecture", ["mac", "mag"])
def test_shared_streams_start_neutral(architecture: str) -> None:
    """A fresh block that shares is one whose attention has the memory's maps and convolution as its own."""
    torch.manual_seed(0)
    sharing = Backbone(small_config(architecture, shared_qkv=True, num_persistent=0)).double()
    settings = {"attention_conv_size": 4, "num_persistent": 0, "memory_reads_embeddings": False}
    apart = Backbone(small_config(architecture, **settings)).double()
    weights = sharing.state_dict()
    taken = {name: weights.get(name, weights.get(name.replace("attention", "memory"))) for name in apart.state_dict()}
    apart.load_state_dict(taken)
    x = tokens()
    assert_close(sharing(x)[0], apart(x)[0])
    saved = sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in sharing.parameters())
    assert saved == 2 * (3 * 8 * 8 + 3 * 4 * 8 - 6 * 8), "3 E² and the taps, less a scale and an offset each"


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [(a, VARIANTS[name]) for a, name in VARIED] + [(a, s) for a in ("mac", "mag") for s in SHARED_VARIANTS.values()],
    ids=[f"{a}-{name}" for a, name in VARIED] + [f"{a}-{name}" for a in ("mac", "mag") for name in SHARED_VARIANTS],
)
def test_parameters_are_counted_by_a_formula(architecture: str, settings: dict[str, Any]) -> None:
    block, c = make(architecture, **settings)
    E = c.hidden_size
    common = 2 * E + 3 * E * c.mlp_width + c.num_persistent * E
    attention = 4 * E * E + (3 * E * c.attention_conv_size if c.attention_conv_size > 1 else 0)
    if c.shared_qkv:
        attention = E * E + 3 * 2 * E
    memory = sum(p.numel() for p in block.memory.parameters()) if c.has_memory else 0  # test_memory.py
    gated = attention + 2 * E + E * E
    own = {"lmm": 0, "tnt": -c.num_persistent * E, "mac": gated, "mag": gated, "mal": attention + E}
    expected = common + memory + own.get(architecture, attention)
    assert sum(p.numel() for p in block.parameters()) == expected
