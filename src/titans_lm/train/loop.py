"""One training loop for every task: language, recall, time series, DNA.

`fit` knows nothing of the task. It takes a model, batches by step, and `loss_fn(model, batch) -> (loss, metrics)`; a
loss that carries something from step to step offers `state_dict`, `load_state_dict` and `forget`.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.data.ahead import Ahead
from titans_lm.data.batches import Batch
from titans_lm.train.checkpoint import (
    load_checkpoint,
    load_trainer,
    random_state,
    restore_random_state,
    verify_checkpoint,
    write_checkpoint,
)
from titans_lm.train.device import mixed_precision, to_device
from titans_lm.train.files import HIDDEN, begin_folder, finish_folder
from titans_lm.train.log import ProgressReport
from titans_lm.train.optimiser import build_optimiser, learning_rate, load_whole_optimiser
from titans_lm.train.parallel import World, is_spread, later, open_world, plain, spread, whole
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings
from titans_lm.train.sharded import has_state, load_state, load_whole_weights, save_state, whole_weights
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

    Under torchrun all processes call it with the same model and batches; `settings.parallel` says how the model is laid
    out. A run may be taken up by another number of processes: the same steps on the same batches, to rounding.

    Raises Interrupted (a KeyboardInterrupt) after Ctrl-C or SIGTERM, with the finished step saved; Diverged where
    `max_skipped` steps in a row are not finite; ValueError for a checkpoint that is damaged or of another run.
    """
    world = open_world(settings.device)
    trainer = _Trainer(model, batches, loss_fn, settings, world)
    result = trainer.result
    session = _Session(trainer, run, progress if progress is not None and world.main else ProgressReport(quiet=True))
    session.resume()
    with StopRequest() as asked, session.progress.start(settings.steps, result.step), trainer.ahead:
        finished = result.step >= settings.steps
        while not finished:
            stop = world.anybody(bool(asked))
            if stop:
                raise Interrupted(result.step, session.save())
            record = trainer.step()
            session.log(record)
            finished = bool(on_step is not None and on_step(record)) or result.step >= settings.steps
            stop = world.anybody(bool(asked))
            if not finished and not stop:
                if _due(result.step, settings.save_every):
                    session.save()
                if eval_fn is not None and _due(result.step, settings.eval_every):
                    session.evaluate(eval_fn)
        checkpoint = session.save()
        session.finish()
        if world.anybody(bool(asked)):
            raise Interrupted(result.step, checkpoint)
    if eval_fn is not None:
        session.evaluate(eval_fn)
    return result


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Trainer:
    """One step of the optimiser after another, and everything that the next one depends on."""

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Batch],
        loss_fn: LossFunction,
        settings: FitSettings,
        world: World,
    ) -> None:
        self.world, self.device, self.settings = world, world.device, settings
        self.loss_fn: Any = loss_fn
        if world.size > 1 and settings.parallel == "fsdp" and hasattr(loss_fn, "forget"):
            raise ValueError(
                "got parallel='fsdp' with a loss that carries a state, which begins outside of the model's forward "
                "pass, where its parameters are in parts; expected parallel='ddp'"
            )
        if settings.activation_checkpointing:
            _checkpoint_activations(model)
        self.model = spread(model, settings.parallel, world)
        self.batches = batches
        self.ahead = Ahead(batches, settings.workers, settings.steps * settings.accumulate)
        self.optimiser = build_optimiser(plain(self.model), settings)
        self.spread = any(is_spread(p) for p in plain(self.model).parameters())
        if world.rank:  # what is drawn while training, such as dropout, differs from process to process
            torch.manual_seed(settings.seed * 1_000_003 + world.rank)
        self.parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        self.result = FitResult(step=0, tokens=0, skipped=0, seconds=0.0)
        self.skipped_in_a_row = 0
        self.rows: list[int] = []
        """Which rows of the text the step has read, where batches say so."""

    def step(self) -> Record:
        """Take one step, and say how it went; a loss or gradient that is not finite changes nothing."""
        started, result = time.perf_counter(), self.result
        lr = learning_rate(result.step, self.settings)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        loss, metrics, tokens = self._backward()
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.settings.clip or float("inf")))
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
            **({"rows": self.rows} if self.rows else {}),
        }
        return result.last

    def _backward(self) -> tuple[Tensor, dict[str, Any], int]:
        """Add up the gradients of the step's batches; the loss is their mean, the metrics are the last one's."""
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        total, tokens, metrics, weight = torch.zeros((), device=self.device), 0, {}, 1.0
        self.rows = []
        several = self.settings.accumulate
        for index in range(several):
            batch = self.ahead(self.result.step * several + index)
            rows = self.world.rows(batch)
            weight = self.world.weight(batch, rows)
            own = to_device(rows, self.device)
            self.rows += batch["sample"].tolist() if "sample" in batch else []
            with later(self.model, index == several - 1):
                with mixed_precision(self.settings.precision, self.device):
                    loss, metrics = self.loss_fn(self.model, own)
                loss = loss if weight == 1.0 else loss * weight
                (loss / several).backward()
            total += loss.detach() / several
            tokens += next((part.shape[0] * part.shape[1] for part in batch.values() if part.dim() > 1), 0)
        if self.world.size == 1:
            return total, metrics, tokens
        numbers = [torch.as_tensor(value, device=self.device) * weight for value in metrics.values()]
        total, *numbers = self.world.mean([total, *numbers])
        return total, dict(zip(metrics, numbers, strict=True)), tokens

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
            return eval_fn(plain(self.model))

    def state(self) -> dict[str, Any]:
        """Take down all that the next step depends on, the weights excepted, and the optimiser of several processes."""
        result, alone = self.result, self.world.size == 1
        carried = self.loss_fn.state_dict() if hasattr(self.loss_fn, "state_dict") else {}
        if not alone:
            everybody = self.world.gathered(carried)
            carried = everybody if any(everybody) else {}
        return {
            "processes": self.world.size,
            "step": result.step,
            "tokens": result.tokens,
            "skipped": result.skipped,
            "seconds": result.seconds,
            "optimiser": self.optimiser.state_dict() if alone else {},
            "loss": carried,
            "batches": getattr(self.batches, "fingerprint", ""),
            "random": random_state() if alone else self.world.gathered(random_state()),
        }

    def load(self, folder: Path) -> None:
        """Stand where the run stood when the checkpoint was written."""
        alone = self.world.size == 1
        saved = load_trainer(folder) if not alone or has_state(folder) else load_checkpoint(folder, self.model)
        if saved["batches"] != getattr(self.batches, "fingerprint", ""):
            raise ValueError(
                f"{folder} was trained on other data, or with another batch_size, seq_len or seed, than it is to go on "
                "with; give those of the run, or begin a new run"
            )
        if saved["loss"] and saved.get("processes", 1) != self.world.size:
            raise ValueError(
                f"{folder} holds the states that {saved.get('processes', 1)} processes carried, and there are "
                f"{self.world.size}; take the run up with as many"
            )
        kept = [{name: group[name] for name in ("weight_decay", "betas")} for group in self.optimiser.param_groups]
        if has_state(folder):
            load_state(folder, self.model, self.optimiser)
        else:
            if not alone:
                load_whole_weights(folder, self.model)
            load_whole_optimiser(self.optimiser, saved["optimiser"])
        for group, settings in zip(self.optimiser.param_groups, kept, strict=True):
            group.update(settings)
        if saved["loss"]:
            self.loss_fn.load_state_dict(saved["loss"] if alone else saved["loss"][self.world.rank])
        for name in ("step", "tokens", "skipped", "seconds"):
            setattr(self.result, name, saved[name])
        self._restore_random(saved["random"])

    def _restore_random(self, saved: Any) -> None:
        """Numbers go on where they stood on as many processes; on another number they begin anew, by step and rank."""
        states = saved if isinstance(saved, list) else [saved]
        if len(states) == self.world.size:
            restore_random_state(states[self.world.rank])
        else:
            torch.manual_seed((self.settings.seed * 1_000_003 + self.result.step) * 1_009 + self.world.rank)


def _checkpoint_activations(model: nn.Module) -> None:
    owner: Any = model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"got activation_checkpointing for a {type(model).__name__}, which has none; expected one of transformers"
        )
    owner.gradient_checkpointing_enable()


class _Session:
    """What a run leaves on disk and on the screen."""

    def __init__(self, trainer: _Trainer, run: RunFolder | None, progress: ProgressReport) -> None:
        self.trainer, self.run, self.progress = trainer, run, progress
        self.saved: tuple[int, Path | None] = (-1, None)

    def resume(self) -> None:
        """Go on from the run's newest checkpoint, if it has one."""
        run, world = self.run, self.trainer.world
        if run is None:
            return
        checkpoint = world.told(run.latest())
        if checkpoint is not None:
            if world.size > 1 or has_state(checkpoint):  # else it is done while loading
                world.first(lambda: verify_checkpoint(checkpoint))
            if world.main and any(run.checkpoints.glob(f"{HIDDEN}*")):
                self.progress.say("a checkpoint was not finished when the run ended: the one before it is used")
            self.trainer.load(checkpoint)
            self.saved = (self.trainer.result.step, checkpoint)
            self.progress.say(f"going on from {checkpoint}")
        world.first(lambda: run.metrics.rewind(self.trainer.result.step))

    def log(self, record: Record) -> None:
        self.progress.update(record)
        settings = self.trainer.settings
        due = _due(record["step"], settings.log_every) or record["step"] == settings.steps
        if self.run is not None and due and self.trainer.world.main:
            self.run.metrics.append(record)

    def save(self) -> Path | None:
        """Write a checkpoint of the step that was taken last, unless there is one."""
        trainer, step = self.trainer, self.trainer.result.step
        if self.run is not None and self.saved[0] != step:
            if trainer.world.size == 1:
                folder = self.run.save(step, trainer.model, trainer.state(), trainer.settings.keep)
            else:
                folder = self._save_together(self.run, step)
            self.saved = (step, folder)
        return self.saved[1]

    def _save_together(self, run: RunFolder, step: int) -> Path:
        """Every process writes its part into a folder that gets its name when all of them have."""
        trainer, world = self.trainer, self.trainer.world
        state = trainer.state()
        folder = world.first(lambda: run.begin_checkpoint(step))
        unfinished = world.first(lambda: begin_folder(folder))
        try:
            save_state(unfinished, trainer.model, trainer.optimiser)
            weights = whole_weights(trainer.model) if trainer.spread else None

            def finish() -> Path:
                write_checkpoint(unfinished, plain(trainer.model), state, run.tokenizer, weights)
                finish_folder(unfinished, folder)
                return run.end_checkpoint(folder, trainer.settings.keep)

            return world.first(finish)
        except BaseException:
            if world.main:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def finish(self) -> None:
        """Save the finished model."""
        run, trainer = self.run, self.trainer
        if run is None:
            return
        weights = whole_weights(trainer.model) if trainer.spread else None
        trainer.world.first(lambda: run.finish(trainer.result.step, plain(trainer.model), weights))

    def evaluate(self, eval_fn: Callable[[Any], dict[str, float]]) -> None:
        """Evaluate, and log what was found as a line of its own."""
        result = self.trainer.result
        result.evaluation = self.trainer.evaluate(eval_fn)
        if self.run is not None and self.trainer.world.main:
            self.run.metrics.append({"step": result.step, **result.evaluation})
        numbers = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in result.evaluation.items())
        self.progress.say(f"step {result.step}: {numbers}")
