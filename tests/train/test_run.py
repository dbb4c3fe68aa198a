import json
import os

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from titans_lm.config import BackboneConfig
from titans_lm.data.batches import RandomCrops
from titans_lm.data.tokenizer import byte_tokenizer, encode_document, is_byte_tokenizer, read_tokenizer
from titans_lm.prepare.tokenise import load_tokenizer as prepare_tokenizer
from titans_lm.retrofit.file import from_pretrained
from titans_lm.train.baselines import fit_baseline
from titans_lm.train.loop import fit
from titans_lm.train.losses import next_token_loss
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import RunFolder, commits_of, load_model, load_tokenizer, progress_of, resolve_model, step_of
from titans_lm.train.settings import FitSettings


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"lr": 0.5}, byte_tokenizer())


def checkpoints(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_run_begins_with_its_settings(run):
    assert json.loads((run.path / "settings.json").read_text()) == {"lr": 0.5}
    assert json.loads((run.path / "environment.json").read_text())["torch"] == torch.__version__
    assert run.latest() is None


def test_a_run_names_the_commits_that_it_was_trained_with(tmp_path, titans, monkeypatch):
    """That of its begin, of every time that it was taken up, and of its end, each where it is another."""
    monkeypatch.setattr("titans_lm.train.run.commit", lambda: now)
    now = "aaa"
    run = RunFolder.create(tmp_path / "run", {})
    assert commits_of(run.path) == ["aaa"]
    RunFolder.open(run.path).note_settings()
    assert commits_of(run.path) == ["aaa"]
    now = "bbb"
    RunFolder.open(run.path)
    assert commits_of(run.path) == ["aaa"], "opened to look into, or by one of several processes"
    RunFolder.open(run.path).note_settings()
    now = "aaa"
    run.finish(3, titans())
    assert commits_of(run.path) == ["aaa", "bbb", "aaa"]
    told = json.loads((run.path / "environment.json").read_text())
    assert told["torch"] == torch.__version__
    del told["commits"]
    (run.path / "environment.json").write_text(json.dumps(told))
    RunFolder.open(run.path).note_settings()
    assert commits_of(run.path) == ["unknown", "aaa"], "a run of before this was kept"


def test_its_folder_may_be_a_word(tmp_path):
    path = tmp_path / "run"
    made = RunFolder.create(str(path), {})
    assert made.path == RunFolder(str(path)).path == RunFolder.open(str(path)).path == path


def test_nothing_is_overwritten(run, titans):
    RunFolder.create(run.path, {"lr": 0.1})  # nothing was trained yet
    run.save(1, titans(), {}, keep=1)
    with pytest.raises(ValueError, match="which holds 'checkpoints' already; choose another folder, or resume"):
        RunFolder.create(run.path, {})
    (run.path.parent / "file").write_text("x")
    with pytest.raises(ValueError, match="which is a file"):
        RunFolder.create(run.path.parent / "file", {})


def test_two_processes_do_not_train_one_run(run, titans, other_owner):
    """Neither steps nor checkpoints are touched."""
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    settings = FitSettings(steps=1, warmup_steps=0, eval_every=0, device="cpu")
    batches = RandomCrops([encode_document(b"the quick brown fox")], seq_len=8, batch_size=2)
    with other_owner(run.path / "in-use"), pytest.raises(ValueError, match="process 7 on the moon has in use"):
        fit(titans(), batches, next_token_loss, settings, run=run)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not run.checkpoints.exists()
    fit(titans(), batches, next_token_loss, settings, run=run)
    assert checkpoints(run) == ["LATEST", "step-000001"]
    assert not (run.path / "in-use").exists()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, titans, capfd):
    batches = RandomCrops([encode_document(b"the quick brown fox")], seq_len=8, batch_size=2)
    settings = FitSettings(steps=3, warmup_steps=0, eval_every=0, save_every=1, keep=3, device="cpu")
    fit(titans(), batches, next_token_loss, settings, run=run)
    whole = run.metrics.read()
    for name in ("step-000003", "step-000002"):
        os.truncate(run.checkpoints / name / "trainer.pt", 100)
    progress = ProgressReport(console=Console(stderr=True))
    steps = []
    fit(titans(), batches, next_token_loss, settings, run=run, progress=progress, on_step=lambda r: steps.append(r))
    assert [record["step"] for record in steps] == [2, 3]
    assert [record["loss"] for record in run.metrics.read()] == [record["loss"] for record in whole]
    said = capfd.readouterr().err
    assert "step-000003/trainer.pt is damaged" in said
    assert f"going on from {run.checkpoints / 'step-000001'}" in said
    fit(titans(), batches, next_token_loss, settings, run=run)  # what was damaged was written anew
    for name in ("step-000003", "step-000002", "step-000001"):
        os.truncate(run.checkpoints / name / "trainer.pt", 100)
    with pytest.raises(ValueError, match=r"step-000003/trainer\.pt is damaged"):
        fit(titans(), batches, next_token_loss, settings, run=run)


