"""Fair baselines: the same number of parameters, by the width of the MLP."""

import dataclasses

from titans_lm.config import BackboneConfig
from titans_lm.train.language import model_without_weights


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
