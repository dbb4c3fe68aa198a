"""Questions from files: scores by hand, those of lm-eval to the last digit, and choices that never see each other."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from model_cases import STACKS
from question_cases import (
    SOURCES,
    ask,
    beginning_bytes,
    in_their_fields,
    small_llama,
    small_titans,
    word_tokenizer,
    write_questions,
    write_tasks,
)
from titans_lm.data.tokenizer import BOS, byte_tokenizer
from titans_lm.questions import (
    TASKS,
    Likelihood,
    Pair,
    Question,
    answer_questions,
    check_local_tasks,
    encode_pair,
    local_tasks,
    log_likelihoods,
    longest_input,
    mean_with_error,
    read_questions,
    score_questions,
    starts_with_bos,
)
from titans_lm.train.checkpoint import save_model
from titans_lm.train.run import RunFolder, load_model, load_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where our files lie, and the folder of lm-eval's tasks over the same items."""
    folder = tmp_path_factory.mktemp("questions")
    write_questions(folder)
    return folder / "local", write_tasks(folder / "tasks", folder / "theirs", folder / "cache")


def model_and_words(kind: str) -> tuple[Any, Any, Any]:
    """A model, its tokenizer, and one that begins texts by itself as ours are begun: what lm-eval's own class needs."""
    if kind == "ours":
        return small_titans("lmm"), byte_tokenizer(), beginning_bytes()
    words = word_tokenizer(begins=kind == "llama with <bos>")
    return small_llama(), words, words


@pytest.mark.parametrize("kind", ["llama with <bos>", "llama", "ours"])
def test_scores_are_those_of_lm_eval_to_the_last_digit(folders: tuple[Path, Path], kind: str) -> None:
    """Its own class for Hugging Face models, its own prompts, its own arithmetic, on the same items and model."""
    local, tasks = folders
    model, words, their_words = model_and_words(kind)
    limit = 5 if kind == "ours" else None  # bytes are many
    length = 512 if kind == "ours" else longest_input(model, words)
    asked = HFLM(pretrained=model, tokenizer=their_words, backend="causal", batch_size=4, max_length=length)
    different = set()
    for name in SOURCES:
        found = ask(asked, [f"file_{name}"], tasks, limit=limit)
        theirs = [tuple(answer[0]) for sample in found["samples"][f"file_{name}"] for answer in sample["resps"]]
        questions = read_questions(name, local, limit)
        mine, cut = answer_questions(model, words, questions, batch_size=4)
        assert (mine, cut) == (theirs, 0), "every sum, bit by bit"
        score, told = score_questions(name, questions, mine), found["results"][f"file_{name}"]
        assert set(score["metrics"]) == {key.partition(",")[0] for key in told if key.endswith(",none")} - {
            key.partition(",")[0] for key in told if "_stderr" in key
        }
        for metric, ours in score["metrics"].items():
            assert ours["value"] == told[f"{metric},none"]
            different.add(ours["value"])
            if metric != "perplexity":  # lm-eval finds that one's error by drawing
                assert ours["stderr"] == pytest.approx(told[f"{metric}_stderr,none"], rel=1e-12)
        assert score["items"] == found["n-samples"][f"file_{name}"]["effective"]
    assert len(different) > 3, "a test of models that all score the same could not fail"


def test_they_are_all_read_as_lm_eval_reads_them_at_once(folders: tuple[Path, Path]) -> None:
    """In one call lm-eval mixes tasks in its batches: sums then differ by rounding, scores by nothing."""
    local, tasks = folders
    model, words, _ = model_and_words("llama with <bos>")
    asked = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=5)
    found = ask(asked, [f"file_{name}" for name in SOURCES], tasks)
    for name in SOURCES:
        questions = read_questions(name, local)
        mine, _ = answer_questions(model, words, questions, batch_size=2)
        theirs = [answer[0][0] for sample in found["samples"][f"file_{name}"] for answer in sample["resps"]]
        assert [each.log_probability for each in mine] == pytest.approx(theirs, rel=1e-12)
        for metric, ours in score_questions(name, questions, mine)["metrics"].items():
            assert ours["value"] == pytest.approx(found["results"][f"file_{name}"][f"{metric},none"], rel=1e-12)


