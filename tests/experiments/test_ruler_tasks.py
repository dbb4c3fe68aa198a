"""Variable tracking and common words from the command to the page of results."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_cases import titans
from experiments.experiment_cases import VariablesExperiment
from experiments.experiment_cases import task_finals as finals
from model_cases import small_config
from titans_lm.cli import parse
from titans_lm.commands.measure import command_line
from titans_lm.data.tasks.common_words import CommonWordsSettings
from titans_lm.data.tasks.variables import VariablesSettings
from titans_lm.experiments.settings import TASK_EXPERIMENTS, TaskFit
from titans_lm.experiments.tasks import FILE, run_task
from titans_lm.report import tasks as scored
from titans_lm.report.page import render_results, without_folders

CommonWordsExperiment: Any = TASK_EXPERIMENTS["common-words"]
TRAIN = TaskFit(
    model=small_config("lmm", hidden_size=16, num_hidden_layers=1), steps=3, warmup_steps=1, batch_size=4, save_every=2
)
SMALL = {"models": ("lmm", "sliding"), "seeds": (0,), "rates": (1e-3,), "examples": 4, "train": TRAIN}
TASKS = [
    VariablesExperiment(
        **SMALL, task=VariablesSettings(name="words", tokenizer="words"), sizes=("0x1", "160x2"), test_sizes=("160x1",)
    ),
    CommonWordsExperiment(**SMALL, sizes=("200x2", "256x2"), test_sizes=("300x3",)),
]


@pytest.mark.parametrize(("settings", "called"), [(TASKS[0], "Variable tracking"), (TASKS[1], "Common words")])
def test_a_command_makes_a_page(settings: Any, called: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = dataclasses.replace(settings, out=tmp_path / "out")
    code, out, err = titans(capsys, *shlex.split(command_line(settings))[1:])
    assert code == 0
    assert [line.split()[:2] for line in err.splitlines()] == [["lmm-seed0", "3/3"], ["sliding-seed0", "3/3"]]
    result = json.loads((tmp_path / "out" / FILE).read_text())
    size = settings.test_sizes[0]
    assert result["chance"] == {size: settings.eval_tasks[size].chance}
    for one in result["contenders"]:
        (run,) = one["runs"]
        assert run["steps"] == 3
        assert run["tests"][size]["answers"] == run["tests"][size]["rows"] == 4, "one answer a row"
        assert run["tests"][size]["asked"] > 4
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ruler.json").write_text(json.dumps(result))
    written = render_results(tmp_path / "results", tmp_path / "results.md")
    assert {path.name for path in written} == {"results.md", "long-context.md", "ruler.png"}
    page = (tmp_path / "results" / "long-context.md").read_text()
    (heading,) = re.findall(rf"## ({called}.*)", page)
    assert heading == {"Variable tracking": "Variable tracking: name words, tokenizer words"}.get(called, called)
    assert "answers are right by chance in" in page
    assert without_folders(command_line(settings)) in page
    assert f"{size}" in out
    assert scored.plot(result).lines[-1].label == "chance"
    assert titans(capsys, *shlex.split(command_line(settings))[1:])[0] == 0
    assert json.loads((tmp_path / "out" / FILE).read_text())["contenders"] == result["contenders"]
    other = dataclasses.replace(settings.task, **({"chains": 3} if called[0] == "V" else {"often": 7}))
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_task(dataclasses.replace(settings, task=other), "", lambda _: None)


def told(task: VariablesSettings | CommonWordsSettings) -> str:
    return bytes(task.draw(np.random.default_rng(0), 1)["input_ids"][0].tolist()).decode()


def test_variables_may_be_tested_in_other_books(tmp_path: Path) -> None:
    for name, text in (("taught", "A hen sat. "), ("tested", "The fox ran. ")):
        (tmp_path / f"{name}.txt").write_text(text * 60)
    task = VariablesSettings(books=tmp_path / "taught.txt", hops=1)
    settings = VariablesExperiment(
        task=task, test_books=tmp_path / "tested.txt", sizes=("500",), test_sizes=("600", "700x2")
    )
    taught, tested = settings.train_tasks[0], settings.eval_tasks["700x2"]
    assert isinstance(taught, VariablesSettings)
    assert isinstance(tested, VariablesSettings)
    assert (tested.length, tested.hops, list(settings.eval_tasks)) == (700, 2, ["600", "700x2"])
    assert ("A hen sat." in told(taught), "The fox ran." in told(taught)) == (True, False)
    assert ("A hen sat." in told(tested), "The fox ran." in told(tested)) == (False, True)
    job = finals(settings, 1000, dict.fromkeys(settings.models, 1e-3))[0]
    assert set(job.spec()["contents"]) == {str(tmp_path / f"{name}.txt") for name in ("taught", "tested")}
    with pytest.raises(ValueError, match=r"got test_books without task\.books"):
        VariablesExperiment(test_books=tmp_path / "tested.txt")


def test_without_sizes_the_task_is_as_it_is_set() -> None:
    for kind in (VariablesExperiment, CommonWordsExperiment):
        settings = kind(sizes=(), test_sizes=())
        assert settings.train_tasks == [settings.task]
        assert settings.eval_tasks == {"": settings.task}


@pytest.mark.parametrize(
    ("command", "size", "said"),
    [
        ("variables", "300", "got length=300 with tokenizer=bytes; expected more than the"),
        ("common-words", "300", "got length=300 with tokenizer=bytes; expected larger sizes, of 629 tokens"),
    ],
)
def test_rows_that_are_too_short_are_told_before_anything_is_trained(
    command: str, size: str, said: str, tmp_path: Path
) -> None:
    settings = parse(["evaluate", command, "--sizes", size, "--out", str(tmp_path / "out")]).what
    with pytest.raises(ValueError, match=said):
        run_task(settings, "", lambda _: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [VariablesExperiment, CommonWordsExperiment])
def test_every_default_size_can_be_drawn(kind: Any) -> None:
    settings = kind()
    for task in [*settings.train_tasks, *settings.eval_tasks.values()]:
        assert task.draw(np.random.default_rng(0), 8)["input_ids"].shape[1] <= max(task.length, 600)
