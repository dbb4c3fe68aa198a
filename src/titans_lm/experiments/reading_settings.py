"""Settings of evaluations in which trained models read documents, or answer questions; they know nothing of torch."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import tyro

from titans_lm.checks import KnownSettings
from titans_lm.config import check_at_least, check_seed
from titans_lm.data.tasks.task import read_size
from titans_lm.experiments.models import NamedModel, named_models
from titans_lm.experiments.settings import check_least, check_once

MemoryKind = Literal["on", "reset", "off"]
RANGES = 64
"""Positions are gathered between 0, 64 and its doubles."""


def _count(text: str) -> int:
    [count] = read_size(text, r"(\d+[KM]?)", "a whole number, or one such as 4K (4,096) or 1M")
    assert count is not None
    return count


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar="INT", instance_from_str=lambda words: _count(words[0]),
        is_instance=lambda value: isinstance(value, int), str_from_instance=lambda value: [str(value)],
    ),
]  # fmt: skip
"""Tokens, as the sizes of tasks are written: 4096 or 4K."""
Models = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")]


class Mode(NamedTuple):
    """What a model may remember of a stretch."""

    kind: Literal["on", "reset", "off", "windows"]
    every: int | None = None
    """Tokens between two resets, or of a window."""

    @property
    def name(self) -> str:
        return self.kind if self.every is None else f"{self.kind}-{self.every}"


@dataclass(frozen=True, kw_only=True)
class ReadingSettings(KnownSettings):
    """What all evaluations have in which trained models read documents."""

    models: Models = ()
    """Run folders or saved models, ours or any causal LM of Hugging Face. NAME=PATH names one; several of one name are
    seeds of one model."""
    text: tuple[Path, ...] = ()
    """Files and folders of documents that no model was trained on; every file is one."""
    skip_tokens: Count = 0
    """Tokens at the start of each document that are left out: title pages, contents, prefaces."""
    piece_len: int = 256
    """Tokens that are read at once; changes speed and nothing else."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    seed: int = 0
    """Seed of what is drawn, and of the bootstrap over it."""
    out: Path = Path("runs/reading")
    """Folder of the results; the same command goes on where it was stopped."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""

    needed: ClassVar[tuple[str, ...]] = ("models", "text")
    """Settings that must be given."""
    lacking: ClassVar[str]
    """What is said where one of them is not."""

    def __post_init__(self) -> None:
        check_least(self, piece_len=1)
        check_seed("seed", self.seed)
        check_least(self, skip_tokens=0)

    def named(self) -> list[NamedModel]:
        """Give models with their names; ValueError for none, for one twice, and for two that would be called alike."""
        if not all(getattr(self, name) for name in self.needed):
            raise ValueError(self.lacking)
        return named_models(self.models)


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(ReadingSettings):
    """Measure bits per byte of whole books by position, with the memory on, reset and held still.

    Begin with `titans evaluate perplexity runs/mac runs/sliding --text books/`. Stopped, the same command goes on.
    """

    memory: tuple[MemoryKind, ...] = ("on", "reset", "off")
    """What models with a state may remember: all of a stretch, what came after the last reset, or, for models with a
    neural memory, what a memory holds that never learns. Others read windows in place of on."""
    reset_every: tuple[Count, ...] = (1024,)
    """Tokens between two resets; several are several readings."""
    stretch: Count | None = None
    """Tokens of the stretches that books are cut into, each read from nothing; by default books are read whole."""
    max_tokens: Count | None = None
    """Tokens that are read of each book; by default all."""
    near: tuple[Count, Count] = (4096, 16_384)
    """Positions that far ones are compared with: 0, 64 or its doubles."""
    far: tuple[Count, Count] = (16_384, 65_536)
    """Far positions; stretches that reach their end are compared."""
    window: Count = 1024
    """Tokens of a window, for models without a state of constant size."""
    window_step: Count = 512
    """Tokens of a window that are new; those before them have been predicted already."""
    batch_size: int = 8
    """Stretches that are read side by side."""
    out: Path = Path("runs/perplexity")

    lacking = "got no model or no text; expected titans evaluate perplexity MODEL … --text FILE_OR_FOLDER …"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, window=1, window_step=1, batch_size=1)
        for name in ("stretch", "max_tokens"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        if self.window < self.window_step:
            raise ValueError(
                f"got window={self.window} and window_step={self.window_step}; expected a window at least as long"
            )
        check_once(self, "memory", "reset_every")
        check_least(self, reset_every=1, near=0, far=0)
        for name in ("near", "far"):
            if any(edge % RANGES or (edge // RANGES) & (edge // RANGES - 1) for edge in getattr(self, name)):
                raise ValueError(f"got {name}={getattr(self, name)}; expected two of 0, 64, 128, 256 and so on")
        edges = [*self.near, *self.far]
        if any(a > b for a, b in pairwise(edges)) or self.near[0] == self.near[1] or self.far[0] == self.far[1]:
            raise ValueError(f"got near={self.near} and far={self.far}; expected near ones before far ones, rising")

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


@dataclass(frozen=True, kw_only=True)
class RereadSettings(ReadingSettings):
    """Measure what a model gains on a passage that it has read before, by the tokens of other books in between.

    Begin with `titans evaluate reread runs/lmm runs/sliding --text novel.txt --between books/`. Stopped, the same
    command goes on.
    """

    between: tuple[Path, ...] = ()
    """Files and folders of other documents, which are read between the two readings of a passage."""
    lengths: tuple[Count, ...] = (64, 256)
    """Tokens of a passage; several are several measurements."""
    distances: tuple[Count, ...] = (0, 256, 1024, 4096, 16_384, 65_536)
    """Tokens of other documents between the two readings, rising."""
    passages: int = 32
    """Passages of each length, shared out among the documents."""
    rows: int = 8
    """Passages of one document that are read side by side, before the same tokens of other documents; each is read in
    another one's place for comparison."""
    context: Count = 0
    """Tokens from the start of the document that are read before each of its passages."""
    max_len: Count = 1024
    """Tokens of the longest row for models whose state grows with the text (full attention), as long as those that they
    were trained on; distances that do not fit are left out."""
    out: Path = Path("runs/reread")

    needed = ("models", "text", "between")
    lacking = (
        "got no model, no text or nothing between; expected titans evaluate reread MODEL … --text FILE … "
        "--between OTHERS …"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, passages=2, rows=2, max_len=1, context=0, lengths=2, distances=0)
        for name in ("lengths", "distances"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"got {name}={values}; expected one or more, rising")
        if self.passages % self.rows:
            raise ValueError(
                f"got passages={self.passages} and rows={self.rows}; expected passages in full groups of rows"
            )


