"""titans evaluate lm-eval: questions from files and lm-eval's tasks as a command, and their part of the page."""

import json
import shlex
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from cli_cases import titans
from question_cases import small_llama, small_titans, word_tokenizer, write_questions, write_tasks
from titans_lm import lm_eval as harness
from titans_lm.cli import parse
from titans_lm.commands.measure import command_line
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.experiments.lm_eval import run_questions
from titans_lm.experiments.reading_settings import QuestionSettings
from titans_lm.lm_eval import TitansLM, harness_scores, run_local
from titans_lm.report.lm_eval import shown, tables
from titans_lm.report.page import render_results, without_folders
from titans_lm.report.table import screen
from titans_lm.train.checkpoint import save_model
from titans_lm.train.run import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saved models, questions in files, and lm-eval's tasks over the same."""
    folder = tmp_path_factory.mktemp("command")
    write_questions(folder, items=5)
    write_tasks(folder / "tasks", folder / "theirs", folder / "cache")
    for name, model, words in (("ours", small_titans("lmm"), byte_tokenizer()), ("theirs", small_llama(), None)):
        save_model(folder / "models" / name, model, words or word_tokenizer())
    return folder


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the test the index of lm-eval's own tasks, which are thousands."""
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))


def asked(folder: Path, *more: Any) -> list[Any]:
    models = [folder / "models" / name for name in ("ours", "theirs")]
    return ["evaluate", "lm-eval", *models, *more]


def test_files_are_scored_without_a_network(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a file needs no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    files = ["--json", tmp_path / "scores.json", "--samples", tmp_path / "samples.jsonl"]
    tasks = ["piqa", "lambada_openai", "winogrande"]
    options = ["--local", folder / "local", "--tasks", *tasks, "--limit", 4, "--batch-size", 3]
    code, out, err = titans(capsys, *asked(folder, *options, *files))
    assert code == 0, err
    result = json.loads((tmp_path / "scores.json").read_text())
    assert (result["what"], result["scorer"], result["settings"]["limit"]) == (
        "lm-eval",
        f"lm-eval {version('lm-eval')}",
        4,
    )
    assert [one["name"] for one in result["models"]] == ["ours", "theirs"]
    assert [one["bos"] for one in result["models"]] == [True, "tokenizer"]
    assert [one["max_length"] for one in result["models"]] == [None, 256]
    # read from the same files: weights that lie elsewhere are added up in another order, and differ in the last digits
    models = [load_model(folder / "models" / name, "cpu") for name in ("ours", "theirs")]
    for one, model, words in zip(result["models"], models, (byte_tokenizer(), word_tokenizer()), strict=True):
        assert list(one["tasks"]) == tasks
        for task, found in one["tasks"].items():
            expected = harness_scores(run_local(TitansLM(model, words, batch_size=3), task, folder / "local", 4))[task]
            assert found["metrics"] == expected["metrics"]
            assert (found["items"], found["chance"], found["cut"]) == (4, expected["chance"], 0)
            assert found["seconds"] > 0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 3 * 4
    assert [set(sample) for sample in samples] == [{"model", "task", "item", "gold", "choices"}] * len(samples)
    assert [len(sample["choices"]) for sample in samples[:12]] == [2] * 4 + [1] * 4 + [2] * 4
    assert [sample["gold"] for sample in samples[:12]] == [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1]
    assert samples[0]["choices"][0]["log_probability"] < 0.0
    assert isinstance(samples[0]["choices"][0]["greedy"], bool)
    assert "ours piqa: acc " in out
    assert out.endswith(f"numbers in {tmp_path / 'scores.json'}\n")
    assert "\n".join(screen(tables(result))) in out
    for choices, times in ((8, 4), (4, 2)):  # a bar for each task of each model, and nothing else
        assert err.count(f"Running loglikelihood requests: 100%|██████████| {choices}/{choices} ") == times
    assert not [line for line in err.replace("\r", "\n").split("\n") if line and "it/s" not in line]


def test_lm_eval_gives_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], few_tasks: None
) -> None:
    """The same models and items asked by lm-eval: the same scores, chance and number of items."""
    names = ("piqa", "arc_easy", "lambada_openai")
    options = ["--tasks", *(f"file_{name}" for name in names), "--include-path", folder / "tasks"]
    files = ["--json", tmp_path / "scores.json", "--samples", tmp_path / "samples.jsonl"]
    code, out, err = titans(capsys, *asked(folder, *options, *files))
    assert code == 0, err
    theirs = json.loads((tmp_path / "scores.json").read_text())
    options = ["--tasks", *names, "--local", folder / "local", "--json", tmp_path / "ours.json"]
    code, quiet, err = titans(capsys, *asked(folder, *options, "--quiet"))
    assert (code, quiet, err) == (0, "", "")
    ours = json.loads((tmp_path / "ours.json").read_text())
    assert theirs["scorer"].startswith("lm-eval 0.")
    for one, other in zip(ours["models"], theirs["models"], strict=True):
        for name in names:
            mine, found = one["tasks"][name], other["tasks"][f"file_{name}"]
            for metric, value in mine["metrics"].items():
                assert found["metrics"][metric]["value"] == pytest.approx(value["value"], rel=1e-12)
            assert [mine[key] for key in ("items", "chance")] == [found[key] for key in ("items", "chance")]
    assert "bootstrapping" not in out, "what lm-eval prints goes to stderr"
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2 * 3 * 5
    args = asked(folder, "--tasks", "file_piqa", "--include-path", folder / "tasks", "--quiet")
    assert titans(capsys, *args) == (0, "", "")


