from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forecast.forecast_cases import SMALL, forecaster, net
from titans_lm.config import BackboneConfig
from titans_lm.forecast.contenders import MODELS, contender, make_model
from titans_lm.forecast.mixing import EinFFT, MambaBlock, make_stack
from titans_lm.forecast.model import Embedding, Forecaster, Shape
from titans_lm.forecast.settings import ForecastSettings, NetSettings
from titans_lm.forecast.tslib import Model

SHAPE = Shape(12, 4, 2)


def test_einfft_by_hand():
    layer = EinFFT(8)
    with torch.no_grad():
        layer.bias.normal_()
    x = torch.randn(2, 5, 8)
    weight, bias = torch.view_as_complex(layer.weight), torch.view_as_complex(layer.bias)

    def transform(n, sign):
        k = torch.arange(n)
        return torch.exp(sign * 2j * torch.pi * torch.outer(k, k) / n) / n**0.5

    z = torch.einsum("st,btki,lk->bsli", transform(5, -1), x.reshape(2, 5, 4, 2).cfloat(), transform(4, -1))
    y = torch.empty_like(z)
    for block in range(4):
        h = z[:, :, block] @ weight[0, block] + bias[0, block]
        h = torch.complex(h.real.clamp(min=0), h.imag.clamp(min=0))
        h = h @ weight[1, block] + bias[1, block]
        y[:, :, block] = torch.complex(*(p.sign() * (p.abs() - 0.01).clamp(min=0) for p in (h.real, h.imag)))
    back = torch.einsum("st,btki,lk->bsli", transform(5, 1), y, transform(4, 1)).real.reshape(2, 5, 8)
    torch.testing.assert_close(layer(x), back, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"got hidden_size=6 with channel='einfft'; expected a multiple of 4"):
        EinFFT(6)


def test_patches_end_where_the_window_ends():
    layer = Embedding(SHAPE, 5, 3, 8, mixed=False)
    assert (layer.tokens, layer.skipped) == (3, 1)
    z = torch.randn(2, 12, 2)
    tokens = layer(z)
    assert tokens.shape == (4, 3, 8)
    last = layer.proj(z[1, 7:12, 1]) + layer.place[2]
    torch.testing.assert_close(tokens[3, 2], last)  # row 1, channel 1
    first = layer.proj(z[0, 1:6, 0]) + layer.place[0]
    torch.testing.assert_close(tokens[0, 0], first)


def test_mixed_tokens_hold_all_channels_and_steps_are_patches_of_one():
    layer = Embedding(SHAPE, 1, 1, 8, mixed=True)
    z = torch.randn(3, 12, 2)
    tokens = layer(z)
    assert tokens.shape == (3, 12, 8)
    torch.testing.assert_close(tokens[2, 5], layer.proj(z[2, 5]) + layer.place[5])
    with pytest.raises(ValueError, match=r"got patch_len=13 and lookback=12"):
        Embedding(SHAPE, 13, 1, 8, mixed=False)


@pytest.mark.parametrize("base", [name for name in MODELS if name not in ("seasonal", "repeat")])
def test_every_model_maps_a_window_to_its_horizon_and_trains_all_its_parameters(base):
    own = net().backbone
    who = contender(base, ForecastSettings(net=NetSettings(patch_len=4, stride=4, shortcut="linear", backbone=own)))
    model = make_model(base, who.net, SHAPE, None)
    if isinstance(model, Forecaster):
        model.head.proj.reset_parameters()
    y = model(torch.randn(3, 12, 2))
    assert y.shape == (3, 4, 2)
    y.square().sum().backward()
    without = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.numel() and (p.grad is None or not p.grad.any())
    ]
    assert without == []


