"""Small language models whose segment, window and chunk are shorter than the texts of the tests."""

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from model_cases import BOUNDED, EVERY_KIND, MEMORIES, SHARED, STACKS, one_block, stack_named, wake
from titans_lm.hf import TitansConfig, TitansForCausalLM

VOCABULARY = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "segment_len": 8,
    "window": 6,
    "chunk_size": 4,
    "num_persistent": 3,
    "memory_expansion": 2,
}
# generate() takes the padding's id for padding wherever it stands in a prompt: no model may write it.
GREEDY = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}

__all__ = [
    "BOUNDED",
    "EVERY_KIND",
    "GREEDY",
    "MEMORIES",
    "SIZES",
    "STACKS",
    "VOCABULARY",
    "prompt",
    "shallow_model",
    "small_model",
    "words",
]


def small_model(architecture: str, dtype: torch.dtype = torch.float32, **settings: Any) -> TitansForCausalLM:
    """A model in evaluation mode whose gates and norms are away from their start; weights depend on nothing else."""
    torch.manual_seed(0)
    named = SIZES | stack_named(architecture) | settings | SHARED.get(architecture, {})
    model = TitansForCausalLM(TitansConfig(**named)).to(dtype).eval()
    wake(model, 0.2)
    return model


def shallow_model(architecture: str, dtype: torch.dtype = torch.float32, **settings: Any) -> TitansForCausalLM:
    """The same with a single block of a kind that stands alone: what several blocks are, mixed stacks show."""
    return small_model(architecture, dtype, **one_block(architecture), **settings)


def prompt(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random ids; 0 is left for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


def words() -> PreTrainedTokenizerFast:
    """A tokeniser whose word for id 7 is w7."""
    vocabulary = {"<pad>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left")
