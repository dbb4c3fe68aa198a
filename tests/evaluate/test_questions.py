"""Questions from files: scores by hand, those of lm-eval's own tasks to the last digit, choices read apart."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from model_cases import STACKS
from question_cases import (
    SOURCES,
    answers_in,
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
from titans_lm.lm_eval import TitansLM, harness_scores, run_local
from titans_lm.questions import (
    TASKS,
    check_local_tasks,
    guessing,
    local_tasks,
    longest_input,
    read_items,
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
    ours, different = TitansLM(model, words, batch_size=4), set()
    for name in SOURCES:
        found = ask(asked, [f"file_{name}"], tasks, limit=limit)
        mine = run_local(ours, name, local, limit)
        assert answers_in(mine, name) == answers_in(found, f"file_{name}"), "every sum, bit by bit"
        score, told = harness_scores(mine)[name], found["results"][f"file_{name}"]
        assert set(score["metrics"]) == {key.partition(",")[0] for key in told if key.endswith(",none")} - {
            key.partition(",")[0] for key in told if "_stderr" in key
        }
        for metric, value in score["metrics"].items():
            assert value["value"] == pytest.approx(told[f"{metric},none"], rel=1e-15)
            different.add(value["value"])
            if metric != "perplexity":  # lm-eval finds that one's error by drawing
                assert value["stderr"] == pytest.approx(told[f"{metric}_stderr,none"], rel=1e-12)
        assert score["items"] == found["n-samples"][f"file_{name}"]["effective"]
    assert ours.cut == 0
    assert len(different) > 3, "a test of models that all score the same could not fail"


def test_they_are_all_read_as_lm_eval_reads_them_at_once(folders: tuple[Path, Path]) -> None:
    """In one call lm-eval mixes tasks in its batches: sums then differ by rounding, scores by nothing."""
    local, tasks = folders
    model, words, _ = model_and_words("llama with <bos>")
    asked = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=5)
    found = ask(asked, [f"file_{name}" for name in SOURCES], tasks)
    for name in SOURCES:
        mine = run_local(TitansLM(model, words, batch_size=2), name, local)
        theirs = [total for total, _ in answers_in(found, f"file_{name}")]
        assert [total for total, _ in answers_in(mine, name)] == pytest.approx(theirs, rel=1e-12)
        for metric, value in harness_scores(mine)[name]["metrics"].items():
            assert value["value"] == pytest.approx(found["results"][f"file_{name}"][f"{metric},none"], rel=1e-12)


def test_long_prompts_lose_their_beginning_as_in_lm_eval(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    local, tasks = folders
    model, words, _ = model_and_words("llama with <bos>")
    asked = HFLM(pretrained=model, tokenizer=words, backend="causal", batch_size=4, max_length=12)
    theirs = answers_in(ask(asked, ["file_boolq"], tasks), "file_boolq")
    caplog.clear()
    ours = TitansLM(model, words, batch_size=4, max_length=12)
    mine = answers_in(run_local(ours, "boolq", local), "boolq")
    assert mine == theirs
    assert ours.cut == len(mine) == 18
    assert caplog.messages == ["18 prompts are too long for the model and lose their beginning"]
    assert mine != answers_in(run_local(TitansLM(model, words, batch_size=4), "boolq", local), "boolq")
    with pytest.raises(ValueError, match=r"continuation of \d+ tokens with max_length=2 "):
        run_local(TitansLM(model, words, max_length=2), "piqa", local)


def scored(model: TitansLM, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Ask of pairs of tokens."""
    return model._loglikelihood_tokens([(("", ""), *pair) for pair in pairs], disable_tqdm=True)


