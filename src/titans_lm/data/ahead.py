"""Batches made ahead of time by processes of their own."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from titans_lm.data.batches import Batch


class _Steps(Dataset[Batch]):
    """Batches by step, as torch's loader asks for them."""

    def __init__(self, batches: Callable[[int], Batch]) -> None:
        self.batches = batches

    def __getitem__(self, index: int) -> Batch:
        return self.batches(index)


class Ahead:
    """The batches of a function of the step, made by `workers` processes while the step before is computed.

    They are the same batches for any number of workers: a batch is a function of its step and nothing else. Without
    workers they are made when they are asked for. A context manager: the workers end with it.
    """

    def __init__(self, batches: Callable[[int], Batch], workers: int, steps: int) -> None:
        self.batches, self.workers, self.steps = batches, workers, steps
        self.coming: Iterator[Batch] | None = None
        self.next = -1

    def __call__(self, step: int) -> Batch:
        if not self.workers:
            return self.batches(step)
        if step != self.next or self.coming is None:
            self.coming = self._from(step)
        self.next = step + 1
        return next(self.coming)

    def _from(self, step: int) -> Iterator[Batch]:
        # A generator of its own: the loader draws a seed for its workers, which must not move the numbers of training.
        loader: Any = DataLoader(
            _Steps(self.batches),
            batch_size=None,
            sampler=range(step, max(self.steps, step + 1)),
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(0),
            multiprocessing_context="spawn",
        )
        return iter(loader)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.coming = None
