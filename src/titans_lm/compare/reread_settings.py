"""Settings of `titans evaluate reread`: which models read which passages twice, and what lies between."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.compare.settings import NamedModel, named_models
from titans_lm.config import check_at_least


@dataclass(frozen=True, kw_only=True)
class RereadSettings:
    """Measure what a model gains on a passage that it has read before, by the tokens of other books in between.

    Begin with `titans evaluate reread runs/lmm runs/sliding --text novel.txt --between books/`. Stopped, the same
    command goes on.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = ()
    """Run folders or saved models, ours or any causal LM of Hugging Face. NAME=PATH names one; several of one name are
    seeds of one model."""
    text: tuple[Path, ...] = ()
    """Files and folders of documents that no model was trained on; passages are drawn from them in turn."""
    between: tuple[Path, ...] = ()
    """Files and folders of other documents, which are read between the two readings of a passage."""
    lengths: tuple[int, ...] = (64, 256)
    """Tokens of a passage; several are several measurements."""
    distances: tuple[int, ...] = (0, 256, 1024, 4096, 16_384, 65_536)
    """Tokens of other documents between the two readings, rising."""
    passages: int = 32
    """Passages of each length, shared out among the documents."""
    rows: int = 8
    """Passages of one document that are read side by side, before the same tokens of other documents; each is read in
    another one's place for comparison."""
    context: int = 0
    """Tokens from the start of the document that are read before each of its passages."""
    skip_tokens: int = 0
    """Tokens at the start of each document that are left out: title pages, contents, prefaces."""
    max_len: int = 1024
    """Tokens of the longest row for models whose state grows with the text (full attention), as long as those that they
    were trained on; distances that do not fit are left out."""
    piece_len: int = 256
    """Tokens that are read at once; changes speed and nothing else."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    seed: int = 0
    """Seed of the passages, and of the bootstrap over them."""
    out: Path = Path("runs/reread")
    """Folder of the results; the same command goes on where it was stopped."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        for name, least in (("passages", 2), ("rows", 2), ("max_len", 1), ("piece_len", 1)):
            check_at_least(name, getattr(self, name), least)
        for name in ("context", "skip_tokens", "seed"):
            check_at_least(name, getattr(self, name), 0)
        for name, least in (("lengths", 2), ("distances", 0)):
            values = getattr(self, name)
            for value in values:
                check_at_least(name, value, least)
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"got {name}={values}; expected one or more, rising")
        if self.passages % self.rows:
            raise ValueError(
                f"got passages={self.passages} and rows={self.rows}; expected passages in full groups of rows"
            )

    def named(self) -> list[NamedModel]:
        """Give models with their names; ValueError for a model twice, and where something to read is missing."""
        if not self.models or not self.text or not self.between:
            raise ValueError(
                "got no model, no text or nothing between; expected titans evaluate reread MODEL … --text FILE … "
                "--between OTHERS …"
            )
        return named_models(self.models)
