import itertools
import json
import pickle
import random
import shutil
import zlib

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_cases import STACKS
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.train.checkpoint import (
    load_checkpoint,
    load_weights,
    random_state,
    restore_random_state,
    save_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from titans_lm.train.sharded import load_state, save_state

TRAINER = {"step": 3, "optimiser": {"state": {0: {"exp_avg": torch.arange(3.0)}}}, "betas": (0.9, 0.95), "none": None}


@pytest.fixture
def saved(titans, tmp_path):
    """A run with a good checkpoint and a newer one that tests may damage."""
    for step in (3, 6):
        save_checkpoint(tmp_path / f"step-00000{step}", titans("mac"), TRAINER, byte_tokenizer())
    return tmp_path / "step-000006"


@pytest.mark.parametrize("architecture", STACKS)
def test_a_checkpoint_gives_back_the_weights_and_the_rest(titans, tmp_path, architecture):
    model = titans(architecture)
    save_checkpoint(tmp_path / "x", model, TRAINER)
    other = titans(architecture)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    trainer = load_checkpoint(tmp_path / "x", other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert trainer["step"] == 3
    assert trainer["betas"] == (0.9, 0.95)
    assert torch.equal(trainer["optimiser"]["state"][0]["exp_avg"], torch.arange(3.0))


def test_a_checkpoint_is_a_saved_model(titans, saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), titans("mac").parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(saved)("é").input_ids == list("é".encode())


def test_models_of_other_kinds_are_saved_too(llama, tmp_path):
    for name, make in (("llama", llama), ("torch", lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))):
        model, other = make(), make()
        save_checkpoint(tmp_path / name, model, TRAINER)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        load_checkpoint(tmp_path / name, other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def draw():
    return [float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.random(), random.gauss()]


def test_the_random_numbers_come_back(unchecked, tmp_path):
    """From where they stood, in the middle of a pair of Gaussians too, and through a file."""
    draw()
    torch.save(random_state(), tmp_path / "x.pt")
    first = [draw(), draw()]
    restore_random_state(torch.load(tmp_path / "x.pt", weights_only=True))
    assert [draw(), draw()] == first


def damage(path, how):
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "one bit":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


DAMAGE = [
    *itertools.product(
        ["trainer.pt", "model.safetensors", "config.json"], ["truncated", "one bit", "empty", "missing"]
    ),
    *itertools.product(["files.json"], ["truncated", "empty", "missing"]),
]


@pytest.mark.parametrize(("name", "how"), DAMAGE)
def test_damage_is_named_and_the_older_checkpoint_is_pointed_to(titans, saved, name, how):
    damage(saved / name, how)
    model = titans("mac")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(ValueError, match=rf"step-000006.*{name}") as error:
        load_checkpoint(saved, model)
    if (name, how) != ("files.json", "missing"):
        assert f"remove {saved} to go on from step-000003" in str(error.value)
    assert (model.lm_head.weight == 0).all()  # nothing was loaded
    load_checkpoint(saved.parent / "step-000003", model)
    assert not (model.lm_head.weight == 0).all()


def test_with_no_older_checkpoint_it_says_so(titans, saved):
    shutil.rmtree(saved.parent / "step-000003")
    damage(saved / "trainer.pt", "truncated")
    with pytest.raises(ValueError, match="there is no older checkpoint"):
        load_checkpoint(saved, titans("mac"))


def test_a_file_of_another_program_is_refused_and_runs_no_code(titans, saved):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("code in a checkpoint was run",))

    for content in ({"step": 3}, {"format": "titans-lm trainer 0"}, [1], Evil()):
        torch.save(content, saved / "trainer.pt")
        files = json.loads((saved / "files.json").read_text())
        data = (saved / "trainer.pt").read_bytes()
        files["trainer.pt"] = [len(data), zlib.crc32(data)]
        (saved / "files.json").write_text(json.dumps(files))
        with pytest.raises(ValueError, match=r"trainer\.pt (was not written by this version|cannot be read)"):
            load_checkpoint(saved, titans("mac"))


def test_a_folder_of_another_program_is_refused(llama, tmp_path):
    llama().save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"holds no files\.json, so it is no checkpoint of titans-lm"):
        load_checkpoint(tmp_path / "theirs", llama())


@pytest.mark.parametrize("other", [{"hidden_size": 32}, {"architecture": "mag"}, {"num_hidden_layers": 2}])
def test_weights_of_another_model_are_refused(titans, saved, other):
    model = titans(**({"architecture": "mac"} | other))
    with pytest.raises(ValueError, match=r"the weights in .*step-000006 do not fit this TitansForCausalLM"):
        load_weights(saved, model)


def test_an_interrupted_save_leaves_the_last_checkpoint(titans, saved, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved.parent / "step-000009", titans("mac"), TRAINER)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step-000003", "step-000006"]


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def parts(titans, folder, lr=0.5):
    """A checkpoint of several processes, written by one."""
    model = titans("mac")
    optimiser = torch.optim.AdamW(model.parameters())
    optimiser.param_groups[0]["lr"] = lr
    folder.mkdir()
    save_state(folder, model, optimiser)
    write_checkpoint(folder, model, TRAINER)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_parts_of_several_processes_come_back(titans, tmp_path):
    folder = parts(titans, tmp_path / "x")
    model = titans("mac")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    verify_checkpoint(folder)
    load_state(folder, model, optimiser)
    assert torch.equal(model.lm_head.weight, titans("mac").lm_head.weight)
    assert optimiser.param_groups[0]["lr"] == 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("where", ["metadata", "values"])
def test_parts_run_no_code_even_where_the_sums_are_right(titans, tmp_path, where):
    ran = tmp_path / "ran"
    folder = parts(titans, tmp_path / "x", *([Evil(ran)] if where == "values" else []))
    if where == "metadata":
        (folder / "state" / ".metadata").write_bytes(pickle.dumps(Evil(ran)))
    model = titans("mac")
    with pytest.raises(ValueError, match="state"):
        load_state(folder, model, torch.optim.AdamW(model.parameters()))
    assert not ran.exists()


@pytest.mark.parametrize("name", ["state/.metadata", "pytorch_model.bin", ".x"])
def test_files_that_were_added_are_refused(titans, saved, name):
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"step-000006.* was not written with this checkpoint; move it elsewhere"):
        load_checkpoint(saved, titans("mac"))
