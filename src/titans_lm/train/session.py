"""What a run leaves on disk and on the screen while it goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from titans_lm.train.checkpoint import verify_checkpoint, write_checkpoint
from titans_lm.train.files import HIDDEN, begin_folder, finish_folder
from titans_lm.train.log import ProgressReport
from titans_lm.train.parallel import plain
from titans_lm.train.run import RunFolder
from titans_lm.train.sharded import has_state, save_state, whole_weights
from titans_lm.train.sinks import NumberSink, flat_numbers, open_sinks
from titans_lm.train.trainer import Record, Trainer


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens at this one; 0 is never."""
    return every > 0 and step % every == 0


class Session:
    """What a run leaves on disk and on the screen."""

    def __init__(self, trainer: Trainer, run: RunFolder | None, progress: ProgressReport) -> None:
        self.trainer, self.run, self.progress = trainer, run, progress
        self.saved: tuple[int, Path | None] = (-1, None)
        self.sinks: list[NumberSink] = []

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
        if world.main:
            self.sinks = open_sinks(self.trainer.settings.sinks, run.path, self.trainer.result.step)

    def log(self, record: Record) -> None:
        self.progress.update(record)
        settings = self.trainer.settings
        wanted = due(record["step"], settings.log_every) or record["step"] == settings.steps
        if self.run is not None and wanted and self.trainer.world.main:
            self._append(self.run, record)

    def _append(self, run: RunFolder, record: Record) -> None:
        run.metrics.append(record)
        for sink in self.sinks:
            sink.log(record["step"], flat_numbers(record))

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self.sinks:  # they write what they have kept back
            sink.close()
        self.sinks = []

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

    def evaluate(self, eval_fn: Callable[[Any], dict[str, Any]]) -> None:
        """Evaluate, and log what was found as a line of its own."""
        result = self.trainer.result
        result.evaluation = self.trainer.evaluate(eval_fn)
        if self.run is not None and self.trainer.world.main:
            self._append(self.run, {"step": result.step, **result.evaluation})
        found = {name: value for name, value in result.evaluation.items() if isinstance(value, float)}
        numbers = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
        self.progress.say(f"step {result.step}: {numbers}")
