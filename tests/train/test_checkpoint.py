import itertools
import json
import shutil
import zlib

import pytest
import safetensors
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.train.checkpoint import (
    load_optimizer,
    load_trainer,
    load_weights,
    optimizer_tensors,
    random_state,
    restore_random_state,
    save_checkpoint,
    verify_checkpoint,
    write_sums,
)

TRAINER = {"step": 3, "carried": {"state": {0: {"S": torch.arange(3.0)}}}, "betas": (0.9, 0.95), "none": None}


MOMENTS = {"lm_head.weight/exp_avg": torch.arange(3.0)}


def load_checkpoint(folder, model):
    """Read a checkpoint as a run does that is taken up again."""
    verify_checkpoint(folder)
    trainer = load_trainer(folder)
    load_weights(folder, model)
    return trainer


def stepped(model):
    """An optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def kept(titans, tmp_path_factory):
    """A run with a good checkpoint and a newer one."""
    folder = tmp_path_factory.mktemp("kept")
    for step in (3, 6):
        save_checkpoint(folder / f"step-00000{step}", titans("mac"), TRAINER, byte_tokenizer(), optimizer=MOMENTS)
    return folder


@pytest.fixture
def saved(kept, tmp_path):
    """The newer one of a copy of it, which tests may damage."""
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    return tmp_path / "step-000006"


@pytest.mark.parametrize("architecture", ["mac", "sliding+lmm+sliding"])
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
    assert torch.equal(trainer["carried"]["state"][0]["S"], torch.arange(3.0))


def test_a_checkpoint_is_a_saved_model(titans, saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), titans("mac").parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(saved)("é").input_ids == list("é".encode())


def test_models_of_other_kinds_are_saved_too(llama, tmp_path):
    def without_numbers():
        return nn.ParameterList([torch.zeros(0, 4), torch.zeros(0, 4), torch.ones(2)])

    layers = "torch", lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    for name, make in (("llama", llama), layers, ("none", without_numbers)):
        model, other = make(), make()
        save_checkpoint(tmp_path / name, model, TRAINER)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        load_checkpoint(tmp_path / name, other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def draw():
    return [float(torch.rand(())), *torch.randn(3).tolist()]


def test_the_random_numbers_come_back(unchecked, tmp_path):
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


FILES = ["model.safetensors", "config.json", "optimizer.safetensors"]
DAMAGE = [
    *itertools.product(["trainer.pt"], ["truncated", "one bit", "empty", "missing"]),
    *itertools.product(FILES, ["one bit", "missing"]),
    *itertools.product(["files.json"], ["truncated", "missing"]),
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


def test_the_optimizer_comes_back_bit_for_bit(titans, tmp_path):
    """Into another one, which goes on with settings of its own."""
    model = titans("mac")
    optimizer = stepped(model)
    save_checkpoint(tmp_path / "x", model, TRAINER, optimizer=optimizer_tensors(model, optimizer))
    other = titans("mac")
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    load_optimizer(tmp_path / "x", other, again)
    found, wanted = optimizer_tensors(other, again), optimizer_tensors(model, optimizer)
    assert found.keys() == wanted.keys()
    assert len(found) == 3 * len(list(model.parameters()))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert again.param_groups[0]["lr"] == 0.5
    size = (tmp_path / "x" / "optimizer.safetensors").stat().st_size
    with (tmp_path / "x" / "optimizer.safetensors").open("r+b") as file:
        file.write(bytes([255]) * size)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), (
        "what was read is no part of a file"
    )


def test_what_has_not_been_trained_yet_has_nothing_to_bring_back(titans, tmp_path):
    """No parameter after a first step that was skipped; one without a gradient never."""
    model = titans("mac")
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(tmp_path / "none", model, TRAINER, optimizer=optimizer_tensors(model, optimizer))
    load_optimizer(tmp_path / "none", model, optimizer)
    assert not optimizer.state
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    save_checkpoint(tmp_path / "one", model, TRAINER, optimizer=optimizer_tensors(model, optimizer))
    again = torch.optim.AdamW(model.parameters())
    load_optimizer(tmp_path / "one", model, again)
    assert list(again.state) == [model.lm_head.weight]


def test_the_optimizer_of_another_model_is_refused(titans, tmp_path):
    model = titans("mac")
    save_checkpoint(tmp_path / "x", model, TRAINER, optimizer=optimizer_tensors(model, stepped(model)))
    for other in (titans("mac", hidden_size=32), titans("sliding")):
        with pytest.raises(ValueError, match=r"optimizer\.safetensors holds 'model\..*give the model that"):
            load_optimizer(tmp_path / "x", other, torch.optim.AdamW(other.parameters()))


@pytest.mark.parametrize("what", ["code", "half", "nothing"])
def test_an_optimizer_is_read_as_tensors_or_not_at_all_even_where_the_sums_are_right(titans, tmp_path, what):
    ran, folder, model = tmp_path / "ran", tmp_path / "x", titans("mac")
    save_checkpoint(folder, model, TRAINER, optimizer=optimizer_tensors(model, stepped(model)))
    if what == "code":
        torch.save(Evil(ran), folder / "optimizer.safetensors")
    else:
        damage(folder / "optimizer.safetensors", {"half": "truncated", "nothing": "empty"}[what])
    (folder / "files.json").unlink()
    write_sums(folder)
    verify_checkpoint(folder)
    with pytest.raises(ValueError, match=r"optimizer\.safetensors cannot be read: .*; remove"):
        load_optimizer(folder, model, torch.optim.AdamW(model.parameters()))
    assert not ran.exists()


def test_the_optimizer_of_weights_that_are_frozen_now_is_refused(titans, tmp_path):
    model = titans("mac")
    save_checkpoint(tmp_path / "x", model, TRAINER, optimizer=optimizer_tensors(model, stepped(model)))
    with pytest.raises(ValueError, match="which this TitansForCausalLM has no use for"):
        load_optimizer(tmp_path / "x", model, torch.optim.AdamW([model.lm_head.weight]))


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (safetensors.SafetensorError("No space left on device"), OSError)],
)
@pytest.mark.parametrize("writer", ["safetensors.torch.save_file", "torch.save"])
def test_ctrl_c_while_an_optimizer_is_written_is_ctrl_c_and_a_full_disk_one(
    titans, tmp_path, monkeypatch, error, told, writer
):
    def interrupted(*_, **__):
        raise error if writer.startswith("safetensors") or told is KeyboardInterrupt else RuntimeError("file write")

    monkeypatch.setattr(f"titans_lm.train.checkpoint.{writer}", interrupted)
    with pytest.raises(told):
        save_checkpoint(tmp_path / "x", titans("mac"), TRAINER, optimizer=MOMENTS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["optimizer/1.safetensors", "pytorch_model.bin", ".x"])
def test_files_that_were_added_are_refused(titans, saved, name):
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"step-000006.* was not written with this checkpoint; move it elsewhere"):
        load_checkpoint(saved, titans("mac"))
