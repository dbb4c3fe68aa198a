"""Fit a model to the training windows: linear maps in closed form, the rest by the training loop; best on validation.

The test part is not read here.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.data.batches import Batch
from titans_lm.forecast.linear import Linear, NormalEquations
from titans_lm.forecast.model import Forecaster
from titans_lm.forecast.score import Score, score, score_streamed
from titans_lm.forecast.settings import Normalisation, TrainSettings
from titans_lm.forecast.windows import Prepared, WindowBatches
from titans_lm.train.device import choose_device
from titans_lm.train.files import write_atomically, write_json
from titans_lm.train.log import ProgressReport
from titans_lm.train.loop import fit
from titans_lm.train.run import RunFolder

Found = dict[str, Any]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Fitted:
    """How a fit ended: the model has the weights that were best on validation."""

    validation: Score
    steps: int = 0
    best_step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    penalty: float | None = None
    """Of the closed form, where there is one."""


class WindowLoss:
    """The mean error of forecasts on scaled values; where a row is several windows, of the forecasts of all of them."""

    def __init__(self, settings: TrainSettings, lookback: int, horizon: int) -> None:
        self.error: Callable[[Tensor, Tensor], Tensor] = F.mse_loss if settings.loss == "mse" else F.l1_loss
        self.span, self.lookback, self.horizon = settings.windows, lookback, horizon

    def __call__(self, model: Any, batch: Batch) -> tuple[Tensor, Found]:
        if self.span == 1:
            return self.error(model(batch["past"]), batch["future"]), {}
        rows, losses, state = torch.cat([batch["past"], batch["future"]], dim=1), [], None
        for turn in range(self.span):
            start, stop = turn * self.lookback, (turn + 1) * self.lookback
            forecast, state = model.read(rows[:, start:stop], state)
            losses.append(self.error(forecast, rows[:, stop : stop + self.horizon]))
        return torch.stack(losses).mean(), {}


class Best:
    """Evaluations on validation while training goes on: the best weights, and when to end.

    It measures when a step is done and before anything is saved, so a run that is taken up again has lost none.
    With a folder, what was found and the best weights are kept there; without, in memory.
    """

    def __init__(
        self, model: nn.Module, measure: Callable[[], Score], every: int, patience: int, folder: Path | None
    ) -> None:
        self.model, self.measure, self.every, self.patience = model, measure, every, patience
        self.file = None if folder is None else folder / "validation.json"
        self.history: list[Found] = _read(self.file) if self.file and self.file.is_file() else []
        self.weights: Weights = {}
        self.started = False

    def after(self, record: Found, last: int) -> bool:
        """Measure where it is time to, and say whether to end: no better one for as long as patience lasts.

        A run that had ended so, and is taken up again, takes the one step that it takes to ask, and no more.
        """
        step = record["step"]
        if not self.started:  # the checkpoint that the run goes on from may be older than what is here
            self.history, self.started = [one for one in self.history if one["step"] < step], True
        if step % self.every == 0 or step == last:
            self.add(step)
        return self.waited >= self.patience

    def add(self, step: int) -> None:
        """Measure the model as it is, and keep its weights where it is the best so far."""
        found = self.measure()
        self.history.append({"step": step, "mse": found.mse, "mae": found.mae, "windows": found.windows})
        if self.best["step"] == step:
            self._keep()
        if self.file is not None:
            write_json(self.file, self.history)

    @property
    def best(self) -> Found:
        """The best evaluation so far, the earliest of equal ones."""
        return min(self.history, key=lambda one: (math.isnan(one["mse"]), one["mse"]))

    @property
    def waited(self) -> int:
        """Evaluations since the best one."""
        best = self.best["step"]
        return sum(one["step"] > best for one in self.history)

    def numbers(self) -> Found:
        """What the training loop logs and says."""
        last = self.history[-1] if self.history else {}
        return {f"validation_{name}": last[name] for name in ("mse", "mae") if name in last}

    def restore(self) -> Found:
        """Give the model the best weights."""
        if self.file is not None:
            safetensors.torch.load_model(self.model, str(self._saved))
        else:
            self.model.load_state_dict(self.weights)
        return self.best

    @property
    def _saved(self) -> Path:
        assert self.file is not None
        return self.file.with_name("best.safetensors")

    def _keep(self) -> None:
        state = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        if self.file is None:
            self.weights = state
        else:
            write_atomically(self._saved, safetensors.torch.save(state))


def _read(file: Path) -> list[Found]:
    """Read evaluations; what was not finite stands as null in the file."""
    told: list[Found] = json.loads(file.read_bytes())
    return [{name: math.nan if value is None else value for name, value in one.items()} for one in told]


def fit_model(
    model: nn.Module,
    data: Prepared,
    settings: TrainSettings,
    *,
    seed: int = 0,
    run: RunFolder | None = None,
    progress: ProgressReport | None = None,
) -> Fitted:
    """Fit a model in place; it ends with the weights that were best on validation.

    Models without parameters are measured. A linear map has its closed form, with the penalty that is best on
    validation; a shortcut starts from it. What has other parameters is then trained by `train.loop.fit`, and evaluated
    on validation `evaluations` times an epoch until `patience` of them brought nothing. With a run folder a run
    that was stopped goes on. Raises what `fit` raises.
    """
    device = choose_device(settings.device)
    model.to(device)
    if isinstance(model, Linear):
        penalty = closed_form(model.map, model.norm.kind, data, settings)
        return Fitted(score(model, data.parts["validation"], device), penalty=penalty)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return Fitted(score(model, data.parts["validation"], device))
    penalty = None
    if isinstance(model, Forecaster) and model.shortcut is not None and model.settings.shortcut == "ridge":
        penalty = closed_form(model.shortcut, model.norm.kind, data, settings)
    return _trained(model, data, settings, device, seed, run, progress, penalty)


def closed_form(linear: nn.Linear, kind: Normalisation, data: Prepared, settings: TrainSettings) -> float:
    """Solve for a linear map of windows, as they are normalised; gives the penalty, the best on validation."""
    train, validation = (
        NormalEquations(data.parts[part], kind, bias=linear.bias is not None) for part in ("train", "validation")
    )
    maps = {penalty: train.solved(penalty) for penalty in settings.ridge}
    best = min(maps, key=lambda penalty: validation.error(maps[penalty]))
    train.put(maps[best], linear)
    return best


def _trained(
    model: nn.Module,
    data: Prepared,
    settings: TrainSettings,
    device: torch.device,
    seed: int,
    run: RunFolder | None,
    progress: ProgressReport | None,
    penalty: float | None,
) -> Fitted:
    carried = settings.windows > 1
    windows = data.parts["train"].spanning(settings.windows)
    batches = WindowBatches(windows, batch_size=settings.batch_size, seed=seed)
    every = max(1, batches.steps // settings.evaluations)
    steps = settings.epochs * batches.steps

    def measure() -> Score:
        # in float32, as the test part is, whatever the precision of training
        if carried:
            return score_streamed(model, data, "validation", "carried", device)
        return score(model, data.parts["validation"], device)

    best = Best(model, measure, every, settings.patience, None if run is None else run.path)
    if not best.history:
        best.add(0)  # a shortcut from its closed form may be the best there is
    ended = fit(
        model,
        batches,
        WindowLoss(settings, windows.lookback, windows.horizon),
        settings.loop(steps=steps, seed=seed, every=every),
        eval_fn=lambda _: best.numbers(),
        on_step=lambda record: best.after(record, steps),
        run=run,
        progress=progress,
    )
    found = best.restore()
    chosen = Score(found["mse"], found["mae"], found["windows"])
    steps = best.history[-1]["step"]  # training ends where it was measured
    return Fitted(chosen, steps, found["step"], ended.seconds, ended.skipped, penalty)
