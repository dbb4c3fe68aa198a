"""Attention in its three ranges against a softmax over explicit rows, and the limits where the ranges meet."""

from typing import Any

import pytest
import torch
from torch import Tensor

from by_hand import AttentionByHand
from model_cases import assert_close, small_config, wake
from titans_lm.attention import (
    FullAttention,
    KeyValues,
    QKVProjection,
    SegmentAttention,
    WindowAttention,
    attend,
    segment_slices,
)
from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.layers import ForwardContext, rope_angles

T, FAR = 21, 10_000_000
SETTINGS = {"plain": {}, "conv": {"attention_conv_size": 3}, "no prefix": {"num_persistent": 0}}


def make(kind: type[QKVProjection], **settings: Any) -> tuple[Any, BackboneConfig, Tensor]:
    config = small_config("attention", **settings)
    torch.manual_seed(0)  # layers of one shape get the same weights
    layer = kind(config).double()
    wake(layer)
    return layer, config, torch.randn(config.num_persistent, config.hidden_size, dtype=torch.float64)


def new_call(
    config: BackboneConfig, tokens: int, position: int = 0, fresh: bool = True, rows: int = 1
) -> ForwardContext:
    """A call without padding; `position` tokens came before."""
    places = position + torch.arange(tokens)[None].expand(rows, -1)
    rope = rope_angles(places, config.rotary_dim, config.rope_theta, torch.float64)
    return ForwardContext(torch.full((rows,), position), None, rope, fresh)


def run(layer: Any, config: BackboneConfig, x: Tensor, persistent: Tensor, position: int = 0) -> Tensor:
    """One pass over x as a fresh document, segments one after another."""
    rows = x.shape[0]
    state, call = layer.init_state(rows), new_call(config, x.shape[1], position, rows=rows)
    if not isinstance(layer, SegmentAttention):
        return layer(x, state, call, persistent)[0]
    outputs, qkv = [], layer.project(x, state.conv, call, persistent)
    slices = segment_slices(call, x.shape[1], config.segment_len)
    cut = qkv.split([here.rope.cos.shape[1] for here, _ in slices])
    for (here, phase), qkv_t in zip(slices, cut, strict=True):
        y, state, _ = layer(qkv_t, state, here, phase)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def first_visible(layer: QKVProjection, config: BackboneConfig, t: int) -> int:
    if isinstance(layer, WindowAttention):
        return max(0, t - config.window + 1)
    return t - t % config.segment_len if isinstance(layer, SegmentAttention) else 0


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", [FullAttention, WindowAttention, SegmentAttention])
def test_every_token_sees_the_prefix_and_its_range(kind: type[QKVProjection], settings: dict[str, Any]) -> None:
    layer, config, persistent = make(kind, **settings)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    y = run(layer, config, x, persistent)
    hand = AttentionByHand(layer, config)
    q, rows = hand.qkv(x[0], list(range(T)))
    prefix = hand.prefix(persistent)
    for t in range(T):
        visible = rows[first_visible(layer, config, t) : t + 1]
        assert_close(y[0, t], hand.look(q[t], prefix + visible), 1e-12)


@pytest.mark.parametrize("window", [T, T + 1, 4 * T])
def test_a_window_as_long_as_the_text_is_full_attention(window: int) -> None:
    wide, config, persistent = make(WindowAttention, window=window)
    full, _, _ = make(FullAttention)
    x = torch.randn(2, T, config.hidden_size, dtype=torch.float64)
    assert_close(run(wide, config, x, persistent), run(full, config, x, persistent), 1e-12)
    narrow, config, _ = make(WindowAttention, window=T - 1)
    differ = (run(narrow, config, x, persistent) - run(full, config, x, persistent)).abs().amax((0, 2))
    assert differ[:-1].max() < 1e-12
    assert differ[-1] > 1e-6


def test_a_window_of_one_sees_the_token_and_the_prefix() -> None:
    layer, config, persistent = make(WindowAttention, window=1, num_persistent=0)
    x = torch.randn(1, 5, config.hidden_size, dtype=torch.float64)
    alone = x @ layer.v_proj.weight.T @ layer.o_proj.weight.T
    assert_close(run(layer, config, x, persistent), alone, 1e-12)


@pytest.mark.parametrize("segment_len", [T, 4 * T])
def test_a_segment_as_long_as_the_text_is_full_attention(segment_len: int) -> None:
    long, config, persistent = make(SegmentAttention, segment_len=segment_len)
    full, _, _ = make(FullAttention)
    x = torch.randn(2, T, config.hidden_size, dtype=torch.float64)
    assert_close(run(long, config, x, persistent), run(full, config, x, persistent), 1e-12)


def test_what_is_recalled_from_a_later_token_is_not_seen() -> None:
    layer, config, persistent = make(SegmentAttention)
    tokens = config.segment_len
    x, h = (torch.randn(1, tokens, config.hidden_size, dtype=torch.float64) for _ in "xh")

    def read(h: Tensor) -> Tensor:
        rows = h, layer.init_recalled(1)
        call, state = new_call(config, tokens), layer.init_state(1)
        return layer(layer.project(x, state.conv, call, persistent), state, call, 0, rows)[0]

    jacobian = torch.autograd.functional.jacobian(read, h)[0, :, :, 0].abs().amax((1, 3))  # (of y_i, to h_j)
    assert bool((jacobian.tril() == jacobian).all()), "row j was made from token j: token i < j must not see it"
    assert bool((jacobian[torch.tril_indices(tokens, tokens).unbind(0)] > 0).all())


