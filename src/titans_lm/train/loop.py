"""One training loop for every task: language, recall, time series, DNA; and its best step by evaluations.

`fit` knows nothing of the task. It takes a model, batches by step, and `loss_fn(model, batch) -> (loss, metrics)`; a
loss that carries something from step to step offers `state_dict`, `load_state_dict` and `forget`.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor, nn

from titans_lm.allocator import keep_freed_memory
from titans_lm.data.batches import Batch
from titans_lm.train.files import remove_unfinished, write_atomically
from titans_lm.train.parallel import open_distributed
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import FitSettings
from titans_lm.train.trainer import UNFIT, Diverged, FitResult, LossFunction, Record, Trainer
from titans_lm.train.writer import RunWriter, due


class StopRequest:
    """Turn the first Ctrl-C or SIGTERM into a wish that a loop reads between steps; the second stops at once,
    but for SIGTERM under torchrun, which passes on what it gets.

    Truthy once asked to stop. Outside of the main thread, which alone receives signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = self.waits = False
        self.before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait inside for what may never come: there the first signal raises StoppedWaiting."""
        self.waits = True
        try:
            if self.asked:
                raise StoppedWaiting
            yield
        finally:
            self.waits = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        echo = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun passes on what it gets too
        again, self.asked = self.asked and not echo, True
        if self.waits:
            raise StoppedWaiting
        if again:
            raise KeyboardInterrupt


class StoppedWaiting(KeyboardInterrupt):
    """A request to stop came while nothing was being done."""


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop (Ctrl-C or SIGTERM), finished its step and saved it."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step, self.checkpoint = step, checkpoint
        where = f"saved in {checkpoint}" if checkpoint else "nothing was saved, as there is no run folder"
        super().__init__(f"stopped after step {step}; {where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Interrupted, (self.step, self.checkpoint)  # from another process


def fit(
    model: nn.Module,
    batches: Callable[[int], Batch],
    loss_fn: LossFunction,
    settings: FitSettings,
    *,
    eval_fn: Callable[[Any], dict[str, Any]] | None = None,
    on_step: Callable[[Record], bool | None] | None = None,
    run: RunFolder | None = None,
    progress: ProgressReport | None = None,
) -> FitResult:
    """Train a model in place, from the newest checkpoint of its run where there is one.

    `batches(step)` gives a batch, `eval_fn(model)` numbers to log beside the loss; either may have a `fingerprint`, by
    which a run that is taken up again knows its own. `on_step(record)` sees every step, and training ends early, and
    well, where it returns true. With a run folder there are checkpoints, a metrics.jsonl and in the end a saved model.
    A run that is taken up again repeats nothing: its losses are bit for bit those of a run that was never stopped.

    Under torchrun all processes call it with the same model and batches; `settings.parallel` says how the model is laid
    out. A run may be taken up by another number of processes: the same steps on the same batches, to rounding.

    On a CPU the process keeps from then on what it frees (`keep_freed_memory`).

    Raises Interrupted (a KeyboardInterrupt) after Ctrl-C or SIGTERM, with the finished step saved; Diverged where
    `max_skipped` steps in a row are not finite; ValueError for a checkpoint that is damaged or of another run.
    """
    world = open_distributed(settings.device)
    if world.device.type == "cpu":
        keep_freed_memory()
    trainer = Trainer(model, batches, loss_fn, settings, world, getattr(eval_fn, "fingerprint", ""))
    result = trainer.result
    shown = progress if progress is not None and world.main else ProgressReport(quiet=True)
    with closing(RunWriter(trainer, run, shown)) as writer:
        writer.resume()
        with StopRequest() as asked, shown.start(settings.steps, result.step), trainer.reading():
            writer.make_up(eval_fn)
            finished, stop = result.step >= settings.steps, world.anybody(bool(asked))
            while not finished and not stop:
                record = trainer.step()
                writer.log(record)
                finished = bool(on_step is not None and on_step(record)) or result.step >= settings.steps
                stop = world.anybody(bool(asked))
                if not finished and not stop:
                    if eval_fn is not None and due(result.step, settings.eval_every):
                        writer.evaluate(eval_fn)  # before the checkpoint: a run that is taken up there has it
                    if due(result.step, settings.save_every):
                        writer.save()
                    stop = world.anybody(bool(asked))
            if finished and result.step and result.skipped == result.step:
                raise Diverged(f"all {result.step} steps {UNFIT}")
            checkpoint = writer.save()
            if finished:
                writer.finish()
            if stop or world.anybody(bool(asked)):
                raise Interrupted(result.step, checkpoint)
        if eval_fn is not None:
            _evaluate_last(writer, eval_fn, checkpoint)
    return result


def _evaluate_last(writer: RunWriter, eval_fn: Callable[[Any], dict[str, Any]], checkpoint: Path | None) -> None:
    """Evaluate when all is saved, which the first signal ends."""
    try:
        with StopRequest() as asked, asked.waiting():
            writer.evaluate(eval_fn)
    except StoppedWaiting:
        raise Interrupted(writer.trainer.result.step, checkpoint) from None


Found = dict[str, Any]


class BestStep:
    """Keeps the weights of the best step: the `on_step` and the `eval_fn` of `fit`.

    It evaluates when a step is done and before anything is saved, so a run that is stopped at that step, and taken up
    again, has lost nothing. Such a run finds what was best before; it takes the same steps once more from its
    checkpoint on, so a best step that lies ahead of it is found again. Weights and numbers are one file, which is
    replaced in one piece; without a path they are kept in memory.
    """

    def __init__(
        self, model: nn.Module, measure: Callable[[nn.Module], Found], rank: Callable[[Found], Any], *, steps: int,
        every: int, patience: int = 0, path: Path | None = None,
    ) -> None:  # fmt: skip
        """Take the most `steps` that there are, those between evaluations, and how many of these may be no better."""
        self.model, self.measure, self.rank, self.path = model, measure, rank, path
        self.last_step, self.every, self.patience = steps, every, patience
        self.last: Found = {}
        self.found: Found | None = None
        """The numbers of the best step, with the step."""
        self.weights: dict[str, Tensor] = {}
        if path is not None and path.is_file():
            with safe_open(path, "pt") as file:
                self.found = json.loads(file.metadata()["found"])

    def on_step(self, record: Found) -> bool:
        """Evaluate where it is due; true where so many evaluations have found no new best that training is to end.

        A run that had ended so, and is taken up again, takes the one step that it takes to ask, and no more.
        """
        step = record["step"]
        if step > self._end():
            return True
        if due(step, self.every) or step == self.last_step:
            self.evaluate(step)
        return step >= self._end()

    def evaluate(self, step: int) -> None:
        """Measure the model as it is, and keep its weights where it is better than any before."""
        self.last = {"step": step, **self.measure(self.model)}
        if self.found is None or self.rank(self.last) > self.rank(self.found):
            self.found = self.last
            self.weights = {name: x.detach().cpu().contiguous().clone() for name, x in self.model.state_dict().items()}
            if self.path is not None:
                numbers = {"found": json.dumps(self.found)}
                write_atomically(self.path, safetensors.torch.save(self.weights, numbers))
                remove_unfinished(self.path.parent)

    def __call__(self, model: nn.Module) -> Found:
        """Give the last numbers; one that has taken no step, as it was done before, has none."""
        return {name: value for name, value in self.last.items() if name != "step"}

    def steps(self, taken: int) -> int:
        """Count the steps of the run as if it had not been taken up again after its end."""
        return min(taken, self._end())

    def restore(self) -> Found:
        """Give the model the weights of the best step, and its numbers."""
        assert self.found is not None
        if self.path is not None and self.path.is_file():
            self.weights = safetensors.torch.load_file(self.path)
        self.model.load_state_dict(self.weights)
        return self.found

    def _end(self) -> float:
        if not self.patience or self.found is None:
            return float("inf")
        return self.found["step"] + self.patience * self.every
