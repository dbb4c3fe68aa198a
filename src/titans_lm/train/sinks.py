"""Numbers of a run to TensorBoard, wandb or trackio, beside metrics.jsonl, which is always written.

Each is a library of its own and is loaded when it is asked for.
"""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Numbers = dict[str, float]
PROJECT = "titans-lm"


@runtime_checkable
class NumberSink(Protocol):
    """What a run tells its numbers to."""

    def log(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


def open_sinks(names: Sequence[str], run: Path, step: int) -> list[NumberSink]:
    """Open the sinks of a run that stands at a step; ValueError where the library is missing."""
    return [SINKS[name](run, step) for name in dict.fromkeys(names)]


def flat_numbers(record: dict[str, Any]) -> Numbers:
    """Take the numbers out of a record, those inside lists and dicts by a path as their name.

    The step is none of them, nor are the rows of the text that it has read.
    """
    told = {key: part for key, part in record.items() if key not in ("step", "rows")}
    return {name: value for key, part in told.items() for name, value in _numbers(key, part)}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(f"{name}/{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(f"{name}/{index}", part)
    else:
        yield name, float(value)


class TensorBoardSink:
    """Event files in the run's folder; what was told after the step that a run goes on from is hidden."""

    def __init__(self, run: Path, step: int) -> None:
        writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.writer = writer(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class TrackerSink:
    """wandb, and trackio, which speaks like it: one run there for each run folder, taken up again with it."""

    def __init__(self, library: str, run: Path) -> None:
        name = hashlib.blake2b(str(run.resolve()).encode(), digest_size=8).hexdigest()
        more = {"id": name, "dir": str(run)} if library == "wandb" else {}
        self.run = _library(library, library).init(
            project=PROJECT, name=run.name if more else f"{run.name}-{name}", resume="allow", **more
        )

    def log(self, step: int, numbers: Numbers) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Any] = {
    "tensorboard": TensorBoardSink,
    "wandb": lambda run, step: TrackerSink("wandb", run),
    "trackio": lambda run, step: TrackerSink("trackio", run),
}


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"got the sink {package!r}, which is not installed; expected: pip install {package}"
        ) from error
