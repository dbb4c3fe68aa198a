"""Language models as lm-eval takes them: importing this module registers them there as "titans".

    import titans_lm.lm_eval
    lm_eval.simple_evaluate(model="titans", model_args={"pretrained": "runs/first"}, tasks=["piqa"])

`pretrained` is a run folder, a checkpoint, a saved model, or a model in memory with its tokenizer: one of ours or any
causal language model of Hugging Face. Every request is read from a fresh start, and rows of a batch share nothing.

This module needs lm-eval (pip install 'titans-lm[eval]'); nothing of the package imports it before it is asked for.
"""

import logging
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import datasets
import huggingface_hub
import lm_eval
import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from titans_lm.checks import did_you_mean
from titans_lm.config import check_at_least
from titans_lm.evaluate.bits_per_byte import LN2, token_bits
from titans_lm.evaluate.documents import first_token
from titans_lm.questions import BOTH, TASKS, guessing, longest_input, read_items, starts_with_bos
from titans_lm.train.run import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_LIMIT = 2**31 - 1
"""What lm-eval is told of a model that can read on and on."""
BOOTSTRAPS = 1000
"""Resamples behind the standard errors that lm-eval finds by resampling, such as that of a perplexity."""
UNSAID = ("`pretrained`", "Truncating", "Custom kwargs")
"""Of what it warns: settings that a model in memory ignores, every prompt that is cut, and settings of files."""
for _place in ("lm_eval.models.huggingface", "lm_eval.api.task"):
    logging.getLogger(_place).addFilter(lambda record: not any(word in record.getMessage() for word in UNSAID))


@register_model("titans")
class TitansLM(HFLM):
    """A causal language model for lm-eval, which does the scoring; this class only says how it is read.

    `bos` says how texts begin: auto, yes, no or tokenizer (see `starts_with_bos`). `max_length` is the most tokens that
    are read: longer prompts lose their beginning, and pages are scored in windows. Without it, models with a state have
    no limit, and score a page as a whole with the state carried along; others have the limit that lm-eval finds.
    """

    def __init__(
        self,
        pretrained: "str | Path | PreTrainedModel",
        tokenizer: "str | Path | PreTrainedTokenizerBase | None" = None,
        *,
        batch_size: int | str = 1,
        max_length: int | None = None,
        device: str = "auto",
        bos: str = "auto",
    ) -> None:
        if not str(batch_size).isdecimal():
            raise ValueError(f"got batch_size={batch_size!r}; expected a number of rows")
        check_at_least("batch_size", int(batch_size), 1)
        if max_length is not None:
            check_at_least("max_length", max_length, 2)
        if not isinstance(pretrained, str | Path) and tokenizer is None:
            raise ValueError("got a model in memory without a tokenizer; expected both")
        words: Any = pretrained if tokenizer is None else tokenizer
        words = load_tokenizer(words) if isinstance(words, str | Path) else words
        model: Any = load_model(pretrained, device) if isinstance(pretrained, str | Path) else pretrained
        begins = starts_with_bos(model, words, bos)
        self.bos = False if begins is None and first_token(words) is None else begins  # lm-eval needs one else
        limit = longest_input(model, words) if max_length is None else max_length
        self.whole_pages = limit is None
        self.cut = 0
        """Prompts that were too long so far, and lost their beginning."""
        narrow = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
        super().__init__(
            pretrained=model,
            tokenizer=words,
            backend="causal",
            batch_size=int(batch_size),
            max_length=NO_LIMIT if limit is None else limit,
            softmax_dtype="float32" if narrow else None,  # sums of bfloat16 are worth two digits
        )

    @property
    def prefix_token_id(self) -> int:
        """What a text begins with, or stands in the place of a context."""
        first = first_token(self.tokenizer)
        if first is None:
            raise ValueError("got a tokenizer without <bos> and <eos>; expected one of them to begin a text with")
        return first

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Turn a text into tokens, as this model's texts begin."""
        if self.bos is None:
            return super().tok_encode(string, add_special_tokens, left_truncate_len, **kwargs)
        ids = super().tok_encode(string, add_special_tokens=False)
        ids = [self.prefix_token_id, *ids] if self.bos and add_special_tokens is not False else ids
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Turn texts into a padded batch and its mask; of those that are too long the beginning is cut."""
        if self.bos is None:
            return super().tok_batch_encode(strings, padding_side, left_truncate_len, truncation)
        tokens = [self.tok_encode(text, left_truncate_len=left_truncate_len) for text in strings]
        ids = [torch.tensor(row, dtype=torch.int64) for row in tokens]
        masks = [torch.ones_like(row) for row in ids]
        return pad_sequence(ids, True, padding_side=padding_side), pad_sequence(masks, True, padding_side=padding_side)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():  # a state that is kept would be thrown away
            return self.model(input_ids=inps, use_cache=False).logits

    def _loglikelihood_tokens(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        cut, lengths = 0, {}
        for _, context, tokens in requests:
            if not context or not 0 < len(tokens) <= self.max_length:
                raise ValueError(
                    f"got a continuation of {len(tokens)} tokens with max_length={self.max_length} after a context of "
                    f"{len(context)}; expected 1 token at least of each, and no longer continuation"
                )
            cut += len(context) + len(tokens) > self.max_length + 1
            lengths.setdefault((*context, *tokens[:-1]), set()).add(len(tokens))
        # of inputs that are the same lm-eval reads one, and takes a shorter continuation at the place of the longest
        self.logits_cache = all(len(one) == 1 for one in lengths.values())
        if cut:
            logging.getLogger(__name__).warning("%d prompts are too long for the model and lose their beginning", cut)
        self.cut += cut
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Sum the log-probabilities of all tokens of pages, each predicted once.

        A model without a limit reads a page from its start to its end; others read windows of `max_length` tokens as
        lm-eval cuts them, none of which knows more of the one before than a token.
        """
        if self.whole_pages:
            texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
            pages = [np.array([self.prefix_token_id, *text]) for text in texts]
            bits = token_bits(self.model, pages, batch_size=self.batch_size)
            return [-float(page.sum()) * LN2 for page in bits]
        bos, self.bos = self.bos, False if self.bos else self.bos  # lm-eval puts it before a page itself
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.bos = bos


