import dataclasses
import functools
import math
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from model_cases import EVERY_KIND
from titans_lm.data.batches import IGNORED, DocumentLanes, RandomCrops, padded
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tokenizer import byte_tokenizer, encode_document
from titans_lm.train.loop import Interrupted, fit
from titans_lm.train.losses import CarriedLoss, next_token_loss, recall_loss
from titans_lm.train.parallel import ALONE
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings
from titans_lm.train.trainer import Diverged, Trainer

DOCUMENTS = [encode_document(b"the quick brown fox jumps over the lazy dog. " * n) for n in (2, 5, 3)]
SETTINGS = FitSettings(steps=8, warmup_steps=2, lr=1e-2, save_every=3, eval_every=0)


def crops(**changes):
    return RandomCrops(DOCUMENTS, **{"seq_len": 16, "batch_size": 2, **changes})


def evaluations(run):
    return [(record["step"], record["found"]) for record in run.metrics.read() if "found" in record]


class Recorder(list):
    """What a run did at each step."""

    def __call__(self, record):
        self.append(record)

    @property
    def losses(self):
        return {record["step"]: record["loss"] for record in self}


def stop_at(step):
    """Press Ctrl-C while a step is under way."""
    return lambda record: os.kill(os.getpid(), signal.SIGINT) if record["step"] == step else None


@pytest.mark.parametrize("architecture", EVERY_KIND)
def test_every_architecture_learns(titans, architecture):
    recorder = Recorder()
    settings = dataclasses.replace(SETTINGS, steps=18, lr=3e-2)
    result = fit(titans(architecture), crops(), next_token_loss, settings, on_step=recorder)
    assert result.step == 18
    assert recorder[-1]["loss"] < recorder[0]["loss"] - 1.0


def test_another_family_learns_by_the_same_loop(llama):
    recorder = Recorder()
    fit(llama(), crops(), next_token_loss, dataclasses.replace(SETTINGS, steps=30, lr=3e-2), on_step=recorder)
    assert recorder[-1]["loss"] < recorder[0]["loss"] - 1.0


def test_another_task_learns_by_the_same_loop(titans):
    """Two pairs out of two keys: which of two values belongs to a key."""
    task = RecallSettings(pairs=2, symbols=4, length=8)
    settings = FitSettings(steps=60, lr=3e-2, warmup_steps=5)
    result = fit(titans("attention"), TaskBatches(task, batch_size=32), recall_loss, settings)
    assert result.last["accuracy"] > 0.45


def test_a_record_says_how_the_step_went(titans):
    result = fit(titans(), crops(), next_token_loss, dataclasses.replace(SETTINGS, steps=2))
    assert result.last.keys() == {
        "step", "loss", "bits_per_token", "lr", "grad_norm", "tokens_per_second", "seconds", "tokens", "skipped",
    }  # fmt: skip
    assert (result.last["step"], result.last["tokens"], result.tokens) == (2, 64, 64)
    assert result.last["lr"] == SETTINGS.lr


