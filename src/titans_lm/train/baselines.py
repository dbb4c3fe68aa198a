"""Other models through the same trainer, with as many parameters as one of ours.

A baseline of Hugging Face takes depth and heads from a `BackboneConfig`, and its size from a number of parameters: by
the rule of ours where it has an MLP (`fresh.py`), else by one or two sizes of its own. What it does not take from there
is what its library ships as default. A folder with a config.json is taken as it is. DeltaNet and Gated DeltaNet are our
own block with settings that make their rule of our op.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titans_lm.checks import one_line
from titans_lm.config import BackboneConfig, nearest
from titans_lm.train.fresh import check_near, fit_shape, match_parameters, size_of, without_weights
from titans_lm.train.mamba2 import use_chunk_scan
from titans_lm.train.settings import RULES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Settings = dict[str, Any]
LONG = 2**20
"""Positions that a rotary embedding is told to expect: more than anybody reads."""


class Knob(NamedTuple):
    """A size by which a baseline is fitted, in steps."""

    name: str
    start: int
    step: int


@dataclass(frozen=True)
class Family:
    """One kind of baseline: its settings for a stack like ours and given sizes, and what these sizes are."""

    model_type: str
    settings: Callable[..., Settings]
    knobs: Callable[[BackboneConfig], tuple[Knob, ...]] | None = None
    """Sizes of its own; None for one with an MLP, whose width and MLP are found as ours are."""


def baseline_names() -> tuple[str, ...]:
    """Name every baseline that is made to fit."""
    return (*FAMILIES, *RULES)


def fit_baseline(
    name: str, like: BackboneConfig, vocab_size: int, parameters: int, **special: int | None
) -> "PreTrainedConfig":
    """Choose a baseline's config for a stack like ours, over a vocabulary, with a number of parameters.

    `special` are the ids of special tokens (bos_token_id, …). Where `name` is a folder with a config.json, or such a
    file, the config is taken as it is but for the vocabulary. Raises ValueError for a name that is neither, and where
    even the smallest of its kind has more parameters.
    """
    given = {"vocab_size": vocab_size, **special}
    if name in RULES:
        from titans_lm.hf import TitansConfig

        stack = match_parameters(dataclasses.replace(like, **RULES[name]), vocab_size, parameters)
        return TitansConfig(**given, **dataclasses.asdict(stack))
    if name not in FAMILIES:
        return _read_config(name, given)
    family = FAMILIES[name]

    def config_of(**sizes: int) -> "PreTrainedConfig":
        from transformers import AutoConfig

        settings = family.settings(like, **sizes)
        return AutoConfig.for_model(family.model_type, tie_word_embeddings=True, **settings, **given)

    try:
        return _fitted(family, config_of, like, parameters)
    except ValueError as error:
        raise ValueError(f"the baseline {name!r} does not fit: {error}") from error


def _fitted(
    family: Family, config_of: Callable[..., "PreTrainedConfig"], like: BackboneConfig, parameters: int
) -> "PreTrainedConfig":
    if family.knobs is None:
        size, mlp = fit_shape(
            lambda size, mlp: _count(config_of(hidden_size=size, intermediate_size=mlp)), like, parameters
        )
        return config_of(hidden_size=size, intermediate_size=mlp)
    knobs = family.knobs(like)
    sizes = {knob.name: knob.start for knob in knobs}
    for knob in knobs:  # the coarse one first, up to what fits, then the fine one

        @cache
        def count(size: int, knob: Knob = knob) -> int:
            return _count(config_of(**{**sizes, knob.name: size}))

        sizes[knob.name] = nearest_size(count, knob, parameters, below=knob is not knobs[-1])
    check_near(_count(config_of(**sizes)), parameters)
    return config_of(**sizes)


def make_baseline(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Make a baseline with fresh weights, those that its library starts with."""
    from transformers import AutoModelForCausalLM

    use_chunk_scan(config.model_type)
    return AutoModelForCausalLM.from_config(config)


