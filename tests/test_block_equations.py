"""Equations 19 to 31, one test each: what a block mixes, recomputed token by token from the block's own parameters.

Every sum is written out by by_hand.py: softmax over a list of visible rows, memory by the token-by-token reference.
The text is longer than two segments and three windows, and its length is a multiple of nothing.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from by_hand import AttentionByHand, MemoryByHand, Pair, capture, rms
from model_cases import assert_close, small_config, wake
from titans_lm.blocks import BLOCKS, Block, Gate
from titans_lm.config import BackboneConfig
from titans_lm.layers import ForwardContext, rope_angles
from titans_lm.ops import MemoryState
from titans_lm.ops.state import take_rows

T = 21
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear memory": {"memory_depth": 1},
    "channel-wise, to zero": {"gates": "channel", "forget_to": "zero", "alpha_init": 0.1},
    "convolved attention": {"attention_conv_size": 3},
    "no residual read": {"memory_reads_residual": False},
    "gated by the memory": {"gating": "memory"},
    "reference": {"memory_backend": "reference"},
}
SHARED: dict[str, dict[str, Any]] = {
    "shared": {"shared_qkv": True},
    "shared, longer convolution": {"shared_qkv": True, "conv_size": 5, "memory_reads_residual": False},
    "shared, no convolution": {"shared_qkv": True, "conv_size": 1},
}
BEHIND: dict[str, dict[str, Any]] = {
    "behind another block": {"behind": True},
    "behind another block, no residual read": {"behind": True, "memory_reads_residual": False},
}
"""Where the memory reads embeddings too (D56)."""
every_setting = pytest.mark.parametrize("name", SETTINGS)
MIXES = SETTINGS | SHARED | BEHIND
every_mix = pytest.mark.parametrize("name", MIXES)


class Mixed(NamedTuple):
    """A block, what it was given, what it made of it, and the calls of its parts: (arguments, result).

    `seen` is what the memory reads where attention reads x.
    """

    block: Any
    config: BackboneConfig
    x: Tensor
    seen: Tensor
    stream: Tensor
    o: Tensor
    state: Any
    attention: list[tuple[tuple, tuple]]
    memory: list[tuple[tuple, tuple]]
    finished: list[tuple[tuple, Tensor]]


def capture_method(module: Any, name: str, into: list) -> None:
    """MAC writes segment after segment and finishes what was answered at once: it calls the memory's two halves."""
    method = getattr(module, name)

    def kept(*arguments: Any) -> Any:
        into.append((arguments, method(*arguments)))
        return into[-1][1]

    setattr(module, name, kept)


def mix(architecture: str, behind: bool = False, **settings: Any) -> Mixed:
    """Let a block mix one row of T tokens at the start of a document, the first block or one `behind` another."""
    config = small_config(architecture, **settings)
    block: Block = BLOCKS[architecture](config)
    if behind:
        block.read_embeddings()
    wake(block.double())
    attention: list = []
    memory: list = []
    finished: list = []
    for name, into in (("attention", attention), ("memory", memory)):
        if hasattr(block, name) and (architecture, name) != ("mac", "memory"):
            capture(getattr(block, name), into)
    if architecture == "mac":
        capture_method(block.memory, "write", memory)
        capture_method(block.memory, "project_output", finished)
    places = torch.arange(T)[None]
    if architecture == "mac":
        places = places % config.segment_len
    rope = rope_angles(places, config.rotary_dim, config.rope_theta, torch.float64)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    start = block.init_state(1)
    memory.clear()  # the persistent tokens, read before the document
    stream, embeddings = torch.randn_like(x), torch.randn_like(x)
    ctx = ForwardContext(torch.zeros(1, dtype=torch.int64), None, rope, is_start=True, embeddings=embeddings)
    o, state = block.mix(x, start, ctx, stream)
    seen = rms(stream, block.memory_norm) + rms(embeddings, block.embedding_norm) if behind else x
    return Mixed(block, config, x[0], seen[0], stream[0], o[0], state, attention, memory, finished)


def gate_by_hand(y: Tensor, m: Tensor, gate: Gate) -> Tensor:
    y, m = rms(y, gate.attention_norm), rms(m, gate.memory_norm)
    passed = {"mutual": y * torch.sigmoid(m) + m * torch.sigmoid(y), "memory": y * torch.sigmoid(m)}
    return passed[gate.gating] @ gate.o_proj.weight.T


def persistent_read(block: Any) -> Tensor:
    """The persistent tokens that the memory reads before the text."""
    return block.persistent


def read_after_persistent(block: Any, x: Tensor) -> tuple[Tensor, MemoryState]:
    """M(x̃) of x̃ = [P | x]: the rows of x, and the memory in the end."""
    before = persistent_read(block)
    o, state = MemoryByHand(block.memory).write(torch.cat([before, x]))
    return o[len(before) :], state


