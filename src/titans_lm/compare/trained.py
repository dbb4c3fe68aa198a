"""Trained models in a comparison, NAME=PATH: where their weights are, what they are, and what they can be asked."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from titans_lm.compare.settings import NamedModel, trained_model
from titans_lm.data.prepared import tokenizer_fingerprint
from titans_lm.data.tasks.hay import BYTES, WORDS, holds_tokenizer, tokenizer_in
from titans_lm.data.tasks.task import Task
from titans_lm.data.text import blocks
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.evaluate.stream import learned_positions
from titans_lm.train.run import load_model, load_tokenizer, resolve_model
from titans_lm.train.sized import Sized

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("*.safetensors", "*.bin", "config.json", "tokenizer.json")
"""Files that what a model does depends on."""
INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a config.json in which seeds of one model may differ."""
PIECES = "readings"
"""Folder of the readings that are done, a file each."""


def weights_sum(folder: Path) -> str:
    """Sum up weights, config and tokenizer of a saved model."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}):
        digest.update(path.name.encode())
        for block in blocks(path):
            digest.update(block)
    return digest.hexdigest()


def kind_of(folder: Path) -> str:
    """Tell what a saved model is: an architecture of ours, or the model type of Hugging Face."""
    config = json.loads((folder / "config.json").read_bytes())
    return str(config.get("architecture") or config.get("model_type"))


def check_seeds(named: Sequence[NamedModel]) -> None:
    """Refuse models of one name that are no seeds of one model, before anything is read."""
    known: dict[str, tuple[Path, Any]] = {}
    for name, path in named:
        settings = json.loads((resolve_model(path) / "config.json").read_bytes())
        sizes = {key: value for key, value in settings.items() if key not in INCIDENTAL}
        told = sizes, tokenizer_fingerprint(load_tokenizer(path))
        first, asked = known.setdefault(name, (path, told))
        if asked != told:
            raise ValueError(
                f"got {first} and {path}, both named {name!r}, with other settings or tokenizers; "
                "expected seeds of one model under one name"
            )


def reading_file(out: Path, name: str, asked: dict[str, Any]) -> Path:
    """Name the file of a reading that is done, by all that its numbers depend on."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    return out / PIECES / f"{plain}-{hashlib.blake2b(json.dumps(asked).encode(), digest_size=8).hexdigest()}.json"


@dataclass(frozen=True)
class Start:
    """A trained model that a contender begins from."""

    name: str
    path: str
    """Run folder or saved model, as it was given."""
    kind: str
    """Architecture of ours, or model type of Hugging Face."""
    weights: str
    """Sum of weights, config and tokenizer: what a path holds may change between two runs."""

    @classmethod
    def of(cls, contender: str) -> "Start | None":
        """Find the model of a contender NAME=PATH; None for others. ValueError where there is none at its path."""
        named = trained_model(contender)
        if named is None:
            return None
        folder = resolve_model(named.path)
        return cls(named.name, str(named.path), kind_of(folder), weights_sum(folder))

    def model(self, device: str) -> "PreTrainedModel":
        """Load the model, in the precision that it was saved in."""
        return load_model(self.path, device)

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Load the tokenizer that lies beside the model; None where there is none."""
        folder = resolve_model(self.path)
        return load_tokenizer(folder) if holds_tokenizer(folder) else None

    def check(self, task: Task, longest: int) -> int:
        """Check that the model has the ids of a task, in its own tokens, and positions for rows of `longest` tokens.

        Gives the number of its parameters. ValueError, saying what to do, and for weights that cannot be loaded.
        """
        model = self.model("cpu")
        if hasattr(task, "tokenizer"):
            self._check_tokens(model, task, task.tokenizer)
        if vocab_size(model) < task.vocab_size:
            raise ValueError(
                f"got {self.name}={self.path}, a model of {vocab_size(model):,} ids, and a task of "
                f"{task.vocab_size:,}; expected a model with as many, or a task with fewer"
            )
        positions = learned_positions(model)
        if positions is not None and positions < longest:
            raise ValueError(
                f"got {self.name}={self.path}, which has learned {positions:,} positions, and rows of {longest:,} "
                f"tokens; expected --sizes and --test-sizes of {positions:,} tokens or fewer"
            )
        return Sized.given(model).parameters

    def _check_tokens(self, model: nn.Module, task: Task, chosen: str) -> None:
        own = self.tokenizer()
        if own is not None and not same_tokens(own, chosen):
            folder = BYTES if is_byte_tokenizer(own) else resolve_model(self.path)
            raise ValueError(
                f"got task.tokenizer={chosen!r} for {self.name}={self.path}, which was trained with another one; "
                f"expected its own: pass --task.tokenizer {folder}"
            )
        if own is None and vocab_size(model) != task.vocab_size:
            raise ValueError(
                f"got task.tokenizer={chosen!r} of {task.vocab_size:,} ids for {self.name}={self.path}, a model of "
                f"{vocab_size(model):,} without a tokenizer beside it; expected the one that it was trained with: pass "
                "--task.tokenizer, or save the model's tokenizer in its folder"
            )


def vocab_size(model: nn.Module) -> int:
    """Count the ids that a model reads."""
    config: Any = model.config
    return config.get_text_config().vocab_size


def same_tokens(own: "PreTrainedTokenizerBase", chosen: str) -> bool:
    """Whether a tokenizer makes the tokens of a task's: bytes, words or a folder, which is compared by its content."""
    if chosen in (BYTES, WORDS):
        return chosen == BYTES and is_byte_tokenizer(own)
    return tokenizer_fingerprint(own) == tokenizer_fingerprint(tokenizer_in(chosen))
