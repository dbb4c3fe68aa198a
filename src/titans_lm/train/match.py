"""Models of equal size: ours by the width of the MLP, and baselines as large as ours."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titans_lm.config import BackboneConfig
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.fresh import language_model, model_without_weights, special_ids
from titans_lm.train.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def count_parameters(config: BackboneConfig, vocab_size: int) -> int:
    """Count the parameters of a language model with this stack, the tied embedding once, without making them."""
    return sum(parameter.numel() for parameter in model_without_weights(config, vocab_size).parameters())


def match_parameters(config: BackboneConfig, vocab_size: int, target: int) -> BackboneConfig:
    """Widen or narrow the MLP so that the model has as nearly `target` parameters as it can.

    One more channel costs 3 E per block (SwiGLU), so the count differs from the target by half of that per block at
    most. ValueError where even an MLP of one channel is too many.
    """
    per_channel = 3 * config.hidden_size * config.num_hidden_layers
    width = config.mlp_width + round((target - count_parameters(config, vocab_size)) / per_channel)
    if width < 1:
        raise ValueError(
            f"got a target of {target} parameters, fewer than {config.architecture!r} of width {config.hidden_size} "
            "has without its MLP; expected a larger target or a smaller hidden_size"
        )
    return dataclasses.replace(config, intermediate_size=width)


@dataclass(frozen=True)
class Sized:
    """A model to train, and how many parameters it was to have, where that was asked for."""

    model: "PreTrainedModel"
    parameters: int
    asked: int | None = None

    @classmethod
    def given(cls, model: "PreTrainedModel", asked: int | None = None) -> "Sized":
        """Count a model's parameters, a tied embedding once."""
        return cls(model, sum(parameter.numel() for parameter in model.parameters()), asked)

    def describe(self) -> str:
        """Say how many parameters there are, and by how much that misses what was asked for."""
        said = f"{self.parameters:,} parameters"
        if self.asked is None:
            return said
        return f"{said}, {self.parameters / self.asked - 1.0:+.2%} from the {self.asked:,} asked for"


def sized_model(settings: ModelSettings, tokenizer: "PreTrainedTokenizerBase") -> Sized:
    """Build the model that settings describe over the ids of a tokeniser, a baseline as large as ours would be.

    Raises ValueError for a baseline that is unknown or does not fit, and where the MLP cannot be made small enough.
    """
    return sized_for(settings, len(tokenizer), **special_ids(tokenizer))


def sized_for(settings: ModelSettings, vocab_size: int, **special: int | None) -> Sized:
    """Build the same over a vocabulary, with the ids of its special tokens where they are known."""
    asked, config = settings.parameters, settings.model
    if settings.baseline is not None:
        size = count_parameters(config, vocab_size) if asked is None else asked
        return Sized.given(make_baseline(fit_baseline(settings.baseline, config, vocab_size, size, **special)), size)
    if asked is not None:
        config = match_parameters(config, vocab_size, asked)
    return Sized.given(language_model(config, vocab_size, **special), asked)