@pytest.mark.parametrize("architecture", STACKS)
def test_a_batch_scores_what_single_rows_do(architecture: str) -> None:
    """Rows of different lengths, across chunks and segments: padding and other rows leave no trace."""
    model = small_titans(architecture)
    pairs = [([BOS, *b"a context of some length"[: 3 + 7 * i]], [*b" and more"[: 2 + i]]) for i in range(4)]
    alone = [scored(TitansLM(model, byte_tokenizer()), [pair])[0] for pair in pairs]
    together = scored(TitansLM(model, byte_tokenizer(), batch_size=4), pairs)
    for one, other, pair in zip(alone, together, pairs, strict=True):
        ids = torch.tensor([pair[0] + pair[1]])
        chances = torch.log_softmax(model(input_ids=ids).logits[0].detach(), -1)  # by hand: one row, nothing else
        places = range(len(pair[0]), ids.shape[1])
        expected = sum(float(chances[place - 1, ids[0, place]]) for place in places)
        assert one[0] == pytest.approx(expected, rel=1e-10)
        assert other[0] == pytest.approx(expected, rel=1e-10)
        assert one[1] == other[1]


def test_inputs_that_are_the_same_are_read_once() -> None:
    model, rows = small_llama(), []
    model.register_forward_pre_hook(lambda _, args, given: rows.extend(given["input_ids"].tolist()), with_kwargs=True)
    pairs = [([1, 2], [3]), ([1, 2], [4]), ([3], [0])]
    found = scored(TitansLM(model, word_tokenizer()), pairs)
    assert rows == [[1, 2], [3]]
    pairs += [([1, 2], [3]), ([1], [2, 0])]  # the same input, and a longer continuation
    found += scored(TitansLM(model, word_tokenizer()), pairs[3:])
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        chances = torch.log_softmax(model(input_ids=torch.tensor([context + continuation])).logits[0].detach(), -1)
        chances = chances[len(context) - 1 : -1]
        wanted = torch.tensor(continuation)
        assert total == pytest.approx(float(chances.gather(1, wanted[:, None]).sum()), rel=1e-10)
        assert greedy == bool((chances.argmax(-1) == wanted).all())


def test_low_precision_is_summed_in_float32() -> None:
    model = small_llama().float()
    pair = [0, *range(40, 60)], [*range(60, 75)]
    exact, model = scored(TitansLM(model, word_tokenizer()), [pair])[0][0], model.bfloat16()
    ids = torch.tensor([[*pair[0], *pair[1][:-1]]])
    logits = model(input_ids=ids).logits[0, 20:35].detach()
    wanted = torch.tensor(pair[1])[:, None]
    careless = torch.log_softmax(logits, -1).gather(1, wanted).sum()
    careful = torch.log_softmax(logits.float(), -1).gather(1, wanted).sum()
    found = scored(TitansLM(model, word_tokenizer()), [pair])[0][0]
    assert found == pytest.approx(float(careful), rel=1e-5)
    assert abs(float(careless) - float(careful)) > 1e-3 * abs(float(careful)), "else nothing is tested"
    assert found == pytest.approx(exact, rel=0.05)


def test_pairs_are_cut_where_the_context_ends() -> None:
    words = word_tokenizer(begins=False)
    asked, seen = TitansLM(small_llama(), words), []
    asked._model_call = lambda ids, **_: seen.append(ids.tolist()) or torch.zeros(*ids.shape, len(words))
    context, continuation = asked._encode_pair("the cat", " sat")
    assert context + continuation == words.encode("the cat sat")
    assert asked._encode_pair("the cat ", "sat") == (context, continuation), "the space belongs to the word"
    assert TitansLM(small_llama(), words, bos="yes")._encode_pair("the cat", " sat") == ([0, *context], continuation)
    asked.loglikelihood(pairs_of(("", "sat")), disable_tqdm=True)
    assert seen == [[[0, *words.encode("sat")][:-1]]]
    with pytest.raises(ValueError, match=r"got a continuation of 0 tokens .* expected 1 token at least of each"):
        asked.loglikelihood(pairs_of(("the cat", "")), disable_tqdm=True)
    with pytest.raises(ValueError, match="without <bos> and <eos>"):
        TitansLM(small_titans("lmm"), byte_words_without_marks()).loglikelihood(pairs_of(("", "x")))
    bare = TitansLM(small_titans("lmm"), byte_words_without_marks()).loglikelihood(pairs_of(("ab", "c")))
    assert bare == TitansLM(small_titans("lmm"), byte_tokenizer(), bos="no").loglikelihood(pairs_of(("ab", "c")))


