"""Stacks of equal size: as many blocks, the width that the number of parameters allows, an MLP at a fixed ratio to it.

Everybody's size is found by this rule (D43), ours and the baselines that have an MLP: the width is what fits, so that a
block with two mixers is narrower and does not pay for them with its MLP.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache

from titans_lm.backbone import reads_embeddings
from titans_lm.blocks import BLOCKS
from titans_lm.config import BackboneConfig
from titans_lm.train.fresh import model_without_weights, size_of

MATCHED_BY = "width and MLP"
"""Name of the rule, for what depends on it; before it sizes were matched by the MLP's width alone."""
LEAST_RATIO = 2.0
"""Least width of an MLP, in widths of the model."""
TOLERANCE = 0.01
"""How far a number of parameters may be from what was asked for."""


@lru_cache(maxsize=1024)  # a comparison asks for the same sizes again for every seed and rate
def count_parameters(config: BackboneConfig, vocab_size: int) -> int:
    """Count the parameters of a language model with this stack, the tied embedding once, without making them.

    Blocks of a kind are alike, up to the norms of those that read embeddings (D56), so one of each is enough: making 24
    takes seconds even without weights.
    """
    blocks = enumerate(config.blocks)
    norms = sum(1 + BLOCKS[name].beside for place, name in blocks if reads_embeddings(config, place))
    kinds = Counter(config.blocks)
    types = tuple(kinds) if len(kinds) > 1 else None
    one_each = dataclasses.replace(
        config, num_hidden_layers=len(kinds), layer_types=types, memory_reads_embeddings=False
    )
    model = model_without_weights(one_each, vocab_size)
    layers = model.base_model.get_submodule("backbone.layers").children()
    more = sum(size_of(one) * (times - 1) for one, times in zip(layers, kinds.values(), strict=True))
    return size_of(model) + more + norms * config.hidden_size


def match_parameters(config: BackboneConfig, vocab_size: int, target: int) -> BackboneConfig:
    """Choose width and MLP so that the model has `target` parameters, up to half a channel of the MLPs.

    Blocks and heads stay as they are, heads get wider or narrower. ValueError where no width comes within 1 %.
    """

    def sized(hidden_size: int, mlp: int) -> BackboneConfig:
        return dataclasses.replace(config, hidden_size=hidden_size, intermediate_size=mlp)

    try:
        return sized(*fit_shape(lambda *sizes: count_parameters(sized(*sizes), vocab_size), config, target))
    except ValueError as error:
        raise ValueError(f"{config.architecture!r} does not fit: {error}") from error


def fit_shape(count: Callable[[int, int], int], like: BackboneConfig, target: int) -> tuple[int, int]:
    """Choose the width E and the MLP's width F of a stack, by what `count(E, F)` says of their parameters.

    Widths go in steps of two channels a head, which rotary pairs need. Each has one F that brings it to the target, as
    every channel more costs the same: that E is taken whose F / E is nearest to that of `like`, or to 2
    where that is less, and none whose F is below 2 E.
    """
    step, ratio = 2 * like.num_attention_heads, max(like.mlp_width / like.hidden_size, LEAST_RATIO)

    @cache
    def mlp(size: int) -> int:
        grain = 8 if size >= 512 else 1  # what the matrix units of a GPU like
        least = int(LEAST_RATIO) * size
        narrow = count(size, least)
        per_grain = count(size, least + grain) - narrow  # SwiGLU has three maps, other libraries' MLPs may have two
        return least + grain * round((target - narrow) / per_grain)

    low = like.hidden_size % step or step
    if mlp(low) < LEAST_RATIO * low:
        least = count(low, int(LEAST_RATIO) * low)
        raise ValueError(
            f"with {like.num_hidden_layers} blocks, a width of {low} and an MLP of twice as much it has {least:,} "
            f"parameters; expected {target:,} or fewer: ask for more, or give fewer blocks or heads"
        )
    high = max(like.hidden_size, low + step)
    while mlp(high) > ratio * high:
        low, high = high, high + max((high - low) // step, 1) * 2 * step
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (middle, high) if mlp(middle) > ratio * middle else (low, middle)
    fits = [size for size in (low, high) if mlp(size) >= LEAST_RATIO * size]
    size = min(fits, key=lambda size: abs(mlp(size) / size - ratio))
    check_near(count(size, mlp(size)), target)
    return size, mlp(size)


def check_near(found: int, target: int) -> None:
    """Refuse a number of parameters that is more than 1 % away from what it was to be."""
    if abs(found / target - 1.0) > TOLERANCE:
        raise ValueError(
            f"its sizes come in steps, the nearest of which has {found:,} parameters, {found / target - 1.0:+.1%} from "
            f"{target:,}; expected at most {TOLERANCE:.0%}: ask for a number that it can have, or for more"
        )
