"""How well a model does a synthetic task, how sure that is, and the bytes of state with which it does it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.config import BackboneConfig, check_at_least, check_choice
from titans_lm.data.batches import IGNORED, Batch
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.task import Task
from titans_lm.evaluate.stream import PIECE, WindowReader, evaluating, has_state, logits_at, reader_for
from titans_lm.ops.state import MemoryState, state_bytes


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


def task_score(
    model: nn.Module,
    task: Task,
    *,
    examples: int = 1024,
    batch_size: int = 64,
    seed: int = 1,
    on_piece: Callable[[int], None] = lambda _: None,
) -> TaskScore:
    """Ask a model for everything that fresh rows of a task ask for; the likeliest token is its answer.

    The right tokens before a target are given, as in training, so an answer is right where greedy writing would write
    it. Long rows are read in pieces, and `on_piece` is told the tokens of each. Whole batches are asked, so `examples`
    is rounded up. The seed must differ from the one that the model was trained with.
    """
    check_at_least("examples", examples, 1)
    batches, score = TaskBatches(task, batch_size=batch_size, seed=seed), TaskScore(0, 0, 0, 0)
    with evaluating(model) as device:
        for step in range(-(-examples // batch_size)):
            batch = {name: part.to(device) for name, part in batches(step).items()}
            columns = (batch["targets"] != IGNORED).any(0).nonzero()[:, 0]
            logits = logits_at(model, batch["input_ids"], columns, on_piece=on_piece)
            score += score_batch(logits, {name: batch[name][:, columns] for name in batch if name != "input_ids"})
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

    total: int | None
    """Bytes of everything: memory, surprise, anchor, convolution tails, keys and values; None for a model that carries
    nothing and reads its text again."""
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


def _measured(model: nn.Module, length: int) -> StateBytes:
    state = None
    with evaluating(model) as device:
        reader = reader_for(model, piece_len=PIECE)
        if isinstance(reader, WindowReader):
            return StateBytes(None, None)
        for piece in torch.zeros(1, length, dtype=torch.int64, device=device).split(reader.piece(0), dim=1):
            _, state = reader.step(piece, state, keep=1)
    parts = list(parts_of(state))
    memories = [state_bytes(part.M) for part in parts if isinstance(part, MemoryState)]
    weights = sum(memories) if memories else None
    if has_state(model):
        return StateBytes(state_bytes(state), weights)
    tensors = {id(part): part for part in parts if isinstance(part, Tensor)}
    return StateBytes(sum(x.numel() * x.element_size() for x in tensors.values()), weights)


def parts_of(value: Any, depth: int = 10) -> Iterator[Any]:
    """Walk over everything that an object holds."""
    yield value
    if depth == 0 or isinstance(value, Tensor | str | bytes | type):
        return
    held = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", {})
    for part in held.values() if isinstance(held, dict) else held:
        yield from parts_of(part, depth - 1)


Z = 3.29
"""Width of the intervals in standard deviations: 99.9 % of a normal distribution."""


@dataclass(frozen=True)
class Recall:
    """How often a model named the value of a key that was asked."""

    hits: int
    asked: int
    chance: float
    """Accuracy of naming any value."""

    @property
    def accuracy(self) -> float:
        return self.hits / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 99.9 % interval of the accuracy."""
        n, p = self.asked, self.accuracy
        centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy cannot be told from chance."""
        low, high = self.interval
        return low <= self.chance <= high

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "accuracy": self.accuracy,
            "interval_99_9": list(self.interval),
            "at_chance": self.at_chance,
        }


def sliding_reach(config: BackboneConfig) -> int:
    """How many tokens back a stack of sliding windows can look at most: layers × (window + convolution − 2).

    Each layer sees window − 1 tokens back, and its short convolution lets the farthest of them know of kernel − 1 more.
    """
    check_choice("architecture", config.architecture, ("sliding",))
    return config.num_hidden_layers * (config.window - 1 + config.attention_conv_size - 1)
