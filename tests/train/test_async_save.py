"""Checkpoints written beside training hold the step they were asked for at, and say where they could not be written."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import titans_lm.train.run as runs
from titans_lm.data.batches import DocumentLanes, RandomCrops
from titans_lm.data.tokenizer import encode_document
from titans_lm.train.checkpoint import copied, load_trainer, load_weights, save_checkpoint
from titans_lm.train.loop import fit
from titans_lm.train.losses import CarriedLoss, next_token_loss
from titans_lm.train.parallel import ALONE, Distributed
from titans_lm.train.run import RunFolder, load_model
from titans_lm.train.settings import FitSettings
from titans_lm.train.writer import AsyncSave

SETTINGS = FitSettings(steps=8, warmup_steps=2, lr=1e-2, save_every=2, eval_every=0, keep=9, save_async=True)
DOCUMENTS = [encode_document(b"written while it goes on. " * 9)] * 2
BATCHES = RandomCrops(DOCUMENTS, seq_len=16, batch_size=2)

UNEQUAL = {"seconds"}
"""What two runs differ in."""


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a.keys() - UNEQUAL)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def torch_optimizer(checkpoint: Path) -> bytes:
    return (checkpoint / "optimizer.safetensors").read_bytes()


class Slow:
    """Writes a checkpoint only when it is let, or never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let, self.was_let, self.save = threading.Event(), threading.Event(), runs.save_checkpoint
        self.error, self.failures = OSError(), 0
        monkeypatch.setattr(runs, "save_checkpoint", self)

    def __call__(self, *args: Any, **more: Any) -> None:
        assert self.let.wait(60), "nobody lets it write"
        self.was_let.set()
        if self.failures > 0:
            self.failures -= 1
            raise self.error
        self.save(*args, **more)


@pytest.mark.parametrize("kind", ["llama", "carried"])
def test_every_checkpoint_is_that_of_its_step(titans, llama, tmp_path: Path, monkeypatch, kind: str) -> None:
    """Each is written a step too late, when the weights have gone on."""
    make = llama if kind == "llama" else lambda: titans("mac")
    batches = DocumentLanes(DOCUMENTS, seq_len=16, batch_size=2) if kind == "carried" else BATCHES
    loss = CarriedLoss if kind == "carried" else lambda: next_token_loss
    fit(
        make(),
        batches,
        loss(),
        dataclasses.replace(SETTINGS, save_async=False),
        run=RunFolder.create(tmp_path / "a", {}),
    )
    slow = Slow(monkeypatch)

    def on_step(record: dict) -> None:
        if record["step"] % 2:
            slow.let.set()
        elif record["step"] < SETTINGS.steps:
            # a thread that is slow to begin would find it shut again
            assert record["step"] == 2 or slow.was_let.wait(60)
            slow.was_let.clear()
            slow.let.clear()

    fit(make(), batches, loss(), SETTINGS, run=RunFolder.create(tmp_path / "b", {}), on_step=on_step)
    for step in (2, 4, 6, 8):
        one, other = (tmp_path / name / "checkpoints" / f"step-{step:06d}" for name in "ab")
        assert equal(load_trainer(one), load_trainer(other))
        assert equal(*(torch_optimizer(checkpoint) for checkpoint in (one, other)))
        assert equal(load_model(one).state_dict(), load_model(other).state_dict())


def test_training_goes_on_while_it_is_written(llama, tmp_path: Path, monkeypatch) -> None:
    slow, written = Slow(monkeypatch), []
    run = RunFolder.create(tmp_path / "run", {})

    def on_step(record: dict) -> None:
        written.append(run.latest())
        if record["step"] == 4:  # two steps after it was begun
            slow.let.set()

    fit(llama(), BATCHES, next_token_loss, SETTINGS, run=run, on_step=on_step)
    assert written[:4] == [None] * 4
    assert run.latest() == tmp_path / "run" / "checkpoints" / "step-000008"


def test_a_checkpoint_that_could_not_be_written_is_told(llama, tmp_path: Path, monkeypatch) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    fit(llama(), BATCHES, next_token_loss, dataclasses.replace(SETTINGS, steps=2), run=run)
    slow = Slow(monkeypatch)
    slow.error, slow.failures = OSError(28, "No space left on device"), 1
    slow.let.set()
    with pytest.raises(OSError, match=r"could not be written: .*No space left.*step-000004"):
        fit(llama(), BATCHES, next_token_loss, SETTINGS, run=run)
    found = sorted(path.name for path in run.checkpoints.glob("step-*"))
    assert found == ["step-000002", "step-000006"], "the next one is written before it is told"
    assert fit(llama(), BATCHES, next_token_loss, SETTINGS, run=run).step == 8


def test_an_error_of_training_waits_for_what_is_being_written(llama, tmp_path: Path, monkeypatch) -> None:
    slow, run = Slow(monkeypatch), RunFolder.create(tmp_path / "run", {})

    def on_step(record: dict) -> None:
        if record["step"] == 3:
            slow.let.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(llama(), BATCHES, next_token_loss, SETTINGS, run=run, on_step=on_step)
    assert run.latest() == tmp_path / "run" / "checkpoints" / "step-000002"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("titans-save")]


def test_one_tensor_under_two_names_is_one_in_the_copy(tmp_path: Path) -> None:
    """A tied model of another kind than Hugging Face's: what is written beside can be loaded."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    torch.manual_seed(0)
    model, other = Tied(), Tied()
    weights = copied(model.state_dict(keep_vars=True))
    assert weights["embed.weight"] is weights["head.weight"]
    save_checkpoint(tmp_path / "beside", model, {"step": 1}, weights=weights)
    save_checkpoint(tmp_path / "at_once", model, {"step": 1})
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("beside", "at_once")]
    assert sizes[0] <= sizes[1]
    load_weights(tmp_path / "beside", other)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


def test_a_failure_on_another_process_is_told_on_this_one(tmp_path: Path) -> None:
    class Two(Distributed):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, "could not be written: the other's disk is full"]

    beside = AsyncSave(Two(0, 2, torch.device("cpu")))
    beside.begin(tmp_path / "step-000003", lambda: None)
    error = beside.wait()
    beside.end()
    assert isinstance(error, OSError)
    assert (error.filename, "disk is full" in str(error)) == (str(tmp_path / "step-000003"), True)
    assert beside.wait() is None, "it is told once"


def test_copies_are_copies() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    found = copied({"a": tensor, "b": tensor.detach()})
    with torch.no_grad():
        tensor += 1.0
    assert equal(found, {"a": torch.zeros(2), "b": torch.zeros(2)})
    assert not found["a"].requires_grad


def test_one_piece_of_work_after_another() -> None:
    beside, done = AsyncSave(ALONE), []
    beside.wait()
    for number in range(3):
        beside.begin(Path(str(number)), lambda number=number: done.append(number))
        beside.wait()
    beside.end()
    assert done == [0, 1, 2]