def test_batches_add_up_to_one_step(llama):
    """Two batches of two are a batch of four, gradients and all."""
    both = crops(batch_size=4)

    def halves(step):
        rows = slice(0, 2) if step % 2 == 0 else slice(2, 4)
        return {name: part[rows] for name, part in both(step // 2).items()}

    def named(step):
        return {**halves(step), "sample": torch.tensor([2 * step, 2 * step + 1])}

    once, twice = llama(), llama()
    fit(once, both, next_token_loss, dataclasses.replace(SETTINGS, steps=3))
    result = fit(twice, named, next_token_loss, dataclasses.replace(SETTINGS, steps=3, accumulate=2))
    assert result.last["rows"] == [8, 9, 10, 11], "those of both batches of the last step"
    assert result.tokens == 3 * 64
    for a, b in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("without", [0, 2])
def test_batches_count_by_their_targets(llama, without):
    """Rows of documents are padded: a batch of four is two of two, though one has more targets, or all."""
    four = padded([encode_document(b"ab" * n) for n in (2, 9, 3, 11)], 24)
    four["targets"][:without] = IGNORED

    def halves(step):
        return {name: part[2 * (step % 2) :][:2] for name, part in four.items()}

    once, twice, last = llama(), llama(), []
    for model, batches, several in ((once, lambda _: four, 1), (twice, halves, 2)):
        settings = dataclasses.replace(SETTINGS, steps=2, accumulate=several)
        last.append(fit(model, batches, next_token_loss, settings).last)
    for name in ("loss", "bits_per_token", "grad_norm"):
        assert last[1][name] == pytest.approx(last[0][name], rel=1e-4)
    assert last[1]["bits_per_token"] == pytest.approx(last[1]["loss"] / math.log(2))
    for a, b in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """A model whose training draws random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.module = nn.Identity()  # the name that a model has inside of DDP

    def forward(self, x):
        noise = torch.rand(4)
        return ((self.weight * noise - x) ** 2).mean()


def noisy_loss(model, batch):
    return model(batch["x"]), {}


CASES = {
    "crops": lambda titans: (titans("mac"), crops(), next_token_loss),
    "lanes": lambda titans: (titans("mal"), DocumentLanes(DOCUMENTS, seq_len=16, batch_size=2), CarriedLoss()),
    "random": lambda _: (Noisy(), lambda step: {"x": torch.full((4,), float(step))}, noisy_loss),
}


@functools.cache
def whole_run(make, titans):
    recorder = Recorder()
    model, batches, loss_fn = make(titans)
    torch.manual_seed(1)
    fit(model, batches, loss_fn, SETTINGS, on_step=recorder)
    return recorder.losses, model.state_dict()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stopped_at", [3, 5])
def test_a_run_that_is_taken_up_again_is_bit_for_bit_the_run(titans, tmp_path, case, stopped_at):
    """Stopped at a checkpoint and between two; taken up with other random numbers, in a model of other weights."""
    losses, weights = whole_run(CASES[case], titans)
    first, second = Recorder(), Recorder()
    model, batches, loss_fn = CASES[case](titans)
    run = RunFolder.create(tmp_path / "run", {}, byte_tokenizer())
    torch.manual_seed(1)

    def on_step(record):
        first(record)
        return stop_at(stopped_at)(record)

    with pytest.raises(Interrupted, match=f"stopped after step {stopped_at}; saved in .*step-00000{stopped_at}"):
        fit(model, batches, loss_fn, SETTINGS, on_step=on_step, run=run)

    model, batches, loss_fn = CASES[case](titans)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    torch.manual_seed(99)
    result = fit(model, batches, loss_fn, SETTINGS, on_step=second, run=RunFolder.open(tmp_path / "run"))
    assert list(second.losses) == list(range(stopped_at + 1, 9))
    assert first.losses | second.losses == losses
    assert result.step == 8
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    steps = [record["step"] for record in run.metrics.read()]
    assert steps == list(range(1, 9))


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(titans, tmp_path):
    losses, _ = whole_run(CASES["crops"], titans)
    run = RunFolder.create(tmp_path / "run", {})

    def killed(record):
        if record["step"] == 5:
            raise MemoryError

    with pytest.raises(MemoryError):
        fit(titans("mac"), crops(), next_token_loss, SETTINGS, on_step=killed, run=run)
    assert [record["step"] for record in run.metrics.read()] == [1, 2, 3, 4, 5]
    recorder = Recorder()
    fit(titans("mac"), crops(), next_token_loss, SETTINGS, on_step=recorder, run=run)
    assert recorder.losses == {step: losses[step] for step in range(4, 9)}
    assert [record["step"] for record in run.metrics.read()] == list(range(1, 9))


def test_evaluating_changes_nothing(titans):
    """Not even the random numbers that come after."""

    def evaluation(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.rand(3)
        return {"score": 1.0}

    plain, _ = whole_run(CASES["random"], titans)
    recorder = Recorder()
    model, batches, loss_fn = CASES["random"](titans)
    torch.manual_seed(1)
    settings = dataclasses.replace(SETTINGS, eval_every=2)
    result = fit(model, batches, loss_fn, settings, eval_fn=evaluation, on_step=recorder)
    assert recorder.losses == plain
    assert result.evaluation == {"score": 1.0}


def test_evaluations_are_lines_of_their_own(llama, tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, eval_every=3, log_every=4)
    fit(llama(), crops(), next_token_loss, settings, eval_fn=lambda _: {"score": 0.5}, run=run)
    found = [(record["step"], "score" in record) for record in run.metrics.read()]
    assert found == [(3, True), (4, False), (6, True), (8, False), (8, True)]


def test_training_ends_early_and_well_when_asked(llama, tmp_path):
    run = RunFolder.create(tmp_path / "run", {}, byte_tokenizer())
    result = fit(llama(), crops(), next_token_loss, SETTINGS, on_step=lambda record: record["step"] == 4, run=run)
    assert result.step == 4
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert run.latest().name == "step-000004"


def test_a_finished_run_has_nothing_left_to_do(llama, tmp_path):
    run = RunFolder.create(tmp_path / "run", {}, byte_tokenizer())
    fit(llama(), crops(), next_token_loss, SETTINGS, run=run)
    recorder, before = Recorder(), run.latest().stat().st_ino
    score = {"score": 2.0}
    result = fit(llama(), crops(), next_token_loss, SETTINGS, run=run, on_step=recorder, eval_fn=lambda _: score)
    assert recorder == []
    assert run.latest().stat().st_ino == before, "its checkpoint is not written again"
    assert (result.step, result.evaluation) == (8, score)
    fit(llama(), crops(), next_token_loss, SETTINGS, run=run, eval_fn=lambda _: score)
    assert [line["step"] for line in run.metrics.read() if "score" in line] == [8], "said once"


class Brittle(nn.Module):
    """A model that gives no number at the steps that are named."""

    def __init__(self, *steps, in_gradient=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.steps, self.in_gradient = steps, in_gradient

    def forward(self, step):
        if step in self.steps:
            return (self.weight - self.weight).sqrt() if self.in_gradient else self.weight * float("nan")
        return self.weight**2


@pytest.mark.parametrize("in_gradient", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(in_gradient, tmp_path):
    model, seen = Brittle(2, 3, in_gradient=in_gradient), []
    forgotten = []

    class Loss:
        def __call__(self, model, batch):
            return model(int(batch["step"])), {}

        def forget(self):
            forgotten.append(True)

    run = RunFolder.create(tmp_path / "run", {})
    result = fit(
        model,
        lambda step: {"step": torch.tensor(step)},
        Loss(),
        dataclasses.replace(SETTINGS, max_skipped=3),
        on_step=lambda _: seen.append(model.weight.item()),
        run=run,
    )
    assert (result.step, result.skipped, len(forgotten)) == (8, 2, 2)
    assert seen[1] == seen[2] == seen[3] != seen[4]
    assert all(np.isfinite(seen))
    assert [record["skipped"] for record in run.metrics.read()] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert ("null" in run.metrics.path.read_text()) is True


def test_too_many_of_them_in_a_row_are_an_error(tmp_path):
    model = Brittle(*range(2, 100))
    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, max_skipped=3, save_every=1)
    with pytest.raises(Diverged, match=r"3 steps in a row, up to step 5, .* lower the learning rate"):
        fit(model, lambda step: {"step": torch.tensor(step)}, lambda m, b: (m(int(b["step"])), {}), settings, run=run)
    assert torch.isfinite(model.weight)
    assert run.latest().name == "step-000004"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(llama, tmp_path, number):
    run, recorder = RunFolder.create(tmp_path / "run", {}, byte_tokenizer()), Recorder()
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def batches(step):
        if step == 3:
            os.kill(os.getpid(), number)
        return crops()(step)

    with pytest.raises(Interrupted) as stopped:
        fit(llama(), batches, next_token_loss, SETTINGS, on_step=recorder, run=run)
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert list(recorder.losses) == [1, 2, 3, 4]
    assert stopped.value.checkpoint == run.latest() == tmp_path / "run" / "checkpoints" / "step-000004"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_evaluation_says_what_was_saved(llama, tmp_path, number):
    run = RunFolder.create(tmp_path / "run", {}, byte_tokenizer())
    with pytest.raises(Interrupted, match=r"stopped after step 8; saved in .*step-000008"):
        fit(llama(), crops(), next_token_loss, SETTINGS, eval_fn=lambda _: os.kill(os.getpid(), number) or {}, run=run)
    assert not (run.path / "in-use").exists()


def test_a_second_signal_stops_at_once(llama):
    def impatient(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was not heard")

    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(llama(), impatient, next_token_loss, SETTINGS)
    assert type(stopped.value) is KeyboardInterrupt


def test_without_a_run_folder_nothing_is_saved_and_that_is_said(llama):
    with pytest.raises(Interrupted, match="stopped after step 2; nothing was saved"):
        fit(llama(), crops(), next_token_loss, SETTINGS, on_step=stop_at(2))


def test_training_works_beside_the_main_thread(llama):
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(llama(), crops(), next_token_loss, SETTINGS)))
    thread.start()
    thread.join()
    assert results[0].step == 8


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 3}, {"seq_len": 8}])
def test_other_data_than_the_runs_is_an_error(llama, tmp_path, change):
    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, steps=2)
    fit(llama(), crops(), next_token_loss, settings, run=run)
    with pytest.raises(ValueError, match="was trained on other data, or with another batch_size"):
        fit(llama(), crops(**change), next_token_loss, SETTINGS, run=run)


def test_other_batches_a_step_than_the_runs_are_an_error(llama, tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    fit(llama(), crops(), next_token_loss, dataclasses.replace(SETTINGS, steps=2), run=run)
    with pytest.raises(ValueError, match=r"got accumulate=2 for .* which was trained with accumulate=1"):
        fit(llama(), crops(), next_token_loss, dataclasses.replace(SETTINGS, accumulate=2), run=run)


def test_padding_is_no_token(llama):
    batch = crops()(0)
    mask = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    mask[:, 5:] = False
    result = fit(llama(), lambda _: {**batch, "attention_mask": mask}, next_token_loss, SETTINGS)
    assert result.tokens == SETTINGS.steps * int(mask.sum())


def test_settings_of_the_optimizer_may_change_on_the_way(llama, tmp_path):
    """The checkpoint holds those of its time; what is asked for now counts."""
    run = RunFolder.create(tmp_path / "run", {}, byte_tokenizer())
    first = dataclasses.replace(SETTINGS, steps=2, lr=0.0, weight_decay=0.0)
    fit(llama(), crops(), next_token_loss, first, run=run)
    second = dataclasses.replace(SETTINGS, steps=3, warmup_steps=0, lr=1.0, lr_floor=1.0, weight_decay=1.0, clip=1e-12)
    trainer = Trainer(llama(), crops(), next_token_loss, second, ALONE)
    trainer.load(run.latest())
    with trainer.reading():
        assert trainer.step()["step"] == 3
    groups = trainer.optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1.0, 1.0), (1.0, 0.0)]


def test_bfloat16_is_used_where_it_is_asked_for(titans):
    seen = []

    def loss_fn(model, batch):
        loss, metrics = next_token_loss(model, batch)
        seen.append(model(batch["input_ids"]).logits.dtype)
        return loss, metrics

    for precision in ("bfloat16", "auto", "float32"):
        settings = dataclasses.replace(SETTINGS, steps=1, precision=precision, device="cpu")
        result = fit(titans("mag"), crops(), loss_fn, settings)
        assert np.isfinite(result.last["loss"])
    assert seen == [torch.bfloat16, torch.float32, torch.float32]


def test_a_run_without_a_step_that_was_finite_is_not_finished(llama, tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, steps=3, max_skipped=10)

    def loss(model, batch):
        found, numbers = next_token_loss(model, batch)
        return found * float("nan"), numbers

    with pytest.raises(Diverged, match="all 3 steps had a loss or gradient that was not finite"):
        fit(llama(), crops(), loss, settings, run=run)
    assert not (tmp_path / "run" / "model").exists()


def test_a_checkpoint_comes_after_the_evaluation_of_its_step(llama, tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    settings = dataclasses.replace(SETTINGS, steps=4, save_every=2, eval_every=2)
    seen = []
    fit(llama(), crops(), next_token_loss, settings, run=run, eval_fn=lambda _: seen.append(run.latest()) or {})
    assert seen[0] is None


def test_a_run_that_was_stopped_where_it_was_to_be_evaluated_makes_up_for_it(titans, tmp_path):
    settings = dataclasses.replace(SETTINGS, eval_every=2)
    told = []
    for name, stop, before in (("whole", None, []), ("stopped", stop_at(4), [2]), ("between", stop_at(5), [2, 4])):
        run = RunFolder.create(tmp_path / name, {}, byte_tokenizer())
        given = {"eval_fn": lambda model: {"found": float(model.lm_head.weight.sum())}, "run": run}
        if stop is not None:
            with pytest.raises(Interrupted):
                fit(titans(), crops(), next_token_loss, settings, on_step=stop, **given)
            assert [step for step, _ in evaluations(run)] == before
        fit(titans(), crops(), next_token_loss, settings, **given)
        told.append(evaluations(run))
    assert told[0] == told[1] == told[2]
    assert [step for step, _ in told[0]] == [2, 4, 6, 8]
    run = RunFolder.create(tmp_path / "nothing", {}, byte_tokenizer())
    with pytest.raises(Interrupted):
        fit(titans(), crops(), next_token_loss, settings, on_step=stop_at(4), eval_fn=lambda _: {}, run=run)
    fit(titans(), crops(), next_token_loss, settings, eval_fn=lambda _: {}, run=run)
    assert not [record for record in run.metrics.read() if record["step"] == 4 and "loss" not in record]
