"""What a run leaves on disk, on the screen and with trackers while it goes on."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from titans_lm.checks import load_library
from titans_lm.train.checkpoint import optimizer_tensors
from titans_lm.train.files import HIDDEN, IN_USE, claimed
from titans_lm.train.parallel import whole_weights
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import MODEL, STEP, RunFolder, progress_of
from titans_lm.train.trainer import Record, Trainer

PROJECT = "titans-lm"
Logger = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers."""


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens at this one; 0 is never."""
    return every > 0 and step % every == 0


def _check_unsaved(run: RunFolder, steps: int) -> None:
    """Refuse to begin again where that would overwrite what a run has come to."""
    model = run.path / MODEL
    if (model / f"{STEP}.json").is_file() or (model.exists() and progress_of(run.path).get("step", 0) >= steps):
        raise ValueError(
            f"got the run {run.path}, which is finished and whose checkpoints are gone; expected one of them in "
            f"{run.checkpoints}, or a new run with --init {run.path}"
        )


class RunWriter:
    """What a run leaves on disk and on the screen, until it is closed."""

    def __init__(self, trainer: Trainer, run: RunFolder | None, progress: ProgressReport) -> None:
        self.trainer, self.run, self.progress = trainer, run, progress
        self.saved: tuple[int, Path | None] = (-1, None)
        self.stack = ExitStack()
        self.loggers: list[Logger] = []
        self.evaluated = -1
        """The last step after which an evaluation was logged."""

    def close(self) -> None:
        """Let loggers come to their end."""
        self.stack.close()  # loggers write what they have kept back

    def resume(self) -> None:
        """Go on from the run's newest checkpoint, if it has one; ValueError where another process trains it."""
        run, world = self.run, self.trainer.world
        if run is None:
            return
        world.first(lambda: self.stack.enter_context(claimed(run.path / IN_USE)))
        checkpoint = world.first(lambda: run.whole(lambda damage: self.progress.say(f"passed over: {damage}")))
        if checkpoint is not None:
            if world.main and any(run.checkpoints.glob(f"{HIDDEN}*")):
                self.progress.say("a checkpoint was not finished when the run ended: the one before it is used")
            self.trainer.load(checkpoint)
            done, steps = self.trainer.result.step, self.trainer.settings.steps
            if done > steps:
                raise ValueError(
                    f"got steps={steps} for the run {run.path}, which has taken {done}; expected as many or more"
                )
            self.saved = (done, checkpoint)
            self.progress.say(f"going on from {checkpoint}")
        else:
            world.first(lambda: _check_unsaved(run, self.trainer.settings.steps))
            if world.main and any(run.metrics):
                self.progress.say("the run was stopped before its first checkpoint: it begins again")
        world.first(run.note_settings)
        world.first(lambda: run.metrics.rewind(self.trainer.result.step))
        self.evaluated = world.first(lambda: max((one["step"] for one in run.metrics if "loss" not in one), default=-1))
        if world.main:
            names = dict.fromkeys(self.trainer.settings.sinks)
            self.loggers = [LOGGERS[name](run.path, self.trainer.result.step, self.stack) for name in names]

    def log(self, record: Record) -> None:
        """Show a step, and log it where it is one that is."""
        self.progress.update(record)
        settings = self.trainer.settings
        if due(record["step"], settings.log_every) or record["step"] == settings.steps:
            self._append(record)

    def _append(self, record: Record) -> None:
        if self.run is not None and self.trainer.world.main:
            self.run.metrics.append(record)
            for logger in self.loggers:
                logger(record["step"], flat_numbers(record))

    def save(self) -> Path | None:
        """Write a checkpoint of the step that was taken last, unless there is one."""
        run, trainer, step = self.run, self.trainer, self.trainer.result.step
        if run is not None and self.saved[0] != step:
            weights, state = whole_weights(trainer.model), trainer.state()
            optimizer = optimizer_tensors(trainer.model, trainer.optimizer, trainer.world.main)
            given = {"optimizer": optimizer, "weights": weights}
            path = trainer.world.first(lambda: run.save(step, trainer.model, state, trainer.settings.keep, **given))
            self.saved = (step, path)
        return self.saved[1]

    def finish(self) -> None:
        run, trainer = self.run, self.trainer
        if run is not None:
            weights = whole_weights(trainer.model)
            trainer.world.first(lambda: run.finish(trainer.result.step, trainer.model, weights))

    def make_up(self, eval_fn: Callable[[Any], dict[str, Any]] | None) -> None:
        """Evaluate now where a run that goes on was stopped between a step and the evaluation that was due after it."""
        step, settings = self.trainer.result.step, self.trainer.settings
        if self.run is None or eval_fn is None or not 0 < step < settings.steps or not due(step, settings.eval_every):
            return
        if self.evaluated != step:
            self.evaluate(eval_fn)

    def evaluate(self, eval_fn: Callable[[Any], dict[str, Any]]) -> None:
        """Evaluate, and log what was found as a line of its own, unless it was logged before."""
        found, result = self.trainer.evaluate(eval_fn), self.trainer.result
        result.evaluation = found
        if not found:
            return
        if self.evaluated != result.step:
            self.evaluated = result.step
            self._append({"step": result.step, "seconds": result.seconds, **result.evaluation})
        numbers = "  ".join(
            f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items() if isinstance(value, float)
        )
        self.progress.say(f"step {result.step}: {numbers}")


def flat_numbers(record: Record) -> dict[str, float]:
    """Take the numbers out of a record, those inside lists and dicts by a path as their name.

    The step is none of them, nor are the rows of the text that it has read.
    """
    return dict(_numbers("", {key: part for key, part in record.items() if key not in ("step", "rows")}))


def _numbers(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(f"{prefix}/{key}" if prefix else str(key), part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, float(value)


def _tensorboard(run: Path, step: int, stack: ExitStack) -> Logger:
    """Event files in the run's folder; what was told after the step that a run goes on from is hidden."""
    summary = sink_library("tensorboard").SummaryWriter
    writer = stack.enter_context(summary(str(run / "tensorboard"), purge_step=step + 1))

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log


def _tracker(library: str, run: Path, _: int, stack: ExitStack) -> Logger:
    """One run of wandb or trackio for each run folder, taken up again with it; trackio knows it by its name alone."""
    key = hashlib.blake2b(str(run.resolve()).encode(), digest_size=8).hexdigest()
    named = {"name": run.name, "id": key, "dir": str(run)} if library == "wandb" else {"name": f"{run.name}-{key}"}
    tracked = sink_library(library).init(project=PROJECT, resume="allow", **named)
    stack.callback(tracked.finish)
    return lambda step, numbers: tracked.log(numbers, step=step)


LOGGERS: dict[str, Callable[[Path, int, ExitStack], Logger]] = {
    "tensorboard": _tensorboard,
    **{library: partial(_tracker, library) for library in ("wandb", "trackio")},
}
"""Where numbers go beside metrics.jsonl: libraries that are loaded when they are asked for."""


def sink_library(package: str) -> Any:
    """Load what a sink writes by; ValueError where it is not installed."""
    module = "torch.utils.tensorboard" if package == "tensorboard" else package
    return load_library(module, f"the sink {package!r} needs", f"pip install {package}")
