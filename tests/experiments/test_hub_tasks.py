"""Tasks of lm-eval that are long, RULER's and BABILong's, on a machine without a network."""

import json
import re
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import wonderwords
import yaml
from lm_eval.tasks import TaskManager

from cli_cases import titans
from question_cases import TASKS, small_titans
from titans_lm import lm_eval as harness
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.train.checkpoint import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "ours"
    save_model(folder, small_titans("lmm").float(), byte_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No host has an address; those that were asked for are listed. Only the tasks that are named are looked for."""
    asked: list[str] = []

    def refuse(host: Any, *_: object, **__: object) -> None:
        asked.append(str(host))
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    return asked


def one_knows(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Let the model answer all questions, and put the right answer in the place of its first."""
    asked = harness.TitansLM.generate_until

    def helped(self: Any, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        said = asked(self, requests, disable_tqdm)
        return [answer(requests[0].args[0]), *said[1:]]

    monkeypatch.setattr(harness.TitansLM, "generate_until", helped)


class FewWords(wonderwords.RandomWord):
    """lm-eval sorts all pairs of an adjective and a noun, six million, as it is imported."""

    def __init__(self) -> None:
        super().__init__()
        self._categories = {name: words[:50] for name, words in self._categories.items()}


def test_a_needle_of_ruler_needs_no_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    """What lm-eval would download, it can do without: sentences are told apart for essays alone."""
    monkeypatch.setattr(wonderwords, "RandomWord", FewWords)
    from lm_eval.tasks.ruler import prepare_niah

    drawn = prepare_niah.generate_samples  # 500 needles, of which two are asked
    monkeypatch.setattr(
        prepare_niah, "generate_samples", lambda *args, **given: drawn(*args, **{**given, "num_samples": 20})
    )
    one_knows(monkeypatch, lambda prompt: re.findall(r"is: (\d{7})\.", prompt)[0])
    options = ["--tasks", "niah_single_1", "--include-path", TASKS / "ruler", "--metadata", "max_seq_lengths=[512]"]
    files = ["--json", tmp_path / "scores.json", "--samples", tmp_path / "samples.jsonl", "--limit", 2]
    code, _, err = titans(capsys, "evaluate", "lm-eval", model, *options, *files, "--device", "cpu")
    assert code == 0, err
    found = json.loads((tmp_path / "scores.json").read_text())["models"][0]["tasks"]["niah_single_1"]
    assert (found["items"], found["metrics"]["512"]["value"]) == (2, 0.5)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        [value] = sample["doc"]["outputs"]
        assert sample["doc"]["input"].count(f"is: {value}.") == 1
        assert len(sample["doc"]["input"].encode()) <= 512
    assert set(offline) <= {"raw.githubusercontent.com"}, "nothing but nltk's marks of sentences"


STORIES = [
    {
        "input": "The sea was calm. Mary moved to the garden. It rained.",
        "question": "Where is Mary?",
        "target": "garden",
    },
    {"input": "John went to the office. Nobody came.", "question": "Where is John?", "target": "office"},
]


def test_questions_of_babilong_s_form_come_from_a_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    """lm-eval's own task, instructions, examples and scoring, over items that lie here."""
    (tmp_path / "qa1.jsonl").write_text("\n".join(map(json.dumps, STORIES)) + "\n")
    task = {
        "include": str(TASKS / "babilong" / "babilong_qa1.yaml"), "task": "local_qa1", "dataset_path": "json",
        "custom_dataset": None,
        "dataset_kwargs": {"data_files": {"qa1": str(tmp_path / "qa1.jsonl")}, "cache_dir": str(tmp_path / "cache")},
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_qa1.yaml").write_text(yaml.safe_dump(task))
    one_knows(monkeypatch, lambda prompt: "The most recent location of Mary is GARDEN.")
    options = ["--tasks", "local_qa1", "--include-path", tmp_path / "tasks", "--samples", tmp_path / "samples.jsonl"]
    code, _, err = titans(
        capsys, "evaluate", "lm-eval", model, *options, "--json", tmp_path / "scores.json", "--device", "cpu"
    )
    assert code == 0, err
    found = json.loads((tmp_path / "scores.json").read_text())["models"][0]["tasks"]["local_qa1"]
    assert (found["items"], found["shots"], found["metrics"]["acc"]["value"]) == (2, 2, 0.5)
    first = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    prompt = str(first["arguments"])
    assert "hidden in some random text" in prompt
    assert "location of Charlie is balcony" in prompt
    assert STORIES[0]["input"] in prompt
    assert offline == []


def test_data_that_cannot_be_had_are_told(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BABILong's own questions lie on the hub."""
    monkeypatch.setattr("datasets.config.HF_CACHE_HOME", tmp_path)
    options = ["--tasks", "babilong_qa1", "--include-path", TASKS / "babilong", "--metadata", "max_seq_lengths=0k"]
    code, out, err = titans(capsys, "evaluate", "lm-eval", model, *options, "--device", "cpu", "--quiet")
    assert (code, out) == (2, "")
    assert "the data of babilong_qa1 cannot be had" in err
    assert "without a network, --local scores files" in err
