"""Files of commonsense questions that lm-eval scores, and how models and tokenizers are read there.

    {"query": …, "choices": […], "gold": 1}                  which choice is likeliest after the query?
    {"context_options": […], "continuation": …, "gold": 0}   after which context is the continuation likeliest?
    {"context": …, "continuation": …}                        is the continuation what the model would write?

Where a file holds lm-eval's items, prompts are lm-eval's to the letter, but for BoolQ, whose passages come without
titles. Where it holds others (two choices of SIQA's three, answered by letters), the task has a name of its own.

Nothing here needs lm-eval: `lm_eval.py` makes tasks of what is read.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from titans_lm.config import check_choice, nearest
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.evaluate.stream import has_state
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
WRITING = ("context", "continuation")
CHOOSING = (("query", "choices", "gold"), ("context_options", "continuation", "gold"))
"""Fields of an item."""


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


def read_items(name: str, folder: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the items of a task, or the first `limit`; ValueError for a line that is no item of the first one's form."""
    path, form = folder / f"{TASKS[name].file}.jsonl", WRITING if "perplexity" in TASKS[name].metrics else ()
    found: list[dict[str, Any]] = []
    try:
        lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)
    except UnicodeDecodeError as error:
        raise ValueError(f"got {path}, which is not UTF-8 at byte {error.start:,}; expected JSON lines") from error
    for number, line in islice(((number, line) for number, line in lines if line.strip()), limit):
        try:
            item = json.loads(line)
            form = form or CHOOSING[isinstance(item, dict) and "context_options" in item]
            found.append(_checked(item, form))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"got line {number} of {path}, which is no item: {error}") from error
    if not found:
        raise ValueError(f"got {path}, which holds no item")
    return found


def _checked(item: Any, form: Sequence[str]) -> dict[str, Any]:
    """Take the fields of a form out of an item; ValueError where one is missing or of another kind."""
    if not isinstance(item, dict):
        raise ValueError(f"it is of type {type(item).__name__}, expected an object with {', '.join(form)}")
    if lacking := [field for field in form if field not in item]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    choices: list[str] = []
    for field in form:
        value = item[field]
        if field in ("choices", "context_options"):
            choices = value
            if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
                raise ValueError(f"{field} is {value!r}, expected a list of texts")
        elif field == "gold":
            if type(value) is not int or not 0 <= value < len(choices):
                raise ValueError(f"gold is {value!r}, expected a number from 0 to {len(choices) - 1}")
        elif not isinstance(value, str):
            raise ValueError(f"{field} is {value!r}, expected a text")
    json.dumps(item, ensure_ascii=False).encode()  # what is no character is refused
    return {field: item[field] for field in form}


def guessing(items: Sequence[tuple[int, Any]]) -> dict[str, float | None]:
    """Accuracy without a model, by how many choices items have and which is right: none where there are no choices.

    `chance` is that of guessing, `majority` that of always giving the most frequent answer, where all are numbers.
    """
    if not items:
        return {"chance": None, "majority": None}
    chance, golds = sum(1 / choices for choices, _ in items) / len(items), [gold for _, gold in items]
    # one place for all is no knowledge of an answer: choices are scored one by one, and their place is not seen
    known = len(set(map(str, golds))) > 1 and all(isinstance(gold, int) for gold in golds)
    return {"chance": chance, "majority": Counter(golds).most_common(1)[0][1] / len(golds) if known else None}
