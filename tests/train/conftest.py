"""Models small enough to train in a test: ours, and one of another family."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from model_cases import stack_named
from titans_lm.config import BackboneConfig
from titans_lm.hf import TitansForCausalLM
from titans_lm.train.fresh import byte_model


@pytest.fixture
def titans() -> Callable[..., TitansForCausalLM]:
    """Make a byte model of any architecture; the same weights every time it is called."""

    def make(architecture: str = "lmm", **settings: object) -> TitansForCausalLM:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "memory_expansion": 2,
            "intermediate_size": 32,
            "chunk_size": 4,
            "segment_len": 8,
            "window": 8,
            "num_persistent": 2,
        }
        return byte_model(BackboneConfig(**(sizes | stack_named(architecture) | settings)))

    return make


@pytest.fixture
def llama() -> Callable[[], PreTrainedModel]:
    """Make a small Llama over bytes; the same weights every time it is called."""

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=259, tie_word_embeddings=True, **sizes))

    return make
