import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from titans_lm.cli import parse
from titans_lm.config import BackboneConfig
from titans_lm.experiments.settings import CompareSettings
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.train.options import as_options, merge_settings, plain_settings, read_settings_file
from titans_lm.train.settings import FitSettings, LanguageSettings


def test_settings_survive_a_file(tmp_path):
    settings = LanguageSettings(
        data="stdlib",
        out=Path("runs/x"),
        lr=1e-4,
        stateful=True,
        model=BackboneConfig(architecture="mag", memory_norm=False),
    )
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(plain_settings(settings)))
    assert merge_settings(LanguageSettings(), read_settings_file(path)) == settings


def test_a_toml_file_changes_what_it_names(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('lr = 1\nrun = "here"\n[model]\narchitecture = "lmm"\nmemory_depth = 1\n')
    merged = merge_settings(LanguageSettings(seed=3), read_settings_file(path))
    model = dataclasses.replace(LanguageSettings().model, architecture="lmm", memory_depth=1)
    assert merged == LanguageSettings(seed=3, lr=1.0, out=Path("here"), model=model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1}, "unknown setting 'learning_rat' for LanguageSettings"),
        ({"warmup_step": 1}, "did you mean 'warmup_steps'?"),
        (
            {"model": {"memory_dept": 1}},
            "unknown setting 'memory_dept' for BackboneConfig; did you mean 'memory_depth'",
        ),
        ({"model": 3}, "expected names and values below model"),
        ({"model": {"architecture": "mad"}}, "got architecture='mad'; did you mean 'ma"),
        ({"lr": "fast"}, "got lr='fast'; expected float"),
        ({"lr": -1}, "got lr=-1.0; expected a finite number of at least 0"),
        ({"steps": 2.5}, "got steps=2.5; expected int"),
        ({"steps": True}, "got steps=True; expected int"),
        ({"vocab_size": 0}, "got vocab_size=0; expected an integer of at least 1"),
        ({"vocab_size": 32e3}, "got vocab_size=32000.0; expected int or nothing"),
        ({"stateful": 1}, "got stateful=1; expected bool"),
        ({"data": 3}, "got data=3; expected str or nothing"),
        ({"out": 3}, "got out=3; expected Path or nothing"),
        ({"precision": "fp8"}, "got precision='fp8'"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(values, message):
    with pytest.raises(ValueError, match=message):
        merge_settings(LanguageSettings(), values)


def test_settings_of_saved_runs_are_found_by_the_names_that_they_had():
    @dataclasses.dataclass(frozen=True)
    class Now:
        lm_loss_weight: float = 0.0
        gate_l1: float = 0.0

    assert merge_settings(Now(), {"text_weight": 0.5, "gate_price": 0.1}) == Now(0.5, 0.1)
    assert merge_settings(Now(), plain_settings(Now(0.5, 0.1))) == Now(0.5, 0.1)
    with pytest.raises(ValueError, match="unknown setting 'text_weigt' for Now"):
        merge_settings(Now(), {"text_weigt": 0.5})


def test_settings_inside_others_go_by_their_own_names_in_files_and_options():
    nested = {"train": {"epochs": 3, "lr": 0.5}, "net": {"backbone": {"hidden_size": 16}, "dropout": 0.2}}
    flat = {"epochs": 3, "lr": 0.5, "model": {"hidden_size": 16}, "dropout": 0.2}
    settings = merge_settings(EvaluateForecasters(), nested)
    assert merge_settings(EvaluateForecasters(), flat) == settings
    assert merge_settings(EvaluateForecasters(), json.loads(json.dumps(plain_settings(settings)))) == settings
    options = as_options(settings, EvaluateForecasters())
    assert options == ["--dropout", "0.2", "--model.hidden-size", "16", "--epochs", "3", "--lr", "0.5"]
    assert merge_settings(CompareSettings(), {"train": {"lr_floor": 0.0}, "steps": 3}).train.steps == 3
    with pytest.raises(ValueError, match="unknown setting 'step' for CompareSettings; did you mean 'steps'"):
        merge_settings(CompareSettings(), {"step": 3})
    for wrong in ({"train": 3, "epochs": 3}, {"epochs": 3, "train": 3}):
        with pytest.raises(ValueError, match="got train=3; expected names and values below train"):
            merge_settings(EvaluateForecasters(), wrong)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", "{", "is not json"),
        ("x.json", "[1]", "with a list in it; expected names and values"),
        ("x.json", '{"lr": ' + "9" * 5000 + "}", "is not json"),
        ("x.toml", "a = = 1", "is not toml"),
        ("x.toml", b"\xff", "is not toml"),
        ("x", "lr: 3", "is not json"),
    ],
)
def test_a_file_that_holds_no_settings_is_an_error(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_settings_file(path)
    with pytest.raises(ValueError, match="does not exist"):
        read_settings_file(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"weight_decay": -0.1},
        {"lr_floor": 1.5},
        {"beta2": 1.0},
        {"keep": 0},
        {"accumulate": 0},
        {"eval_every": -1},
        {"precision": "float16"},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"got {next(iter(wrong))}="):
        FitSettings(**wrong)


