"""Models of ours with fresh weights: their sizes, matched to a number of parameters, and what any model is made of.

Stacks of equal size (D43), ours and the baselines that have an MLP, have as many blocks, an MLP at a fixed ratio to the
width, and the width that fits: a block with two mixers is narrower and does not pay for them with its MLP.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titans_lm.backbone import reads_embeddings
from titans_lm.blocks import BLOCKS
from titans_lm.caching import CachedMemories
from titans_lm.config import BackboneConfig
from titans_lm.data.tokenizer import byte_tokenizer, count_ids
from titans_lm.evaluate.accuracy import parts_of
from titans_lm.ops.state import state_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    try:
        model = model_without_weights(one_each, vocab_size)
    except RuntimeError as error:
        raise ValueError(f"got a model too large to be counted ({error}); expected a smaller one") from error
    layers = model.base_model.get_submodule("backbone.layers").children()
    more = sum(size_of(one) * (times - 1) for one, times in zip(layers, kinds.values(), strict=True))
    return size_of(model) + more + norms * config.hidden_size


def match_parameters(config: BackboneConfig, vocab_size: int, target: int) -> BackboneConfig:
    """Choose width and MLP so that the model has `target` parameters, up to half a step of the MLPs: a channel,
    eight from a width of 512 on.

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


def byte_model(config: BackboneConfig) -> "PreTrainedModel":
    """Build a fresh language model over bytes."""
    return model_for(config, byte_tokenizer())


def model_for(config: BackboneConfig, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """Build a fresh language model over the ids of a tokeniser."""
    return language_model(config, count_ids(tokenizer), **special_ids(tokenizer))


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int | None]:
    """Give the ids of a tokeniser's special tokens by the names that configs have for them."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def language_model(config: BackboneConfig, vocab_size: int, **special: int | None) -> "PreTrainedModel":
    """Build a fresh language model over a vocabulary, with the ids of its special tokens where they are known."""
    from titans_lm.hf import TitansConfig, TitansForCausalLM

    return TitansForCausalLM(TitansConfig(vocab_size=vocab_size, **special, **dataclasses.asdict(config)))


def model_without_weights(config: BackboneConfig, vocab_size: int) -> "PreTrainedModel":
    """Build the same model on the meta device: every parameter with its name and shape, and no memory for it."""
    import titans_lm.hf  # noqa: F401 - with transformers; what an import makes must not come to lie on the meta device

    with without_weights():
        return language_model(config, vocab_size)


class _Undrawn(TorchFunctionMode):
    """Draw no first values."""

    DRAWS = frozenset({
        nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, torch.Tensor.normal_, torch.Tensor.uniform_,
    })  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if func in self.DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


@contextmanager
def without_weights() -> Iterator[None]:
    """Make models on the meta device, without drawing weights there, which would take half of the time for nothing."""
    with torch.device("meta"), _Undrawn():
        yield


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Settings that every transformer has, ours and others, by which people know a model."""


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Count a model's parameters by part, and the state bytes of one row by block (None without a state).

    `layer_types` are the blocks of a mixed stack. Parts are modules by name, those of all blocks together:
    `layers.*.memory`. A tied matrix counts once. The state is that of the start of a document; it keeps this size,
    except for full attention, whose keys and values grow. A pretrained model with a memory names its base too.
    """
    state = model.init_state(1) if hasattr(model, "init_state") else None
    parts, config = count_parts(model), getattr(model, "config", None)
    cached = sum(state_bytes(part) for part in parts_of(state) if isinstance(part, CachedMemories))  # D52
    return {
        "model": type(model).__name__,
        "architecture": getattr(config, "architecture", None),
        "layer_types": getattr(config, "layer_types", None),
        **{name: getattr(config, name, None) for name in SIZES},
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        **({"adapter": describe_adapter(model)} if hasattr(model, "retrofit") else {}),
        "state_bytes": None if state is None else state_bytes(state),
        **({"cached_memories_bytes": cached} if cached else {}),
        "state_bytes_by_layer": None if state is None else [state_bytes(layer) for layer in state.layers],
    }


def describe_adapter(model: Any) -> dict[str, Any]:
    """Say whose weights an adapter belongs to, what it lets attention see, and how large it is."""
    from titans_lm.retrofit import adapter_of

    kept, parameters = model.retrofit, list(adapter_of(model).parameters())
    return {
        "base": model.config._name_or_path,
        **{name: getattr(kept, name) for name in ("window", "sinks", "layers", "lora_rank")},
        "parameters": sum(x.numel() for x in parameters),
        "bytes": sum(x.numel() * x.element_size() for x in parameters),
    }


def size_of(module: nn.Module) -> int:
    """Count the parameters of a module, a tied one once; it may be on the meta device."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_parts(model: nn.Module) -> dict[str, int]:
    """Count a model's parameters by part; it may be on the meta device."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts[part_name(name)] += parameter.numel()
    return dict(parts)


def part_name(parameter: str) -> str:
    """Name the part of a model that a parameter belongs to.

    model.backbone.layers.3.memory.q_proj.weight  →  layers.*.memory
    model.embed_tokens.weight                     →  embed_tokens
    """
    names = parameter.split(".")
    block = next((index for index, name in enumerate(names) if name.isdigit()), None)
    if block is not None:
        return ".".join((names[max(block - 1, 0)], "*", *names[block + 1 : block + 2]))
    return names[-2] if len(names) > 1 else names[0]