@dataclass(frozen=True, kw_only=True)
class GapSettings(ReadingSettings):
    """Measure how much of what a window costs a pretrained model its memory wins back (titans retrofit).

    Begin with `titans evaluate gap runs/retrofit --text novel.txt`. Stopped, the same command goes on.
    """

    rows: int = 16
    """Rows, shared out among the documents."""
    seq_len: int = 2048
    """Tokens of a row."""
    windows: tuple[int, ...] = ()
    """Windows to read with; by default the adapter's own."""
    out: Path = Path("runs/gap")

    lacking = "got no model or no text; expected titans evaluate gap ADAPTER … --text FILE_OR_FOLDER …"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, rows=2, seq_len=2, windows=1)
        check_once(self, empty=("windows",))


@dataclass(frozen=True, kw_only=True)
class QuestionSettings(KnownSettings):
    """Ask trained models lm-eval's tasks (--tasks piqa), or have it ask files of questions (--local DIR).

    Begin with `titans evaluate lm-eval runs/first --tasks piqa arc_easy --limit 100`.
    """

    models: Models = ()
    """Run folders, checkpoints, or folders of saved models: ours, or any causal language model of Hugging Face.
    NAME=PATH names one."""
    tasks: tuple[str, ...] = ()
    """Tasks by their names; with --local all that are there, if none is named."""
    local: Path | None = None
    """Folder of JSON lines (piqa.jsonl and the like) to ask of instead, without a network."""
    limit: int | None = None
    """Items of each task, the first ones; all if not set."""
    batch_size: int = 8
    """Texts read at once; changes speed and nothing else."""
    max_length: int | None = None
    """Most tokens that are read: longer prompts lose their beginning, pages are cut into windows.

    Without it, a model of ours has no limit and reads a page as a whole; others have the limit of their config."""
    num_fewshot: int | None = None
    """Examples before each question; if not set, as many as the task says. Not with --local."""
    include_path: Path | None = None
    """Folder of more tasks for lm-eval, in YAML. Not with --local."""
    metadata: tuple[str, ...] = ()
    """What tasks are told, as NAME=VALUE with VALUE in JSON: max_seq_lengths=[1024,2048] for RULER, max_seq_lengths=4k
    for BABILong. Not with --local."""
    bos: Literal["auto", "yes", "no", "tokenizer"] = "auto"
    """Whether texts begin with <bos>; auto is yes for what was trained here, and elsewhere as the tokenizer does."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    seed: int = 1234
    """Seed of the examples before questions, and of what tasks draw."""
    samples: Path | None = None
    """Write a line of JSON for every item to this file: what the model made of each choice."""
    json: Path | None = None
    """Write the numbers to this file; titans bench render makes a table of it."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        check_least(self, batch_size=1)
        for name, least in (("limit", 1), ("max_length", 2), ("num_fewshot", 0)):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), least)
        if self.local is not None:
            for name, unset in (("num_fewshot", None), ("include_path", None), ("metadata", ())):
                if getattr(self, name) != unset:
                    raise ValueError(
                        f"got {name}={getattr(self, name)!r} with --local; expected it for lm-eval's tasks"
                    )
        self.task_metadata()

    def task_metadata(self) -> dict[str, Any]:
        """Return the metadata by name; ValueError for a part that is no NAME=VALUE."""
        found = {}
        for part in self.metadata:
            name, equals, value = part.partition("=")
            if not name or not equals:
                raise ValueError(f"got the metadata {part!r}; expected NAME=VALUE")
            try:
                found[name] = json.loads(value)
            except json.JSONDecodeError:
                found[name] = value
        return found
