"""Bits per byte of documents of any length, read in pieces at constant memory: overall, by position, by document.

Every token of a document is predicted exactly once, the first one from <bos> where the tokenizer has one. `memory` says
what a model may know of the tokens before a piece:

    "on"       everything it kept: the state is carried through the document
    "reset"    nothing older than `reset_every` tokens: the state starts anew there, as if a document began with the
               last token read. Models without a state read plain windows of that length.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import nn

from titans_lm.config import check_at_least, check_choice
from titans_lm.data.text import Document
from titans_lm.data.tokenizer import TokenIds, encode_document, is_byte_tokenizer
from titans_lm.evaluate.bootstrap import bounds
from titans_lm.train.bits_per_byte import Bucket, buckets, default_edges, token_bits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Memory = Literal["on", "reset"]


@dataclass(frozen=True)
class Text:
    """A document as a model reads it."""

    name: str
    ids: TokenIds
    bytes: int
    """Bytes that the tokens after the first stand for: those that are predicted."""


@dataclass(frozen=True)
class DocumentScore:
    """What one document cost."""

    name: str
    bytes: int
    bits: float


@dataclass(frozen=True)
class BitsPerByte:
    """How well a model predicts documents; lower is better, 8 is knowing nothing."""

    bits_per_byte: float
    bits_per_token: float
    bytes: int
    tokens: int
    memory: str
    """What was known of earlier tokens: on, or reset every N tokens."""
    by_position: tuple[Bucket, ...]
    by_document: tuple[DocumentScore, ...]

    @property
    def perplexity(self) -> float:
        """2 to the bits per token."""
        return 2.0**self.bits_per_token

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class Difference:
    """Bits per byte of one measurement minus those of another on the same documents, below 0 where the first is better.

    `low` and `high` bound it with 95 % confidence over documents like these (bootstrap over documents, not over seeds).
    """

    bits_per_byte: float
    low: float
    high: float
    documents: int

    @property
    def clear(self) -> bool:
        """Whether the documents tell the two apart."""
        return self.documents > 1 and (self.high < 0.0 or self.low > 0.0)


def encode_text(
    document: Document, tokenizer: "PreTrainedTokenizerBase | None" = None, *, max_bytes: int | None = None
) -> Text:
    """Turn a document, or its first `max_bytes` bytes, into what a model reads; without a tokenizer, into bytes.

    Raises ValueError where there is nothing to predict, and for bytes that are not UTF-8 with a tokenizer that needs
    text.
    """
    data = document.data[:max_bytes]
    if tokenizer is None or is_byte_tokenizer(tokenizer):
        text = Text(document.name, encode_document(data, eos=False), len(data))
    else:
        ids, count = _encode_words(document.name, data, tokenizer)
        text = Text(document.name, ids, count)
    if len(text.ids) < 2:
        raise ValueError(f"got {document.name!r} with {len(text.ids)} tokens; expected at least one to predict")
    return text


def bits_per_byte(
    model: nn.Module,
    texts: Sequence[Text],
    *,
    memory: Memory = "on",
    reset_every: int | None = None,
    piece_len: int = 512,
    batch_size: int = 8,
    edges: Sequence[int] | None = None,
) -> BitsPerByte:
    """Measure how many bits a model needs for the bytes of documents.

    `piece_len` is how many tokens are read at once and changes nothing but speed. `edges` are the borders of the
    position buckets, by default 0, 64, 128, 256 and so on. Raises ValueError for no text, for "reset" without
    `reset_every`, and for "on" with a model that has no state.
    """
    if not texts:
        raise ValueError("got no text to measure on; expected at least one document")
    bits = score_texts(model, texts, memory=memory, reset_every=reset_every, piece_len=piece_len, batch_size=batch_size)
    joined, count = np.concatenate(bits), sum(text.bytes for text in texts)
    return BitsPerByte(
        bits_per_byte=float(joined.sum()) / count,
        bits_per_token=float(joined.mean()),
        bytes=count,
        tokens=len(joined),
        memory="on" if memory == "on" else f"reset every {reset_every} tokens",
        by_position=buckets(bits, default_edges(max(map(len, bits))) if edges is None else edges),
        by_document=tuple(
            DocumentScore(text.name, text.bytes, float(part.sum())) for text, part in zip(texts, bits, strict=True)
        ),
    )


def score_texts(
    model: nn.Module,
    texts: Sequence[Text],
    *,
    memory: Memory = "on",
    reset_every: int | None = None,
    piece_len: int = 512,
    batch_size: int = 8,
) -> list[np.ndarray]:
    """Return the bits of every predicted token of every document; see `bits_per_byte`."""
    check_choice("memory", memory, ("on", "reset"))
    check_at_least("piece_len", piece_len, 1)
    carries = hasattr(model, "init_state")
    if memory == "on":
        if not carries:
            raise ValueError(f"got memory='on' for {type(model).__name__}, which has no state; expected 'reset'")
        documents = [text.ids for text in texts]
        scored = token_bits(model, documents, seq_len=piece_len, batch_size=batch_size, carry=True)
        return [part.numpy() for part in scored]
    if reset_every is None:
        raise ValueError("got memory='reset' without reset_every; expected the tokens between two resets")
    check_at_least("reset_every", reset_every, 1)
    # A part ends with the token that the next one starts from, so that every token is still predicted once.
    starts = [range(0, len(text.ids) - 1, reset_every) for text in texts]
    parts = [
        text.ids[start : start + reset_every + 1] for text, row in zip(texts, starts, strict=True) for start in row
    ]
    seq_len = min(piece_len, reset_every) if carries else reset_every
    scored = iter(token_bits(model, parts, seq_len=seq_len, batch_size=batch_size, carry=carries))
    return [np.concatenate([next(scored).numpy() for _ in row]) for row in starts]


def compare(a: BitsPerByte, b: BitsPerByte, *, seed: int = 0) -> Difference:
    """Compare two measurements of the same documents; ValueError where they are not the same."""
    if [(d.name, d.bytes) for d in a.by_document] != [(d.name, d.bytes) for d in b.by_document]:
        raise ValueError("got measurements of different documents; expected the same ones in the same order")
    sizes = np.array([d.bytes for d in a.by_document], float)
    bits = np.array([x.bits - y.bits for x, y in zip(a.by_document, b.by_document, strict=True)])
    low, high = bounds(np.array([bits, sizes]), lambda sums: sums[0] / sums[1], seed)
    return Difference(float(bits.sum() / sizes.sum()), low, high, len(bits))


def _encode_words(name: str, data: bytes, tokenizer: "PreTrainedTokenizerBase") -> tuple[TokenIds, int]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8, which this tokenizer needs; a byte model reads it") from error
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if tokenizer.bos_token_id is not None:
        return np.array([tokenizer.bos_token_id, *ids], np.int64), len(data)
    # Without <bos> nothing predicts the first token, so its bytes do not count.
    return np.array(ids, np.int64), len(data) - len(str(tokenizer.decode(ids[:1])).encode())
