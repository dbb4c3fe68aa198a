"""The best step is kept, and found again where a run was stopped."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titans_lm.train.loop import BestStep


def rank(found: dict[str, float]) -> tuple[float, float]:
    """The highest accuracy, of equals the lower loss; what is no number is never the best."""
    return -1.0 if math.isnan(found["accuracy"]) else found["accuracy"], -found["loss"]


def best_of(looks: list[tuple[float, float]], path: Path | None = None, **settings: Any) -> tuple[nn.Linear, BestStep]:
    """One that is told numbers instead of measuring them; the weight counts the steps."""
    model, told = nn.Linear(1, 1), iter(looks)
    usual = {"steps": 99, "every": 5, "patience": 2, **settings}
    return model, BestStep(
        model, lambda _: dict(zip(("accuracy", "loss"), next(told), strict=True)), rank, path=path, **usual
    )


def take(model: nn.Linear, best: BestStep, steps: range) -> list[bool]:
    ended = []
    for step in steps:
        with torch.no_grad():
            model.weight.fill_(step)
        ended.append(best.on_step({"step": step}))
    return ended


def test_the_first_of_equals_is_kept_unless_the_loss_is_lower(tmp_path: Path) -> None:
    looks = [(0.5, 1.0), (0.5, 1.0), (0.5, 0.9), (0.4, 0.1), (0.6, 2.0)]
    model, best = best_of(looks, tmp_path / "best")
    kept = []
    for first in range(1, 26, 5):
        assert not any(take(model, best, range(first, first + 5)))
        kept.append(best.found["step"])
        assert best(model) == {name: value for name, value in best.last.items() if name != "step"}
    assert kept == [5, 5, 15, 15, 25]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    other, again = best_of([(0.0, 0.0)] * 3, tmp_path / "best")
    assert again.restore() == {"step": 25, "accuracy": 0.6, "loss": 2.0}
    assert other.weight.item() == 25.0
    assert [again.on_step({"step": step}) for step in (20, 30, 35, 36)] == [False, False, True, True], "two looks"


@pytest.mark.parametrize("kept", [True, False])
def test_it_ends_when_patience_is_out(tmp_path: Path, kept: bool) -> None:
    """In memory as in a file, from what it was before the first step on; steps after the end are not counted."""
    model, best = best_of(
        [(0.1, 1.0), (0.5, 1.0), (0.5, 1.0), (0.4, 1.0)], tmp_path / "best" if kept else None, every=2
    )
    best.evaluate(0)
    assert take(model, best, range(1, 7)) == [False] * 5 + [True]
    assert best.restore() == {"step": 2, "accuracy": 0.5, "loss": 1.0}
    assert (model.weight.item(), best.steps(7), best.steps(4)) == (2.0, 6, 4)
    _, endless = best_of([(0.1, 1.0)] * 9, patience=0, every=2, steps=3)
    assert [endless.on_step({"step": step}) for step in (2, 3)] == [False, False]
    assert endless.last["step"] == 3, "the last step is measured"


def test_a_run_that_had_ended_takes_one_step_and_looks_no_more(tmp_path: Path) -> None:
    """Where every step is looked at, a better one behind the end would move it."""
    model, best = best_of([(0.5, 1.0), (0.4, 1.0), (0.4, 1.0)], tmp_path / "best", every=1)
    assert take(model, best, range(1, 4)) == [False, False, True]
    _, again = best_of([(0.9, 0.1)], tmp_path / "best", every=1)
    assert again.on_step({"step": 4})
    assert again.found["step"] == 1


def test_what_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    nan = (math.nan, math.nan)
    model, best = best_of([nan, (0.5, 1.0), nan], tmp_path / "best", every=2, patience=1)
    best.evaluate(0)
    _, again = best_of([], tmp_path / "best")
    assert again.found["step"] == 0, "a file may hold it"
    assert take(model, best, range(1, 5)) == [False, False, False, True]
    assert best.found["step"] == 2


def test_a_best_that_is_half_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.train.files as module

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    model, best = best_of([(0.5, 1.0), (0.9, 1.0)], tmp_path / "best", every=1)
    take(model, best, range(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(module, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            take(model, best, range(2, 3))
    other, again = best_of([], tmp_path / "best")
    assert again.restore()["accuracy"] == 0.5
    assert other.weight.item() == 1.0
