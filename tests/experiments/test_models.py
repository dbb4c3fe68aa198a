"""What models of experiments are made of: other models' rules in our block, and what all share of a stack."""

import dataclasses
from pathlib import Path

import pytest
from transformers import LlamaConfig

from model_cases import small_config
from titans_lm.experiments.models import folder_name
from titans_lm.experiments.settings import CompareSettings, small_training
from titans_lm.experiments.text import check_models, language_settings
from titans_lm.report.section import remembers, title
from titans_lm.train.baselines import fit_baseline
from titans_lm.train.settings import LanguageSettings


def small(tmp_path: Path) -> CompareSettings:
    train = LanguageSettings(model=small_config("mac", hidden_size=16, num_hidden_layers=1), steps=6, warmup_steps=1)
    return CompareSettings(data="text", test=tmp_path, out=tmp_path / "out", train=train)


def test_deltanet_is_a_model_by_name(tmp_path: Path) -> None:
    """The rule of DeltaNet or Gated DeltaNet in our block; its variants change that block and nothing of the rest."""
    settings = small(tmp_path)
    plain, gated, varied = (
        language_settings(settings, name, 9_000)
        for name in ("delta-net", "gated-delta-net", "gated-delta-net:conv_size=2")
    )
    lmm = language_settings(settings, "lmm", 9_000)
    assert gated.baseline is None
    assert (gated.model.decay, gated.model.decay_first, plain.model.decay) == (True, True, False)
    assert dataclasses.replace(varied.model, conv_size=lmm.model.conv_size) == gated.model
    kept = {"hidden_size", "num_attention_heads", "window", "conv_size", "norm_eps", "num_persistent"}
    assert all(getattr(gated.model, name) == getattr(lmm.model, name) for name in kept)
    assert folder_name("gated-delta-net") == "gated-delta-net"
    assert title("delta-net").startswith("DeltaNet")
    assert title("gated-delta-net:conv_size=2").endswith("start), conv size 2")


def test_what_all_share_reaches_a_model_as_far_as_its_blocks_have_it(tmp_path: Path) -> None:
    """The attention's convolution is the memory's unless one is given; q, k and v are shared where a block can."""
    base = small(tmp_path)
    deep = {"num_hidden_layers": 3}
    shared = dataclasses.replace(base.train.model, **deep, shared_qkv=True, architecture="mag")
    sharing = dataclasses.replace(base, train=dataclasses.replace(base.train, model=shared))
    kernels = {"hybrid:conv_size=2": 2, "hybrid": 4, "sliding:conv_size=3": 4, "hybrid:attention_conv_size=1": 1}
    kernels |= {"mal": 4, "mag:conv_size=2": 2, "mac:attention_conv_size=1": 1, "lmm": 1}
    for name, kernel in kernels.items():
        assert language_settings(sharing, name, 20_000).model.attention_conv_size == kernel, name
    own = dataclasses.replace(base.train.model, **deep, attention_conv_size=8)
    given = dataclasses.replace(base, train=dataclasses.replace(base.train, model=own))
    assert language_settings(given, "sliding", 20_000).model.attention_conv_size == 8
    shares = {
        name: language_settings(sharing, name, 20_000).model.shared_qkv for name in ("mag", "mac", "sliding", "mal")
    }
    assert shares == {"mag": True, "mac": True, "sliding": False, "mal": False}
    mixed = language_settings(
        base, "hybrid:layer_types=[mac,sliding],shared_qkv=true,conv_size=2,num_hidden_layers=2", 20_000
    )
    assert (mixed.model.shared_qkv, mixed.model.attention_conv_size) == (True, 2)
    with pytest.raises(ValueError, match="got shared_qkv=True"):
        language_settings(base, "sliding:shared_qkv=true", 20_000)
    stack = dataclasses.replace(base.train.model, **deep, layer_types=("sliding", "lmm"), alpha_init=(0.001, 0.1))
    other = dataclasses.replace(base, train=dataclasses.replace(base.train, model=stack))
    assert language_settings(other, "delta-net", 20_000).model.blocks == ("lmm",) * 3
    rule = fit_baseline("delta-net", stack, 50, 9_000)
    assert rule.backbone_config().blocks == ("lmm",) * 3
    assert [remembers(f"hybrid:layer_types=[{blocks}]") for blocks in ("sliding,attention", "sliding,mac")] == [
        False,
        True,
    ]
    assert remembers("delta-net")


def test_a_model_that_is_none_is_told_the_nearest_of_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got the model 'lmmm'; did you mean 'lmm'\?"):
        language_settings(small(tmp_path), "lmmm", 9_000)


def test_a_folder_that_comes_first_sets_the_size(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to and fro and to " * 200)
    sizes = {"vocab_size": 259, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True).save_pretrained(tmp_path / "mini")
    settings = dataclasses.replace(
        small(tmp_path), data=str(tmp_path / "text"), test=tmp_path / "text", models=(str(tmp_path / "mini"), "lmm")
    )
    told: list[str] = []
    size = check_models(settings, told.append)
    assert f"mini: {size:,} parameters, +0.00%" in told[0]
    assert int(told[1].split()[1].replace(",", "")) == pytest.approx(size, rel=0.01)


def test_models_that_are_compared_begin_anew(tmp_path: Path) -> None:
    train = dataclasses.replace(small_training(), init=tmp_path)
    with pytest.raises(ValueError, match=r"got init=.*, but models that are compared begin anew"):
        CompareSettings(data="text", test=tmp_path, train=train)
