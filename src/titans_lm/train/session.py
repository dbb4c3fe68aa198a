"""What a run leaves on disk and on the screen while it goes on."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from titans_lm.train.beside import Beside, copied
from titans_lm.train.checkpoint import write_checkpoint
from titans_lm.train.files import HIDDEN, begin_folder, claimed, finish_folder, naming
from titans_lm.train.log import ProgressReport
from titans_lm.train.parallel import plain
from titans_lm.train.run import IN_USE, RunFolder
from titans_lm.train.sharded import begin_state, save_state, whole_weights
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
        self.beside, self.held = Beside(trainer.world), ExitStack()

    def resume(self) -> None:
        """Go on from the run's newest checkpoint, if it has one; ValueError where another process trains it."""
        run, world = self.run, self.trainer.world
        if run is None:
            return
        world.first(lambda: self.held.enter_context(claimed(run.path / IN_USE)))
        checkpoint = world.first(lambda: run.whole(lambda damage: self.progress.say(f"passed over: {damage}")))
        if checkpoint is not None:
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
        self.beside.end()
        for sink in self.sinks:  # they write what they have kept back
            sink.close()
        self.sinks = []
        self.held.close()

    def save(self, *, beside: bool = False) -> Path | None:
        """Write a checkpoint of the step that was taken last, unless there is one.

        With `beside` it may still be being written when this returns; the next call waits for it. Where it failed that
        raises OSError, after it has written its own.
        """
        trainer, step = self.trainer, self.trainer.result.step
        failed = self.beside.wait()
        if self.run is not None and self.saved[0] != step:
            save = self._save_alone if trainer.world.size == 1 else self._save_together
            self.saved = (step, save(self.run, step, beside and failed is None))
        if failed is not None:
            raise failed
        return self.saved[1]

    def _save_alone(self, run: RunFolder, step: int, beside: bool) -> Path:
        trainer, keep = self.trainer, self.trainer.settings.keep
        model, state = trainer.model, trainer.state()
        if not beside:
            return run.save(step, model, state, keep)
        weights, state = copied(model.state_dict()), copied(state)
        folder = run.checkpoint(step)
        self.beside.begin(folder, lambda: run.save(step, model, state, keep, weights))
        return folder

    def _save_together(self, run: RunFolder, step: int, beside: bool) -> Path:
        """Every process writes its part into a folder that gets its name when all of them have."""
        trainer, world = self.trainer, self.trainer.world
        state = trainer.state()
        folder = world.first(lambda: run.begin_checkpoint(step))
        unfinished = world.first(lambda: begin_folder(folder))

        def finish() -> Path:
            write_checkpoint(unfinished, plain(trainer.model), state, run.tokenizer, weights)
            finish_folder(unfinished, folder)
            return run.end_checkpoint(folder, trainer.settings.keep)

        def later() -> None:
            with self._or_nothing(unfinished):
                written()
                if world.main:
                    finish()

        with self._or_nothing(unfinished):
            if beside:
                written = begin_state(unfinished, trainer.model, trainer.optimiser, self.beside.group())
            else:
                save_state(unfinished, trainer.model, trainer.optimiser)
            weights = whole_weights(trainer.model) if trainer.spread else None
            if beside and not trainer.spread and world.main:
                weights = copied(plain(trainer.model).state_dict())
            if not beside:
                return world.first(finish)
        self.beside.begin(folder, later)
        return folder

    @contextmanager
    def _or_nothing(self, unfinished: Path) -> Iterator[None]:
        """Leave no part of a folder behind where something fails."""
        try:
            with naming(unfinished):
                yield
        except BaseException:
            if self.trainer.world.main:
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
            self._append(self.run, {"step": result.step, "seconds": result.seconds, **result.evaluation})
        found = {name: value for name, value in result.evaluation.items() if isinstance(value, float)}
        numbers = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
        self.progress.say(f"step {result.step}: {numbers}")
