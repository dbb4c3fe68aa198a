"""Models of ours with fresh weights."""

import dataclasses
from typing import TYPE_CHECKING

import torch

from titans_lm.config import BackboneConfig
from titans_lm.data.tokenizer import byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def byte_model(config: BackboneConfig) -> "PreTrainedModel":
    """Build a fresh language model over bytes."""
    return model_for(config, byte_tokenizer())


def model_for(config: BackboneConfig, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """Build a fresh language model over the ids of a tokeniser."""
    return language_model(config, len(tokenizer), **special_ids(tokenizer))


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

    with torch.device("meta"):
        return language_model(config, vocab_size)