def nearest_size(count: Callable[[int], int], knob: Knob, target: int, *, below: bool = False) -> int:
    """Find the multiple of the knob's step whose count, which grows with it, comes nearest to the target.

    With `below`, the largest whose count is not above it, or one step. ValueError where one step is too much already.
    """
    least = knob.step
    if count(least) > target:
        if below:
            return least
        raise ValueError(
            f"with {knob.name}={least} it has {count(least):,} parameters; expected {target:,} or fewer: ask for more, "
            "or give a smaller hidden_size or fewer layers"
        )
    most = max(knob.start // least * least, least)
    while count(most) < target:
        most *= 2
    sizes = range(least, most + 1, least)
    enough = bisect_left(sizes, target, key=count)
    around = sizes[max(enough - 1, 0) : enough + 1]
    if below:
        return max(size for size in around if count(size) <= target)
    return min(around, key=lambda size: abs(count(size) - target))


def _count(config: "PreTrainedConfig") -> int:
    with without_weights():
        return size_of(make_baseline(config))


def _read_config(name: str, given: Settings) -> "PreTrainedConfig":
    from transformers import AutoConfig

    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"got the baseline {name!r}; {nearest(name, baseline_names())} (or a folder with a model's config.json)"
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **given)  # else it asks, and waits
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"got the baseline {name!r}, whose config cannot be read: {one_line(error)}") from error


def _llama(c: BackboneConfig, hidden_size: int, intermediate_size: int) -> Settings:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_attention_heads,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": LONG,
    }


def _mistral(c: BackboneConfig, hidden_size: int, intermediate_size: int) -> Settings:
    return {**_llama(c, hidden_size, intermediate_size), "sliding_window": c.window}


def _qwen3_next(c: BackboneConfig, hidden_size: int, intermediate_size: int) -> Settings:
    """Gated DeltaNet with one block of full attention in four, and at the end, without experts."""
    last = c.num_hidden_layers - 1
    kinds = ["full_attention" if i % 4 == 3 or i == last else "linear_attention" for i in range(last + 1)]
    heads, width = c.num_attention_heads, hidden_size // c.num_attention_heads
    rope = {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": c.rotary_fraction}
    return {
        **_llama(c, hidden_size, intermediate_size),
        "rope_parameters": rope,
        "head_dim": width,
        "layer_types": kinds,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
    }


def _mamba(c: BackboneConfig, hidden_size: int, state_size: int) -> Settings:
    """Two of its blocks for each of ours: it has no MLP."""
    return {"hidden_size": hidden_size, "num_hidden_layers": 2 * c.num_hidden_layers, "state_size": state_size}


def _mamba_knobs(c: BackboneConfig) -> tuple[Knob, ...]:
    return Knob("hidden_size", c.hidden_size, max(c.hidden_size // 128, 1)), Knob("state_size", 16, 1)


def _mamba2(c: BackboneConfig, hidden_size: int, state_size: int) -> Settings:
    head = _mamba2_head(c)
    return {
        **_mamba(c, hidden_size, state_size),
        "head_dim": head,
        "num_heads": 2 * hidden_size // head,
        "n_groups": 1,
        # The same function for any chunk. `chunk_scan`, which small models on a CPU take, holds chunk² numbers for
        # every head and chunk, and is faster with short ones; 256 is the library's default, for the kernels of a GPU.
        "chunk_size": 32 if head < 64 else 256,
    }


def _mamba2_head(c: BackboneConfig) -> int:
    return 64 if c.hidden_size >= 512 else 16


def _mamba2_knobs(c: BackboneConfig) -> tuple[Knob, ...]:
    state = min(128, max(c.hidden_size // 8 * 8, 8))
    grain = 8 if c.hidden_size >= 512 else 1
    return Knob("hidden_size", c.hidden_size, _mamba2_head(c) // 2), Knob("state_size", state, grain)


FAMILIES = {
    "llama": Family("llama", _llama),
    "mistral": Family("mistral", _mistral),
    "mamba": Family("mamba", _mamba, _mamba_knobs),
    "mamba2": Family("mamba2", _mamba2, _mamba2_knobs),
    "qwen3-next": Family("qwen3_next", _qwen3_next),
}
"""Transformer++, the same with a sliding window, Mamba, Mamba2, and Gated DeltaNet with attention."""
