"""What is told of a task beside its numbers: panels, guessing, and how long the stories were."""

import dataclasses
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from experiments.experiment_cases import BabiLongExperiment
from model_cases import small_config
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.experiments.settings import TASK_EXPERIMENTS, TaskFit
from titans_lm.experiments.tasks import FRESH, run_task
from titans_lm.report import tasks as scored

TRAIN = TaskFit(model=small_config("lmm", hidden_size=16, num_hidden_layers=1), steps=1, warmup_steps=1, batch_size=4)


def test_every_model_has_a_panel_of_its_own() -> None:
    """Two that are called alike in short are called in full; two spellings of one are shown as they are written."""
    family = "lmm:chunk_size=1,momentum=false,forget_to=zero,theta_bound=0.5"
    expected = {
        "lmm": "LMM", "attention": "Transformer++ with short convolution", "llama": "Transformer++ (Llama)",
        "sliding": "sliding window with short convolution", "mistral": "sliding window (Mistral)", "mamba": "Mamba",
        "segment": "segments", family: family, f"{family},theta_stretch=0": f"{family},theta_stretch=0",
    }  # fmt: skip
    contenders = [
        {"name": name, "by_test": {f"{size}@0.5": {"mean": (place + more) / 100} for more, size in ((0, 8), (20, 16))}}
        for place, name in enumerate(expected)
    ]
    result = {"task": "Needle", "settings": {"task": {}}, "contenders": contenders}
    found = scored.heat(result)
    assert found is not None
    assert found.panels == {
        shown: [pytest.approx([place, place + 20])] for place, shown in enumerate(expected.values())
    }
    alone = scored.heat({**result, "contenders": [contenders[1]]})
    assert alone is not None
    assert list(alone.panels) == ["Transformer++"]


def test_chance_is_that_of_the_column_it_stands_beside(tmp_path: Path) -> None:
    settings = TASK_EXPERIMENTS["tracking"](
        models=("sliding",), seeds=(0,), rates=(1e-3,), examples=4, sizes=("2",), test_sizes=("2", "3"),
        train=TRAIN, out=tmp_path,
    )  # fmt: skip
    result = run_task(settings, "titans evaluate tracking", lambda _: None)
    assert result["chance"] == {"2": pytest.approx(1 / 120), "3": pytest.approx(1 / 120)}
    assert "answers are right by chance in 0.83 % at most" in scored.said(result)
    assert scored.guessed(result) == "by guessing 0.833 % of whole answers are right"


def test_facts_of_stories_are_told_by_size(tmp_path: Path) -> None:
    """What was drawn for the tests, so that a reader sees that short rows have short stories."""
    task = BabiLongExperiment().task
    settings = BabiLongExperiment(
        task=dataclasses.replace(task, story="qa2"), models=("sliding",), seeds=(0, 1), rates=(1e-3,), examples=20,
        sizes=("0",), test_sizes=("0", "512"), train=TRAIN, out=tmp_path,
    )  # fmt: skip
    result = run_task(settings, "titans evaluate babilong", lambda _: None)
    runs = result["contenders"][0]["runs"]
    for place, (size, one) in enumerate(settings.eval_tasks.items(), 1):
        batches = TaskBatches(dataclasses.replace(one, books=book(tmp_path)), batch_size=4, seed=place * FRESH)
        texts = [bytes(ids.tolist()).decode() for step in range(5) for ids in batches(step)["input_ids"]]
        assert runs[0]["tests"][size]["facts"] == pytest.approx(mean(text.count(". ") for text in texts))
    means = {size: mean(run["tests"][size]["facts"] for run in runs) for size in ("0", "512")}
    assert means["512"] < means["0"]
    assert (
        f"whose stories have {means['0']:.1f} (size 0), {means['512']:.1f} (size 512) facts on average"
        in scored.said(result)
    )


def test_what_was_equal_is_told_as_it_was() -> None:
    train = {"steps": 5, "batch_size": 4, "accumulate": 2, "batch_tokens": 128, "gate_l1": 0.0}
    settings = {
        "seeds": [0],
        "rates": [0.01],
        "examples": 16,
        "sizes": ["64"],
        "train": train,
        "depths": [0.0, 0.5, 1.0],
    }

    def one(name: str, parameters: int, *tests: str) -> dict[str, Any]:
        runs = [{"steps": 5, "tests": {test: {} for test in tests}}]
        return {"name": name, "parameters": parameters, "runs": runs, "state_bytes": {"length": 64}}

    result = {"settings": settings, "parameters_asked_for": 1000, "chance": {"64": 0.1}}
    told = scored.said({**result, "contenders": [one("lmm", 1001, "1024x4"), one("llama", 1500, "1024x4")]})
    assert "1,000 parameters each, but for Transformer++ (Llama) (1,500), 5 steps of up to 8 sequences" in told
    assert "16 fresh sequences of each evaluation size;" in told
    told = scored.said({**result, "contenders": [one("lmm", 1001, "64@0", "64@0.5", "64@1")]})
    assert "1,000 parameters each, 5 steps" in told
    assert "of each evaluation size at each of 3 depths;" in told
    told = scored.said({**result, "contenders": [one("lmm", 1001, "64@0.5", "1024x4")]})
    assert "at each of 3 depths where there is one needle;" in told


def book(folder: Path) -> Path:
    """A background without a full stop: those that are counted are of the facts."""
    (folder / "book.txt").write_text("nothing is told here of anybody! " * 100)
    return folder / "book.txt"