def slide(block: Any, config: BackboneConfig, x: Tensor) -> Tensor:
    """SWA(x̃): every token sees the persistent rows and the last `window` tokens."""
    hand = AttentionByHand(block.attention, config, block.memory)
    q, rows = hand.qkv(x, list(range(len(x))), persistent_read(block))
    prefix = hand.prefix(block.persistent)
    return torch.stack([hand.look(q[t], prefix + rows[max(0, t - config.window + 1) : t + 1]) for t in range(len(x))])


class Segments:
    """MAC by hand, segment after segment; the memory is read back from its start for every question."""

    def __init__(self, block: Any, config: BackboneConfig, x: Tensor, seen: Tensor) -> None:
        self.attention = AttentionByHand(block.attention, config, block.memory)
        self.memory = MemoryByHand(block.memory)
        self.prefix = self.attention.prefix(block.persistent)
        self.places = [t % config.segment_len for t in range(len(x))]
        self.q, self.rows = self.attention.qkv(x, self.places)
        self.h, self.y = x[:0], x[:0]
        for start in range(0, len(x), config.segment_len):
            stop = min(start + config.segment_len, len(x))
            h = self.memory.recall(seen, self.before(start).M)[start:stop]
            self.h = torch.cat([self.h, h])
            y = [self.attention.look(self.q[t], self.visible(t)) for t in range(start, stop)]
            self.y = torch.cat([self.y, torch.stack(y)])
            self.z = self.y + seen[:stop] if config.memory_reads_residual else self.y
        self.m, self.end = self.memory.write(self.z)

    def before(self, start: int) -> MemoryState:
        """The memory after the segments before token `start`, all of whose z have been written."""
        return self.memory.write(self.z[:start])[1] if start else self.memory.start()

    def visible(self, t: int) -> list[Pair]:
        """S̃ as token t sees it: P, the recalled rows and the tokens of its segment, up to its own."""
        start = t - self.places[t]
        recalled = self.attention.recalled(self.h[start : t + 1], self.places[start : t + 1])
        return self.prefix + recalled + self.rows[start : t + 1]


@cache
def mixed_by(architecture: str, name: str) -> Mixed:
    """What a block mixes under a setting, for all tests that ask about it: the first of them makes it, none changes it.

    Every test is seeded alike, so whichever is the first draws the same.
    """
    return mix(architecture, **MIXES[name])


@cache
def segments_by(name: str) -> tuple[Mixed, Segments]:
    mixed = mixed_by("mac", name)
    return mixed, Segments(mixed.block, mixed.config, mixed.x, mixed.seen)


@cache
def slid_by(name: str) -> Tensor:
    mixed = mixed_by("mag", name)
    return slide(mixed.block, mixed.config, mixed.x)


@cache
def compressed_by(name: str) -> tuple[Tensor, MemoryState]:
    mixed = mixed_by("mal", name)
    return read_after_persistent(mixed.block, mixed.x)


def recalled_rows(mixed: Mixed) -> Tensor:
    """The rows h that the block handed to its attention."""
    return torch.cat([arguments[4][0][0] for arguments, _ in mixed.attention])


def outputs(calls: list[tuple[tuple, tuple]]) -> Tensor:
    return torch.cat([result[0][0] for _, result in calls])


@every_setting
def test_eq19_persistent_tokens_come_before_the_text(name: str) -> None:
    """x̃ = [p_1 … p_P | x]"""
    mixed = mixed_by("lmm", name)
    o, state = read_after_persistent(mixed.block, mixed.x)
    assert_close(mixed.o, o)
    for got, expected in zip(mixed.state.memory.M, state.M, strict=True):
        assert_close(got, expected)


def test_eq20_persistent_rows_are_a_feed_forward_layer_of_attention() -> None:
    """FFN(x) = W_V softmax(W_K x): what a token sees of the prefix depends on the token and on no other token."""
    mixed = mix("sliding", window=1)
    a, P = mixed.block.attention, mixed.block.persistent
    hand = AttentionByHand(a, mixed.config)
    q, rows = hand.qkv(mixed.x, list(range(T)))
    W_K, W_V = (torch.stack([pair[i] for pair in hand.prefix(P)], dim=1) for i in (0, 1))  # (H, P, D)
    for t in range(T):
        scores = (W_K @ q[t][..., None]).squeeze(-1) / q[t].shape[-1] ** 0.5  # (H, P)
        own = (q[t] * rows[t][0]).sum(-1, keepdim=True) / q[t].shape[-1] ** 0.5
        share = torch.cat([scores, own], dim=-1).softmax(-1)[:, :-1].sum(-1, keepdim=True)  # attention to the prefix
        ffn = (scores.softmax(-1)[:, None] @ W_V).squeeze(1)
        y = share * ffn + (1 - share) * rows[t][1]
        assert_close(mixed.o[t], y.flatten() @ a.o_proj.weight.T)


