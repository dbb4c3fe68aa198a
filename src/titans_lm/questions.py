"""Commonsense questions from JSON lines on this machine, scored as lm-eval scores them, without lm-eval.

    {"query": …, "choices": […], "gold": 1}                  which choice is likeliest after the query?
    {"context_options": […], "continuation": …, "gold": 0}   after which context is the continuation likeliest?
    {"context": …, "continuation": …}                        is the continuation what the model would write?

    acc           share of the items whose right answer has the largest summed log-probability
    acc_norm      the same after division by the characters of the choice
    perplexity    exp(−mean of the summed log-probabilities): of whole continuations, not of tokens

Contexts and continuations are tokenised together and cut where the context alone would end; spaces at the end of a
context belong to the continuation. Every pair is read from a fresh start: rows of a batch share nothing, and padding
stands on the right, where a causal model's answers do not depend on it. Pairs whose inputs are the same are read once.

Where a file holds lm-eval's items, prompts are lm-eval's to the letter, but for BoolQ, whose passages come without
titles. Where it holds others (two choices of SIQA's three, answered by letters), the task has a name of its own.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from titans_lm.config import check_at_least, check_choice, nearest
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.evaluate.documents import first_token
from titans_lm.evaluate.stream import evaluating, has_state
from titans_lm.train.run import is_of_a_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS: dict[str, bool | None] = {"yes": True, "no": False, "tokenizer": None}
"""How a text may begin: with <bos>, without it, or as the tokenizer begins it by itself."""
LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
"""Where configs say how much a model can read, in the order that lm-eval looks."""
USUAL_LENGTH = 2048
"""What lm-eval takes where nothing says how much a model can read."""
NO_LENGTH = 10**18
"""Tokenizers that know no length name one beyond this."""


class Likelihood(NamedTuple):
    """What a model makes of a continuation."""

    log_probability: float
    """Sum over the tokens, in nats."""
    greedy: bool
    """Whether every token was the likeliest."""


class Pair(NamedTuple):
    """A context and its continuation, as tokens."""

    context: list[int]
    continuation: list[int]


def starts_with_bos(model: nn.Module, tokenizer: "PreTrainedTokenizerBase", bos: str = "auto") -> bool | None:
    """Say whether texts begin with <bos>: True, False, or None where the tokenizer decides.

    "auto" is True for what was trained here, and None elsewhere: documents of `titans train` begin with <bos>, which
    tokenizers seldom add by themselves. A model is known to be from here by its type, by the folder that a run left, or
    by the byte tokenizer.
    """
    check_choice("bos", bos, ("auto", *BOS))
    if bos != "auto":
        return BOS[bos]
    if tokenizer.bos_token_id is None:
        return None
    kind, folder = getattr(getattr(model, "config", None), "model_type", None), getattr(model, "name_or_path", "")
    here = kind == "titans" or (folder and is_of_a_run(Path(folder))) or is_byte_tokenizer(tokenizer)
    return True if here else None


def longest_input(model: nn.Module, tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Tokens that a model can read, as lm-eval finds it; None for a model that has a state and no limit."""
    if has_state(model):
        return None
    config: Any = model.config
    for part in (config.get_text_config(decoder=True), config):
        for name in LENGTHS:
            if isinstance(found := getattr(part, name, None), int):
                return found
    known = tokenizer.model_max_length
    return int(known) if known and known < NO_LENGTH else USUAL_LENGTH