def test_only_a_run_is_opened(run, tmp_path):
    assert RunFolder.open(run.path).path == run.path
    with pytest.raises(ValueError, match=r"holds no settings\.json; expected the folder of a run"):
        RunFolder.open(tmp_path)


def test_the_newest_checkpoints_are_kept(run, titans):
    for step in (1, 2, 10, 3_000_000):
        folder = run.save(step, titans(), {"step": step}, keep=2)
        assert run.latest() == folder
    assert checkpoints(run) == ["LATEST", "step-000010", "step-3000000"]


def test_a_checkpoint_is_not_removed_for_later_ones_that_were_passed_over(run, titans):
    for step in (5, 10, 7):
        folder = run.save(step, titans(), {}, keep=2)
    assert run.latest() == folder
    assert checkpoints(run) == ["LATEST", "step-000005", "step-000007"]


def test_the_latest_is_found_though_it_was_removed(run, titans):
    for step in (1, 2, 3):
        run.save(step, titans(), {}, keep=3)
    (run.checkpoints / "LATEST").write_text("step-000002\n")
    assert run.latest().name == "step-000002"
    (run.checkpoints / "LATEST").write_text("step-000009\n")
    assert run.latest().name == "step-000003"
    for other in (b"../../elsewhere\n", b"\xff\xfe", b"step-000002\0", b"x" * 5000, b""):
        (run.checkpoints / "LATEST").write_bytes(other)
        assert run.latest().name == "step-000003"
    (run.checkpoints / "LATEST").unlink()
    assert run.latest().name == "step-000003"


def test_what_a_killed_save_left_is_no_checkpoint(run, titans):
    run.save(1, titans(), {}, keep=2)
    (run.checkpoints / ".unfinished-step-000002-x").mkdir()
    assert run.latest().name == "step-000001"
    run.save(3, titans(), {}, keep=2)
    assert checkpoints(run) == ["LATEST", "step-000001", "step-000003"]


def test_a_flipped_bit_in_a_finished_model_is_found(run, titans):
    path = run.finish(3, titans()) / "model.safetensors"
    load_model(run.path, "cpu")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged .* remove files\.json if it was changed"):
        load_model(run.path, "cpu")
    (run.path / "model" / "files.json").unlink()
    load_model(run.path, "cpu")


def test_a_model_is_found_wherever_it_is(run, titans):
    first = run.save(4, titans(), {}, keep=2)
    assert resolve_model(run.path) == first
    assert resolve_model(first) == first
    finished = run.finish(4, titans())
    assert resolve_model(str(run.path)) == finished == run.path / "model"
    assert resolve_model(finished) == finished
    later = run.save(8, titans(), {}, keep=2)
    assert resolve_model(run.path) == later


