"""One training loop for every task: language, recall, time series, DNA.

`fit` knows nothing of the task. It takes a model, batches by step, and `loss_fn(model, batch) -> (loss, metrics)`; a
loss that carries something from step to step offers `state_dict`, `load_state_dict` and `forget`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.data.batches import Batch
from titans_lm.train.checkpoint import load_checkpoint, random_state, restore_random_state
from titans_lm.train.device import choose_device, mixed_precision, to_device
from titans_lm.train.log import ProgressReport
from titans_lm.train.optimiser import build_optimiser, learning_rate
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings
from titans_lm.train.stop import StopRequest

LossFunction = Callable[[Any, Batch], tuple[Tensor, dict[str, Any]]]
Record = dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop (Ctrl-C or SIGTERM), finished its step and saved it."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step, self.checkpoint = step, checkpoint
        where = f"saved in {checkpoint}" if checkpoint else "nothing was saved, as there is no run folder"
        super().__init__(f"stopped after step {step}; {where}")


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient that was not finite."""


@dataclass
class FitResult:
    """How training ended."""

    step: int
    """Steps done."""
    tokens: int
    """Tokens read, over all sessions of the run."""
    skipped: int
    """Steps whose loss or gradient was not finite, and which changed nothing."""
    seconds: float
    """Time in steps, over all sessions of the run; evaluations and checkpoints are not counted."""
    last: Record = field(default_factory=dict)
    """The last step's record."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """What the evaluation after the last step found."""


def fit(
    model: nn.Module,
    batches: Callable[[int], Batch],
    loss_fn: LossFunction,
    settings: FitSettings,
    *,
    eval_fn: Callable[[Any], dict[str, float]] | None = None,
    on_step: Callable[[Record], bool | None] | None = None,
    run: RunFolder | None = None,
    progress: ProgressReport | None = None,
) -> FitResult:
    """Train a model in place, from the newest checkpoint of its run where there is one.

    `batches(step)` gives a batch, `eval_fn(model)` numbers to log beside the loss; `on_step(record)` sees every step,
    and training ends early, and well, where it returns true. With a run folder there are checkpoints, a metrics.jsonl
    and in the end a saved model. A run that is taken up again repeats nothing: its losses are bit for bit those of a
    run that was never stopped.

    Raises Interrupted (a KeyboardInterrupt) after Ctrl-C or SIGTERM, with the finished step saved; Diverged where
    `max_skipped` steps in a row are not finite; ValueError for a checkpoint that is damaged or of another run.
    """
    trainer = _Trainer(model, batches, loss_fn, settings)
    result = trainer.result
    session = _Session(trainer, run, progress or ProgressReport(quiet=True))
    session.resume()
    with StopRequest() as stop, session.progress.start(settings.steps, result.step):
        finished = result.step >= settings.steps
        while not finished:
            if stop:
                raise Interrupted(result.step, session.save())
            record = trainer.step()
            session.log(record)
            finished = bool(on_step is not None and on_step(record)) or result.step >= settings.steps
            if not finished and not stop:
                if _due(result.step, settings.save_every):
                    session.save()
                if eval_fn is not None and _due(result.step, settings.eval_every):
                    session.evaluate(eval_fn)
        checkpoint = session.save()
        if run is not None:
            run.finish(result.step, model)
        if stop:
            raise Interrupted(result.step, checkpoint)
    if eval_fn is not None:
        session.evaluate(eval_fn)
    return result


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Trainer:
    """One step of the optimiser after another, and everything that the next one depends on."""

    def __init__(
        self, model: nn.Module, batches: Callable[[int], Batch], loss_fn: LossFunction, settings: FitSettings
    ) -> None:
        self.device = choose_device(settings.device)
        self.model, self.batches, self.settings = model.to(self.device), batches, settings
        self.loss_fn: Any = loss_fn
        self.optimiser = build_optimiser(model, settings)
        self.parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        self.result = FitResult(step=0, tokens=0, skipped=0, seconds=0.0)
        self.skipped_in_a_row = 0

    def step(self) -> Record:
        """Take one step, and say how it went; a loss or gradient that is not finite changes nothing."""
        started, result = time.perf_counter(), self.result
        lr = learning_rate(result.step, self.settings)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        loss, metrics, tokens = self._backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip or float("inf"))
        if bool(torch.isfinite(loss) & torch.isfinite(norm)):
            self.optimiser.step()
            self.skipped_in_a_row = 0
        else:
            self._skip()
        seconds = time.perf_counter() - started
        result.step, result.tokens = result.step + 1, result.tokens + tokens
        result.seconds += seconds
        result.last = {
            "step": result.step,
            "loss": float(loss),
            **{name: float(value) for name, value in metrics.items()},
            "lr": lr,
            "grad_norm": float(norm),
            "tokens_per_second": tokens / seconds,
            "seconds": result.seconds,
            "tokens": result.tokens,
            "skipped": result.skipped,
        }
        return result.last

    def _backward(self) -> tuple[Tensor, dict[str, Any], int]:
        """Add up the gradients of the step's batches; the loss is their mean, the metrics are the last one's."""
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        total, tokens, metrics = torch.zeros((), device=self.device), 0, {}
        for index in range(self.settings.accumulate):
            batch = to_device(self.batches(self.result.step * self.settings.accumulate + index), self.device)
            with mixed_precision(self.settings.precision, self.device):
                loss, metrics = self.loss_fn(self.model, batch)
            (loss / self.settings.accumulate).backward()
            total += loss.detach() / self.settings.accumulate
            tokens += next((part.shape[0] * part.shape[1] for part in batch.values() if part.dim() > 1), 0)
        return total, metrics, tokens

    def _skip(self) -> None:
        """Count a step that was not finite, and forget what it may have left in a carried state."""
        self.result.skipped += 1
        self.skipped_in_a_row += 1
        if hasattr(self.loss_fn, "forget"):
            self.loss_fn.forget()
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row, up to step {self.result.step + 1}, had a loss or gradient "
                "that was not finite; lower the learning rate, or look for such values in the data"
            )

    def evaluate(self, eval_fn: Callable[[Any], dict[str, float]]) -> dict[str, float]:
        """Evaluate in the precision of training; what comes after is as if this had not been."""
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        with torch.random.fork_rng(devices), torch.no_grad(), mixed_precision(self.settings.precision, self.device):
            return eval_fn(self.model)

    def state(self) -> dict[str, Any]:
        """Take down all that the next step depends on, the weights excepted."""
        result = self.result
        return {
            "step": result.step,
            "tokens": result.tokens,
            "skipped": result.skipped,
            "seconds": result.seconds,
            "optimiser": self.optimiser.state_dict(),
            "loss": self.loss_fn.state_dict() if hasattr(self.loss_fn, "state_dict") else {},
            "batches": getattr(self.batches, "fingerprint", ""),
            "random": random_state(),
        }

    def load(self, folder: Path) -> None:
        """Stand where the run stood when the checkpoint was written."""
        saved = load_checkpoint(folder, self.model)
        if saved["batches"] != getattr(self.batches, "fingerprint", ""):
            raise ValueError(
                f"{folder} was trained on other data, or with another batch_size, seq_len or seed, than it is to go on "
                "with; give those of the run, or begin a new run"
            )
        kept = [{name: group[name] for name in ("weight_decay", "betas")} for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict(saved["optimiser"])
        for group, settings in zip(self.optimiser.param_groups, kept, strict=True):
            group.update(settings)
        if saved["loss"]:
            self.loss_fn.load_state_dict(saved["loss"])
        for name in ("step", "tokens", "skipped", "seconds"):
            setattr(self.result, name, saved[name])
        restore_random_state(saved["random"])


class _Session:
    """What a run leaves on disk and on the screen."""

    def __init__(self, trainer: _Trainer, run: RunFolder | None, progress: ProgressReport) -> None:
        self.trainer, self.run, self.progress = trainer, run, progress
        self.saved: tuple[int, Path | None] = (-1, None)

    def resume(self) -> None:
        """Go on from the run's newest checkpoint, if it has one."""
        if self.run is None:
            return
        checkpoint = self.run.latest()
        if checkpoint is not None:
            self.trainer.load(checkpoint)
            self.saved = (self.trainer.result.step, checkpoint)
        self.run.metrics.rewind(self.trainer.result.step)

    def log(self, record: Record) -> None:
        self.progress.update(record)
        settings = self.trainer.settings
        if self.run is not None and (_due(record["step"], settings.log_every) or record["step"] == settings.steps):
            self.run.metrics.append(record)

    def save(self) -> Path | None:
        """Write a checkpoint of the step that was taken last, unless there is one."""
        step = self.trainer.result.step
        if self.run is not None and self.saved[0] != step:
            folder = self.run.save(step, self.trainer.model, self.trainer.state(), self.trainer.settings.keep)
            self.saved = (step, folder)
        return self.saved[1]

    def evaluate(self, eval_fn: Callable[[Any], dict[str, float]]) -> None:
        """Evaluate, and log what was found as a line of its own."""
        result = self.trainer.result
        result.evaluation = self.trainer.evaluate(eval_fn)
        if self.run is not None:
            self.run.metrics.append({"step": result.step, **result.evaluation})
        numbers = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.evaluation.items())
        self.progress.say(f"step {result.step}: {numbers}")