def encode(tokenizer: "PreTrainedTokenizerBase", text: str, bos: bool | None = None) -> list[int]:
    """Turn a text into tokens: with <bos> before them (True), without (False), or as the tokenizer does (None)."""
    if bos is None:
        return tokenizer.encode(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [_begin(tokenizer), *ids] if bos else ids


def encode_pair(tokenizer: "PreTrainedTokenizerBase", context: str, continuation: str, bos: bool | None = None) -> Pair:
    """Turn a context and its continuation into tokens; a context of nothing is <bos>, or <eos> without one.

    ValueError for a continuation that adds no token.
    """
    if not context:
        ids, first = encode(tokenizer, continuation, False), _begin(tokenizer)
        pair = Pair(ids[:1], ids[1:]) if ids[:1] == [first] else Pair([first], ids)
    else:
        kept = context.rstrip()
        whole, start = encode(tokenizer, context + continuation, bos), encode(tokenizer, kept, bos)
        pair = Pair(start, whole[len(start) :])
    if not pair.context or not pair.continuation:
        raise ValueError(f"got the continuation {continuation!r}, which adds no token to {context[-40:]!r}")
    return pair


def log_likelihoods(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Likelihood]:
    """Score every pair, in the order given; of more than `max_length` tokens the first ones are left out.

    Batches are made as lm-eval makes them, the longest first, so that the sums agree with its own bit by bit. `done` is
    told how many pairs are scored. Raises ValueError for a continuation that alone is longer than `max_length`.
    """
    check_at_least("batch_size", batch_size, 1)
    if max_length is not None:
        check_at_least("max_length", max_length, 1)
        longest = max((len(pair.continuation) for pair in pairs), default=0)
        if longest > max_length:
            raise ValueError(f"got a continuation of {longest} tokens with max_length={max_length}; expected no longer")
    asked: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        asked.setdefault((*pair.context, *pair.continuation[:-1]), []).append(index)
    order = sorted(asked, key=lambda ids: (-len(ids), ids))
    found: dict[int, Likelihood] = {}
    with evaluating(model) as device:
        for first in range(0, len(order), batch_size):
            group = order[first : first + batch_size]
            inputs = [torch.tensor(ids if max_length is None else ids[-max_length:]) for ids in group]
            logits = model(input_ids=pad_sequence(inputs, batch_first=True).to(device), use_cache=False).logits
            for ids, read, row in zip(group, inputs, logits, strict=True):
                for index in asked[ids]:
                    targets = pairs[index].continuation
                    found[index] = _add_up(row[len(read) - len(targets) : len(read)], targets)
            done(len(found))
    return [found[index] for index in range(len(pairs))]


def _add_up(logits: Tensor, targets: Sequence[int]) -> Likelihood:
    """Sum the log-probabilities of targets (T) by their logits (T, V), in float32 at least."""
    chances = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    wanted = torch.tensor(targets, device=logits.device)
    total = chances.gather(1, wanted[:, None]).squeeze(1).sum()
    return Likelihood(float(total), bool((chances.argmax(dim=-1) == wanted).all()))


def _begin(tokenizer: "PreTrainedTokenizerBase") -> int:
    first = first_token(tokenizer)
    if first is None:
        raise ValueError("got a tokenizer without <bos> and <eos>; expected one of them to begin a text with")
    return first


@dataclass(frozen=True)
class Question:
    """An item: what is read before what, and which of the pairs is right."""

    pairs: tuple[tuple[str, str], ...]
    """Context and continuation of every choice; one pair where a continuation is to be written."""
    characters: tuple[int, ...]
    """Length of every choice, which acc_norm divides by."""
    gold: int


@dataclass(frozen=True)
class LocalTask:
    """A file of items, and how its prompts are made."""

    file: str
    """Name of the file, without .jsonl."""
    metrics: tuple[str, ...]
    cut: str = ""
    """What is taken off the start of a query."""
    add: str = ""
    """What is put behind a query."""
    note: str = ""
    """How the items differ from lm-eval's."""


BOTH = ("acc", "acc_norm")
TASKS = {
    "lambada_openai": LocalTask("lambada_openai", ("perplexity", "acc")),
    "piqa": LocalTask("piqa", BOTH, add="Answer:"),
    "winogrande": LocalTask("winogrande", ("acc",)),
    "arc_easy": LocalTask("arc_easy", BOTH, add="\nAnswer:"),
    "arc_challenge": LocalTask("arc_challenge", BOTH, add="\nAnswer:"),
    "boolq": LocalTask("boolq", ("acc",), cut="Passage: ", add="\nAnswer:", note="passages without their titles"),
    "openbookqa": LocalTask("openbook_qa", BOTH),
    "wsc273": LocalTask("winograd_wsc", ("acc",)),
    "copa_comma": LocalTask("copa", ("acc",), note="a comma before because and therefore"),
    "commonsense_qa_4_letters": LocalTask("commonsense_qa", ("acc",), note="four of five choices, answered by letters"),
    "siqa_2_letters": LocalTask("siqa", ("acc",), note="two of three choices, answered by letters: not SIQA"),
}
"""The tasks by what they are called here: lm-eval's name where the questions are lm-eval's, and only there."""
RENAMED = {task.file: name for name, task in TASKS.items() if task.file != name} | {"social_iqa": "siqa_2_letters"}
"""Names that one might try, and the task that is there instead."""


def local_tasks(folder: Path) -> tuple[str, ...]:
    """Name the tasks whose files lie in a folder; ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f"got --local {folder}, which is no folder; expected one with files such as piqa.jsonl")
    found = tuple(name for name, task in TASKS.items() if (folder / f"{task.file}.jsonl").is_file())
    if not found:
        files = ", ".join(f"{task.file}.jsonl" for task in TASKS.values())
        raise ValueError(f"got --local {folder}, which holds no file of a task; expected some of {files}")
    return found


def check_local_tasks(names: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the tasks asked for, all that are there if none is named; ValueError for one that is not there."""
    there = local_tasks(folder)
    for name in names:
        if name not in TASKS and name in RENAMED:
            task = TASKS[RENAMED[name]]
            differs = f" ({task.note})" if task.note else ""
            raise ValueError(f"got the task {name!r}; {task.file}.jsonl is {RENAMED[name]!r} here{differs}")
        if name not in TASKS:
            raise ValueError(f"got the task {name!r}; {nearest(name, there)} in {folder}")
        if name not in there:
            raise ValueError(f"got the task {name!r}, but {folder} holds no {TASKS[name].file}.jsonl")
    return tuple(dict.fromkeys(names)) or there


def read_questions(name: str, folder: Path, limit: int | None = None) -> list[Question]:
    """Read the items of a task, or the first `limit`; ValueError for a line that is no item of a known form."""
    if limit is not None:
        check_at_least("limit", limit, 1)
    task, found = TASKS[name], []
    path = folder / f"{task.file}.jsonl"
    try:
        lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)
    except UnicodeDecodeError as error:
        raise ValueError(f"got {path}, which is not UTF-8 at byte {error.start:,}; expected JSON lines") from error
    for number, line in islice(((number, line) for number, line in lines if line.strip()), limit):
        try:
            found.append(_question(task, json.loads(line)))
        except KeyError as error:
            raise ValueError(f"got line {number} of {path}, which is no item: it lacks {error}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"got line {number} of {path}, which is no item: {error}") from error
    if not found:
        raise ValueError(f"got {path}, which holds no item")
    return found


def _question(task: LocalTask, item: Any) -> Question:
    if not isinstance(item, dict):
        raise ValueError(
            f'it is of type {type(item).__name__}, expected an object such as {{"query": …, "choices": […]}}'
        )
    if "perplexity" in task.metrics:  # of a text that is to be written
        context, continuation = _text("context", item["context"]), _text("continuation", item["continuation"])
        return Question(((context, f" {continuation}"),), (len(continuation),), 0)
    if "context_options" in item:
        contexts = _texts("context_options", item["context_options"])
        continuation = _text("continuation", item["continuation"])
        pairs = tuple((context, f" {continuation}") for context in contexts)
        return Question(pairs, tuple(map(len, contexts)), _gold(item, len(contexts)))
    context, choices = _text("query", item["query"]).removeprefix(task.cut), _texts("choices", item["choices"])
    pairs = tuple((context + task.add, f" {choice}") for choice in choices)
    return Question(pairs, tuple(map(len, choices)), _gold(item, len(choices)))


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{name} is {given!r}, expected a text")
    given.encode()  # what is no character is refused
    return given


def _texts(name: str, given: Any) -> list[str]:
    if not isinstance(given, list):
        raise ValueError(f"{name} is {given!r}, expected a list of texts")
    return [_text(name, one) for one in given]


def _gold(item: dict[str, Any], choices: int) -> int:
    gold = item["gold"]
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < choices:
        raise ValueError(f"gold is {gold!r}, expected a number from 0 to {choices - 1}")
    return gold


def answer_questions(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    questions: Sequence[Question],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    bos: str = "auto",
    done: Callable[[int], None] = lambda _: None,
) -> tuple[list[Likelihood], int]:
    """Read every choice of every question from a fresh start.

    Returns what the model makes of each, and how many were longer than it could read and lost their beginning.
    `bos` is what `starts_with_bos` takes, and `max_length` what `longest_input` finds where it is not given. `done` is
    told how many choices are read.
    """
    begin = starts_with_bos(model, tokenizer, bos)
    max_length = longest_input(model, tokenizer) if max_length is None else max_length
    pairs = [encode_pair(tokenizer, *pair, begin) for question in questions for pair in question.pairs]
    cut = sum(max_length is not None and len(p.context) + len(p.continuation) > max_length + 1 for p in pairs)
    return log_likelihoods(model, pairs, batch_size=batch_size, max_length=max_length, done=done), cut


def score_questions(name: str, questions: Sequence[Question], found: Sequence[Likelihood]) -> dict[str, Any]:
    """Turn log-probabilities, one for each pair in order, into the scores of a task.

    Beside each score stands its standard error over items; beside all of them the share of right answers that
    guessing would give, and that of always giving the most frequent answer.
    """
    rest = iter(found)
    items = [(question, [next(rest) for _ in question.pairs]) for question in questions]
    sums = [[each.log_probability for each in given] for _, given in items]
    written = [len(question.pairs) == 1 for question, _ in items]
    right: dict[str, list[float]] = {
        "acc": [
            float(given[0].greedy if alone else _best(row) == question.gold)
            for (question, given), row, alone in zip(items, sums, written, strict=True)
        ],
        "acc_norm": [
            float(_best([x / max(n, 1) for x, n in zip(row, question.characters, strict=True)]) == question.gold)
            for (question, _), row in zip(items, sums, strict=True)
        ],
    }
    metrics = {
        metric: _perplexity([row[0] for row in sums]) if metric == "perplexity" else mean_with_error(right[metric])
        for metric in TASKS[name].metrics
    }
    guesses = guessing([] if all(written) else [(len(question.pairs), question.gold) for question in questions])
    return {"items": len(items), "metrics": metrics, **guesses, "note": TASKS[name].note}


def guessing(items: Sequence[tuple[int, Any]]) -> dict[str, float | None]:
    """Accuracy without a model, by how many choices items have and which is right: none where there are no choices.

    `chance` is that of guessing, `majority` that of always giving the most frequent answer, where all are numbers.
    """
    if not items:
        return {"chance": None, "majority": None}
    chance, golds = sum(1 / choices for choices, _ in items) / len(items), [gold for _, gold in items]
    known = all(isinstance(gold, int) for gold in golds)
    return {"chance": chance, "majority": Counter(golds).most_common(1)[0][1] / len(golds) if known else None}


def mean_with_error(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and its standard error; None where one value says nothing about it."""
    count, mean = len(values), sum(values) / len(values)
    if count < 2:
        return {"value": mean, "stderr": None}
    variance = sum((x - mean) ** 2 for x in values) / (count - 1)
    return {"value": mean, "stderr": math.sqrt(variance) / math.sqrt(count)}


def _perplexity(sums: Sequence[float]) -> dict[str, float | None]:
    """exp(−mean); its error is that of the mean, times the slope of exp there."""
    told = mean_with_error(sums)
    mean, error = told["value"] or 0.0, told["stderr"]
    value = math.exp(-mean) if mean > -700.0 else math.inf
    return {"value": value, "stderr": None if error is None else value * error}


def _best(values: Sequence[float]) -> int:
    """Place of the largest, the first of equals."""
    return max(range(len(values)), key=values.__getitem__)
