"""The step of a run that did best on the validation part, kept beside its checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from titans_lm.genomics.settings import GenomicsFit
from titans_lm.train.files import remove_unfinished, write_atomically, write_json
from titans_lm.train.session import due

NUMBERS, OLDER = "best.json", "model.safetensors"
"""Runs that were begun before weights had the step in their name have them in the latter."""
Found = dict[str, Any]


class Best:
    """Keeps the weights of the best step: the most right on the validation part, of equals the lower loss.

    It is the `on_step` and the `eval_fn` of `fit`: it looks when a step is done and before anything is saved, so a run
    that is stopped at that step, and taken up again, has lost no look. Such a run finds what was best before; it takes
    the same steps once more from its checkpoint on, so a best step that lies ahead of it is found again.

    The weights have the step in their name, and best.json, which is replaced in one piece, says whose count.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        measure: Callable[[nn.Module], Found],
        settings: GenomicsFit,
        *,
        writes: bool = True,
    ) -> None:
        self.folder, self.model, self.measure, self.settings, self.writes = folder, model, measure, settings, writes
        self.last: Found = {}
        kept = folder / NUMBERS
        self.found: Found | None = json.loads(kept.read_bytes()) if kept.is_file() else None

    def on_step(self, record: Found) -> bool:
        """Look where it is time to; true where so many looks have found no new best that training is to end.

        A run that had ended so, and is taken up again, takes the one step that it takes to ask, and no more.
        """
        step, settings = record["step"], self.settings
        if due(step, settings.eval_every) or step == settings.steps:
            self._look(step)
        return bool(settings.patience) and self.found is not None and step >= self._patient_until(self.found)

    def __call__(self, model: nn.Module) -> Found:
        """Give the numbers of the last look; one that has taken no step, as it was done before, looks at none."""
        return {name: value for name, value in self.last.items() if name != "step"}

    def steps(self, taken: int) -> int:
        """Count the steps of the run as if it had not been taken up again after its end."""
        if not self.settings.patience or self.found is None:
            return taken
        return min(taken, self._patient_until(self.found))

    def load(self, model: nn.Module) -> Found:
        """Give a model the weights of the best step; returns what was found then."""
        assert self.found is not None
        kept = self._weights(self.found)
        safetensors.torch.load_model(model, str(kept if kept.is_file() else self.folder / OLDER))
        return self.found

    def _look(self, step: int) -> None:
        self.last = {"step": step, **self.measure(self.model)}
        if self.found is None or _rank(self.last) > _rank(self.found):
            self.found = self.last
            if self.writes:
                self._keep(self.found)

    def _keep(self, found: Found) -> None:
        state = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
        write_atomically(self._weights(found), safetensors.torch.save(state))
        write_json(self.folder / NUMBERS, found)
        for older in self.folder.glob("*.safetensors"):
            if older != self._weights(found):
                older.unlink()
        remove_unfinished(self.folder)

    def _weights(self, found: Found) -> Path:
        return self.folder / f"step-{found['step']}.safetensors"

    def _patient_until(self, found: Found) -> int:
        return found["step"] + self.settings.patience * self.settings.eval_every


def _rank(found: Found) -> tuple[float, float]:
    return found["validation_accuracy"], -found["validation_loss"]