@pytest.mark.parametrize("kind", [FullAttention, WindowAttention, SegmentAttention])
def test_only_distances_count_even_ten_million_tokens_in(kind: type[QKVProjection]) -> None:
    layer, config, persistent = make(kind, num_persistent=0, segment_len=T)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    # Only the angles move: where the tokens stand in window and segment stays.
    near, far = run(layer, config, x, persistent), run(layer, config, x, persistent, position=FAR)
    assert_close(near, far, 1e-8)


def test_persistent_rows_are_as_far_from_every_token() -> None:
    """With values only in the prefix, the output depends on the query's free channels and not on its place."""
    layer, config, persistent = make(FullAttention)
    with torch.no_grad():
        layer.k_proj.weight[[0, 1, 4, 5]] = 0.0  # the turned channels of both heads: tokens lose their positions
    x = torch.randn(1, 1, config.hidden_size, dtype=torch.float64).expand(1, T, -1)
    with_prefix = run(layer, config, x, persistent)
    assert_close(run(layer, config, x, persistent, position=FAR), with_prefix, 1e-12)
    hand = AttentionByHand(layer, config)
    for k, _ in hand.prefix(persistent):
        assert bool((k[:, : config.rotary_dim] == 0).all())


def test_a_prefix_moves_with_no_text() -> None:
    """The same window of text reads the same prefix the same way, wherever it stands."""
    layer, config, persistent = make(WindowAttention)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    assert_close(run(layer, config, x, persistent), run(layer, config, x, persistent, position=FAR), 1e-8)


@pytest.mark.parametrize("window", [1, 4, 6, 50])
@pytest.mark.parametrize("cut", [1, 5, 6, 7, 20])
def test_a_window_keeps_what_later_tokens_see(window: int, cut: int) -> None:
    layer, config, persistent = make(WindowAttention, window=window, attention_conv_size=3)
    x = torch.randn(2, T, config.hidden_size, dtype=torch.float64)
    whole = run(layer, config, x, persistent)
    first, state = layer(x[:, :cut], layer.init_state(2), new_call(config, cut, rows=2), persistent)
    assert isinstance(state, KeyValues)
    assert state.k.shape[1] == window
    call = new_call(config, T - cut, cut, fresh=False, rows=2)
    second, _ = layer(x[:, cut:], state, call, persistent)
    assert_close(torch.cat([first, second], dim=1), whole, 1e-12)


@pytest.mark.parametrize("induction", [True, False])
def test_keys_start_one_token_behind_queries(induction: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_conv_size": 4, "num_persistent": 0, "rotary_fraction": 0.0}
    config = small_config("attention", induction_init=induction, **sizes)
    layer = Backbone(config).layers[0].attention
    qkv = layer.project(torch.randn(1, 12, 64), layer.init_state(1).conv, new_call(config, 12), torch.zeros(0, 64))
    alike = torch.cosine_similarity(qkv.q[0, :11], qkv.keys[1][0, 1:], dim=-1)
    assert (alike.min().item() > 0.9) == induction


@pytest.mark.parametrize("architecture", ["attention", "sliding", "segment", "mac", "mag", "mal"])
def test_a_token_qkv_at_itself_first_where_nothing_is_convolved(architecture: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_conv_size": 1, "conv_size": 1}

    def on_itself(induction: bool) -> float:
        """The share of attention that tokens give to themselves, where 12 are to be seen."""
        config = small_config(architecture, induction_init=induction, **sizes)
        layer = Backbone(config).layers[0].attention
        qkv = layer.project(torch.randn(1, 12, 64), (), new_call(config, 12), torch.zeros(0, 64))
        scores = torch.einsum("bihd,bjhd->bhij", qkv.q, qkv.keys[1]) / 32**0.5
        return scores.softmax(-1).diagonal(dim1=-2, dim2=-1).mean().item()

    assert on_itself(True) > 0.7, "D34"
    assert on_itself(False) < 0.3


def test_attend_takes_values_of_another_precision() -> None:
    q = torch.randn(1, 3, 2, 4)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None]
    y = attend(q.bfloat16(), q, q, mask)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), attend(q, q, q, mask), 0.1)


def pieces(positions: list[int], length: int, fresh: bool = False, lengths: list[int] | None = None) -> list:
    config = small_config("segment")
    call = ForwardContext(
        torch.tensor(positions),
        None if lengths is None else torch.tensor(lengths),
        rope_angles(torch.arange(length)[None], 2, 10.0, torch.float32),
        fresh,
    )
    found, start = [], 0
    for here, phase in segment_slices(call, length, config.segment_len):
        stop = start + here.rope.cos.shape[1]
        found.append((start, stop, phase if isinstance(phase, int) else phase.tolist()))
        start = stop
    return found


def test_a_call_is_cut_where_segments_end() -> None:
    assert pieces([0, 0], 20, fresh=True) == [(0, 8, 0), (8, 16, 0), (16, 20, 0)]
    assert pieces([0], 8, fresh=True) == [(0, 8, 0)]
    assert pieces([13, 21], 9) == [(0, 3, 5), (3, 9, 0)]
    assert pieces([8, 16], 3) == [(0, 3, 0)]


def test_rows_of_different_length_are_cut_where_any_of_them_ends_a_segment() -> None:
    assert pieces([6, 1], 9) == [(0, 2, [6, 1]), (2, 7, [0, 3]), (7, 9, [5, 0])]
    # The second row has only three tokens: it stops at phase 4, whatever happens to the first.
    assert pieces([6, 1], 9, lengths=[9, 3]) == [(0, 2, [6, 1]), (2, 7, [0, 3]), (7, 9, [5, 4])]


def test_one_token_is_never_cut() -> None:
    assert pieces([7, 3], 1) == [(0, 1, [7, 3])]
    assert pieces([0, 0], 1, fresh=True) == [(0, 1, 0)]