def pairs_of(*pairs: tuple[str, str]) -> list[Instance]:
    return [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]


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


def answered(folder: Path, name: str, sums: list[tuple[float, bool]]) -> dict[str, Any]:
    """Scores of a task whose choices have the sums given, in order."""
    asked = TitansLM(small_llama(), word_tokenizer())
    asked.loglikelihood = lambda requests: sums
    return harness_scores(run_local(asked, name, folder))[name]


def test_a_place_that_is_always_right_is_no_answer_to_give() -> None:
    """Choices are scored one by one: a model does not see where they stand."""
    assert guessing([(2, 0)] * 5) == {"chance": 0.5, "majority": None}
    assert guessing([(2, 0), (2, 1), (2, 1)]) == {"chance": 0.5, "majority": pytest.approx(2 / 3)}


def test_tasks_that_count_in_another_way_have_no_chance() -> None:
    seen = [{"doc_id": 0, "arguments": [1, 2], "target": 0}, {"doc_id": 1, "arguments": [1, 2], "target": 1}]
    config: dict[str, Any] = {"output_type": "multiple_choice"}
    found: dict[str, Any] = {
        "results": {"t": {"acc,none": 0.5}}, "samples": {"t": seen}, "configs": {"t": config},
        "n-samples": {}, "versions": {}, "n-shot": {},
    }  # fmt: skip
    assert harness_scores(found)["t"]["chance"] == 0.5
    config["process_results"] = "def process_results(doc, results): ..."
    assert harness_scores(found)["t"]["chance"] is None


