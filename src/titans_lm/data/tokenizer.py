"""Bytes as tokens: token id = byte value, so that any file can be read and nothing has to be downloaded.

    id 0 … 255    the byte itself
    id 256        <bos>, before the first byte of a document
    id 257        <eos>, after its last
    id 258        <pad>

`byte_tokenizer` is an ordinary tokenizer.json for everything that speaks Hugging Face; `encode_bytes` and
`decode_bytes` are the direct path, which also takes bytes that are not UTF-8.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.checks import load_pretrained

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
TokenIds = np.ndarray
"""Token ids of one document: a one-dimensional array of uint16."""


@cache
def byte_vocabulary() -> dict[str, int]:
    """Return the printable character that stands for each byte in byte-level tokenizers, and the byte.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order. This is the
    alphabet of `tokenizers.pre_tokenizers.ByteLevel`, with ids that are byte values.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    return vocabulary | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the byte tokenizer as a Hugging Face tokenizer that loads again without code of ours."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # a batch is written on at its right end
    return byte_level(tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", padding_side="left")


def byte_level(tokenizer: "Tokenizer", **special: str) -> "PreTrainedTokenizerFast":
    """Give a byte-level tokenizer to Hugging Face: every text comes back from its tokens byte for byte.

    Special tokens are never parsed from text: "<eos>" written in a document is no token of its own, as it must be.
    """
    from tokenizers import decoders
    from transformers import PreTrainedTokenizerFast

    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, split_special_tokens=True, clean_up_tokenization_spaces=False, **special
    )


def is_byte_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether a tokenizer's ids are byte values, as those of `byte_tokenizer` are."""
    if len(tokenizer) != VOCAB_SIZE:  # the vocabulary of a large one takes a fifth of a second to ask for
        return False
    vocabulary = tokenizer.get_vocab()
    return len(vocabulary) == VOCAB_SIZE and byte_vocabulary().items() <= vocabulary.items()


def count_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Count the ids that a model needs: one more than the largest, as there may be gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def encode_bytes(data: bytes) -> TokenIds:
    """Turn bytes into token ids, one per byte."""
    return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)


def decode_bytes(ids: Iterable[Any]) -> bytes:
    """Turn token ids into bytes; special tokens stand for no byte and are left out."""
    return bytes(int(token) for token in ids if int(token) < BOS)


def encode_document(data: bytes, *, eos: bool = True) -> TokenIds:
    """Turn a document into the sequence a model reads: <bos>, its bytes, <eos>."""
    return np.concatenate([[BOS], encode_bytes(data), [EOS][: int(eos)]]).astype(np.uint16)


def read_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a folder; ValueError where it cannot be loaded."""
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, folder, f"the tokenizer in {folder}", local_files_only=True)
