from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forecast.forecast_cases import SMALL, forecaster, net
from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.forecast.baselines import MODELS, make_model, model_spec
from titans_lm.forecast.model import Embedding, Forecaster, MambaBlock, Shape
from titans_lm.forecast.settings import ForecastSettings, NetSettings
from titans_lm.forecast.tslib import Model

SHAPE = Shape(12, 4, 2)


def test_patches_end_where_the_window_ends():
    layer = Embedding(SHAPE, 5, 3, 8)
    assert (layer.tokens, layer.skipped) == (3, 1)
    z = torch.randn(2, 12, 2)
    tokens = layer(z)
    assert tokens.shape == (4, 3, 8)
    last = layer.proj(z[1, 7:12, 1]) + layer.place[2]
    torch.testing.assert_close(tokens[3, 2], last)  # row 1, channel 1
    first = layer.proj(z[0, 1:6, 0]) + layer.place[0]
    torch.testing.assert_close(tokens[0, 0], first)


def test_a_patch_is_no_longer_than_the_window():
    with pytest.raises(ValueError, match=r"got patch_len=13 and lookback=12"):
        Embedding(SHAPE, 13, 1, 8)


@pytest.mark.parametrize("base", [name for name in MODELS if name not in ("seasonal", "repeat")])
def test_every_model_maps_a_window_to_its_horizon_and_trains_all_its_parameters(base):
    own = {  # a stack that comes to a memory; one whose global memory is read within the window
        "hybrid": "hybrid:num_hidden_layers=2",
        "tnt": "tnt:tnt_global_chunk=2,tnt_local_chunks=[1],tnt_shard=4",
    }
    name = own.get(base, base)
    model = make_model(base, model_spec(name, ForecastSettings(net=net())).net, SHAPE, None)
    if isinstance(model, Forecaster):
        model.head.reset_parameters()
    y = model(torch.randn(3, 12, 2))
    assert y.shape == (3, 4, 2)
    y.square().sum().backward()
    without = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.numel() and (p.grad is None or not p.grad.any())
    ]
    assert without == []


@pytest.mark.parametrize("patch_len", [1, 4])
def test_a_model_without_a_shortcut_or_a_mean(patch_len):
    model = forecaster(patch_len=patch_len, stride=patch_len, instance_norm="last", shortcut="none")
    assert model(torch.randn(2, 12, 2)).shape == (2, 4, 2)


def test_channels_are_rows_of_their_own():
    x = torch.randn(2, 12, 2)
    other = x.clone()
    other[:, :, 1] += torch.randn(2, 12)
    model = forecaster().eval()
    torch.testing.assert_close(model(x)[:, :, 0], model(other)[:, :, 0], atol=1e-6, rtol=0)


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
    assert Forecaster(net(shortcut="none"), SHAPE).head.weight.abs().max() > 0


def test_a_block_is_simbas_with_the_memory_in_mambas_place():
    """x + mix(norm(x)), then x + mlp(norm(x)), for each of the mixers."""
    config = BackboneConfig(architecture="lmm", **SMALL)
    x = torch.randn(2, 5, 8)
    ours = Forecaster(net(), SHAPE).stack
    assert isinstance(ours, Backbone)
    [block] = ours.layers
    h = x + block.memory(block.mixer_norm(x), block.init_state(2))[0]
    torch.testing.assert_close(ours(x)[0], ours.norm(h + block.mlp(block.mlp_norm(h))))
    mamba = MambaBlock(config)
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
    spec = model_spec("lmm:memory_depth=1,patch_len=6,lr=0.01,shortcut=none", shared)
    assert (spec.net.backbone.memory_depth, spec.net.patch_len, spec.train.lr, spec.net.shortcut) == (
        1,
        6,
        0.01,
        "none",
    )
    assert spec.net.backbone.architecture == "lmm"
    assert spec.has_memory
    assert spec.trained
    attention = model_spec("attention", shared)
    assert attention.net.backbone.attention_conv_size == shared.net.backbone.conv_size
    assert not attention.has_memory
    assert not model_spec("mamba", shared).has_memory
    mixed = model_spec("hybrid:layer_types=[attention,lmm],num_hidden_layers=2,patch_len=6", shared)
    assert mixed.net.backbone.blocks == ("attention", "lmm")
    assert (mixed.net.backbone.attention_conv_size, mixed.net.patch_len) == (shared.net.backbone.conv_size, 6)
    assert mixed.has_memory
    assert model_spec("dlinear:epochs=2", shared).train.epochs == 2
    assert not model_spec("nlinear", shared).trained


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm", "did you mean 'lmm'"),
        ("lmm:patchlen=3", "got 'patchlen', .*did you mean 'patch_len'"),
        ("lmm:architecture=mac", "got 'architecture'"),
        ("lmm:layer_types=[lmm,mac]", "got layer_types for a variant of 'lmm'"),
        ("nlinear:lr=1", "'nlinear:lr=1', which has no settings to vary"),
        ("dlinear:patch_len=3", "got 'patch_len', which a variant of 'dlinear' cannot change"),
        ("lmm:patch_len", "expected lmm:SETTING=VALUE"),
        ("lmm:patch_len=3.5", "got patch_len=3.5; expected int"),
    ],
)
def test_wrong_names_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        model_spec(name, ForecastSettings())


def test_seasonal_needs_a_season_and_patchtst_a_patch_that_fits():
    with pytest.raises(ValueError, match=r"got no season .* expected table.period"):
        make_model("seasonal", net(), SHAPE, None)
    with pytest.raises(ValueError, match="got patch_len=13 and lookback=12"):
        make_model("patchtst", net(patch_len=13), SHAPE, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"instance_norm": "std"}, "got instance_norm='std'"),
        ({"shortcut": "yes"}, "got shortcut='yes'"),
        ({"patch_len": 0}, "got patch_len=0"),
        ({"dropout": 1.0}, "got dropout=1.0"),
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
