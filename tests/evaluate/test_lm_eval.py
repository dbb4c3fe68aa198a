"""Our class in lm-eval: registered, read as its texts begin, one row like many, pages as a whole or in windows."""

from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from forks import said_by
from model_cases import EVERY_KIND
from question_cases import (
    SOURCES,
    answers_in,
    ask,
    beginning_bytes,
    small_llama,
    small_titans,
    word_tokenizer,
    write_questions,
    write_tasks,
)
from titans_lm import lm_eval as harness
from titans_lm.data.tokenizer import BOS, byte_tokenizer
from titans_lm.lm_eval import TitansLM, harness_scores, run_local, run_tasks
from titans_lm.questions import guessing, read_items
from titans_lm.train.checkpoint import save_model
from titans_lm.train.run import load_model

PROMPTS = ["a", "a longer prompt that crosses segments", "the third — naïve", "x y"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("questions")
    write_questions(folder)
    return folder / "local", write_tasks(folder / "tasks", folder / "theirs", folder / "cache")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("test", index, 1))
        for index, each in enumerate(arguments)
    ]


def generation(*texts: str) -> list[Instance]:
    settings = {"until": ["\n\n"], "max_gen_toks": 9, "do_sample": False}
    return requests("generate_until", [(text, dict(settings)) for text in texts])


def rolling(*texts: str) -> list[Instance]:
    return requests("loglikelihood_rolling", [(text,) for text in texts])


def test_a_folder_is_a_model_of_lm_eval(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """By its name there, with the settings that lm-eval passes on."""
    model, words = small_titans("lmm"), byte_tokenizer()
    save_model(tmp_path, model, words)
    manager = TaskManager(include_path=str(folders[1]), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="titans",
        model_args={"pretrained": str(tmp_path)},
        tasks=["file_piqa"],
        task_manager=manager,
        batch_size=4,
        device="cpu",
    )
    assert found is not None
    model = load_model(tmp_path, "cpu")  # weights that lie elsewhere are added up in another order
    mine = run_local(TitansLM(model, words, batch_size=4), "piqa", folders[0])
    assert answers_in(found, "file_piqa") == answers_in(mine, "piqa")


@pytest.mark.parametrize("architecture", [*EVERY_KIND, "tnt"])
def test_one_row_is_like_many(architecture: str) -> None:
    """Scores and written text do not depend on what else is in the batch, with padding on either side."""
    model, words = small_titans(architecture), byte_tokenizer()
    alone, together = (TitansLM(model, words, batch_size=size) for size in (1, 4))
    pairs = requests("loglikelihood", [(text, " and so on"[: 3 + 2 * i]) for i, text in enumerate(PROMPTS)])
    one, many = alone.loglikelihood(pairs, disable_tqdm=True), together.loglikelihood(pairs, disable_tqdm=True)
    assert [sum_ for sum_, _ in one] == pytest.approx([sum_ for sum_, _ in many], rel=1e-10)
    assert [greedy for _, greedy in one] == [greedy for _, greedy in many]
    written = together.generate_until(generation(*PROMPTS), disable_tqdm=True)
    assert written == alone.generate_until(generation(*PROMPTS), disable_tqdm=True)
    for text, found in zip(PROMPTS, written, strict=True):
        ids = torch.tensor([[BOS, *text.encode()]])
        with torch.no_grad():
            expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        assert found == words.decode(expected, skip_special_tokens=True).split("\n\n")[0]


def test_nothing_is_said_against_a_model_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    TitansLM(small_titans("lmm"), byte_tokenizer())
    assert not caplog.messages


def test_texts_begin_as_they_do_in_training() -> None:
    model = small_titans("lmm")
    ours, theirs = TitansLM(model, byte_tokenizer()), HFLM(pretrained=model, tokenizer=beginning_bytes(), max_length=99)
    assert ours.tok_encode("ab") == theirs.tok_encode("ab") == [BOS, 97, 98]
    assert ours.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert ours.tok_encode("abc", left_truncate_len=2) == [98, 99]
    assert TitansLM(model, byte_tokenizer(), bos="no").tok_encode("ab") == [97, 98]
    pairs = requests("loglikelihood", [("", "x"), ("a", " b"), ("a ", "b")])
    assert ours.loglikelihood(pairs) == theirs.loglikelihood(pairs)
    ids, mask = ours.tok_batch_encode(["a", "bcd"], left_truncate_len=3)
    assert (ids.tolist(), mask.tolist()) == ([[0, BOS, 97], [98, 99, 100]], [[0, 1, 1], [1, 1, 1]])
    ids, mask = ours.tok_batch_encode(["a", "bc"], padding_side="right")
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("begins", [True, False])
def test_any_causal_model_is_read_as_lm_eval_reads_it(folders: tuple[Path, Path], begins: bool) -> None:
    model, words = small_llama(), word_tokenizer(begins)
    ours = TitansLM(model, words, batch_size=4)
    theirs = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=4)
    assert ours.max_length == theirs.max_length == 256
    names = [f"file_{name}" for name in SOURCES]
    mine, found = ask(ours, names, folders[1]), ask(theirs, names, folders[1])
    for name in names:
        for key, value in found["results"][name].items():
            assert mine["results"][name][key] == value or "perplexity_stderr" in key
    assert ours.generate_until(generation(*PROMPTS)) == theirs.generate_until(generation(*PROMPTS))
    assert ours.loglikelihood_rolling(rolling(*PROMPTS)) == theirs.loglikelihood_rolling(rolling(*PROMPTS))


