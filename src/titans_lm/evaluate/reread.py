"""Rereading: how many bits a passage costs the second time, after tokens of other books, and how many it would have
cost unread (D39).

    gain = bits per token of the passage where another one of its book was read in its place
         − bits per token where it was read itself

Passages of one book are rows that are read side by side, each before the same tokens of other books. So one row serves
twice: it has read its own passage, and for another row's it is the one that has not. The tokens between are read once,
up to the longest distance; at each distance a copy of the state reads the passages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from titans_lm.evaluate.bits_per_byte import bits_of
from titans_lm.evaluate.documents import Book, Encoder, TokenSource
from titans_lm.evaluate.stream import ENDLESS, PieceReader, State, evaluating


@dataclass(frozen=True)
class Passages:
    """Passages of one book, and what is read before and after them."""

    document: str
    starts: tuple[int, ...]
    """Tokens of the book before each."""
    before: np.ndarray
    """The token that begins a document, and the context: the same for all."""
    ids: np.ndarray
    """Their tokens (R, n)."""
    between: np.ndarray
    """Tokens of other books, as many as the longest distance."""


@dataclass(frozen=True)
class Drawing:
    """What is drawn from books."""

    length: int
    """Tokens n of a passage."""
    passages: int
    """Passages in all, shared out among the books."""
    rows: int
    """Passages R that are read side by side."""
    distance: int
    """Tokens of other books that are read after them."""
    context: int = 0
    """Tokens from the start of the book that are read before each of its passages."""
    skip_tokens: int = 0
    """Tokens at the start of each book, of either kind, that are left out."""
    seed: int = 0


def draw_passages(
    found: Sequence[Book], others: Sequence[Book], encoder: Encoder, drawing: Drawing
) -> Iterator[Passages]:
    """Draw passages that do not overlap from books in turn, each with the tokens of the next one of the others.

    ValueError for a book that is too short for its passages, and for others that are too short for the distance.
    """
    groups = drawing.passages // drawing.rows
    starts = cycle(range(len(others)))
    for index, book in enumerate(found):
        count = len(range(index, groups, len(found)))
        if not count:
            continue
        tokens = TokenSource(encoder.tokens(book)).take(ENDLESS).ids
        context = tokens[drawing.skip_tokens : drawing.skip_tokens + drawing.context]
        places = _places(book, tokens, count * drawing.rows, index, drawing)
        for group in range(count):
            mine = places[group * drawing.rows : (group + 1) * drawing.rows]
            ids = np.stack([tokens[place : place + drawing.length] for place in mine])
            between = _between(others, next(starts), encoder, drawing)
            yield Passages(book.name, tuple(mine), np.concatenate([encoder.begin, context]), ids, between)


def _places(book: Book, tokens: np.ndarray, count: int, index: int, drawing: Drawing) -> list[int]:
    """Draw the places of passages: the rest of the book cut into pieces of their length, some of which are taken."""
    first, length = drawing.skip_tokens + drawing.context, drawing.length
    pieces = max(len(tokens) - first, 0) // length
    if pieces < count:
        raise ValueError(
            f"got {count} passages of {length} tokens from {book.name!r}, which has {len(tokens):,} tokens, {first:,} "
            f"of them left out or read before; expected a book of at least {first + count * length:,} tokens, or "
            "fewer or shorter passages"
        )
    chosen = np.random.default_rng([drawing.seed, length, index]).permutation(pieces)[:count]
    return [first + int(piece) * length for piece in chosen]


def _between(others: Sequence[Book], start: int, encoder: Encoder, drawing: Drawing) -> np.ndarray:
    """Take tokens of other books, from the start of one on and through those after it."""
    parts: list[np.ndarray] = [np.empty(0, np.int64)]
    missing = drawing.distance
    for book in [*others[start:], *others[:start]]:
        source = TokenSource(encoder.tokens(book), drawing.skip_tokens + missing)
        source.take(drawing.skip_tokens)
        parts.append(source.take(missing).ids)
        missing -= len(parts[-1])
        if not missing:
            break
    if missing:
        raise ValueError(
            f"got a distance of {drawing.distance:,} tokens between two readings and other books of "
            f"{drawing.distance - missing:,} tokens; expected longer ones, or shorter distances"
        )
    return np.concatenate(parts)


class _Rows:
    """Rows that read on. Their last token is kept back: it is the input from which the next one is predicted."""

    def __init__(self, reader: PieceReader, first: Tensor, piece_len: int, on_piece: Callable[[int], None]) -> None:
        self.reader, self.piece_len, self.on_piece = reader, piece_len, on_piece
        self.state: State = None
        self.last = first[:, :0]
        self.read(first)

    def read(self, ids: Tensor) -> None:
        given = torch.cat([self.last, ids], dim=1)
        self.last = given[:, -1:]
        for piece in given[:, :-1].split(self.piece_len, dim=1):
            if piece.numel():
                _, self.state = self.reader.step(piece, self.state, keep=1)
                self.on_piece(piece.numel())

    def cost(self, passages: Tensor, order: Tensor) -> np.ndarray:
        """Bits (R,) of passages, each read by a copy of the row that `order` names."""
        state, parts = self.reader.keep_rows(self.reader.fork(self.state), order), []
        inputs = torch.cat([self.last[order], passages[:, :-1]], dim=1)
        for ids, targets in zip(*(x.split(self.piece_len, dim=1) for x in (inputs, passages)), strict=True):
            logits, state = self.reader.step(ids, state)
            parts.append(bits_of(logits, targets).sum(1))
            self.on_piece(ids.numel())
        return np.sum(parts, axis=0)


def fitting_distances(drawn: Passages, distances: Sequence[int], max_len: int) -> list[int]:
    """List the distances at which a row with both readings has at most `max_len` tokens."""
    return [d for d in distances if len(drawn.before) + 2 * drawn.ids.shape[1] + d <= max_len]


def reread(
    model: nn.Module,
    drawn: Passages,
    distances: Sequence[int],
    reader: PieceReader,
    *,
    on_piece: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Measure the bits (2, distances, R) of passages at rising distances: unread, with another one of the book read in
    their place, and read before.

    The memory that this takes does not grow with the distance, where `reader.constant` says so.
    """
    passages, between, before = map(torch.from_numpy, (drawn.ids, drawn.between, drawn.before))
    count, read, found = len(passages), 0, []
    with evaluating(model) as device:
        passages, between, before = passages.to(device), between.to(device), before.to(device)
        same = torch.arange(count, device=device)
        first = torch.cat([before.expand(count, -1), passages], dim=1)
        rows = _Rows(reader, first, reader.piece(1) or ENDLESS, on_piece)
        for distance in distances:
            if distance > read:
                rows.read(between[read:distance].expand(count, -1))
                read = distance
            found.append([rows.cost(passages, order) for order in (same.roll(-1), same)])
    return np.array(found).reshape(len(distances), 2, count).swapaxes(0, 1)
