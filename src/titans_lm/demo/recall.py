"""Associative recall over a gap that is longer than a window: a memory against a sliding window of equal size."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from titans_lm.config import BackboneConfig
from titans_lm.data.batches import IGNORED
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.recall import RecallCurriculum, RecallSettings
from titans_lm.demo.settings import RecallPlan
from titans_lm.demo.training import Lesson, Trained
from titans_lm.evaluate.accuracy import Recall, recall_accuracy, sliding_reach
from titans_lm.train.losses import recall_loss
from titans_lm.train.match import count_parameters, match_parameters
from titans_lm.train.options import plain_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def build(config: BackboneConfig) -> "PreTrainedModel":
        from titans_lm.hf import TitansConfig, TitansForCausalLM

        return TitansForCausalLM(TitansConfig(vocab_size=task.vocab_size, **dataclasses.asdict(config)))

    def accuracy(model: "PreTrainedModel", examples: int, seed: int) -> Recall:
        return recall_accuracy(model, task, examples=examples, batch_size=plan.batch_size, seed=seed)

    lesson = Lesson(
        build=build,
        batches=RecallCurriculum(task, gaps=plan.gaps, alone=plan.alone, batch_size=plan.batch_size, seed=seed),
        loss_fn=recall_loss,
        settings=plan.fit,
        metric="accuracy",
        check=lambda model: {"accuracy_over_the_gap": accuracy(model, plan.check_examples, fresh + 1).accuracy},
    )
    memory = lesson.train("recall, memory", plan.memory, quiet=quiet)
    window = lesson.train("recall, window", window_config, quiet=quiet)
    found = [accuracy(trained.model, plan.examples, fresh) for trained in (memory, window)]
    example = _example(memory.model, window.model, task, fresh)
    return RecallOutcome(task, plan.gaps, memory, window, *found, reach, example)


@torch.no_grad()
def _example(memory: "PreTrainedModel", window: "PreTrainedModel", task: RecallSettings, seed: int) -> Example:
    batch = TaskBatches(task, batch_size=1, seed=seed)(0)
    asked = batch["targets"] != IGNORED
    ids = batch["input_ids"].to(memory.device)
    answers = [model(input_ids=ids, use_cache=False).logits.argmax(-1).cpu() * asked for model in (memory, window)]
    return Example(*(row[0].tolist() for row in (batch["input_ids"], batch["targets"] * asked, *answers)))
