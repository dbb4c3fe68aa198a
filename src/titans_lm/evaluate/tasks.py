"""How well a model does a synthetic task, and the bytes of state with which it does it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.config import check_at_least
from titans_lm.data.batches import IGNORED, Batch
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.task import Task
from titans_lm.evaluate.pieces import logits_at, read_all
from titans_lm.ops.state import MemoryState, state_bytes
from titans_lm.train.device import to_device


@dataclass(frozen=True)
class TaskScore:
    """What a model got right."""

    hits: int
    """Targets whose likeliest token was right."""
    asked: int
    """Targets."""
    right: int
    """Answers that were right in all of their targets."""
    answers: int
    """Answers."""

    @property
    def accuracy(self) -> float:
        return self.hits / self.asked

    @property
    def exact(self) -> float:
        """Share of the answers that were right as a whole."""
        return self.right / self.answers

    def __add__(self, other: "TaskScore") -> "TaskScore":
        return TaskScore(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@torch.no_grad()
def task_score(
    model: nn.Module,
    task: Task,
    *,
    examples: int = 1024,
    batch_size: int = 64,
    seed: int = 1,
    on_piece: Callable[[int], None] | None = None,
) -> TaskScore:
    """Ask a model for everything that fresh rows of a task ask for; the likeliest token is its answer.

    The right tokens before a target are given, as in training, so an answer is right where greedy writing would write
    it. Long rows are read in pieces, and `on_piece` is told the tokens of each. Whole batches are asked, so `examples`
    is rounded up. The seed must differ from the one that the model was trained with.
    """
    check_at_least("examples", examples, 1)
    device = next(model.parameters()).device
    was_training, batches = model.training, TaskBatches(task, batch_size=batch_size, seed=seed)
    score = TaskScore(0, 0, 0, 0)
    model.eval()
    try:
        for step in range(-(-examples // batch_size)):
            batch = to_device(batches(step), device)
            columns = (batch["targets"] != IGNORED).any(0).nonzero()[:, 0]
            logits = logits_at(model, batch["input_ids"], columns, on_piece=on_piece)
            score += score_batch(logits, {name: batch[name][:, columns] for name in batch if name != "input_ids"})
    finally:
        model.train(was_training)
    return score


def score_batch(logits: Tensor, batch: Batch) -> TaskScore:
    """Count what is right in a batch."""
    targets = batch["targets"]
    asked = targets != IGNORED
    wrong = (logits.argmax(-1) != targets)[asked]
    hits, count = int((~wrong).sum()), int(asked.sum())
    if "answers" not in batch:
        return TaskScore(hits, count, hits, count)
    rows = torch.arange(len(targets), device=targets.device)[:, None].expand_as(targets)
    answers = torch.stack([rows[asked], batch["answers"][asked]], dim=1)
    failed = len(answers[wrong].unique(dim=0))
    total = len(answers.unique(dim=0))
    return TaskScore(hits, count, total - failed, total)


@dataclass(frozen=True)
class StateBytes:
    """What one row of a model carries from token to token."""

    total: int
    """Bytes of everything: memory, surprise, anchor, convolution tails, keys and values."""
    memory: int | None
    """Bytes of the memories' weights M alone; None where there is no memory."""


SETTLED = 4096
"""Tokens after which a state that is constant has its size: windows of a model that is told by tasks are shorter."""


def bytes_of_state(model: nn.Module, length: int) -> StateBytes:
    """Measure the state of a row after `length` tokens, of any causal language model: what its cache holds.

    A state that is no larger after 8,192 tokens than after 4,096 is taken to be constant, and no more are read.
    """
    if length > 2 * SETTLED:
        settled = _measured(model, 2 * SETTLED)
        if settled == _measured(model, SETTLED):
            return settled
    return _measured(model, length)


@torch.no_grad()
def _measured(model: nn.Module, length: int) -> StateBytes:
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        ids = torch.zeros(1, length, dtype=torch.int64, device=device)
        output = read_all(model, ids)
    finally:
        model.train(was_training)
    cache: Any = getattr(output, "past_key_values", None)
    cache = getattr(output, "cache_params", None) if cache is None else cache
    if cache is None:
        raise ValueError(f"got a {type(model).__name__}, whose output has no cache; expected a causal language model")
    memories = [part for part in _parts(cache) if isinstance(part, MemoryState)]
    weights = sum(state_bytes(memory.M) for memory in memories) if memories else None
    if hasattr(cache, "state_bytes"):
        return StateBytes(cache.state_bytes(), weights)
    seen = {id(part): part for part in _parts(cache) if isinstance(part, Tensor)}
    return StateBytes(sum(x.numel() * x.element_size() for x in seen.values()), weights)


def _parts(value: Any, depth: int = 10) -> Iterator[Any]:
    """Walk over everything that an object holds."""
    yield value
    if depth == 0 or isinstance(value, Tensor | str | bytes | type):
        return
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    for part in inside:
        yield from _parts(part, depth - 1)
