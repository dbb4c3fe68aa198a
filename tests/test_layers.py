"""The ordinary parts, each against its formula written out."""

import math

import pytest
import torch
from torch.nn import functional as F

from model_cases import assert_close, close
from titans_lm.layers import (
    ForwardContext,
    Linear,
    RMSNorm,
    Rope,
    ShortConvolution,
    SwiGLU,
    init_linear,
    last_valid,
    length_mask,
    rope_angles,
    rotate,
)
from titans_lm.ops import matmul

FAR = 20_000_003  # odd and beyond 2²⁴: float32 has no such number


def random_rope(tokens: int) -> Rope:
    return rope_angles(torch.arange(tokens)[None], 4, 10_000.0, torch.float64)


def test_rms_norm_is_its_formula() -> None:
    norm = RMSNorm(6, 1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert_close(norm(x), expected, 1e-12)


def test_rms_norm_starts_with_weights_of_one() -> None:
    assert RMSNorm(6, 1e-6).weight.tolist() == [1.0] * 6


def test_rms_norm_is_computed_in_float32_for_bfloat16() -> None:
    norm = RMSNorm(64, 1e-6).bfloat16()
    x = 300.0 * torch.randn(4, 64).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, RMSNorm(64, 1e-6)(x.float()).bfloat16(), 0.0)


