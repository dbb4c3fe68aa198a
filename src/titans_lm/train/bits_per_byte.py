"""Bits per byte on text that was held out: every token predicted once, with the memory carried or started anew."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import check_at_least
from titans_lm.data.batches import IGNORED, padded
from titans_lm.data.prepared import Split
from titans_lm.data.text import Document
from titans_lm.data.tokenizer import TokenIds, encode_document, is_byte_tokenizer
from titans_lm.ops.state import map_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Bucket:
    """Tokens at positions start … stop − 1 of their documents, counted from 0 at the first that is predicted."""

    start: int
    stop: int
    tokens: int
    bits_per_token: float


class BitsPerByte:
    """Measure bits per byte on documents, over all and by position: the evaluation that runs during training.

    A position counts what the model has read before: in the document where the state is carried, else in the piece of
    `seq_len` tokens. Each document begins with a token that is not predicted, <bos> where there is one; `text_bytes`
    are the bytes of text that all others stand for.
    """

    def __init__(
        self, documents: Sequence[TokenIds], text_bytes: int, *, seq_len: int, batch_size: int, carry: bool = False
    ) -> None:
        self.seq_len, self.batch_size, self.carry = seq_len, batch_size, carry
        self.documents, self.bytes = list(documents), text_bytes
        if not self.bytes:
            raise ValueError("got no held-out text; expected at least one byte to predict")

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        found = token_bits(model, self.documents, seq_len=self.seq_len, batch_size=self.batch_size, carry=self.carry)
        bits, step = [part.numpy() for part in found], self.seq_len
        pieces = bits if self.carry else [row[i : i + step] for row in bits for i in range(0, len(row), step)]
        return {
            "held_out_bits_per_byte": float(sum(row.sum() for row in bits)) / self.bytes,
            "held_out_by_position": [asdict(b) for b in buckets(pieces, default_edges(max(map(len, pieces))))],
        }


def default_edges(longest: int) -> list[int]:
    """Borders 0, 64, 128, 256, … up to the longest document."""
    edges = [0, 64]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return edges


def buckets(bits: Iterable[np.ndarray], edges: Sequence[int]) -> tuple[Bucket, ...]:
    """Mean the bits of tokens between each two borders; ValueError for borders that do not rise."""
    if len(edges) < 2 or edges[0] < 0 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"got edges={list(edges)}; expected two or more positions, each larger than the one before")
    rows, found = list(bits), []
    for start, stop in pairwise(edges):
        inside = np.concatenate([row[start:stop] for row in rows])
        if len(inside):
            found.append(Bucket(start, stop, len(inside), float(inside.mean())))
    return tuple(found)


def held_out_bytes(documents: Iterable[Document], max_bytes: int) -> tuple[list[TokenIds], int]:
    """Take whole documents in the given order as tokens until `max_bytes` are used up; the last is cut there."""
    taken, used = [], 0
    for document in documents:
        if used < max_bytes:
            taken.append(encode_document(document.data[: max_bytes - used], eos=False))
            used += len(taken[-1]) - 1
    return taken, used


def held_out_tokens(split: Split, tokenizer: "PreTrainedTokenizerBase", max_bytes: int) -> tuple[list[TokenIds], int]:
    """The same from prepared documents; the last is cut after a token that ends a character."""
    taken, used = [], 0
    for index in range(len(split)):
        if used >= max_bytes:
            break
        tokens, size = _text_of(split[index], tokenizer), split.bytes_of(index)
        if size > max_bytes - used:
            tokens, size = _cut(tokens, (max_bytes - used) / size, tokenizer)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        taken.append(np.concatenate([[begin], tokens]))
        used += size
    return taken, used


def _text_of(document: TokenIds, tokenizer: "PreTrainedTokenizerBase") -> TokenIds:
    """A document without the tokens that begin and end it."""
    start, stop = tokenizer.bos_token_id is not None, tokenizer.eos_token_id is not None
    return document[int(start) : len(document) - int(stop)]


def _cut(tokens: TokenIds, share: float, tokenizer: "PreTrainedTokenizerBase") -> tuple[TokenIds, int]:
    """About a share of a text, and the bytes that it is: a character may take several tokens, and is not torn."""
    for stop in range(max(round(len(tokens) * share), 1), len(tokens) + 1):
        kept = tokens[:stop]
        if is_byte_tokenizer(tokenizer):
            return kept, stop
        text = str(tokenizer.decode(kept.tolist(), clean_up_tokenization_spaces=False))
        if not text.endswith("\ufffd"):
            break
    return kept, len(text.encode("utf-8", "replace"))


@torch.no_grad()
def token_bits(
    model: nn.Module, documents: Sequence[TokenIds], *, seq_len: int, batch_size: int = 8, carry: bool = False
) -> list[Tensor]:
    """Return how many bits the model needs for each token of each document after its first, in float64 on the CPU.

    Documents are read in pieces of `seq_len` tokens, and every token but a document's first is predicted exactly once:
    the last token of a piece predicts the first of the next. With `carry` the state goes on from piece to piece (the
    model needs `init_state`); without it every piece starts anew with one token of context.
    """
    check_at_least("seq_len", seq_len, 1)
    check_at_least("batch_size", batch_size, 1)
    if carry and not hasattr(model, "init_state"):
        raise ValueError(f"got carry=True for a {type(model).__name__}, which has no init_state; expected memory")
    steps = [max(len(document), 1) if carry else seq_len for document in documents]
    starts = [range(0, max(len(document) - 1, 1), step) for document, step in zip(documents, steps, strict=True)]
    texts = [
        document[start : start + step + 1]
        for document, step, begun in zip(documents, steps, starts, strict=True)
        for start in begun
    ]
    was_training = model.training
    model.eval()
    try:
        bits = iter(_read(model, texts, seq_len, batch_size, carry))
    finally:
        model.train(was_training)
    return [torch.cat([next(bits) for _ in begun]) for begun in starts]


def _read(model: nn.Module, texts: list[TokenIds], seq_len: int, batch_size: int, carry: bool) -> list[Tensor]:
    """Score texts side by side, piece by piece; longest first, so that rows end from the last on.

    With `carry` the state goes on from piece to piece; without it a text is one piece.
    """
    found = [[torch.zeros(0, dtype=torch.float64)] for _ in texts]
    order = sorted((row for row in range(len(texts)) if len(texts[row]) > 1), key=lambda row: -len(texts[row]))
    for first in range(0, len(order), batch_size):
        group, state, start = order[first : first + batch_size], None, 0
        while group:
            pieces = [texts[row][start : start + seq_len + 1] for row in group]
            bits, state = _score(model, pieces, state, carry=carry)
            for row, part in zip(group, bits, strict=True):
                found[row].append(part)
            start += seq_len
            group = [row for row in group if len(texts[row]) - 1 > start]
            alive = len(group)
            state = map_state(lambda x, alive=alive: x[:alive], state) if group else None
    return [torch.cat(parts) for parts in found]


def _score(model: nn.Module, pieces: Sequence[TokenIds], state: object, *, carry: bool) -> tuple[list[Tensor], object]:
    """Return the bits of each piece's tokens after its first, and the state after the piece."""
    device = next(model.parameters()).device
    lengths = [len(tokens) - 1 for tokens in pieces]
    batch = padded(pieces, max(lengths))
    input_ids, targets = batch["input_ids"].to(device), batch["targets"].to(device)
    # Padding stands on the right of rows that end here: a causal model's answers before it do not depend on it.
    extra = {"state": state, "return_state": True} if carry else {}
    output = model(input_ids=input_ids, use_cache=False, **extra)
    logits = output.logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    bits = (nats.view(targets.shape) / LN2).double().cpu()
    return [bits[row, :length] for row, length in enumerate(lengths)], output.state if carry else None