def test_scores_by_hand(tmp_path: Path) -> None:
    two = {"query": "q", "choices": ["a", "b b b b b "], "gold": 0}
    write_items(tmp_path, "piqa", two, two, {"query": "q", "choices": ["a", "b", "c", "d"], "gold": 1})
    sums = [-3.0, -4.0, -5.0, -4.0, -1.0, -1.0, -2.0, -3.0]
    score = answered(tmp_path, "piqa", [(x, False) for x in sums])
    assert score["metrics"]["acc"] == {"value": pytest.approx(1 / 3), "stderr": pytest.approx(1 / 3)}
    assert score["metrics"]["acc_norm"]["value"] == 0.0, "divided by characters the longer ones win"
    assert (score["items"], score["chance"], score["majority"]) == (3, pytest.approx((0.5 + 0.5 + 0.25) / 3), 2 / 3)
    options = {"context_options": ["so Ann", "so Robert"], "continuation": "left."}
    write_items(tmp_path, "winogrande", *({**options, "gold": gold} for gold in (0, 1, 1)))
    score = answered(tmp_path, "winogrande", [(-x, False) for x in (1.0, 2.0) * 3])
    assert score["metrics"] == {"acc": {"value": pytest.approx(1 / 3), "stderr": pytest.approx(1 / 3)}}
    assert (score["chance"], score["majority"]) == (0.5, 2 / 3)
    write_items(tmp_path, "lambada_openai", *[{"context": "c", "continuation": "w"}] * 2)
    score = answered(tmp_path, "lambada_openai", [(-1.0, True), (-3.0, False)])
    assert score["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(2.0))
    assert score["metrics"]["perplexity"]["stderr"] == pytest.approx(math.exp(2.0))
    assert score["metrics"]["acc"]["value"] == 0.5
    assert (score["chance"], score["majority"]) == (None, None)
    endless = answered(tmp_path, "lambada_openai", [(-2000.0, False)] * 2)
    assert endless["metrics"]["perplexity"]["value"] == math.inf
    write_items(tmp_path, "lambada_openai", {"context": "c", "continuation": "w"})
    alone = answered(tmp_path, "lambada_openai", [(-0.25, False)])["metrics"]
    assert alone["acc"] == {"value": 0.0, "stderr": None}
    assert alone["perplexity"] == {"value": pytest.approx(math.exp(0.25)), "stderr": None}


def write_items(folder: Path, name: str, *items: dict[str, Any]) -> None:
    lines = [json.dumps(item) + "\n\n" for item in items]
    (folder / f"{TASKS[name].file}.jsonl").write_text("".join(lines), encoding="utf-8")


def test_prompts_are_made_of_the_file(tmp_path: Path) -> None:
    write_items(tmp_path, "piqa", {"query": "Question: goal\n", "choices": ["x", "yy"], "gold": 1})
    write_items(tmp_path, "boolq", {"query": "Passage: Passage: p\nQuestion: q?", "choices": ["no", "yes"], "gold": 0})
    write_items(
        tmp_path, "winogrande", {"context_options": ["so Ann", "so Robert"], "continuation": "left.", "gold": 0}
    )
    write_items(tmp_path, "siqa_2_letters", {"query": "…\nAnswer:", "choices": ["A", "B"], "gold": 1})
    write_items(tmp_path, "openbookqa", {"query": " 7 ", "choices": ["[1]", "2"], "gold": 1})
    write_items(tmp_path, "lambada_openai", {"context": "{{x}}\n", "continuation": "[1]"})
    names = ("lambada_openai", "piqa", "winogrande", "boolq", "openbookqa", "siqa_2_letters")
    assert local_tasks(tmp_path) == names
    prompt = "Question: goal\nAnswer:"
    expected = (
        [("{{x}}\n", " [1]")],
        [(prompt, " x"), (prompt, " yy")],
        [("so Ann", " left."), ("so Robert", " left.")],
        [("Passage: p\nQuestion: q?\nAnswer:", " no"), ("Passage: p\nQuestion: q?\nAnswer:", " yes")],
        [(" 7 ", " [1]"), (" 7 ", " 2")],
        [("…\nAnswer:", " A"), ("…\nAnswer:", " B")],
    )
    for name, pairs in zip(names, expected, strict=True):
        assert [sample["arguments"] for sample in samples_of(name, tmp_path)] == [pairs]
    assert check_local_tasks(["boolq", "piqa", "boolq"], tmp_path) == ("boolq", "piqa")
    assert "not SIQA" in TASKS["siqa_2_letters"].note


def of_any_size(requests: list[Any]) -> list[tuple[float, bool]]:
    return [(-float(i * 31 % 17), i % 3 == 0) for i in range(len(requests))]


def samples_of(name: str, folder: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """What a model is asked of a file, with answers of any size."""
    asked = TitansLM(small_llama(), word_tokenizer())
    asked.loglikelihood = of_any_size
    return run_local(asked, name, folder, limit)["samples"][name]


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
        '{"query": "q", "choices": ["a", ""], "gold": 0}',
        '{"context_options": ["a", "b"], "continuation": "c", "gold": 0}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_item_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text(f'{{"query": "q", "choices": ["a", "b"], "gold": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*piqa\.jsonl, which is no item"):
        read_items("piqa", tmp_path)
    assert len(read_items("piqa", tmp_path, limit=1)) == 1
    (tmp_path / "lambada_openai.jsonl").write_text(line)
    with pytest.raises(ValueError, match="which is no item"):
        read_items("lambada_openai", tmp_path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no item"):
        read_items("piqa", tmp_path)
    with pytest.raises(ValueError, match="which is no folder"):
        local_tasks(tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected some of .*piqa.jsonl"):
        local_tasks(Path(sys.prefix))


def test_the_real_files_are_read_whole(data_dir: Path) -> None:
    folder = data_dir / "lm_eval_local"
    counts = {name: len(read_items(name, folder)) for name in local_tasks(folder)}
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
    asked.loglikelihood = of_any_size
    for name in SOURCES:
        theirs = ask(asked, [f"file_{name}"], tasks)["samples"][f"file_{name}"]
        mine = samples_of(name, folder, 40)
        assert [sample["arguments"] for sample in mine] == [sample["arguments"] for sample in theirs]
        assert [sample["acc"] for sample in mine] == [sample["acc"] for sample in theirs]
        assert 0 < sum(sample["acc"] for sample in mine) < 40, "else it says nothing of which one is right"