def test_swiglu_is_its_formula() -> None:
    mlp = SwiGLU(4, 6).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    gate, up, down = (p.weight for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    a = x @ gate.T
    assert_close(mlp(x), (a * torch.sigmoid(a) * (x @ up.T)) @ down.T, 1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("kernel", [2, 4])
def test_short_convolution_looks_back_at_its_tail(kernel: int, tokens: int) -> None:
    conv = ShortConvolution(3, kernel).double()
    x = torch.randn(2, tokens, 3, dtype=torch.float64)
    tail = torch.randn(2, kernel - 1, 3, dtype=torch.float64)
    y, new_tail = conv(x, tail, None)
    before = torch.cat([tail, x], dim=1)
    for t in range(tokens):
        window = before[:, t : t + kernel]  # the tail and tokens up to t
        assert_close(y[:, t], F.silu((window * conv.weight).sum(1)), 1e-12)
    assert torch.equal(new_tail, before[:, -(kernel - 1) :])


@pytest.mark.parametrize("back", [0, 1, 3])
def test_short_convolution_starts_as_a_token_of_the_past(back: int) -> None:
    x = torch.randn(2, 9, 64)
    conv = ShortConvolution(64, 4, back)
    y, _ = conv(x, conv.init_tail(2), None)
    past = F.silu(F.pad(x, [0, 0, back, 0])[:, :9])
    assert F.cosine_similarity(y[:, 3:], past[:, 3:], dim=-1).min().item() > 0.9
    assert not torch.equal(conv.weight.detach().round(), conv.weight), "and a little noise on all taps"


def test_short_convolution_leaves_padding_out_of_its_tail() -> None:
    conv = ShortConvolution(3, 4).double()
    x, tail = torch.randn(3, 5, 3, dtype=torch.float64), torch.randn(3, 3, 3, dtype=torch.float64)
    _, new_tail = conv(x, tail, torch.tensor([5, 2, 0]))
    for row, length in enumerate([5, 2, 0]):
        _, alone = conv(x[row : row + 1, :length], tail[row : row + 1], None)
        assert torch.equal(new_tail[row], alone[0])


def test_tails_of_a_half_precision_model_are_float32() -> None:
    conv = ShortConvolution(3, 4).bfloat16()
    y, tail = conv(torch.randn(1, 5, 3).bfloat16(), conv.init_tail(1), None)
    assert (conv.init_tail(1).dtype, y.dtype, tail.dtype) == (torch.float32, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("lengths", [None, torch.tensor([4])])
def test_rows_that_a_state_keeps_are_no_view_of_the_whole_call(lengths: torch.Tensor | None) -> None:
    x = torch.randn(1, 1000, 3)
    kept = last_valid(x, 5, lengths)
    assert kept.shape == (1, 5, 3)
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


def test_last_rows_of_ragged_rows_end_where_each_row_ends() -> None:
    x = torch.arange(2 * 7).view(2, 7)  # three kept ones, then four of the call
    assert last_valid(x, 3, torch.tensor([4, 1])).tolist() == [[4, 5, 6], [8, 9, 10]]


def test_valid_tokens_come_first() -> None:
    assert length_mask(None, 3) is None
    mask = length_mask(torch.tensor([0, 2, 3]), 3)
    assert mask is not None
    assert mask.int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_rope_turns_pairs_of_channels_by_the_angle_of_the_token() -> None:
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64)
    y = rotate(x, random_rope(5))
    for t in range(5):
        for pair in range(2):
            angle = t * 10_000.0 ** (-2 * pair / 4)
            a, b = x[0, t, :, pair], x[0, t, :, pair + 2]
            assert_close(y[0, t, :, pair], a * math.cos(angle) - b * math.sin(angle), 1e-12)
            assert_close(y[0, t, :, pair + 2], b * math.cos(angle) + a * math.sin(angle), 1e-12)
    assert torch.equal(y[..., 4:], x[..., 4:]), "the others know no position"


@pytest.mark.parametrize("channels", [0, 6])
def test_rope_turns_no_channel_or_all(channels: int) -> None:
    x = torch.randn(1, 5, 2, 6)
    y = rotate(x, rope_angles(torch.arange(5)[None], channels, 10_000.0, torch.float32))
    assert torch.equal(y, x) == (channels == 0)
    assert_close(y.norm(dim=-1), x.norm(dim=-1), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_rope_knows_distances_only_even_twenty_million_tokens_in(dtype: torch.dtype, tolerance: float) -> None:
    q, k = (torch.randn(1, 40, 1, 8, dtype=dtype) for _ in "qk")

    def similarities(first: int) -> torch.Tensor:
        rope = rope_angles(first + torch.arange(40)[None], 8, 10_000.0, dtype)
        return torch.einsum("bthd,bnhd->btn", rotate(q, rope), rotate(k, rope))

    near, far = similarities(0), similarities(FAR)
    assert not close(near, torch.einsum("bthd,bnhd->btn", q, k), 1e-2), "the angles matter"
    assert_close(near, far, tolerance)


def test_rope_angles_are_those_of_exact_integers() -> None:
    """float32 positions would be off by 1, float32 angles by radians long before."""
    rope = rope_angles(torch.tensor([[FAR]]), 2, 10_000.0, torch.float32)
    assert rope.cos.item() == pytest.approx(math.cos(FAR), abs=1e-7)
    assert rope.sin.item() == pytest.approx(math.sin(FAR), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_is_float32_for_models_of_less(dtype: torch.dtype) -> None:
    rope = rope_angles(torch.arange(3)[None], 4, 10_000.0, dtype)
    assert rope.cos.dtype == torch.float32
    assert rotate(torch.randn(1, 3, 1, 4).to(dtype), rope).dtype == dtype


def test_a_piece_of_a_call_is_the_call_as_its_tokens_see_it() -> None:
    rope = random_rope(10)
    call = ForwardContext(torch.tensor([5, 0]), torch.tensor([10, 3]), rope, is_start=True)
    piece = call.slice(4, 8)
    assert piece.position.tolist() == [9, 3], "a row that has ended moves no further"
    assert piece.lengths is not None
    assert piece.lengths.tolist() == [4, 0]
    assert torch.equal(piece.rope.cos, rope.cos[:, 4:8])
    assert not piece.is_start
    assert call.slice(0, 4).is_start
    whole = ForwardContext(torch.tensor([5, 0]), None, rope, is_start=False)
    assert whole.slice(4, 8).position.tolist() == [9, 4]
    assert whole.slice(4, 8).lengths is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1,), (), (2, 1), (1, 3), (0, 2)], ids=str)
def test_linear_is_a_product_for_one_row_and_for_many(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Linear(5, 7, bias=bias).to(dtype)
    x = torch.randn(*shape, 5, dtype=dtype, requires_grad=True)
    expected = F.linear(x, layer.weight, layer.bias)
    assert_close(layer(x), expected, 1e-6 if dtype != torch.bfloat16 else 0.0)
    grads = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (layer(x), expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    monkeypatch.setattr(matmul, "MOST", 0)
    assert torch.equal(layer(x), expected), "a large matrix stays with the library"


def test_linear_computes_one_row_under_autocast_as_asked() -> None:
    layer, x = Linear(5, 7), torch.randn(1, 1, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_map_without_weights_draws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device drawing is slow and gives nothing; anywhere else it is how a map starts."""
    drawn: list[torch.Size] = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda weight, std: drawn.append(weight.shape))
    init_linear(torch.nn.Linear(3, 4, device="meta"))
    assert drawn == []
    init_linear(torch.nn.Linear(3, 4))
    assert drawn == [(4, 3)]


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (2, 5)])
def test_a_linear_map_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(6, 4, bias=False)(torch.randn(shape))
