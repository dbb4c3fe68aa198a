"""The best step of a training, by evaluations on the validation part, and its end where none is better for long."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor, nn

from titans_lm.train.files import remove_unfinished, write_atomically
from titans_lm.train.writer import due

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
        every: int, patience: int = 0, path: Path | None = None, writes: bool = True,
    ) -> None:  # fmt: skip
        """Take the most `steps` that there are, those between evaluations, and how many of these may be no better."""
        self.model, self.measure, self.rank, self.path, self.writes = model, measure, rank, path, writes
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
            if self.path is not None and self.writes:
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