def test_long_prompts_lose_their_beginning_as_in_lm_eval(folders: tuple[Path, Path]) -> None:
    local, tasks = folders
    model, words, _ = model_and_words("llama with <bos>")
    asked = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=4, max_length=12)
    theirs = ask(asked, ["file_boolq"], tasks)["samples"]["file_boolq"]
    questions = read_questions("boolq", local)
    mine, cut = answer_questions(model, words, questions, batch_size=4, max_length=12)
    assert mine == [tuple(answer[0]) for sample in theirs for answer in sample["resps"]]
    assert cut == len(mine) == 18
    assert mine != answer_questions(model, words, questions, batch_size=4)[0]
    with pytest.raises(ValueError, match=r"continuation of \d+ tokens with max_length=2"):
        answer_questions(model, words, read_questions("piqa", local), max_length=2)


@pytest.mark.parametrize("architecture", STACKS)
def test_a_batch_scores_what_single_rows_do(architecture: str) -> None:
    """Rows of different lengths, across chunks and segments: padding and other rows leave no trace."""
    model = small_titans(architecture)
    pairs = [Pair([BOS, *b"a context of some length"[: 3 + 7 * i]], [*b" and more"[: 2 + i]]) for i in range(4)]
    alone = [log_likelihoods(model, [pair])[0] for pair in pairs]
    together = log_likelihoods(model, pairs, batch_size=4)
    for one, other, pair in zip(alone, together, pairs, strict=True):
        ids = torch.tensor([pair.context + pair.continuation])
        chances = torch.log_softmax(model(input_ids=ids).logits[0].detach(), -1)  # by hand: one row, nothing else
        places = range(len(pair.context), ids.shape[1])
        expected = sum(float(chances[place - 1, ids[0, place]]) for place in places)
        assert one.log_probability == pytest.approx(expected, rel=1e-10)
        assert other.log_probability == pytest.approx(expected, rel=1e-10)
        assert one.greedy == other.greedy


def test_inputs_that_are_the_same_are_read_once() -> None:
    rows = []

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(5))

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            rows.extend(input_ids.tolist())
            return SimpleNamespace(logits=(input_ids[..., None] + torch.arange(5.0)) * (self.weight + 1.0))

    said: list[int] = []
    pairs = [Pair([1, 2], [3]), Pair([1, 2], [4]), Pair([1], [2, 0]), Pair([3], [0])]
    found = log_likelihoods(Counting(), pairs, batch_size=1, done=said.append)
    assert rows == [[1, 2], [3]]
    assert said == [3, 4]
    last = torch.log_softmax(torch.arange(5.0), 0)
    expected = [last[3], last[4], last[2] + last[0], last[0]]
    assert [each.log_probability for each in found] == pytest.approx([float(x) for x in expected], rel=1e-6)
    assert [each.greedy for each in found] == [False, True, False, False]


def test_low_precision_is_summed_in_float32() -> None:
    model = small_llama().float()
    pairs = [Pair([0, *range(40, 60)], [*range(60, 75)])]
    exact, model = log_likelihoods(model, pairs)[0], model.bfloat16()
    ids = torch.tensor([[*pairs[0].context, *pairs[0].continuation[:-1]]])
    logits = model(input_ids=ids).logits[0, 20:35].detach()
    wanted = torch.tensor(pairs[0].continuation)[:, None]
    careless = torch.log_softmax(logits, -1).gather(1, wanted).sum()
    careful = torch.log_softmax(logits.float(), -1).gather(1, wanted).sum()
    found = log_likelihoods(model, pairs)[0].log_probability
    assert found == pytest.approx(float(careful), rel=1e-5)
    assert abs(float(careless) - float(careful)) > 1e-3 * abs(float(careful)), "else nothing is tested"
    assert found == pytest.approx(exact.log_probability, rel=0.05)


def test_pairs_are_cut_where_the_context_ends() -> None:
    words = word_tokenizer(begins=False)
    joined = words.encode("the cat sat")
    context, continuation = encode_pair(words, "the cat", " sat")
    assert context + continuation == joined
    assert encode_pair(words, "the cat ", "sat") == (context, continuation), "the space belongs to the word"
    assert encode_pair(words, "the cat", " sat", True) == ([0, *context], continuation)
    assert encode_pair(words, "", "sat") == ([0], words.encode("sat"))
    with pytest.raises(ValueError, match="adds no token"):
        encode_pair(words, "the cat", "")
    with pytest.raises(ValueError, match="without <bos> and <eos>"):
        encode_pair(byte_words_without_marks(), "", "x")


def byte_words_without_marks() -> Any:
    words = byte_tokenizer()
    words.bos_token = words.eos_token = None
    return words


