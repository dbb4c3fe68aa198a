"""Numbers go where they were asked to go, and metrics.jsonl is written whatever happens there."""

import dataclasses
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from titans_lm.data.batches import RandomCrops
from titans_lm.data.tokenizer import encode_document
from titans_lm.train.loop import fit
from titans_lm.train.losses import next_token_loss
from titans_lm.train.options import merge_settings, plain_settings
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings
from titans_lm.train.writer import LOGGERS, flat_numbers

BATCHES = RandomCrops([encode_document(b"to and fro " * 20)], seq_len=8, batch_size=2)
SETTINGS = FitSettings(steps=4, warmup_steps=1, save_every=2, eval_every=2)


class Tracker:
    """A library that speaks as wandb and trackio do, and remembers."""

    def __init__(self) -> None:
        self.given: dict = {}
        self.logged: list = []
        self.finished = 0

    def init(self, **given: object) -> SimpleNamespace:
        self.given = given
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, numbers: dict, step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def look(model: object) -> dict:
    return {"held_out": 2.0, "by_position": [{"start": 0, "bits": 3.0}]}


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_tracker_gets_every_step_and_evaluation(llama, tmp_path, monkeypatch, library: str) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, library, tracker)
    run = RunFolder.create(tmp_path / "run", {})
    fit(llama(), BATCHES, next_token_loss, dataclasses.replace(SETTINGS, sinks=(library,)), eval_fn=look, run=run)
    assert [step for step, _ in tracker.logged] == [1, 2, 2, 3, 4, 4]
    steps = [record for record in run.metrics.read() if "loss" in record]
    assert [numbers["loss"] for _, numbers in tracker.logged if "loss" in numbers] == [r["loss"] for r in steps]
    found = {"held_out": 2.0, "by_position/0/start": 0.0, "by_position/0/bits": 3.0}
    assert tracker.logged[2][1] == {**found, "seconds": tracker.logged[1][1]["seconds"]}
    assert tracker.finished == 1
    assert tracker.given["project"] == "titans-lm"
    assert tracker.given["resume"] == "allow"


def test_a_run_is_the_same_one_for_the_tracker_when_it_goes_on(tmp_path, monkeypatch) -> None:
    names = []
    for folder in ("run", "run", "other"):
        tracker = Tracker()
        monkeypatch.setitem(sys.modules, "wandb", tracker)
        with ExitStack() as stack:
            LOGGERS["wandb"](tmp_path / folder, 0, stack)
        names.append(tracker.given["id"])
    assert names[0] == names[1] != names[2]


def test_tensorboard_holds_what_metrics_hold(llama, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, sinks=("tensorboard",))
    fit(llama(), BATCHES, next_token_loss, settings, eval_fn=look, run=run)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    told = {event.step: event.value for event in events.Scalars("loss")}
    steps = {record["step"]: record["loss"] for record in run.metrics.read() if "loss" in record}
    assert told == pytest.approx(steps)
    assert [event.step for event in events.Scalars("held_out")] == [2, 4]


def test_a_library_that_is_missing_is_named_before_training(llama, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    run = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(ValueError, match="the sink 'trackio' needs; install it with: pip install trackio"):
        fit(llama(), BATCHES, next_token_loss, dataclasses.replace(SETTINGS, sinks=("trackio",)), run=run)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_an_unknown_sink_gets_a_hint() -> None:
    with pytest.raises(ValueError, match="sinks='tensorbord'; did you mean 'tensorboard'"):
        FitSettings(sinks=("tensorbord",))


def test_sinks_come_back_from_a_file_of_settings() -> None:
    settings = FitSettings(sinks=("wandb", "tensorboard"))
    assert merge_settings(FitSettings(), {**plain_settings(settings), "sinks": ["wandb", "tensorboard"]}) == settings
    with pytest.raises(ValueError, match="sinks='nobody'"):
        merge_settings(FitSettings(), {"sinks": ["nobody"]})


def test_only_numbers_are_numbers() -> None:
    record = {"step": 3, "rows": [4, 5], "a": 1, "b": {"c": [1.5, {"d": 2}], "e": "text", "f": None, "g": True}}
    assert flat_numbers(record) == {"a": 1.0, "b/c/0": 1.5, "b/c/1/d": 2.0}


@pytest.mark.parametrize("save_every", [2, 0])
def test_a_run_that_goes_on_tells_each_step_once(llama, tmp_path, save_every: int) -> None:
    """Stopped after step 3, with a checkpoint of step 2 or none: TensorBoard shows what metrics.jsonl holds."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, sinks=("tensorboard",), eval_every=0, save_every=save_every)

    def fail(record: dict) -> None:
        if record["step"] == 3:
            raise RuntimeError("the machine died")

    with pytest.raises(RuntimeError, match="died"):
        fit(llama(), BATCHES, next_token_loss, settings, run=run, on_step=fail)
    fit(llama(), BATCHES, next_token_loss, settings, run=run)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    told = {event.step: event.value for event in events.Scalars("loss")}
    assert len(events.Scalars("loss")) == 4
    assert told == pytest.approx({record["step"]: record["loss"] for record in run.metrics.read()})


def test_an_evaluation_that_found_nothing_says_nothing(llama) -> None:
    said = []

    class Screen(ProgressReport):
        def say(self, text: str) -> None:
            said.append(text)

    fit(llama(), BATCHES, next_token_loss, SETTINGS, eval_fn=lambda _: {}, progress=Screen(quiet=True))
    assert not [text for text in said if text.startswith("step")]
