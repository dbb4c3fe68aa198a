"""The tokeniser of a token folder, and documents through it: <bos> text <eos>."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from titans_lm.checks import did_you_mean, one_line
from titans_lm.data.text import Document
from titans_lm.data.tokenizer import TokenIds, byte_level, byte_tokenizer, count_ids, encode_document, is_byte_tokenizer
from titans_lm.prepare.settings import PrepareSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
PIECE, AT_ONCE = 1 << 16, 1 << 20
"""Characters that a long text is cut into, and that are encoded together: a token takes some 200 bytes meanwhile."""
WORDS = re.compile(r"(?<=\S)(?=[ \n])")
ANYWHERE = re.compile(rf"{WORDS.pattern}|(?<=[A-Za-z])(?=[\x21-\x40])|(?<=[0-9])(?=[A-Za-z])")
"""Where GPT-2's pattern ends a piece whatever stands before and after: its only look ahead is within whitespace."""


def use_threads(workers: int) -> None:
    """Say how many threads tokenizers may take; it listens before its first use only."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers == 1 else "true"
    if workers > 1:
        os.environ["RAYON_NUM_THREADS"] = str(workers)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load the tokeniser of a name: bytes, a folder, or one on the hub; ValueError where there is none such."""
    if name == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    import titans_lm.hf  # noqa: F401 - registers our models, beside which tokenizers are saved

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # else it asks, and waits
    except Exception as error:  # that of tokenizers has no class of its own
        why = did_you_mean(name, ["bytes"]) or f"{one_line(error)};"
        raise ValueError(
            f"the tokenizer {name!r} cannot be loaded: {why} expected bytes, a folder with a Hugging Face "
            "tokenizer, or its name on the hub"
        ) from error
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {name!r} has neither a <bos> nor an <eos>; expected one that can show where a document "
            'ends: name its token in a tokenizer_config.json beside its tokenizer.json, as {"eos_token": "<eos>"}'
        )
    return tokenizer


def train_bpe(texts: Iterable[Document], settings: PrepareSettings) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE: 256 bytes, three special tokens, and merges up to `train_bpe` ids.

    Every text comes back from its tokens byte for byte, and special tokens are never read out of text. ValueError where
    the text is too small for so many ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.train_bpe,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts, settings.bpe_bytes), trainer)
    if tokenizer.get_vocab_size() != settings.train_bpe:
        raise ValueError(
            f"got train_bpe={settings.train_bpe}, and text that gives {tokenizer.get_vocab_size()} ids at most; "
            "give more text, or ask for fewer"
        )
    return byte_level(tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _sample(texts: Iterable[Document], most: int) -> Iterator[str]:
    for document in texts:
        yield from pieces(as_text(document.data[:most]), ANYWHERE)
        most -= len(document.data)
        if most <= 0:
            return


def as_text(data: bytes) -> str:
    """Bytes as text for tokenisers that take only that; what is not UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", "replace")


def pieces(text: str, cut: re.Pattern[str] | None) -> Iterator[str]:
    """Cut a long text at places where its tokens are cut in any case."""
    start = 0
    while cut is not None and len(text) - start > PIECE and (found := cut.search(text, start + PIECE)):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def safe_cut(backend: Any) -> re.Pattern[str] | None:
    """Where a text may be cut without changing its tokens; None where that is not known of the tokenizer.

    It is known of byte-level BPE after GPT-2's pattern alone, whose tokens stay within the pattern's pieces, at places
    that are inside of no added token that is read out of text.
    """
    rules = json.loads(backend.to_str())
    before = rules["pre_tokenizer"] or {}
    told = before.get("type"), before.get("use_regex"), before.get("add_prefix_space"), rules["normalizer"]
    if told != ("ByteLevel", True, False, None):
        return None
    read = [token for token in rules["added_tokens"] if not (token["special"] and backend.encode_special_tokens)]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in read):
        return None
    cuts = (cut for cut in (ANYWHERE, WORDS) if not any(cut.search(token["content"]) for token in read))
    return next(cuts, None)


class Encoder:
    """Documents into token ids: <bos> text <eos>, as far as the tokeniser has these."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer, self.bytes = tokenizer, is_byte_tokenizer(tokenizer)
        self.backend = _backend(tokenizer)
        self.cut = None if self.backend is None else safe_cut(self.backend)
        self.dtype = np.dtype("<u2" if count_ids(tokenizer) <= 2**16 else "<u4")
        self.before, self.after = (
            np.array([] if token is None else [token], self.dtype)
            for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )

    def __call__(self, documents: list[Document]) -> list[TokenIds]:
        """Encode several at once: a fast tokenizer takes a thread for each."""
        if self.bytes:
            return [encode_document(document.data) for document in documents]
        texts = [as_text(document.data) for document in documents]
        parts = [list(pieces(text, self.cut)) for text in texts]
        ids = self._ids(itertools.chain.from_iterable(parts))
        return [np.concatenate([self.before, *itertools.islice(ids, len(of_text)), self.after]) for of_text in parts]

    def _ids(self, texts: Iterator[str]) -> Iterator[TokenIds]:
        """Encode texts, about AT_ONCE characters at a time."""
        for group in grouped(texts, len, AT_ONCE):
            if self.backend is None:
                found = self.tokenizer(group, add_special_tokens=False, return_attention_mask=False, verbose=False)
                yield from (np.array(ids, self.dtype) for ids in found["input_ids"])
            else:
                encoded = self.backend.encode_batch_fast(group, add_special_tokens=False)
                yield from [np.array(each.ids, self.dtype) for each in encoded]


def grouped(
    items: Iterable[Item], size: Callable[[Item], int], at_once: int, most: int = 2**30
) -> Iterator[list[Item]]:
    """Put items together until their sizes come to `at_once`, or there are `most` of them."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= at_once or len(group) >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


def _backend(tokenizer: Any) -> Any:
    """The library below a fast tokenizer, as transformers would set it up: it keeps no offsets and no strings.

    These are most of the memory that encoding takes, some 200 bytes for every token.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend
