"""The Hugging Face config: the backbone's settings, flat, checked, and the same after a trip to disk."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf.hf_cases import SIZES, STACKS
from model_cases import stack_named
from titans_lm.config import BackboneConfig
from titans_lm.hf import TitansConfig, TitansForCausalLM


def test_the_defaults_are_those_of_the_backbone() -> None:
    config = TitansConfig()
    assert config.backbone_config() == BackboneConfig()
    assert config.vocab_size == 259
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert config.tie_word_embeddings


def test_every_setting_of_the_backbone_is_a_setting() -> None:
    changed = BackboneConfig(
        layer_types=("mag", "sliding"), hidden_size=12, num_attention_heads=3, memory_depth=3, memory_expansion=2,
        memory_activation="silu", memory_residual=False, memory_norm=False, memory_objective="dot", forget_to="zero",
        chunk_size=8, gates="channel", gate_rank=5, momentum=False, decay=False, theta_bound=0.5, eta_max=0.3,
        alpha_init=0.1, conv_size=3, memory_backend="reference", norm_eps=1e-5, num_hidden_layers=3,
        induction_init=False, theta_stretch=0.1, alpha_stretch=0.0, intermediate_size=7, segment_len=24, window=9,
        num_persistent=2, memory_reads_residual=False, memory_reads_embeddings=False, gating="memory",
        rope_theta=500.0, rotary_fraction=1.0, attention_conv_size=3,
        gates_see_keys=True, theta_init=0.4, theta_later_init=0.2, eta_init=(0.2, 0.6), time_scales="shifted",
        shared_qkv=True, threshold_init=0.3,
    )  # fmt: skip
    values = dataclasses.asdict(changed)
    linear = {"memory_depth": 1, "chunk_size": 1, "forget_to": "zero"}
    also = dataclasses.asdict(
        BackboneConfig(architecture="lmm", decay_first=True, **linear)
    )  # which the first excludes
    beyond = {"omega_window": 3, "key_degree": 2, "lookahead_values": True}
    windows = dataclasses.asdict(BackboneConfig(architecture="lmm", memory_depth=1, **beyond))
    caching = dataclasses.asdict(
        BackboneConfig(
            architecture="lmm", memory_caching="ssc", caching_segment=8, caching_slots=3, caching_top=1,
            caching_lengths="fenwick", caching_open=1.0,
        )
    )  # fmt: skip
    anew = dataclasses.asdict(BackboneConfig(architecture="lmm", caching_start="independent"))
    shards = {"tnt_global_chunk": 4, "tnt_local_chunks": (1, 2), "tnt_shard": 8, "tnt_projection": False}
    tnt = dataclasses.asdict(BackboneConfig(architecture="tnt", **shards))
    default, made = dataclasses.asdict(BackboneConfig()), (values, also, windows, caching, anew, tnt)
    same = [name for name, value in default.items() if all(given[name] == value for given in made)]
    assert not same, "this test must change every setting"
    for given in made:
        config, stack = TitansConfig(**given), BackboneConfig(**given)
        written = list(stack.blocks) if stack.is_mixed else None  # a short list at its length, as transformers has it
        assert config.backbone_config() == dataclasses.replace(stack, layer_types=written and tuple(written))
        assert {name: getattr(config, name) for name in given} == given | {"layer_types": written}


@pytest.mark.parametrize("architecture", STACKS)
def test_a_config_is_the_same_after_a_trip_to_disk(architecture: str, tmp_path: Path) -> None:
    config = TitansConfig(**(SIZES | stack_named(architecture)), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, TitansConfig)
    assert loaded.backbone_config() == config.backbone_config()
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()


def test_every_setting_is_written_so_that_a_new_default_changes_no_old_model(tmp_path: Path) -> None:
    TitansConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    settings = json.loads(json.dumps(dataclasses.asdict(BackboneConfig())))  # JSON has lists for tuples
    assert {name: written[name] for name in settings} == settings
    assert written["vocab_size"] == 259
    assert written["model_type"] == "titans"


@pytest.mark.parametrize("given", [{"architecture": "hybrid"}, {"layer_types": ["attention", "mac"]}], ids=str)
def test_a_mixed_stack_is_written_block_by_block(given: dict[str, Any], tmp_path: Path) -> None:
    """Another default hybrid would change no old model, and no name is taken for one of transformers' own."""
    config = TitansConfig(**SIZES, **given)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architecture"] == "hybrid"
    assert written["layer_types"] == given.get("layer_types", ["sliding", "lmm"])
    assert config.layer_types == written["layer_types"]
    assert AutoConfig.from_pretrained(tmp_path).layer_types == written["layer_types"]


