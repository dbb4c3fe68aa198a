"""Models that stand in for those that ship: as small as can be, and taught nothing."""

from pathlib import Path
from typing import Any

import torch

from model_cases import small_config, wake
from titans_lm.data.tasks.vocabulary import FULL_STOP, word_count, word_tokenizer
from titans_lm.data.tokenizer import VOCAB_SIZE, byte_tokenizer
from titans_lm.train.fresh import language_model


def ship(folder: Path) -> Path:
    """Write facts, needles and books, of different architectures, into a folder; the same after whatever tests."""
    torch.manual_seed(0)
    for name, architecture in (("facts", "lmm"), ("needles", "mac")):
        model: Any = language_model(small_config(architecture, segment_len=16, chunk_size=8), word_count())
        wake(model, 0.2)
        model.generation_config.eos_token_id = FULL_STOP
        model.save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    books: Any = language_model(small_config("hybrid"), VOCAB_SIZE)
    wake(books, 0.2)
    books.save_pretrained(folder / "books")
    byte_tokenizer().save_pretrained(folder / "books")
    return folder