def test_the_page_has_a_table_of_it(folder: Path, tmp_path: Path) -> None:
    settings = QuestionSettings(
        models=(str(folder / "models" / "ours"), f"other={folder / 'models' / 'theirs'}"),
        local=folder / "local",
        tasks=("boolq", "lambada_openai"),
        max_length=20,
        json=tmp_path / "results" / "questions.json",
        quiet=True,
    )
    result = run_questions(settings, command_line(settings), lambda _: None)
    assert {one["tasks"]["boolq"]["cut"] for one in result["models"]} == {10}
    render_results(tmp_path / "results", tmp_path / "results.md")
    page = (tmp_path / "results" / "language.md").read_text()
    assert "## Questions scored as lm-eval scores them: ours, other" in page
    assert f"`{without_folders(command_line(settings))}`" in page
    cut = sum(found["cut"] for one in result["models"] for found in one["tasks"].values())
    assert f" {cut} choices, counted for each model, were too long for it" in page
    assert "Not lm-eval's items: boolq: passages without their titles." in page
    accuracy = 100 * result["models"][0]["tasks"]["boolq"]["metrics"]["acc"]["value"]
    [line] = [line for line in page.splitlines() if line.startswith("| boolq |")]
    assert f"| acc | 5 | 50.00 | 60.00 | {accuracy:.2f} ± " in line
    [table] = tables(result)
    assert len(table.head) == 7
    body = table.body
    assert [row[0] for row in body] == ["boolq", "lambada_openai", ""]


def test_scores_as_they_are_shown() -> None:
    assert shown("acc", {"value": 0.5, "stderr": 0.125}) == "50.00 ± 12.50"
    assert shown("4096", {"value": 0.25, "stderr": None}) == "25.00"
    assert shown("perplexity", {"value": 12.5, "stderr": 1.0}) == "12.50 ± 1.00"
    assert shown("perplexity", {"value": None, "stderr": None}) == "∞"
    assert shown("acc", None) == "–"


def test_the_command_line_gives_the_same_settings() -> None:
    settings = QuestionSettings(
        models=("runs/a", "runs/b c"), tasks=("niah_single_1",), metadata=("max_seq_lengths=[1024, 2048]", "size=4k"),
        limit=3, bos="no", num_fewshot=2, include_path=Path("tasks"), max_length=99, seed=5,
    )  # fmt: skip
    told = parse(shlex.split(command_line(settings))[1:]).what
    assert {name: getattr(told, name) for name in vars(settings)} == vars(settings)
    assert settings.task_metadata() == {"max_seq_lengths": [1024, 2048], "size": "4k"}


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": ([], "got no model"),
    "no task": (["{models}/ours"], "got no --tasks"),
    "no such model": (["/nowhere", "--tasks", "piqa"], "'/nowhere', which does not exist"),
    "no such folder": (["{models}/ours", "--local", "/nowhere"], "got --local /nowhere, which is no folder"),
    "siqa": (["{models}/ours", "--local", "{local}", "--tasks", "siqa"], "siqa.jsonl is 'siqa_2_letters' here"),
    "one twice": (["{models}/ours", "{models}/ours", "--tasks", "piqa"], "expected every model once"),
    "shots here": (["x", "--local", "{local}", "--num-fewshot", "3"], "got num_fewshot=3 with --local"),
    "no rows": (["x", "--batch-size", "0"], "got batch_size=0"),
    "no items": (["x", "--limit", "0"], "got limit=0"),
    "no pair": (["x", "--metadata", "size"], "got the metadata 'size'; expected NAME=VALUE"),
    "no tasks there": (["{models}/ours", "--tasks", "x", "--include-path", "/nowhere"], "which is no folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    args, said = MISTAKES[name]
    places = {"models": folder / "models", "local": folder / "local"}
    code, out, err = titans(capsys, "evaluate", "lm-eval", *(arg.format(**places) for arg in args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_lm_eval_that_is_not_there_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titans_lm.experiments.lm_eval.find_spec", lambda name: None)
    for where in (["--tasks", "piqa"], ["--local", folder / "local"]):
        code, out, err = titans(capsys, *asked(folder, *where))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "pip install 'titans-lm[eval]'" in err
