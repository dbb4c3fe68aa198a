"""Trained models that come with the package, by name; each has a card, README.md, beside its weights."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from titans_lm.config import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "pretrained:"
"""What stands before a name wherever the folder of a model is taken."""
FOLDER = Path(__file__).parent.parent / "weights"


def shipped_names() -> list[str]:
    """Name the models that this installation has."""
    return sorted(path.parent.name for path in FOLDER.glob("*/model.safetensors"))


def shipped_model(name: str) -> Path:
    """Find the folder of a model; ValueError for a name that none has, and for a wheel without weights."""
    known = shipped_names()
    if not known:
        raise ValueError(
            f"got {PREFIX}{name}, and a titans-lm that came without weights; install a wheel that has them, or give "
            "the folder of a model"
        )
    if name not in known:
        raise ValueError(f"got {PREFIX}{name}, which is no model of this package; {nearest(name, known)}")
    return FOLDER / name


@cache
def pretrained(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model and its tokenizer."""
    from titans_lm.train.run import load_model, load_tokenizer

    folder = shipped_model(name)
    return load_model(folder, "cpu"), load_tokenizer(folder)
