"""Settings of `titans evaluate perplexity`: which models read which books, and what they may remember."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

from titans_lm.compare.settings import NamedModel, named_models
from titans_lm.config import check_at_least

MemoryKind = Literal["on", "reset", "off"]
RANGES = 64
"""Positions are gathered between 0, 64 and its doubles."""


class Mode(NamedTuple):
    """What a model may remember of a stretch."""

    kind: Literal["on", "reset", "off", "windows"]
    every: int | None = None
    """Tokens between two resets, or of a window."""

    @property
    def name(self) -> str:
        return self.kind if self.every is None else f"{self.kind}-{self.every}"


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings:
    """Measure bits per byte of whole books by position, with the memory on, reset and held still.

    Begin with `titans evaluate perplexity runs/mac runs/sliding --text books/`. Stopped, the same command goes on.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = ()
    """Run folders or saved models, ours or any causal LM of Hugging Face. NAME=PATH names one; several of one name are
    seeds of one model."""
    text: tuple[Path, ...] = ()
    """Files and folders of documents that no model was trained on; every file is a book."""
    memory: tuple[MemoryKind, ...] = ("on", "reset", "off")
    """What models with a state may remember: all of a stretch, what came after the last reset, or, for models with a
    neural memory, what a memory holds that never learns. Others read windows in place of on."""
    reset_every: tuple[int, ...] = (1024,)
    """Tokens between two resets; several are several readings."""
    stretch: int | None = None
    """Tokens of the stretches that books are cut into, each read from nothing; by default books are read whole."""
    max_tokens: int | None = None
    """Tokens that are read of each book; by default all."""
    skip_tokens: int = 0
    """Tokens at the start of each book that are left out: title pages, contents, prefaces."""
    near: tuple[int, int] = (4096, 16_384)
    """Positions that far ones are compared with: 0, 64 or its doubles."""
    far: tuple[int, int] = (16_384, 65_536)
    """Far positions; stretches that reach their end are compared."""
    window: int = 1024
    """Tokens of a window, for models without a state of constant size."""
    window_step: int = 512
    """Tokens of a window that are new; those before them have been predicted already."""
    piece_len: int = 256
    """Tokens that are read at once; changes speed and nothing else."""
    batch_size: int = 8
    """Stretches that are read side by side."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    seed: int = 0
    """Seed of the bootstrap over books."""
    out: Path = Path("runs/perplexity")
    """Folder of the results; the same command goes on where it was stopped."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        for name in ("window", "window_step", "piece_len", "batch_size"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("stretch", "max_tokens"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name in ("seed", "skip_tokens"):
            check_at_least(name, getattr(self, name), 0)
        if self.window < self.window_step:
            raise ValueError(
                f"got window={self.window} and window_step={self.window_step}; expected a window at least as long"
            )
        for name in ("memory", "reset_every"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"got {name}={values!r}; expected one or more, each once")
        for every in self.reset_every:
            check_at_least("reset_every", every, 1)
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name in ("near", "far"):
            for edge in getattr(self, name):
                check_at_least(name, edge, 0)
                if edge % RANGES or (edge // RANGES) & (edge // RANGES - 1):
                    raise ValueError(f"got {name}={getattr(self, name)}; expected two of 0, 64, 128, 256 and so on")
        edges = [*self.near, *self.far]
        if any(a > b for a, b in pairwise(edges)) or self.near[0] == self.near[1] or self.far[0] == self.far[1]:
            raise ValueError(f"got near={self.near} and far={self.far}; expected near ones before far ones, rising")

    def named(self) -> list[NamedModel]:
        """Give models with their names; ValueError for a model twice, and for two that would be called alike."""
        if not self.models or not self.text:
            raise ValueError(
                "got no model or no text; expected titans evaluate perplexity MODEL … --text FILE_OR_FOLDER …"
            )
        return named_models(self.models)

    def modes(self, *, carries: bool, remembers: bool) -> list[Mode]:
        """List the readings of a model: one that carries a state of constant size, and may have a neural memory."""
        found: list[Mode] = []
        # "on" comes first, whatever was written first: the others are told by their difference from it.
        for kind in sorted(self.memory, key=lambda kind: kind != "on"):
            if kind == "reset":
                found += [Mode("reset", every) for every in self.reset_every]
            elif kind == "on":
                found.append(Mode("on") if carries else Mode("windows", self.window))
            elif remembers:
                found.append(Mode("off"))
        return found