def run_tasks(
    model: TitansLM,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    metadata: dict[str, Any] | None = None,
    seed: int = 1234,
) -> dict[str, Any]:
    """Let lm-eval ask a model its tasks; returns what lm-eval returns, with the samples.

    `metadata` is what tasks of their own making are told: RULER needs "tokenizer", the folder of one. Raises ValueError
    for a task that lm-eval does not know, and for one whose data cannot be had.
    """
    manager = TaskManager(include_path=include_path, metadata=metadata)
    for name in tasks:
        if not manager.match_tasks([name]):
            hint = did_you_mean(name, manager.all_tasks) or "`lm_eval ls tasks` lists what there is"
            raise ValueError(f"got the task {name!r}, which lm-eval does not know; {hint}")
    try:
        with _kept_alone_without_a_network():
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=list(dict.fromkeys(manager.match_tasks(list(tasks)))),
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                metadata=metadata,
                bootstrap_iters=BOOTSTRAPS,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
    except (ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the data of {', '.join(tasks)} cannot be had: {reason}; without a network, --local scores files"
        ) from error
    assert found is not None, "this is the only process"
    return dict(found)


def _perplexity(sums: Sequence[float]) -> float:
    """exp(−mean), which may be beyond all numbers."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(sums)))


def run_local(model: TitansLM, name: str, folder: Path, limit: int | None = None) -> dict[str, Any]:
    """Let lm-eval ask a model the questions of a file (see `local_tasks`), or the first `limit`.

    Returns what `run_tasks` does. Raises ValueError for a line that is no item.
    """
    task, items = TASKS[name], read_items(name, folder, limit)
    if "query" in items[0]:
        form = {"doc_to_text": lambda item: item["query"].removeprefix(task.cut) + task.add}
        form |= {"doc_to_choice": "choices", "doc_to_target": "gold"}
    elif "gold" in items[0]:
        form = {"doc_to_text": "gold", "doc_to_choice": "context_options", "doc_to_target": "continuation"}
    else:  # nothing puts a space before what is no choice
        form = {"doc_to_text": "context", "doc_to_target": lambda item: f" {item['continuation']}"}
    config: dict[str, Any] = {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(items)},
        "test_split": "test",
        "num_fewshot": 0,
        "output_type": "multiple_choice" if "gold" in items[0] else "loglikelihood",
        "metric_list": [
            {"metric": one, "aggregation": "mean" if one in BOTH else _perplexity, "higher_is_better": one in BOTH}
            for one in task.metrics
        ],
        **form,
    }
    tasks = TaskManager(include_defaults=False).load([config])
    found = lm_eval.evaluate(lm=model, task_dict=tasks, bootstrap_iters=BOOTSTRAPS)
    assert found is not None, "this is the only process"
    for sample in found["samples"][name]:  # where contexts are the choices, lm-eval takes the continuation for it
        sample["target"] = sample["doc"].get("gold", sample["target"])
    return dict(found)


@contextmanager
def _kept_alone_without_a_network() -> Iterator[None]:
    """Read what is kept here at once where the hub does not answer: every file is asked for six times otherwise."""
    modules = huggingface_hub.constants, datasets.config
    before = [module.HF_HUB_OFFLINE for module in modules]
    if not any(before) and not hub_answers():
        for module in modules:
            module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = was


def hub_answers(seconds: float = 3.0) -> bool:
    """Tell whether the Hugging Face hub, or what HF_ENDPOINT names in its place, can be connected to."""
    place = urlsplit(huggingface_hub.constants.ENDPOINT)
    if getproxies():  # a proxy knows names that this machine does not
        return True
    try:
        socket.create_connection(
            (place.hostname or "", place.port or (80 if place.scheme == "http" else 443)), timeout=seconds
        ).close()
    except OSError:
        return False
    return True


def harness_scores(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the scores of every task out of what lm-eval returns.

    `chance` and `majority` (see `guessing`) are there for multiple choice, where the samples are in it.
    """
    return {task: _task_scores(task, values, found) for task, values in found["results"].items()}


def _task_scores(task: str, values: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    metrics, seen = {}, found.get("samples", {}).get(task, [])
    for key, value in values.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        if metric.isdecimal() and value < 0:  # RULER: a length that was not run
            continue
        error = values.get(f"{metric}_stderr,{kept}")
        error = error if isinstance(error, int | float) and math.isfinite(error) else None
        if metric == "perplexity" and error is None and len(seen) > 1:  # that of the mean, times the slope of exp there
            error = value * float(np.std([sample[metric] for sample in seen], ddof=1)) / math.sqrt(len(seen))
        metrics[metric if kept == "none" else f"{metric} ({kept})"] = {"value": value, "stderr": error}
    config = found.get("configs", {}).get(task, {})  # one with process_results counts in another way
    choosing = config.get("output_type") == "multiple_choice" and not config.get("process_results")
    items = {one["doc_id"]: (len(one["arguments"]), one["target"]) for one in (seen if choosing else ())}
    return {
        "items": found["n-samples"].get(task, {}).get("effective"),
        "metrics": metrics,
        **guessing([*items.values()]),
        "note": "",
        "version": found["versions"].get(task),
        "shots": found["n-shot"].get(task),
    }
