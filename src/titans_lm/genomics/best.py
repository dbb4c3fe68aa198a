"""The step of a run that did best on the validation part, kept beside its checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from titans_lm.genomics.settings import GenomicsFit
from titans_lm.train.checkpoint import WEIGHTS
from titans_lm.train.files import new_folder, write_json

NUMBERS = "best.json"
Found = dict[str, Any]


class Best:
    """Keeps the weights of the best step: the most right on the validation part, of equals the lower loss.

    It is the `eval_fn` and the `on_step` of `fit`. A run that is taken up again finds what was best before; it takes
    the same steps once more from its checkpoint on, so a best step that lies ahead of it is found again.
    """

    def __init__(
        self, folder: Path, measure: Callable[[nn.Module], Found], settings: GenomicsFit, *, writes: bool = True
    ) -> None:
        self.folder, self.measure, self.settings, self.writes = folder, measure, settings, writes
        self.step = settings.steps
        kept = folder / NUMBERS
        self.found: Found | None = json.loads(kept.read_bytes()) if kept.is_file() else None

    def on_step(self, record: Found) -> bool:
        """Take down the step; true where so many looks have found no new best that training is to end.

        The look at a step comes after this, so the step after the last of them is the first to say so.
        """
        self.step = record["step"]
        waited = self.step - (self.step if self.found is None else self.found["step"])
        return 0 < self.settings.patience * self.settings.eval_every < waited

    def __call__(self, model: nn.Module) -> Found:
        """Look at the validation part, and keep the weights where they are the best so far."""
        found = {"step": self.step, **self.measure(model)}
        if self.found is None or _rank(found) > _rank(self.found):
            self.found = found
            if self.writes:
                with new_folder(self.folder) as unfinished:
                    safetensors.torch.save_model(model, str(unfinished / WEIGHTS))
                    write_json(unfinished / NUMBERS, found)
        return {name: value for name, value in found.items() if name != "step"}

    def load(self, model: nn.Module) -> Found:
        """Give a model the weights of the best step; returns what was found then."""
        assert self.found is not None
        safetensors.torch.load_model(model, str(self.folder / WEIGHTS))
        return self.found


def _rank(found: Found) -> tuple[float, float]:
    return found["validation_accuracy"], -found["validation_loss"]
