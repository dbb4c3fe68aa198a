"""Accuracy on associative recall, with how sure it is, and how far a model without memory can look back."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from titans_lm.config import BackboneConfig, check_choice
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.evaluate.tasks import task_score

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


def recall_accuracy(
    model: nn.Module, settings: RecallSettings, *, examples: int = 1024, batch_size: int = 64, seed: int = 1
) -> Recall:
    """Ask a model every key of fresh examples; the likeliest token is its answer.

    Whole batches are asked, so `examples` is rounded up. The seed must differ from the one the model was trained with.
    """
    score = task_score(model, settings, examples=examples, batch_size=batch_size, seed=seed)
    return Recall(score.hits, score.asked, settings.chance)


def sliding_reach(config: BackboneConfig) -> int:
    """How many tokens back a stack of sliding windows can look at most: layers × (window + convolution − 2).

    Each layer sees window − 1 tokens back, and its short convolution lets the farthest of them know of kernel − 1 more.
    """
    check_choice("architecture", config.architecture, ("sliding",))
    return config.num_hidden_layers * (config.window - 1 + config.attention_conv_size - 1)