def test_where_there_is_no_model_it_says_what_there_is(run, tmp_path):
    (tmp_path / "file").write_text("x")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for path, message in (
        (tmp_path / "nothing", "which does not exist; expected a run folder or a saved model"),
        (tmp_path / "file", "which is a file; expected the folder that holds it"),
        (tmp_path, "which is neither a run nor a saved model"),
        (run.path, "which is a run without a checkpoint yet"),
        (adapter, r"which is an adapter of PEFT alone: save what its merge_and_unload\(\) gives"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_model(path)


def test_a_finished_model_is_loaded_by_transformers(run, titans):
    model = titans("mag")
    run.finish(5, model)
    loaded = AutoModelForCausalLM.from_pretrained(run.path / "model")
    ours = load_model(run.path)
    assert not ours.training
    for other in (loaded, ours):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert is_byte_tokenizer(load_tokenizer(run.path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[]", b"\xff\xff"])
def test_a_model_that_is_damaged_is_an_error_of_one_line(run, titans, name, content):
    folder = run.finish(5, titans())
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"the model in .*model cannot be loaded: ") as error:
        load_model(run.path)
    assert "\n" not in str(error.value)
    whole = (folder / "tokenizer.json").read_text()
    unknown = {**json.loads(whole)["model"], "type": "BPE", "merges": [["no", "such"]]}
    for damaged in (whole[:-20], "{}", json.dumps({**json.loads(whole), "model": unknown})):
        (folder / "tokenizer.json").write_text(damaged)
        for load in (load_tokenizer, read_tokenizer, prepare_tokenizer):
            with pytest.raises(ValueError, match=r"the tokenizer .* cannot be loaded: "):
                load(str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded: "):
        load_tokenizer(run.path)


def test_sums_that_are_damaged_do_not_cost_the_model(run, titans):
    folder = run.finish(5, titans())
    (folder / "files.json").write_bytes(b"")
    with pytest.raises(ValueError, match=r"files\.json cannot be read; bring it back, or remove files\.json"):
        load_model(run.path)


def test_whether_to_run_the_code_of_a_model_is_never_asked(run, titans, monkeypatch):
    """Nobody may be there to answer, and transformers waits."""
    folder = run.finish(5, titans())
    told = {"model_type": "another", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(told))
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    with pytest.raises(ValueError, match="it needs code of its own, and no code is run that a model brings"):
        load_model(run.path)
    with pytest.raises(ValueError, match=r"it needs code of its own; titans_lm\.retrofit\.load\(.*\) runs it"):
        from_pretrained(AutoModelForCausalLM, folder)
    with pytest.raises(ValueError, match="it needs code of its own"):
        fit_baseline(str(folder), BackboneConfig(), 259, 1)
    assert (len(prepare_tokenizer(str(folder))), asked) == (259, [])


def test_a_model_without_all_of_its_weights_is_refused(run, titans):
    """transformers would draw the others anew, as of a model that another version has saved."""
    folder = run.finish(1, titans("mac", num_hidden_layers=2))
    weights = load_file(folder / "model.safetensors")
    del weights["model.backbone.layers.1.memory_norm.weight"]
    (folder / "files.json").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"cannot be loaded: it lacks model\.backbone\.layers\.1\.memory_norm\.weight: not"
    ):
        load_model(run.path)


def test_progress_is_that_of_the_model_that_is_there(run, titans):
    for step in (2, 4, 6):
        run.metrics.append({"step": step, "held_out_bits_per_byte": 8.0 - step})
    assert progress_of(run.path) == {"step": 6, "held_out_bits_per_byte": 2.0}
    assert progress_of(run.path, step_of(run.save(4, titans(), {}, keep=1))) == {
        "step": 4,
        "held_out_bits_per_byte": 4.0,
    }


def test_a_model_that_diverged_is_refused(run, titans):
    model = titans("lmm")
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = float("nan")
    folder = run.finish(1, model)
    with pytest.raises(ValueError, match=r"whose weights are not all finite .*; expected one that did not diverge"):
        load_model(folder)


def test_what_is_in_the_way_of_a_run_is_named(tmp_path):
    (tmp_path / "contents.json").touch()
    (tmp_path / "notes").touch()
    with pytest.raises(ValueError, match="which holds 'notes' already"):
        RunFolder.create(tmp_path, {})


def test_a_run_goes_by_the_settings_that_it_was_made_with(run):
    """Somebody else may have begun it again before its first step."""
    RunFolder.create(run.path, {"lr": 0.1})
    run.note_settings()
    assert json.loads((run.path / "settings.json").read_text()) == {"lr": 0.5}
