"""Training that begins with a trained model, at another chunk size."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_cases import titans
from titans_lm.cli import parse
from titans_lm.config import BackboneConfig
from titans_lm.train.language import train_language_model
from titans_lm.train.run import load_model
from titans_lm.train.settings import LanguageSettings
from titans_lm.train.sized import model_from

SMALL: dict[str, Any] = {
    "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "memory_expansion": 1, "intermediate_size": 8,
    "chunk_size": 4, "tnt_global_chunk": 16, "tnt_local_chunks": (8,), "tnt_shard": 16,
}  # fmt: skip
SHORT: dict[str, Any] = {
    "steps": 1, "warmup_steps": 0, "seq_len": 32, "batch_size": 1, "eval_bytes": 60, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module", params=["tnt", "lmm"])
def trained(request: Any, tmp_path_factory: Any) -> tuple[Path, LanguageSettings]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text").write_bytes(b"what was written down is never lost. " * 40)
    config = BackboneConfig(architecture=request.param, **SMALL)
    settings = LanguageSettings(data=str(folder / "text"), out=folder / "run", model=config, **SHORT)
    train_language_model(settings)
    return folder, settings


def test_it_goes_on_at_another_chunk_with_all_that_was_learned(trained: Any, tmp_path: Path) -> None:
    folder, settings = trained
    change: dict[str, Any] = {"tnt_local_chunks": (1,)} if settings.model.architecture == "tnt" else {"chunk_size": 1}
    shorter = dataclasses.replace(settings.model, **change)
    model, before = model_from(folder / "run", shorter), load_model(folder / "run", "cpu")
    assert model.config.backbone_config() == shorter
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0.0, atol=0.0)
    ids = torch.randint(0, 256, (1, 20))
    assert not torch.equal(model.eval()(ids).logits, before(ids).logits), "another chunk is another model"
    again = dataclasses.replace(settings, model=shorter, init=folder / "run", out=tmp_path / "again", lr=0.0)
    train_language_model(again)
    after = load_model(tmp_path / "again", "cpu")
    assert after.config.backbone_config() == shorter
    torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0.0, atol=0.0)
    train_language_model(dataclasses.replace(again, init=tmp_path / "gone", steps=2), resume=True)  # it has its own


def test_the_command_begins_with_what_the_model_is(trained: Any, tmp_path: Path, capsys: Any) -> None:
    folder, settings = trained
    run, text = str(folder / "run"), settings.data
    command = parse(["train", text, "--init", run, "--model.chunk-size", "2", "--model.tnt_local_chunks", "2"])
    expected = dataclasses.replace(settings.model, chunk_size=2, tnt_local_chunks=(2,))
    assert (command.model, command.vocab_size, command.init) == (expected, 259, folder / "run")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    code, _, error = titans(capsys, "train", text, "--init", run, "--out", tmp_path / "a", *options, "--quiet")
    assert (code, error) == (0, "")
    assert json.loads((tmp_path / "a" / "settings.json").read_text())["init"] == run
    code, _, error = titans(capsys, "train", text, "--init", run, "--model.hidden-size", "16", "--out", tmp_path / "b")
    assert code == 2
    assert error.startswith(f"titans: error: got init='{run}' with hidden_size=16, which was 8: its weights would be")
    assert not (tmp_path / "b").exists()
    code, _, error = titans(capsys, "train", text, "--init", run, "--resume", run)
    assert (code, error.count("\n")) == (2, 1)
    assert "expected one of them: a run goes on with its own weights" in error


@pytest.mark.parametrize("name", ["init", "resume"])
def test_a_file_may_name_what_it_begins_with(trained: Any, tmp_path: Path, name: str) -> None:
    folder, settings = trained
    run, file = str(folder / "run"), tmp_path / "c.json"
    file.write_text(json.dumps({name: run, "lr": 0.25}))
    command = parse(["train", settings.data, "--config", str(file)])
    assert (getattr(command, name), command.model, command.lr) == (Path(run), settings.model, 0.25)
    assert command.steps == (settings.steps if name == "resume" else LanguageSettings().steps)
    if name == "init":  # as the file of a run does that was begun so, and goes on
        assert parse(["train", settings.data, "--config", str(file), "--resume", run]).steps == settings.steps
        file.write_text(json.dumps({"init": run, "resume": run}))
    with pytest.raises(ValueError, match=r"expected one of them: a run goes on with its own weights"):
        parse(["train", settings.data, "--config", str(file), *([] if name == "init" else ["--init", run])])


def test_what_does_not_fit_is_refused(trained: Any) -> None:
    folder, settings = trained
    if settings.model.architecture == "tnt":
        with pytest.raises(ValueError, match=r"got init=.*tnt_local_chunks=\(8, 4\), which was \(8,\): its weights"):
            model_from(folder / "run", dataclasses.replace(settings.model, tnt_local_chunks=(8, 4)))
    with pytest.raises(ValueError, match="which does not exist"):
        model_from(folder / "nothing", settings.model)
    for other in ({"baseline": "llama"}, {"parameters": 1000}):
        with pytest.raises(ValueError, match=f"got init and {next(iter(other))}"):
            dataclasses.replace(settings, init=folder / "run", **other)
