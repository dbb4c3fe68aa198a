"""Training one model of a comparison, and what is kept of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from titans_lm.config import BackboneConfig
from titans_lm.train.fresh import describe_model
from titans_lm.train.loop import fit
from titans_lm.train.options import plain_settings
from titans_lm.train.progress import ProgressReport
from titans_lm.train.settings import FitSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Check = Callable[[Any], dict[str, float]]


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
    """Loss and metric of every step."""
    checks: list[dict[str, Any]]
    """What was measured now and then during training."""
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


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What the models of a comparison are trained on, and what is looked at meanwhile."""

    build: Callable[[BackboneConfig], "PreTrainedModel"]
    batches: Callable[[int], Any]
    loss_fn: Callable[..., Any]
    settings: FitSettings
    metric: str
    """Metric of the loss that the curve keeps beside it."""
    check: Check | None = None
    """What to measure on the model every `settings.eval_every` steps and at the end."""

    def train(
        self,
        name: str,
        config: BackboneConfig,
        *,
        quiet: bool,
    ) -> Trained:
        """Train a fresh model."""
        torch.manual_seed(self.settings.seed)
        model = self.build(config)
        counts = describe_model(model)
        curve: list[dict[str, Any]] = []
        checks: list[dict[str, Any]] = []
        started = time.perf_counter()

        def keep(record: dict[str, Any]) -> bool:
            curve.append({key: record[key] for key in ("step", "loss", self.metric)})
            return False

        def look(check: Check, model: Any) -> dict[str, float]:
            found = check(model)
            checks.append({"step": len(curve), **found})
            return found

        check = self.check
        result = fit(
            model,
            self.batches,
            self.loss_fn,
            self.settings,
            on_step=keep,
            eval_fn=None if check is None else lambda model: look(check, model),
            progress=ProgressReport(quiet=quiet, title=f"train {name}"),
        )
        return Trained(
            name=name, model=model.eval(), config=config, parameters=counts["parameters"],
            state_bytes=counts["state_bytes"], curve=curve, checks=checks, planned_steps=self.settings.steps,
            tokens=result.tokens, seconds=time.perf_counter() - started,
        )  # fmt: skip