def test_a_config_can_be_changed_while_it_is_loaded(tmp_path: Path) -> None:
    TitansConfig(**SIZES).save_pretrained(tmp_path)
    assert TitansConfig.from_pretrained(tmp_path, window=11).window == 11
    with pytest.raises(ValueError, match="window=0"):
        TitansConfig.from_pretrained(tmp_path, window=0)
    with pytest.raises(ValueError, match="got vocab_size=0"):
        TitansConfig.from_pretrained(tmp_path, vocab_size=0)
    TitansConfig(**SIZES, layer_types=["lmm", "mac"]).save_pretrained(tmp_path)
    kept = TitansConfig.from_pretrained(tmp_path, architecture="hybrid", window=11)
    assert (kept.layer_types, kept.window) == (["lmm", "mac"], 11)
    TitansConfig(**SIZES, architecture="hybrid").save_pretrained(tmp_path)
    changed = TitansConfig.from_pretrained(tmp_path, architecture="lmm")
    assert (changed.architecture, changed.layer_types, set(changed.backbone_config().blocks)) == ("lmm", None, {"lmm"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("memory_deth", "memory_depth"), ("num_heads", "num_attention_heads"), ("vocab", "vocab_size"), ("eos", "eos_")],
)
def test_an_unknown_setting_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting '{name}' for TitansConfig; .*{nearest}"):
        TitansConfig(**{name: 3})


def test_what_others_added_to_a_saved_config_is_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TitansConfig(**SIZES)
    config.reward_scale, config.quantization_config = 3.0, {"quant_method": "torchao"}
    config.save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger="transformers"):
        loaded, unused = AutoConfig.from_pretrained(tmp_path, window=11, return_unused_kwargs=True, color="red")
    assert (loaded.reward_scale, loaded.window, unused) == (3.0, 11, {"color": "red"})
    assert loaded.quantization_config == {"quant_method": "torchao"}
    assert "kept what is no setting of TitansConfig: reward_scale" in caplog.text
    loaded.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").reward_scale == 3.0


def test_a_misspelt_setting_is_refused_of_a_file_and_beside_it(tmp_path: Path) -> None:
    TitansConfig(**SIZES).save_pretrained(tmp_path)
    for loader in (AutoConfig, AutoModelForCausalLM, TitansForCausalLM):  # a model is not reached
        with pytest.raises(ValueError, match="unknown setting 'memory_dept' for TitansConfig; did you mean 'memory_d"):
            loader.from_pretrained(tmp_path, memory_dept=1)
    assert AutoConfig.from_pretrained(tmp_path, memory_depth=1).memory_depth == 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"memory_deth": 2}))
    with pytest.raises(ValueError, match="unknown setting 'memory_deth' for TitansConfig; did you mean 'memory_depth'"):
        AutoConfig.from_pretrained(tmp_path)


def test_clients_that_ask_are_told_of_no_longest_text(tmp_path: Path) -> None:
    config = TitansConfig(**SIZES)
    assert config.max_position_embeddings == 2**30
    config.save_pretrained(tmp_path)
    assert "max_position_embeddings" not in (tmp_path / "config.json").read_text()


def test_a_saved_model_with_settings_that_are_no_more_loads_where_they_had_their_value(tmp_path: Path) -> None:
    TitansConfig(**SIZES).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text()) | {"memory_targets": "rms", "theta_fan_in": None, "alpha_max": 1.0}
    path.write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).backbone_config() == TitansConfig(**SIZES).backbone_config()
    path.write_text(json.dumps(written | {"memory_init_scale": 3.0}))
    with pytest.raises(ValueError, match=r"got memory_init_scale=3.0, a setting that is no more: .*expected 1.0 or"):
        AutoConfig.from_pretrained(tmp_path)


def test_wrong_settings_are_refused_as_in_the_backbone() -> None:
    with pytest.raises(ValueError, match="multiple of chunk_size"):
        TitansConfig(architecture="mac", segment_len=10, chunk_size=4)
    with pytest.raises(ValueError, match="layer_types='slidng'; did you mean 'sliding'"):
        TitansConfig(layer_types=["lmm", "slidng"])
    with pytest.raises(ValueError, match="did you mean 'lmm'"):
        TitansConfig(architecture="LMM")
    with pytest.raises(ValueError, match="got vocab_size=0"):
        TitansConfig(vocab_size=0)


def test_settings_that_every_config_has_are_taken() -> None:
    config = TitansConfig(output_hidden_states=True, id2label={0: "a"}, name_or_path="x")
    assert config.output_hidden_states
    assert config.id2label == {0: "a"}


def test_a_setting_that_was_changed_later_is_checked_when_a_model_is_made() -> None:
    config = TitansConfig(**SIZES)
    config.hidden_size = 15
    with pytest.raises(ValueError, match="expected a width that the heads divide"):
        config.backbone_config()


def test_the_stub_is_uploaded_beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers uploads what is newer than what it has noted."""
    seen: dict[str, Any] = {}

    def upload(_: Any, folder: str, __: str, stamps: dict[str, float], **___: Any) -> None:
        seen.update({file.name: stamps.get(file.name, 0.0) < file.stat().st_mtime for file in Path(folder).iterdir()})

    api = SimpleNamespace(create_repo=lambda *_, **__: SimpleNamespace(repo_id="a/b"))
    monkeypatch.setattr("transformers.configuration_utils.hf_api", lambda: api)
    monkeypatch.setattr(PreTrainedConfig, "_upload_modified_files", upload)
    TitansConfig(**SIZES).save_pretrained(str(tmp_path), push_to_hub=True)
    assert seen == {"config.json": True, "modeling_titans_lm.py": True}