def test_a_baseline_of_a_run_begins_as_ours_do(tmp_path: Path) -> None:
    """Its tokenizer may be anybody's: the folder says where it was trained."""
    run = RunFolder.create(tmp_path / "run", {}, word_tokenizer())
    finished, checkpoint = run.finish(3, small_llama()), run.save(3, small_llama(), {"format": 1}, keep=1)
    save_model(tmp_path / "elsewhere", small_llama(), word_tokenizer())
    for folder, begins in ((finished, True), (checkpoint, True), (tmp_path / "elsewhere", None)):
        assert starts_with_bos(load_model(folder, "cpu"), load_tokenizer(folder)) is begins


def test_how_texts_begin_and_how_long_they_may_be() -> None:
    llama, ours = small_llama(), small_titans("lmm")
    assert starts_with_bos(ours, word_tokenizer()) is True, "ours by its type"
    assert starts_with_bos(llama, byte_tokenizer()) is True, "a baseline of ours by its bytes"
    assert starts_with_bos(llama, word_tokenizer()) is None
    assert starts_with_bos(ours, byte_words_without_marks()) is None
    assert [starts_with_bos(ours, byte_tokenizer(), how) for how in ("yes", "no", "tokenizer")] == [True, False, None]
    with pytest.raises(ValueError, match="got bos='on'"):
        starts_with_bos(ours, byte_tokenizer(), "on")
    assert longest_input(ours, byte_tokenizer()) is None
    for model, words in ((llama, word_tokenizer()), (small_llama(), byte_tokenizer())):
        assert (
            longest_input(model, words) == HFLM(pretrained=model, tokenizer=words, backend="causal").max_length == 256
        )
    words = word_tokenizer()
    unlimited = torch.nn.Identity()
    unlimited.config = SimpleNamespace(get_text_config=lambda decoder: None)
    assert longest_input(unlimited, words) == 2048
    words.model_max_length = 77
    assert longest_input(unlimited, words) == 77


def test_scores_by_hand() -> None:
    questions = [
        Question((("q", " a"), ("q", " b b b")), (1, 10), 0),
        Question((("q", " a"), ("q", " b b b")), (1, 10), 0),
        Question((("q", " a"), ("q", " b"), ("q", " c"), ("q", " d")), (1, 1, 1, 1), 1),
    ]
    sums = [-3.0, -4.0, -5.0, -4.0, -1.0, -1.0, -2.0, -3.0]
    score = score_questions("piqa", questions, [Likelihood(x, False) for x in sums])
    assert score["metrics"]["acc"] == {"value": pytest.approx(1 / 3), "stderr": pytest.approx(1 / 3)}
    assert score["metrics"]["acc_norm"]["value"] == 0.0, "divided by characters the longer ones win"
    assert (score["items"], score["chance"], score["majority"]) == (3, pytest.approx((0.5 + 0.5 + 0.25) / 3), 2 / 3)
    written = [Question((("c", " w"),), (1,), 0)] * 2
    score = score_questions("lambada_openai", written, [Likelihood(-1.0, True), Likelihood(-3.0, False)])
    assert score["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(2.0))
    assert score["metrics"]["perplexity"]["stderr"] == pytest.approx(math.exp(2.0))
    assert score["metrics"]["acc"]["value"] == 0.5
    assert (score["chance"], score["majority"]) == (None, None)
    endless = score_questions("lambada_openai", written, [Likelihood(-2000.0, False)] * 2)
    assert endless["metrics"]["perplexity"]["value"] == math.inf
    assert mean_with_error([0.25]) == {"value": 0.25, "stderr": None}


def test_prompts_are_made_of_the_file(tmp_path: Path) -> None:
    items = {
        "piqa": {"query": "Question: goal\n", "choices": ["x", "yy"], "gold": 1},
        "boolq": {"query": "Passage: Passage: p\nQuestion: q?", "choices": ["no", "yes"], "gold": 0},
        "winogrande": {"context_options": ["so Ann", "so Robert"], "continuation": "left.", "gold": 0},
        "siqa": {"query": "…\nAnswer:", "choices": ["A", "B"], "gold": 1},
    }
    for name, item in items.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(item) + "\n\n", encoding="utf-8")
    assert local_tasks(tmp_path) == ("piqa", "winogrande", "boolq", "siqa_2_letters")
    [found] = read_questions("piqa", tmp_path)
    prompt = "Question: goal\nAnswer:"
    assert found == Question(((prompt, " x"), (prompt, " yy")), (1, 2), 1)
    assert read_questions("boolq", tmp_path)[0].pairs[1] == ("Passage: p\nQuestion: q?\nAnswer:", " yes")
    assert read_questions("winogrande", tmp_path)[0].pairs == (("so Ann", " left."), ("so Robert", " left."))
    assert check_local_tasks(["boolq", "piqa", "boolq"], tmp_path) == ("boolq", "piqa")
    assert "not SIQA" in TASKS["siqa_2_letters"].note


