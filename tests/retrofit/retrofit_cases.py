"""Small pretrained models of five families, in float64, and adapters with weights that say something."""

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

from titans_lm.retrofit import adapter_of, add_memory

WINDOW, SINKS, VOCAB, POSITIONS = 8, 2, 61, 24
"""Longer texts than POSITIONS have sinks that move up."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(head_dim=6, **SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(head_dim=8, **SIZES),
    "mistral": MistralConfig(head_dim=8, sliding_window=16, **SIZES),
    "gemma": GemmaConfig(head_dim=8, hidden_activation="gelu_pytorch_tanh", **SIZES),
}
"""Queries share keys in all; biases in Qwen2, norms of q and k in Qwen3, a window of its own in Mistral."""
KIN: dict[str, PreTrainedConfig] = {
    "phi": PhiConfig(partial_rotary_factor=0.5, **SIZES | {"hidden_size": 32}),
    "cohere": CohereConfig(**SIZES),
    "smollm3": SmolLM3Config(head_dim=8, no_rope_layers=[0, 1], **SIZES),
    "stablelm": StableLmConfig(partial_rotary_factor=0.5, **SIZES | {"hidden_size": 32}),
    "gemma3": Gemma3TextConfig(
        head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"], **SIZES
    ),
}
"""What else there is: rotary on a part of a head, of neighbouring channels, on some layers only, of two kinds beside
windows of some layers, and layers that hand on to attention less than they are given."""


def base_of(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A base with random weights that are large enough for attention to choose."""
    config = copy.deepcopy((FAMILIES | KIN)[family])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(8.0)
    return model


def with_memory(base: PreTrainedModel, *, trained: bool = True, **settings: Any) -> PreTrainedModel:
    """A copy of a base with a memory, whose adapter is filled with random numbers unless it is to be as it starts."""
    model = add_memory(copy.deepcopy(base), **{"window": WINDOW, "sinks": SINKS, **settings})
    if trained:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in adapter_of(model).parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def some_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(7))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
