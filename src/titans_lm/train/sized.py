"""The model that a training begins with: a fresh one as large as settings say, or a saved one; and its shape."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titans_lm.config import BackboneConfig
from titans_lm.data.tokenizer import count_ids
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.device import machine_memory
from titans_lm.train.fresh import (
    count_parameters,
    language_model,
    match_parameters,
    model_without_weights,
    size_of,
    special_ids,
)
from titans_lm.train.run import load_model, resolve_model
from titans_lm.train.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_MLP = ("mamba", "mamba2")
"""Model types whose intermediate_size is that of the mixer."""


@dataclass(frozen=True)
class Shape:
    """What a model consists of; None where its config does not say it, or has none."""

    blocks: int | None
    hidden_size: int
    heads: int | None
    head_dim: int | None
    mlp_width: int | None
    mlp_ratio: float | None
    """Width of the MLP in widths of the model."""

    @classmethod
    def of(cls, model: "PreTrainedModel") -> "Shape":
        """Read it from the config of a model, ours or another."""
        config: Any = model.config.get_text_config()
        if hasattr(config, "backbone_config"):
            config = config.backbone_config()
        size = config.hidden_size
        heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
        head_dim = getattr(config, "head_dim", None) or (size // heads if heads else None)
        given = getattr(config, "intermediate_size", None)
        mlp = None if getattr(config, "model_type", None) in NO_MLP else getattr(config, "mlp_width", given)
        ratio = None if mlp is None else mlp / size
        return cls(getattr(config, "num_hidden_layers", None), size, heads, head_dim, mlp, ratio)

    def describe(self) -> str:
        heads = f", {self.heads} heads of {self.head_dim}" if self.heads else ""
        mlp = f", MLP {self.mlp_width:,} ({self.mlp_ratio:.2f} of it)" if self.mlp_width else ""
        blocks = f"{self.blocks} blocks of width" if self.blocks else "width"
        return f"{blocks} {self.hidden_size:,}{heads}{mlp}"


@dataclass(frozen=True)
class Sized:
    """A model to train, and how many parameters it was to have, where that was asked for."""

    model: "PreTrainedModel"
    asked: int | None = None

    @cached_property
    def parameters(self) -> int:
        return size_of(self.model)

    @property
    def shape(self) -> Shape:
        return Shape.of(self.model)

    def describe(self) -> str:
        """Say how many parameters there are, by how much that misses what was asked for, and the shape."""
        said = f"{self.parameters:,} parameters"
        if self.asked is not None:
            said += f", {self.parameters / self.asked - 1.0:+.2%} from the {self.asked:,} asked for"
        return f"{said}; {self.shape.describe()}"


def sized_model(settings: ModelSettings, tokenizer: "PreTrainedTokenizerBase") -> Sized:
    """Build the model that settings describe over the ids of a tokeniser, a baseline as large as ours would be.

    Raises ValueError for a baseline that is unknown or does not fit, and for a size that cannot be had, or not here.
    """
    return sized_for(settings, count_ids(tokenizer), **special_ids(tokenizer))


def sized_for(settings: ModelSettings, vocab_size: int, **special: int | None) -> Sized:
    """Build the same over a vocabulary, with the ids of its special tokens where they are known."""
    asked, config = settings.parameters, settings.model
    size = count_parameters(config, vocab_size) if asked is None else asked
    if 4 * size > machine_memory() and not torch.empty(0).is_meta:  # the system would stall long before it refuses
        raise ValueError(
            f"got a model of {size:,} parameters, {4 * size / 2**30:,.1f} GiB in float32; expected one that this "
            f"machine's {machine_memory() / 2**30:,.1f} GiB of memory can hold"
        )
    if settings.baseline is not None:
        return Sized(make_baseline(fit_baseline(settings.baseline, config, vocab_size, size, **special)), size)
    if asked is not None:
        config = match_parameters(config, vocab_size, asked)
    return Sized(language_model(config, vocab_size, **special), asked)


def own_size(settings: ModelSettings, vocab_size: int, **special: int | None) -> int:
    """Count the parameters of the model that others are matched by: a folder's as it is, else those of our stack."""
    if settings.baseline is not None and Path(settings.baseline).exists():
        return sized_for(dataclasses.replace(settings, parameters=None), vocab_size, **special).parameters
    return count_parameters(settings.model, vocab_size)


def saved_settings(path: Path) -> dict[str, Any]:
    """Read what a saved model of ours is, for a command line to begin with: its stack, and its vocabulary."""
    from titans_lm.hf import TitansConfig

    config = TitansConfig.from_pretrained(resolve_model(path))
    return {"model": dataclasses.asdict(config.backbone_config()), "vocab_size": config.vocab_size}


def model_from(path: Path, config: BackboneConfig) -> "PreTrainedModel":
    """Load a saved model with other settings; ValueError where it is none of ours, or a weight would not fit.

    That is the second stage of TNT, at shorter local chunks, and the way to another `chunk_size` of any memory.
    """
    from titans_lm.hf import TitansConfig, TitansForCausalLM

    saved: Any = load_model(path, "cpu")
    if not isinstance(saved, TitansForCausalLM):
        raise ValueError(f"got init={str(path)!r}, a {type(saved).__name__}; expected a model that titans train made")
    before, size = saved.config.backbone_config(), saved.config.vocab_size
    shapes = _shapes(saved)
    changed = [name for name, value in vars(config).items() if value != getattr(before, name)]
    if _shapes(model_without_weights(config, size)) != shapes:
        told = ", ".join(f"{name}={getattr(config, name)!r}, which was {getattr(before, name)!r}" for name in changed)
        raise ValueError(
            f"got init={str(path)!r} with {told}: its weights would be of other shapes; expected settings that leave "
            "all shapes as they are, such as chunk_size, or tnt_local_chunks of as many memories"
        )
    settings = {**saved.config.to_dict(), **dataclasses.asdict(config)}
    model = TitansForCausalLM(TitansConfig.from_dict(settings))
    model.load_state_dict(saved.state_dict())
    return model


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
