"""Stacks of equal size: as many parameters, blocks and heads, an MLP that is as wide beside the width of each."""

import dataclasses

import pytest
import torch

from model_cases import ARCHITECTURES, STACKS, small_config
from titans_lm.config import BackboneConfig
from titans_lm.train.fresh import (
    byte_model,
    check_near,
    count_parameters,
    fit_shape,
    match_parameters,
    model_without_weights,
    without_weights,
)
from titans_lm.train.settings import ModelSettings
from titans_lm.train.sized import sized_for

SHARED = BackboneConfig(architecture="lmm", hidden_size=128, num_attention_heads=4, num_hidden_layers=3)


@pytest.mark.parametrize("architecture", [*STACKS, "lmm+sliding+lmm"])
def test_counted_without_making_them(architecture: str) -> None:
    config = small_config(architecture)
    assert count_parameters(config, 259) == sum(p.numel() for p in byte_model(config).parameters())


@pytest.mark.parametrize("architecture", ["lmm+attention+mac", "tnt"])
def test_weights_that_nobody_needs_are_not_drawn(architecture: str) -> None:
    config = small_config(architecture)
    before = torch.get_rng_state()
    bare = model_without_weights(config, 259)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in bare.parameters())
    model = byte_model(config)
    assert not torch.equal(torch.get_rng_state(), before), "and after it they are drawn as ever"
    shapes = [{name: x.shape for name, x in one.state_dict().items()} for one in (bare, model)]
    assert shapes[0] == shapes[1]


def test_a_match_is_as_near_as_a_channel() -> None:
    target = count_parameters(small_config("mac", hidden_size=16), 259)
    matched = match_parameters(small_config("segment", hidden_size=16), 259, target)
    assert abs(count_parameters(matched, 259) - target) <= 3 * matched.hidden_size * 2 // 2
    assert matched.architecture == "segment"
    assert match_parameters(matched, 259, count_parameters(matched, 259)) == matched


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_mlp_pays_for_a_second_mixer(architecture: str) -> None:
    """Whatever the mixers, the MLP keeps its share: the width gives way, in steps of two channels a head."""
    target = count_parameters(SHARED, 259)
    matched = match_parameters(dataclasses.replace(SHARED, architecture=architecture), 259, target)
    ratio = SHARED.mlp_width / SHARED.hidden_size
    assert abs(count_parameters(matched, 259) / target - 1.0) <= 0.001
    assert abs(matched.mlp_width / matched.hidden_size - ratio) <= 0.5
    assert (matched.num_hidden_layers, matched.num_attention_heads) == (3, 4)
    assert matched.head_dim % 2 == 0
    others = [
        dataclasses.replace(matched, hidden_size=matched.hidden_size + step, intermediate_size=1) for step in (-8, 8)
    ]
    for other in others:  # no width beside it keeps the share better
        mlp = 1 + (target - count_parameters(other, 259)) / (3 * other.hidden_size * 3)
        assert abs(mlp / other.hidden_size - ratio) > abs(matched.mlp_width / matched.hidden_size - ratio) - 0.01
    if architecture == "lmm":
        assert matched == dataclasses.replace(SHARED, intermediate_size=SHARED.mlp_width)


def test_an_mlp_has_twice_the_width_at_least() -> None:
    """An MLP that is given narrower is no share to keep; at a share of two all widths are on its wider side."""
    for width in (32, 128):
        given = dataclasses.replace(SHARED, hidden_size=64, intermediate_size=width)
        for architecture in ("lmm", "mag", "sliding"):
            matched = match_parameters(dataclasses.replace(given, architecture=architecture), 259, 200_000)
            assert 2.0 <= matched.mlp_width / matched.hidden_size < 2.8


def test_an_mlp_need_not_be_gated() -> None:
    """What a channel costs is counted: two maps with a bias where SwiGLU has three without."""

    def count(size: int, mlp: int) -> int:
        return 259 * size + 3 * (4 * size**2 + size + (2 * size + 1) * mlp)

    size, mlp = fit_shape(count, SHARED, 200_000)
    assert abs(count(size, mlp) - 200_000) <= 3 * (2 * size + 1) / 2
    assert size % 8 == 0
    assert abs(mlp / size - SHARED.mlp_width / SHARED.hidden_size) <= 0.5


def test_an_mlp_cannot_be_less_than_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"with 2 blocks, a width of 4 and an MLP of twice as much it has 1,916 .* ask for more, or"
    ):
        match_parameters(small_config("mac"), 259, 100)


def test_a_size_that_its_steps_miss_is_refused() -> None:
    check_near(1009, 1000)
    with pytest.raises(ValueError, match=r"come in steps.*1,011 parameters, \+1.1% from 1,000; expected at most 1%"):
        check_near(1011, 1000)


@pytest.mark.parametrize("baseline", [None, "llama"])
def test_what_the_machine_cannot_hold_is_not_begun(baseline: str | None) -> None:
    """An allocation of it would take every page that there is before it failed; a dry run needs none."""
    wide = dataclasses.replace(SHARED, hidden_size=2**20)
    for settings in (ModelSettings(baseline=baseline, parameters=10**15), ModelSettings(baseline=baseline, model=wide)):
        with pytest.raises(ValueError, match=r"got a model of [\d,]+ parameters, [\d,.]+ GiB in float32; expected one"):
            sized_for(settings, 259)
    with pytest.raises(ValueError, match="got a model too large to be counted"):
        sized_for(ModelSettings(model=dataclasses.replace(SHARED, hidden_size=2**30)), 259)
    with without_weights():
        assert sized_for(ModelSettings(model=wide), 259).parameters > 10**13
