"""The best step of a run: the most right, then the lower loss; kept in one piece, and found again."""

from pathlib import Path

import pytest
import torch
from torch import nn

from genomics.genomics_cases import tiny_fit
from titans_lm.genomics.best import Best


def test_the_first_of_equals_is_kept_unless_the_loss_is_lower(tmp_path: Path) -> None:
    looks = iter([(0.5, 1.0), (0.5, 1.0), (0.5, 0.9), (0.4, 0.1), (0.6, 2.0)])
    model, kept = nn.Linear(1, 1), []

    def measure(_: nn.Module) -> dict[str, float]:
        accuracy, loss = next(looks)
        return {"validation_accuracy": accuracy, "validation_loss": loss}

    fit = tiny_fit(patience=2, eval_every=5, steps=99)
    best = Best(tmp_path / "best", model, measure, fit)
    for step in range(1, 26):
        with torch.no_grad():
            model.weight.fill_(step)
        assert best.on_step({"step": step}) is False
        if step % 5 == 0:
            kept.append(best.found["step"])
            assert best(model) == {name: value for name, value in best.last.items() if name != "step"}
    assert kept == [5, 5, 15, 15, 25]
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["best.json", "step-25.safetensors"]
    again = Best(
        tmp_path / "best", model, lambda _: dict.fromkeys(("validation_accuracy", "validation_loss"), 0.0), fit
    )
    other = nn.Linear(1, 1)
    assert again.load(other)["validation_accuracy"] == 0.6
    assert other.weight.item() == 25.0
    assert [again.on_step({"step": step}) for step in (20, 30, 35, 36)] == [False, False, True, True], "two looks"
    (tmp_path / "best" / "step-25.safetensors").rename(tmp_path / "best" / "model.safetensors")
    again.load(other)  # a run that was begun with an older version


def test_a_best_that_is_half_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.genomics.best as module

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    looks = iter([0.5, 0.9])
    model = nn.Linear(1, 1)
    best = Best(
        tmp_path, model, lambda _: {"validation_accuracy": next(looks), "validation_loss": 1.0}, tiny_fit(eval_every=1)
    )
    weight = model.weight.item()
    best.on_step({"step": 1})
    with torch.no_grad():
        model.weight.fill_(7.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            best.on_step({"step": 2})
    again = Best(tmp_path, model, lambda _: {}, tiny_fit())
    assert again.load(model)["validation_accuracy"] == 0.5
    assert model.weight.item() == weight