def test_pages_are_read_whole_or_in_windows() -> None:
    model, words = small_titans("mac"), byte_tokenizer()
    page = "a page of some length and of many words, no two of which are quite alike, as pages mostly are: "
    pages = [page, "short", "one more — naïve"]
    whole = TitansLM(model, words, batch_size=2).loglikelihood_rolling(rolling(*pages))
    for page, found in zip(pages, whole, strict=True):
        ids = torch.tensor([[BOS, *page.encode()]])
        with torch.no_grad():
            chances = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        assert found == pytest.approx(float(chances.gather(1, ids[0, 1:, None]).sum()), rel=1e-5)
    windows = TitansLM(model, words, max_length=16, batch_size=2)
    theirs = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=2, max_length=16)
    found = windows.loglikelihood_rolling(rolling(*pages))
    assert found == theirs.loglikelihood_rolling(rolling(*pages)), "its tokenizer puts no <bos>, lm-eval does"
    assert found[0] != pytest.approx(whole[0], rel=1e-3), "a window knows nothing of the one before"
    assert found[1] == pytest.approx(whole[1], rel=1e-5)
    assert windows.bos is True


def test_a_long_prompt_is_read_from_its_start() -> None:
    """Our models have no limit, so nothing is cut at the 2048 tokens that lm-eval assumes."""
    model, words = small_titans("lmm"), byte_tokenizer()
    text = "far back " + "and on " * 320
    found = TitansLM(model, words).loglikelihood(requests("loglikelihood", [(text, " end")]))[0][0]
    ids = torch.tensor([[BOS, *f"{text} end".encode()]])
    assert ids.shape[1] > 2100
    with torch.no_grad():
        chances = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
    places = ids.shape[1] - 1 - torch.arange(4, 0, -1)
    # the space at the end of the prompt moves to the continuation
    places = torch.cat([places[:1] - 1, places])
    assert found == pytest.approx(float(chances[places].gather(1, ids[0, places + 1, None]).sum()), rel=1e-9)


def test_scores_are_taken_out_of_what_lm_eval_returns(folders: tuple[Path, Path]) -> None:
    model = TitansLM(small_llama(), word_tokenizer(), batch_size=4)
    found = ask(model, ["file_arc_easy", "file_lambada_openai"], folders[1], limit=7)
    scores = harness_scores(found)
    easy, words = scores["file_arc_easy"], scores["file_lambada_openai"]
    assert list(easy["metrics"]) == ["acc", "acc_norm"]
    assert easy["metrics"]["acc"]["value"] == found["results"]["file_arc_easy"]["acc,none"]
    assert easy["metrics"]["acc"]["stderr"] == found["results"]["file_arc_easy"]["acc_stderr,none"]
    assert (easy["items"], words["items"]) == (7, 7)
    here = guessing([(len(one["choices"]), one["gold"]) for one in read_items("arc_easy", folders[0], 7)])
    assert {name: easy[name] for name in here} == pytest.approx(here)
    assert (words["chance"], words["majority"]) == (None, None)
    results = {"r": {"alias": "r", "1024,none": 0.5, "4096,none": -1, "1024_stderr,none": "N/A", "acc,strict": 1.0}}
    told = harness_scores({"results": results, "n-samples": {}, "versions": {}, "n-shot": {}})["r"]
    assert told["metrics"] == {
        "1024": {"value": 0.5, "stderr": None},
        "acc (strict)": {"value": 1.0, "stderr": None},
    }
    assert told["items"] is None


def test_tasks_that_cannot_be_asked_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))  # those are thousands
    config = (SOURCES["piqa"].read_text()).replace("task: piqa", "task: file_piqa").replace("baber", "nobody-at-all")
    (tmp_path / "piqa.yaml").write_text(config)
    model = TitansLM(small_llama(), word_tokenizer())
    with pytest.raises(ValueError, match=r"got the task 'file_pica'.*did you mean 'file_piqa'"):
        run_tasks(model, ["file_piqa", "file_pica"], include_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"the data of file_piqa cannot be had: .*--local scores files"):
        run_tasks(model, ["file_piqa"], include_path=str(tmp_path), limit=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": "auto"}, "got batch_size='auto'; expected a number of rows"),
        ({"batch_size": 0}, "got batch_size=0"),
        ({"max_length": 1}, "got max_length=1"),
        ({"bos": "always"}, "got bos='always'"),
        ({"tokenizer": None}, "without a tokenizer"),
        ({"pretrained": "/nowhere", "tokenizer": None}, "'/nowhere', which does not exist"),
    ],
)
def test_mistakes_are_told(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TitansLM(**{"pretrained": small_llama(), "tokenizer": word_tokenizer(), **change})


def test_lm_eval_is_not_loaded_before_it_is_asked(tmp_path: Path) -> None:
    """In a process that has loaded neither: neither the command line nor the module of the command loads it."""
    code = "import sys; mine = 'titans_lm.experiments.lm_eval'; assert mine not in sys.modules; "
    code += "import titans_lm.cli; __import__(mine); assert 'lm_eval' not in sys.modules"
    said_by(code, tmp_path / "said")