def test_a_state_that_grows_cannot_be_carried():
    with pytest.raises(ValueError, match="whose state grows with the text"):
        LanguageSettings(stateful=True, model=BackboneConfig(architecture="attention"))
    with pytest.raises(ValueError, match="whose state grows with the text"):
        LanguageSettings(stateful=True, model=BackboneConfig(layer_types=("lmm", "attention")))


def test_the_blocks_of_a_stack_come_from_files_and_go_into_them(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('stateful = true\n[model]\nlayer_types = ["sliding", "lmm", "sliding"]\nnum_hidden_layers = 6\n')
    settings = merge_settings(LanguageSettings(), read_settings_file(path))
    assert settings.model.blocks == ("sliding", "lmm", "sliding") * 2
    plain = json.loads(json.dumps(plain_settings(settings)))
    assert plain["model"]["layer_types"] == ["sliding", "lmm", "sliding"]
    assert merge_settings(LanguageSettings(), plain) == settings
    options = as_options(settings, LanguageSettings())
    start = options.index("--model.layer-types")
    assert options[start : start + 4] == ["--model.layer-types", "sliding", "lmm", "sliding"]
    with pytest.raises(ValueError, match="got layer_types='slidng'; did you mean 'sliding'"):
        merge_settings(LanguageSettings(), {"model": {"layer_types": ["slidng"]}})
    with pytest.raises(ValueError, match="got layer_types='lmm'; expected"):
        merge_settings(LanguageSettings(), {"model": {"layer_types": "lmm"}})


def test_a_switch_that_may_be_left_open_takes_a_value_as_an_option():
    """`--model.memory-norm True`: the command that a result names can be given again."""
    model = BackboneConfig(memory_norm=False, memory_residual=True, momentum=False)
    options = as_options(model, BackboneConfig(), "--model.")
    assert options == ["--model.memory-residual", "True", "--model.memory-norm", "False", "--model.no-momentum"]
    parsed = parse(["train", "stdlib", *options]).model
    assert (parsed.memory_norm, parsed.memory_residual, parsed.momentum) == (False, True, False)


def test_every_setting_is_explained():
    """The docstring under a field is its help on the command line."""
    source = Path(inspect.getfile(FitSettings)).read_text()
    for cls in (FitSettings, LanguageSettings):
        for field in cls.__annotations__:
            assert f"    {field}: " in source
            after = source.split(f"    {field}: ", 1)[1].split("\n")[1]
            assert after.strip().startswith('"""'), field


def test_a_pair_has_two_values():
    with pytest.raises(ValueError, match=r"got alpha_init=\[0.1\]; expected 2 values"):
        merge_settings(LanguageSettings(), {"model": {"alpha_init": [0.1]}})


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True])
def test_a_seed_is_one_that_torch_and_numpy_take(seed):
    with pytest.raises(ValueError, match=r"expected an integer from 0 to 4,294,967,295"):
        FitSettings(seed=seed)
