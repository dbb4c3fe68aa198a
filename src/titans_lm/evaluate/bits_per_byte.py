"""Bits per byte of documents that fit in memory: every token predicted once, with the state carried or reset.

Every token of a document is predicted exactly once, the first one from <bos> where the tokenizer has one. Models with a
state carry it through the document, or start anew after every `reset_every` tokens, as if a document began with the
last token read. Models without a state read plain windows of that length.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import check_at_least
from titans_lm.data.batches import IGNORED, padded
from titans_lm.data.tokenizer import TokenIds
from titans_lm.evaluate.documents import Span, Tokens
from titans_lm.evaluate.stream import PieceReader, StatefulReader, WindowReader, evaluating, has_state

LN2 = 0.6931471805599453
FIRST = 64
"""Where the first range of positions ends; each later one ends at twice the position."""
EDGES = (0, *(FIRST << i for i in range(40)))


def bits_of(logits: Tensor, targets: Tensor) -> np.ndarray:
    """Bits (B, T) that targets (B, T) cost, by the logits (B, T, V) before each; 0 where a target is ignored."""
    wide: Any = logits if logits.dtype == torch.float64 else logits.float()
    nats = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return (nats.view(targets.shape).double() / LN2).cpu().numpy()


def read_spans(
    model: nn.Module, spans: Sequence[Span], reader: PieceReader, reset_every: int | None = None
) -> Iterator[list[tuple[int, Tokens, np.ndarray]]]:
    """Read spans side by side to the end of the longest; rows that end are let go.

    Gives after every piece, for each span that has not ended, its place, its tokens and their bits. With `reset_every`
    nothing is known that is older than so many tokens: there it starts anew, from the last token before.
    """
    device, state, since = next(model.parameters()).device, None, 0
    rows, last = list(range(len(spans))), [span.begin for span in spans]
    while True:
        if since == reset_every:
            state, since = None, 0
        size = reader.piece(since) if reset_every is None else min(reader.piece(since), reset_every - since)
        drawn = [spans[row].source.take(size) for row in rows]
        alive = [index for index, tokens in enumerate(drawn) if len(tokens.ids)]
        if not alive:
            return
        if len(alive) < len(rows):
            rows, drawn = [rows[index] for index in alive], [drawn[index] for index in alive]
            last = [last[index] for index in alive]
            if state is not None:
                state = reader.keep_rows(state, torch.tensor(alive, device=device))
        # Padding stands at the right of rows that end here: a causal model's answers before it do not depend on it.
        batch = padded([np.concatenate([a, tokens.ids]) for a, tokens in zip(last, drawn, strict=True)])
        logits, state = reader.step(batch["input_ids"].to(device), state)
        bits = bits_of(logits, batch["targets"].to(device))
        yield [(row, tokens, values[: len(tokens.ids)]) for row, tokens, values in zip(rows, drawn, bits, strict=True)]
        last, since = [tokens.ids[-1:] for tokens in drawn], since + size


def token_bits(
    model: nn.Module,
    documents: Sequence[TokenIds],
    *,
    piece_len: int = 512,
    batch_size: int = 8,
    reset_every: int | None = None,
) -> list[np.ndarray]:
    """Return how many bits a model needs for each token of each document after its first, in float64.

    `piece_len` is how many tokens are read at once and changes nothing but speed. ValueError for a model without a
    state and no `reset_every`.
    """
    for name, value in (("piece_len", piece_len), ("batch_size", batch_size), ("reset_every", reset_every)):
        if value is not None:
            check_at_least(name, value, 1)
    reader: PieceReader = StatefulReader(model, piece_len)
    if reset_every is not None and (reset_every <= piece_len or not has_state(model)):
        reader = WindowReader(model, reset_every, 0)
    elif not has_state(model):
        raise ValueError(f"got a {type(model).__name__}, which has no state, and no reset_every; expected one of them")
    # A part ends with the token that the next one starts from, so that every token is predicted once. Long parts are
    # read first: rows of a batch then have similar lengths.
    parts = [
        (row, ids[start : None if reset_every is None else start + reset_every + 1])
        for row, ids in enumerate(documents)
        for start in range(0, len(ids) - 1, reset_every or len(ids))
    ]
    order = sorted(range(len(parts)), key=lambda index: -len(parts[index][1]))
    bits: list[list[np.ndarray]] = [[] for _ in parts]
    with evaluating(model):
        for first in range(0, len(order), batch_size):
            group = order[first : first + batch_size]
            for piece in read_spans(model, [Span.of(parts[index][1]) for index in group], reader):
                for row, _, values in piece:
                    bits[group[row]].append(values)
    found: list[list[np.ndarray]] = [[np.empty(0)] for _ in documents]
    for (row, _), values in zip(parts, bits, strict=True):
        found[row] += values
    return [np.concatenate(values) for values in found]


def buckets(bits: Iterable[np.ndarray], edges: Sequence[int]) -> list[dict[str, Any]]:
    """Mean the bits of tokens at positions start … stop − 1, from 0 at the first that is predicted, by borders.

    ValueError for borders that do not rise.
    """
    if len(edges) < 2 or edges[0] < 0 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"got edges={list(edges)}; expected two or more positions, each larger than the one before")
    rows, found = list(bits), []
    for start, stop in pairwise(edges):
        inside = np.concatenate([row[start:stop] for row in rows])
        if len(inside):
            mean = float(inside.mean())
            found.append({"start": start, "stop": stop, "tokens": len(inside), "bits_per_token": mean})
    return found


class HeldOut:
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
        if not self.bytes or max(map(len, self.documents)) < 2:  # a tokenizer may have dropped all that there was
            raise ValueError("got no held-out text; expected at least one token to predict")

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        step = self.seq_len
        reset_every = None if self.carry else step
        bits = token_bits(model, self.documents, piece_len=step, batch_size=self.batch_size, reset_every=reset_every)
        pieces = bits if self.carry else [row[i : i + step] for row in bits for i in range(0, len(row), step)]
        reached = bisect_left(EDGES, max(map(len, pieces)))
        return {
            "held_out_bits_per_byte": float(sum(row.sum() for row in bits)) / self.bytes,
            "held_out_by_position": buckets(pieces, EDGES[: reached + 1]),
        }
