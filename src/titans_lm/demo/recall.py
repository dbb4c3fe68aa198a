"""Associative recall over a gap that is longer than a window: a memory against a sliding window of equal size."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from titans_lm.config import BackboneConfig
from titans_lm.data.batches import IGNORED, Batch
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.demo.settings import RecallPlan
from titans_lm.evaluate.accuracy import Recall, sliding_reach, task_score
from titans_lm.train.fresh import count_parameters, describe_model, language_model, match_parameters
from titans_lm.train.loop import fit
from titans_lm.train.losses import recall_loss
from titans_lm.train.options import plain_settings
from titans_lm.train.progress import ProgressReport
from titans_lm.train.settings import FitSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Trained:
    """A trained model, its size, and how training went."""

    name: str
    model: "PreTrainedModel"
    config: BackboneConfig
    parameters: int
    state_bytes: int
    """Bytes that one sequence carries from token to token, however long it is."""
    curve: list[dict[str, Any]]
    """Loss and accuracy of every step."""
    checks: list[dict[str, Any]]
    """Accuracy over the whole gap, now and then during training."""
    planned_steps: int
    tokens: int
    seconds: float

    @property
    def steps(self) -> int:
        return len(self.curve)

    def as_dict(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "model"}
        speed = {"steps": self.steps, "tokens_per_second": self.tokens / self.seconds}
        return {**kept, **speed, "config": plain_settings(self.config)}


@dataclass(frozen=True)
class Example:
    """One test example: what was read, what was asked, and both answers (0 where nothing was asked)."""

    tokens: list[int]
    targets: list[int]
    memory: list[int]
    window: list[int]


@dataclass(frozen=True)
class RecallOutcome:
    """What came out of the recall experiment."""

    task: RecallSettings
    gaps: tuple[int, ...]
    """Gaps that were trained on."""
    memory: Trained
    window: Trained
    memory_recall: Recall
    window_recall: Recall
    reach: int
    """How many tokens back the stack of windows can look."""
    example: Example

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": plain_settings(self.task),
            "gaps": list(self.gaps),
            "window_reach": self.reach,
            "memory": {**self.memory.as_dict(), "recall": self.memory_recall.as_dict()},
            "window": {**self.window.as_dict(), "recall": self.window_recall.as_dict()},
        }


def run_recall(plan: RecallPlan, *, seed: int, quiet: bool) -> RecallOutcome:
    """Train both models on the same batches and test them on the same fresh examples.

    ValueError for a gap that the windows could bridge: nothing would be shown then.
    """
    # Answers are not given away: a model that only knows which values occurred could exclude those.
    task = RecallSettings(pairs=plan.pairs, symbols=plan.symbols, gap=plan.gap, length=plan.length, answers=False)
    window_config = match_parameters(plan.window, task.vocab_size, count_parameters(plan.memory, task.vocab_size))
    reach = sliding_reach(window_config)
    if reach > plan.gap:
        raise ValueError(f"got gap={plan.gap}, but the windows can look {reach} tokens back; expected a longer gap")
    fresh = seed + 1_000_003
    batches = growing_gaps(task, plan, seed)

    def accuracy(model: "PreTrainedModel", examples: int, seed: int) -> Recall:
        score = task_score(model, task, examples=examples, batch_size=plan.batch_size, seed=seed)
        return Recall(score.hits, score.asked, task.chance)

    def train(name: str, config: BackboneConfig) -> Trained:
        check = lambda model: accuracy(model, plan.check_examples, fresh + 1).accuracy
        return train_one(name, config, task.vocab_size, batches, plan.fit, check, quiet=quiet)

    memory, window = train("recall, memory", plan.memory), train("recall, window", window_config)
    found = [accuracy(trained.model, plan.examples, fresh) for trained in (memory, window)]
    example = _example(memory.model, window.model, task, fresh)
    return RecallOutcome(task, plan.gaps, memory, window, *found, reach, example)


def growing_gaps(task: RecallSettings, plan: RecallPlan, seed: int) -> Callable[[int], Batch]:
    """Batches with the first gap alone, then with every gap in turn; a row has the length of the task.

    Trained on a long gap alone, a model learns which values occurred and stays there: what the filler writes hides
    what a pair has written. With short gaps among them it first learns to bind a key to its value, then to keep it.
    """
    stages = [
        TaskBatches(replace(task, gap=gap), batch_size=plan.batch_size, seed=seed + i)
        for i, gap in enumerate(plan.gaps)
    ]
    return lambda step: stages[0 if step < plan.alone else step % len(stages)](step)


def train_one(
    name: str,
    config: BackboneConfig,
    vocab_size: int,
    batches: Callable[[int], Batch],
    settings: FitSettings,
    check: Callable[["PreTrainedModel"], float],
    *,
    quiet: bool,
) -> Trained:
    """Train a fresh model; `check` is asked every `settings.eval_every` steps and at the end."""
    torch.manual_seed(settings.seed)
    model = language_model(config, vocab_size)
    counts = describe_model(model)
    curve: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    started = time.perf_counter()

    def keep(record: dict[str, Any]) -> bool:
        curve.append({key: record[key] for key in ("step", "loss", "accuracy")})
        return False

    def look(model: "PreTrainedModel") -> dict[str, float]:
        found = {"accuracy_over_the_gap": check(model)}
        checks.append({"step": len(curve), **found})
        return found

    progress = ProgressReport(quiet=quiet, title=f"train {name}")
    result = fit(model, batches, recall_loss, settings, on_step=keep, eval_fn=look, progress=progress)
    return Trained(
        name=name, model=model.eval(), config=config, parameters=counts["parameters"],
        state_bytes=counts["state_bytes"], curve=curve, checks=checks, planned_steps=settings.steps,
        tokens=result.tokens, seconds=time.perf_counter() - started,
    )  # fmt: skip


@torch.no_grad()
def _example(memory: "PreTrainedModel", window: "PreTrainedModel", task: RecallSettings, seed: int) -> Example:
    batch = TaskBatches(task, batch_size=1, seed=seed)(0)
    asked = batch["targets"] != IGNORED
    ids = batch["input_ids"].to(memory.device)
    answers = [model(input_ids=ids, use_cache=False).logits.argmax(-1).cpu() * asked for model in (memory, window)]
    return Example(*(row[0].tolist() for row in (batch["input_ids"], batch["targets"] * asked, *answers)))
