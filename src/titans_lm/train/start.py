"""A training that begins with the weights of a saved model, whose settings may differ as far as all weights still fit.

That is the second stage of TNT, at shorter local chunks, and the way to another `chunk_size` of any memory.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_lm.config import BackboneConfig
from titans_lm.train.run import load_model, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def saved_settings(path: Path) -> dict[str, Any]:
    """Read what a saved model of ours is, for a command line to begin with: its stack, and its vocabulary."""
    from titans_lm.hf import TitansConfig

    config = TitansConfig.from_pretrained(resolve_model(path))
    return {"model": dataclasses.asdict(config.backbone_config()), "vocab_size": config.vocab_size}


def model_from(path: Path, config: BackboneConfig) -> "PreTrainedModel":
    """Load a saved model with other settings; ValueError where it is none of ours, or a weight would not fit."""
    from titans_lm.hf import TitansConfig, TitansForCausalLM
    from titans_lm.train.fresh import model_without_weights

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
