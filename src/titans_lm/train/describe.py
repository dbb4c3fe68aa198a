"""What a model is made of: parameters by part, and the bytes that each block carries from token to token."""

from collections import Counter
from typing import Any

from torch import nn

from titans_lm.ops.state import state_bytes


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Count a model's parameters by part, and the state bytes of one row by block (None without a state).

    `layer_types` are the blocks of a mixed stack. Parts are modules by name, those of all blocks together:
    `layers.*.memory`. A tied matrix counts once. The state
    is that of the start of a document; it keeps this size, except for full attention, whose keys and values grow.
    """
    state = model.init_state(1) if hasattr(model, "init_state") else None
    parts = count_parts(model)
    return {
        "model": type(model).__name__,
        "architecture": getattr(getattr(model, "config", None), "architecture", None),
        "layer_types": getattr(getattr(model, "config", None), "layer_types", None),
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "state_bytes": None if state is None else state_bytes(state),
        "state_bytes_by_layer": None if state is None else [state_bytes(layer) for layer in state.layers],
    }


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