MISTAKES = {
    "social_iqa": "'siqa_2_letters' here .*not SIQA",
    "siqa": "'siqa_2_letters' here .*not SIQA",
    "openbook_qa": "is 'openbookqa' here",
    "hellaswag": "got the task 'hellaswag'; expected one of piqa",
    "piqua": "did you mean 'piqa'",
    "arc_easy": "holds no arc_easy.jsonl",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_task_that_is_not_there_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "piqa.jsonl").write_text('{"query": "q", "choices": ["a", "b"], "gold": 0}\n')
    with pytest.raises(ValueError, match=MISTAKES[name]):
        check_local_tasks([name], tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "{", '{"query": "q"}', '{"query": "q", "choices": ["a"], "gold": 1}', "[]", "3",
        '{"query": "q", "choices": ["a", "b"], "gold": true}',
        '{"query": "q", "choices": "AB", "gold": 0}', '{"query": "q", "choices": [["x"], ["y"]], "gold": 0}',
        '{"query": null, "choices": ["a", "b"], "gold": 0}', '{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}',
        '{"context": 5, "continuation": "x"}', '{"context": "c", "continuation": ["x"]}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_item_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text(f'{{"query": "q", "choices": ["a", "b"], "gold": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*piqa\.jsonl, which is no item"):
        read_questions("piqa", tmp_path)
    assert len(read_questions("piqa", tmp_path, limit=1)) == 1
    (tmp_path / "lambada_openai.jsonl").write_text(line)
    with pytest.raises(ValueError, match="which is no item"):
        read_questions("lambada_openai", tmp_path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no item"):
        read_questions("piqa", tmp_path)
    with pytest.raises(ValueError, match="which is no folder"):
        local_tasks(tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected some of .*piqa.jsonl"):
        local_tasks(Path(sys.prefix))


def test_the_real_files_are_read_whole(data_dir: Path) -> None:
    folder = data_dir / "lm_eval_local"
    counts = {name: len(read_questions(name, folder)) for name in local_tasks(folder)}
    assert counts["lambada_openai"] == 5153
    assert [counts[name] for name in ("piqa", "winogrande", "arc_easy", "arc_challenge", "boolq")] == [
        1838, 1267, 2376, 1172, 3270,
    ]  # fmt: skip
    assert {name for name in counts if "letters" in name} == {"siqa_2_letters", "commonsense_qa_4_letters"}


def test_real_prompts_are_those_of_lm_eval(data_dir: Path, tmp_path: Path) -> None:
    """Its own tasks make the prompts of the first items from their parts; ours come from the files as they are."""
    folder = data_dir / "lm_eval_local"
    (tmp_path / "theirs").mkdir()
    for name in SOURCES:
        lines = (folder / f"{TASKS[name].file}.jsonl").read_text(encoding="utf-8").split("\n")[:40]
        items = [json.dumps(in_their_fields(name, json.loads(line))) for line in lines]
        (tmp_path / "theirs" / f"{name}.jsonl").write_text("\n".join(items) + "\n")
    tasks = write_tasks(tmp_path / "tasks", tmp_path / "theirs", tmp_path / "cache")
    asked = HFLM(pretrained=small_llama(), tokenizer=word_tokenizer(), backend="causal")
    asked.loglikelihood = lambda requests: [(0.0, False)] * len(requests)
    for name in SOURCES:
        theirs = ask(asked, [f"file_{name}"], tasks)["samples"][f"file_{name}"]
        questions = read_questions(name, folder, 40)
        assert [list(question.pairs) for question in questions] == [sample["arguments"] for sample in theirs]
        if name != "lambada_openai":
            scores = [score_questions(name, [question], _only(question, question.gold)) for question in questions]
            assert all(score["metrics"]["acc"]["value"] == 1.0 for score in scores)


def _only(question: Question, likely: int) -> list[Likelihood]:
    return [Likelihood(-1.0 if place == likely else -9.0, False) for place in range(len(question.pairs))]
