"""Steps that stand out are skipped, counted and said; training goes on as if they had not been."""

import dataclasses
import random

import pytest
import torch
from torch import nn

from titans_lm.train.checkpoint import load_trainer
from titans_lm.train.loop import fit
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings
from titans_lm.train.trainer import WINDOW, Diverged, Spikes

STEPS = WINDOW
SETTINGS = FitSettings(steps=STEPS, warmup_steps=1, lr=1e-3, save_every=0, eval_every=0, spike_sigmas=6.0)
SPIKE = WINDOW // 2 + 20


class Line(nn.Module):
    """y = a x, which is all that a step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))


def batches(spikes: dict[int, float]):
    def make(step: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([[1.0 + 0.1 * random.Random(step).random()]]) * spikes.get(step, 1.0)
        return {"x": x}

    return make


def loss(model: Line, batch: dict[str, torch.Tensor]):
    return ((model.a * batch["x"]) ** 2).mean(), {}


def trained(spikes: dict[int, float], **changes) -> tuple[Line, object]:
    model = Line()
    return model, fit(model, batches(spikes), loss, dataclasses.replace(SETTINGS, **changes))


def test_a_spike_changes_nothing_and_is_counted() -> None:
    _, calm = trained({})
    assert calm.skipped == 0
    _, result = trained({SPIKE: 50.0})
    assert result.skipped == 1
    _, result = trained({SPIKE: 50.0}, spike_sigmas=0.0)
    assert result.skipped == 0


def test_weights_are_those_of_before() -> None:
    seen = []
    model = Line()
    fit(
        model, batches({SPIKE: 50.0}), loss, SETTINGS,
        on_step=lambda record: seen.append((record["step"], float(model.a.detach()), record["skipped"])) and False,
    )  # fmt: skip
    by_step = {step: (a, skipped) for step, a, skipped in seen}
    assert by_step[SPIKE + 1] == (by_step[SPIKE][0], 1)
    assert by_step[SPIKE + 2][0] != by_step[SPIKE + 1][0]


def test_too_few_steps_are_no_measure() -> None:
    _, result = trained({WINDOW // 2 - 1: 50.0})
    assert result.skipped == 0


def test_a_level_that_stays_is_followed() -> None:
    """Training that has moved to another level is not stopped there: the window fills with it."""
    found = Spikes(3.0)
    rng = random.Random(0)
    assert not any(found(1.0 + 0.01 * rng.random(), 1.0) for _ in range(WINDOW))
    skipped = [found(5.0 + 0.01 * rng.random(), 1.0) for _ in range(WINDOW)]
    assert skipped[0]
    assert not any(skipped[WINDOW // 2 :])


def test_only_what_lies_above_is_a_spike() -> None:
    found = Spikes(3.0)
    rng = random.Random(0)
    assert not any(found(1.0 + 0.01 * rng.random(), 2.0 + 0.01 * rng.random()) for _ in range(WINDOW))
    assert not found(0.1, 0.1)
    assert found(1.0, 9.0), "the gradient's norm counts as the loss does"


def test_too_many_in_a_row_are_an_error() -> None:
    with pytest.raises(Diverged, match=r"3 steps in a row.*or a spike"):
        trained({step: 50.0 * 8.0 ** (step - SPIKE) for step in range(SPIKE, SPIKE + 3)}, max_skipped=3)


def test_a_run_that_goes_on_knows_what_was_usual(tmp_path) -> None:
    """The window is part of a checkpoint: stopped right before the spike, the run still skips it."""
    run = RunFolder.create(tmp_path / "run", {})
    fit(Line(), batches({}), loss, dataclasses.replace(SETTINGS, steps=SPIKE), run=run)
    result = fit(Line(), batches({SPIKE: 50.0}), loss, dataclasses.replace(SETTINGS, steps=SPIKE + 5), run=run)
    assert result.skipped == 1


def pulled(model: Line, batch: dict[str, torch.Tensor]):
    """The same loss with a gradient beside it that adds nothing to its value."""
    value, metrics = loss(model, batch)
    return value + batch["pull"] * (model.a - model.a.detach()), metrics


def test_a_run_that_goes_on_knows_what_norms_were_usual(tmp_path) -> None:
    def pulls(steep: set[int]):
        def make(step: int) -> dict[str, torch.Tensor]:
            pull = random.Random(step).random() + (50.0 if step in steep else 0.0)
            return {"x": torch.ones(1, 1), "pull": torch.tensor(pull)}

        return make

    run = RunFolder.create(tmp_path / "run", {})
    fit(Line(), pulls(set()), pulled, dataclasses.replace(SETTINGS, steps=SPIKE), run=run)
    result = fit(Line(), pulls({SPIKE}), pulled, dataclasses.replace(SETTINGS, steps=SPIKE + 5), run=run)
    assert result.skipped == 1
    kept, records = load_trainer(run.path / "checkpoints" / f"step-{SPIKE + 5:06d}")["spikes"], run.metrics.read()
    assert kept == [[record[name] for record in records[-WINDOW:]] for name in ("loss", "grad_norm")]