@every_mix
def test_eq21_mac_recalls_with_the_memory_after_the_previous_segment(name: str) -> None:
    """h_t = M*_{t−1}(S_t W_Q)"""
    mixed, hand = segments_by(name)
    assert_close(recalled_rows(mixed), hand.h)


@every_mix
def test_eq22_mac_attention_has_persistent_recalled_and_present_rows(name: str) -> None:
    """S̃_t = [P | h_t | S_t]: P + 2 i rows for the i-th token of a segment, and without any of them another result."""
    mixed, hand = segments_by(name)
    y, P = outputs(mixed.attention), mixed.config.num_persistent
    for t in range(T):
        visible = hand.visible(t)
        assert len(visible) == P + 2 * (hand.places[t] + 1)
        for missing in range(len(visible)):
            less = hand.attention.look(hand.q[t], visible[:missing] + visible[missing + 1 :])
            assert (less - y[t]).abs().max() > 1e-9


@every_mix
def test_eq23_mac_attends_over_them(name: str) -> None:
    """y_t = Attn(S̃_t)"""
    mixed, hand = segments_by(name)
    assert_close(outputs(mixed.attention), hand.y)


@every_mix
def test_eq24_mac_writes_what_attention_made(name: str) -> None:
    """M_t = M_{t−1}(z_t), z = y + s or y (D36)"""
    mixed, hand = segments_by(name)
    assert_close(torch.cat([arguments[0][0] for arguments, _ in mixed.memory]), hand.z)
    for got, expected in zip(mixed.state.memory.memory[:3], hand.end[:3], strict=True):
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b)
    begun = T - T % mixed.config.segment_len
    for a, b in zip(mixed.state.at_segment_start, hand.before(begun).M, strict=True):
        assert_close(a, b)


@every_mix
def test_eq25_mac_gates_by_a_second_recall(name: str) -> None:
    """o_t = y_t ⊗ M*_t(z_t), token i from the memory as written up to i"""
    mixed, hand = segments_by(name)
    assert_close(mixed.finished[-1][1][0], hand.m)  # the ones before are recalls
    assert_close(mixed.o, gate_by_hand(hand.y, hand.m, mixed.block.gate))


@every_mix
def test_eq26_mag_gives_both_branches_the_persistent_tokens(name: str) -> None:
    """x̃ = [P | x], where the memory's x may hold the embeddings too"""
    mixed = mixed_by("mag", name)
    [(attended, _)], [(written, _)] = mixed.attention, mixed.memory
    assert torch.equal(attended[0][0], mixed.x)
    assert torch.equal(attended[3], mixed.block.persistent)
    assert_close(written[0][0], mixed.seen)
    hand = MemoryByHand(mixed.block.memory)
    read = hand.write(mixed.block.persistent)[1]
    for got, expected in zip(written[1].memory.M, read.M, strict=True):
        assert_close(got, expected)


@every_mix
def test_eq27_mag_slides_a_window(name: str) -> None:
    """y = SWA(x̃)"""
    mixed = mixed_by("mag", name)
    assert_close(outputs(mixed.attention), slid_by(name))


@every_mix
def test_eq28_mag_gates_by_the_memory(name: str) -> None:
    """o = y ⊗ M(x̃)"""
    mixed = mixed_by("mag", name)
    m, _ = read_after_persistent(mixed.block, mixed.seen)
    assert_close(mixed.o, gate_by_hand(slid_by(name), m, mixed.block.gate))


@every_setting
def test_eq29_mal_gives_the_memory_the_persistent_tokens(name: str) -> None:
    """x̃ = [P | x]"""
    mixed = mixed_by("mal", name)
    [(written, _)], [(attended, _)] = mixed.memory, mixed.attention
    assert torch.equal(written[0][0], mixed.x)
    assert torch.equal(attended[3], mixed.block.persistent)
    _, read = MemoryByHand(mixed.block.memory).write(mixed.block.persistent)
    for got, expected in zip(written[1].memory.M, read.M, strict=True):
        assert_close(got, expected)


@every_setting
def test_eq30_mal_compresses_first(name: str) -> None:
    """y = M(x̃)"""
    mixed = mixed_by("mal", name)
    y, state = compressed_by(name)
    assert_close(outputs(mixed.memory), y)
    for got, expected in zip(take_rows(mixed.state.memory.memory, torch.tensor([0])).M, state.M, strict=True):
        assert_close(got, expected)


@every_setting
def test_eq31_mal_looks_at_what_the_memory_made(name: str) -> None:
    """o = SWA(norm(s + y)), and the block adds both: y + o"""
    mixed = mixed_by("mal", name)
    y, _ = compressed_by(name)
    assert_close(mixed.o, y + slide(mixed.block, mixed.config, rms(mixed.stream + y, mixed.block.between)))