@pytest.mark.parametrize("channel", ["mlp", "einfft"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("embedding", ["patch", "step"])
def test_the_parts_go_together(embedding, mixed, channel):
    model = forecaster(embedding=embedding, mixed=mixed, channel=channel, instance_norm="last", shortcut="none")
    assert model(torch.randn(2, 12, 2)).shape == (2, 4, 2)


def test_channels_are_rows_of_their_own_unless_they_are_mixed():
    x = torch.randn(2, 12, 2)
    other = x.clone()
    other[:, :, 1] += torch.randn(2, 12)
    for mixed in (False, True):
        model = forecaster(mixed=mixed).eval()
        same = torch.allclose(model(x)[:, :, 0], model(other)[:, :, 0], atol=1e-6)
        assert same is not mixed


def test_a_forecaster_follows_the_level_and_the_size_of_its_window():
    model = forecaster().eval()
    x = torch.randn(2, 12, 2)
    torch.testing.assert_close(model(7 * x + 100), 7 * model(x) + 100, atol=1e-2, rtol=1e-3)
    plain = forecaster(instance_norm="none").eval()
    assert not torch.allclose(plain(7 * x + 100), 7 * plain(x) + 100, atol=1.0)


def test_beside_a_shortcut_the_head_starts_at_zero():
    model = Forecaster(net(), SHAPE)
    x = torch.randn(2, 12, 2)
    torch.testing.assert_close(model(x), x.mean(1, keepdim=True).expand(2, 4, 2))
    assert Forecaster(net(shortcut="none"), SHAPE).head.proj.weight.abs().max() > 0


def test_a_block_is_simbas_with_the_memory_in_mambas_place():
    """x + mix(norm(x)), then x + channel(norm(x)), for each of the mixers."""
    config = BackboneConfig(architecture="lmm", **SMALL)
    x = torch.randn(2, 5, 8)
    [block] = make_stack(config, "einfft").layers
    assert isinstance(block.mlp, EinFFT)
    h = x + block.memory(block.mixer_norm(x), block.init_state(2))[0]
    [ours] = [make_stack(config, "einfft")]
    ours.layers[0] = block
    torch.testing.assert_close(ours(x)[0], ours.norm(h + block.mlp(block.mlp_norm(h))))
    mamba = MambaBlock(config, "mlp")
    h = x + mamba.mixer(mamba.mixer_norm(x))
    torch.testing.assert_close(mamba(x), h + mamba.mlp(mamba.mlp_norm(h)))
    assert (mamba.mixer.ssm_state_size, mamba.mixer.intermediate_size) == (64, 16)


def test_a_window_of_another_shape_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"got a window \(1, 11, 2\); expected \(B, L, C\) with \(L, C\) = \(12, 2\)"):
        forecaster()(torch.zeros(1, 11, 2))


def test_names_are_read_over_the_settings_that_all_share():
    shared = ForecastSettings(
        net=net(),
    )
    who = contender("lmm:memory_depth=1,patch_len=6,lr=0.01,shortcut=none", shared)
    assert (who.net.backbone.memory_depth, who.net.patch_len, who.train.lr, who.net.shortcut) == (1, 6, 0.01, "none")
    assert who.net.backbone.architecture == "lmm"
    assert who.has_memory
    assert who.trained
    attention = contender("attention", shared)
    assert attention.net.backbone.attention_conv_size == shared.net.backbone.conv_size
    assert not attention.has_memory
    assert not contender("mamba", shared).has_memory
    mixed = contender("hybrid:layer_types=[attention,lmm],num_hidden_layers=2,patch_len=6", shared)
    assert mixed.net.backbone.blocks == ("attention", "lmm")
    assert (mixed.net.backbone.attention_conv_size, mixed.net.patch_len) == (shared.net.backbone.conv_size, 6)
    assert mixed.has_memory
    assert contender("dlinear:epochs=2", shared).train.epochs == 2
    assert not contender("nlinear", shared).trained


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm", "did you mean 'lmm'"),
        ("lmm:patchlen=3", "got 'patchlen' .*did you mean 'patch_len'"),
        ("lmm:architecture=mac", "got 'architecture'"),
        ("lmm:layer_types=[lmm,mac]", "got layer_types for a variant of 'lmm'"),
        ("nlinear:lr=1", "nlinear has no settings of its own"),
        ("dlinear:patch_len=3", "got 'patch_len' in the model"),
        ("lmm:patch_len", "expected ARCHITECTURE:SETTING=VALUE"),
        ("lmm:patch_len=3.5", "got patch_len=3.5; expected int"),
    ],
)
def test_wrong_names_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        contender(name, ForecastSettings())


def test_seasonal_needs_a_season_and_patchtst_a_patch_that_fits():
    with pytest.raises(ValueError, match=r"got no season .* expected table.period"):
        make_model("seasonal", net(), SHAPE, None)
    with pytest.raises(ValueError, match="got patch_len=13 and lookback=12"):
        make_model("patchtst", net(patch_len=13), SHAPE, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"instance_norm": "std"}, "got instance_norm='std'"),
        ({"embedding": "token"}, "got embedding='token'"),
        ({"channel": "fft"}, "got channel='fft'"),
        ({"shortcut": "yes"}, "got shortcut='yes'"),
        ({"patch_len": 0}, "got patch_len=0"),
        ({"dropout": 1.0}, "got dropout=1.0"),
        ({"affine": True, "instance_norm": "none"}, "got affine=True"),
    ],
)
def test_wrong_settings_of_the_net_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        NetSettings(**settings)


def test_the_adapter_has_the_signature_of_the_time_series_library():
    configs = SimpleNamespace(
        task_name="long_term_forecast", seq_len=12, pred_len=4, enc_in=3, d_model=8, n_heads=2, e_layers=1, d_ff=16,
        dropout=0.0, patch_len=4,
    )  # fmt: skip
    model = Model(configs).float().eval()
    x = torch.randn(2, 12, 3)
    y = model(x, torch.zeros(2, 12, 4), torch.zeros(2, 6, 3), torch.zeros(2, 6, 4))
    assert y.shape == (2, 4, 3)
    torch.testing.assert_close(y, model.forecaster(x))
    assert isinstance(model, nn.Module)
    with pytest.raises(ValueError, match="got task_name='imputation'; expected long_term_forecast"):
        Model(SimpleNamespace(**{**vars(configs), "task_name": "imputation"}))
