"""Batches of texts, of prepared tokens and of rows in which passages return (D40), by step.

A batch is a pure function of the seed and the step, so that a run resumes at any step without reading what came before.

Every batch holds `input_ids` and `targets` of one shape (B, T): `targets[b, t]` is the token that follows
`input_ids[b, t]`, and −100 where nothing is to be predicted. Nothing is shifted afterwards.

Of prepared tokens, every row is read once before any comes again, in an order that the seed alone decides: sample i is
row i mod n of epoch ⌊i / n⌋, and step s holds samples s B … (s + 1) B − 1. So the place in the data is one number,
whoever reads: any number of processes or workers gives the same rows, each once.
"""

import signal
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from titans_lm.config import check_at_least
from titans_lm.data.curriculum import RereadCurriculum
from titans_lm.data.prepared import Split
from titans_lm.data.tokenizer import PAD, TokenIds

IGNORED = -100
Batch = dict[str, Tensor]


def fingerprint(documents: Sequence[TokenIds], **settings: int | str) -> str:
    """Name the tokens and settings that batches are made of, so that a run resumes on the same ones or not at all."""
    digest = blake2b(repr(sorted(settings.items())).encode(), digest_size=16)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(document).data)
    return digest.hexdigest()


def count_targets(batch: Batch) -> int:
    """Targets of a batch that its loss is the mean over; 1 of batches without any."""
    return int((batch["targets"] != IGNORED).sum()) if "targets" in batch else 1


def padded(rows: Sequence[TokenIds], length: int | None = None, pad: int = 0) -> Batch:
    """Lay rows of up to T + 1 tokens side by side: input_ids, targets, attention_mask (B, T), padded on the right.

    T is the `length`, or without one what the longest row needs.
    """
    shape = (len(rows), max(map(len, rows)) - 1 if length is None else length)
    inputs, targets, mask = np.full(shape, pad, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64)
    for row, tokens in enumerate(rows):
        end = len(tokens) - 1
        inputs[row, :end], targets[row, :end], mask[row, :end] = tokens[:-1], tokens[1:], 1
    return as_batch(input_ids=inputs, targets=targets, attention_mask=mask)


def as_batch(**parts: np.ndarray) -> Batch:
    """Make a batch of rows of integers: int64, side by side in memory."""
    return {name: torch.from_numpy(np.ascontiguousarray(part, np.int64)) for name, part in parts.items()}


class RandomCrops:
    """Crops of T + 1 tokens at random places of the documents, which lie one after the other.

    A document keeps its <bos> and <eos>, so a crop that crosses a border shows where the next text starts. The first T
    tokens of a crop are read, the last T predicted.
    """

    def __init__(self, documents: Sequence[TokenIds], *, seq_len: int, batch_size: int, seed: int = 0) -> None:
        check_sizes(seq_len, batch_size)
        self.tokens = np.concatenate([np.zeros(0, np.uint16), *documents])
        if len(self.tokens) <= seq_len:
            raise ValueError(
                f"got {len(self.tokens)} tokens to train on; expected at least seq_len + 1 = {seq_len + 1}: "
                "give more text or a smaller seq_len"
            )
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.fingerprint = fingerprint(documents, kind="crops", seq_len=seq_len, batch_size=batch_size, seed=seed)

    def take(self, start: int, stop: int) -> TokenIds:
        """Tokens start … stop of all documents laid end to end."""
        return self.tokens[start:stop]

    def __call__(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, len(self.tokens) - self.seq_len, self.batch_size)
        crops = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)]
        return as_batch(input_ids=crops[:, :-1], targets=crops[:, 1:])


class DocumentLanes:
    """B lanes that read documents from start to end, T tokens a step: for memory that is carried from step to step.

        input_ids        (B, T)   the next T tokens of each lane's document, <bos> first but in later parts of
                                  one that is cut, padded on the right
        targets          (B, T)   the token after each, across the borders of pieces; −100 on padding
        attention_mask   (B, T)   0 on padding
        reset            (B,)     true where a row's piece is the first of its document

    So every token of a document is predicted exactly once, and only the last piece of a document is padded, with
    the id `pad`. The lanes draw from one endless list, the documents in an order shuffled anew each time around. A
    document longer than an equal share of all tokens is cut into such shares first, else one long file would leave
    all lanes but one idle.
    """

    def __init__(
        self, documents: Sequence[TokenIds], *, seq_len: int, batch_size: int, seed: int = 0, pad: int = PAD
    ) -> None:
        check_sizes(seq_len, batch_size)
        self.documents = _Shares(documents, batch_size)
        if not self.documents:
            raise ValueError("got no document of two tokens or more; expected text to train on")
        self.seq_len, self.batch_size, self.seed, self.pad = seq_len, batch_size, seed, pad
        self.pieces = [-(-(stop - start - 1) // seq_len) for _, start, stop in self.documents.places]
        self.ends: list[list[int]] = [[] for _ in range(batch_size)]
        named: str | None = getattr(documents, "fingerprint", None)  # prepared documents have been hashed already
        settings = {"kind": "lanes", "seq_len": seq_len, "batch_size": batch_size, "seed": seed}
        self.fingerprint = fingerprint(documents, **settings) if named is None else f"{named} {settings}"

    def __call__(self, step: int) -> Batch:
        places = [self._locate(lane, step) for lane in range(self.batch_size)]
        starts = [piece * self.seq_len for _, piece in places]
        rows = [
            self.documents[document][start : start + self.seq_len + 1]
            for (document, _), start in zip(places, starts, strict=True)
        ]
        return {**padded(rows, self.seq_len, self.pad), "reset": torch.tensor([start == 0 for start in starts])}

    def _locate(self, lane: int, step: int) -> tuple[int, int]:
        """Find the document and the piece that a lane reads at a step, by where its documents end so far."""
        ends = self.ends[lane]
        while not ends or ends[-1] <= step:
            ends.append((ends[-1] if ends else 0) + self.pieces[self._entry(lane, len(ends))])
        place = bisect_right(ends, step)
        return self._entry(lane, place), step - (ends[place - 1] if place else 0)

    def _entry(self, lane: int, place: int) -> int:
        """Name the document at a place of a lane's list: entry `place * B + lane` of the endless list."""
        entry = place * self.batch_size + lane
        count = len(self.documents)
        return int(shuffled(self.seed, entry // count, count)[entry % count])


def permuted(seed: int, epoch: int, count: int) -> np.ndarray:
    """The numbers below `count` in the order of an epoch, which the seed alone decides."""
    return np.random.default_rng([seed, epoch]).permutation(count)


shuffled = lru_cache(maxsize=8)(permuted)
"""The same, kept for lanes that read documents of several epochs at a time."""
of_epoch = lru_cache(maxsize=2)(permuted)
"""The same, kept for rows of one epoch or of two at its border."""


def check_sizes(seq_len: int, batch_size: int) -> None:
    check_at_least("seq_len", seq_len, 1)
    check_at_least("batch_size", batch_size, 1)


class _Shares(Sequence[TokenIds]):
    """Documents of two tokens or more, cut where they are longer than an equal share of all tokens.

    The cut token ends one part and begins the next. Only places are kept: a folder's tokens stay on the disk, also
    where this goes to another process.
    """

    def __init__(self, documents: Sequence[TokenIds], lanes: int) -> None:
        lengths = documents.lengths.tolist() if isinstance(documents, Split) else [len(one) for one in documents]
        share = max(-(-sum(max(length - 1, 0) for length in lengths) // lanes), 1)
        self.source = documents
        self.places = [
            (index, start, min(start + share + 1, length))
            for index, length in enumerate(lengths)
            for start in range(0, length - 1, share)
        ]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: Any) -> Any:
        index, start, stop = self.places[place]
        return self.source[index][start:stop]


def prefetched(batches: Callable[[int], Batch], first: int, last: int, workers: int = 0) -> Iterator[Batch]:
    """The batches of steps first … last − 1, made by so many processes while the step before is computed.

    They are the same batches for any number of workers, as a batch is a function of its step and nothing else. Without
    workers they are made when they are asked for.
    """
    if not workers or last <= first:
        return map(batches, range(first, last))
    # A generator of its own: the loader draws a seed for its workers, which must not move the numbers of training.
    loader: Any = DataLoader(
        range(first, last),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=batches,
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),
        multiprocessing_context="spawn",
        worker_init_fn=_undisturbed,
    )
    return iter(loader)


def _undisturbed(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # when to end is for the process that trains
        signal.signal(number, signal.SIG_IGN)


class _Rows(ABC):
    """The order of n rows, and batches of them; what a row holds is for `_row` to say."""

    kind: ClassVar[str]

    def __init__(self, split: Split, *, seq_len: int, batch_size: int, seed: int = 0) -> None:
        check_sizes(seq_len, batch_size)
        if not len(split):
            raise ValueError(f"got no documents to train on in {split.folder}; expected a folder with some")
        self.split, self.seq_len, self.batch_size, self.seed = split, seq_len, batch_size, seed
        self.rows = self._count()
        self.fingerprint = f"{split.fingerprint} {self.kind} {seq_len} {batch_size} {seed}"

    @abstractmethod
    def _count(self) -> int:
        """Rows of an epoch."""

    @abstractmethod
    def _row(self, row: int) -> np.ndarray:
        """At most T + 1 tokens."""

    def __call__(self, step: int) -> Batch:
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        places = (divmod(sample, self.rows) for sample in samples)
        rows = [int(of_epoch(self.seed, epoch, self.rows)[place]) for epoch, place in places]
        batch = padded([self._row(row) for row in rows], self.seq_len) | {"sample": torch.tensor(rows)}
        if batch["attention_mask"].all():
            del batch["attention_mask"]
        return batch


class PackedRows(_Rows):
    """Rows of T + 1 tokens of all documents laid end to end; each begins with the token that the one before ended with.

        input_ids   (B, T)   tokens, across the borders of documents, which show as <eos> <bos>
        targets     (B, T)   the token after each
        sample      (B,)     which rows of the text these are

    A memory goes on across the borders inside a row. ValueError for fewer than T + 1 tokens.
    """

    kind = "packed"

    def _count(self) -> int:
        if self.split.tokens <= self.seq_len:
            raise ValueError(
                f"got {self.split.tokens:,} tokens to train on; expected at least seq_len + 1 = {self.seq_len + 1:,}: "
                "prepare more text, or give a smaller seq_len"
            )
        return (self.split.tokens - 1) // self.seq_len

    def _row(self, row: int) -> np.ndarray:
        start = row * self.seq_len
        return self.split.take(start, start + self.seq_len + 1)


class DocumentRows(_Rows):
    """Rows that hold one document each, or T tokens of one: no memory hears of another document.

        input_ids        (B, T)   tokens of one document, padded on the right with 0
        targets          (B, T)   the token after each, −100 on padding
        attention_mask   (B, T)   0 on padding; absent where there is none
        sample           (B,)     which rows of the text these are

    Every token but a document's first is predicted once in an epoch.
    """

    kind = "documents"

    def _count(self) -> int:
        pieces = -(-(self.split.lengths - 1) // self.seq_len)
        self.ends = np.cumsum(np.maximum(pieces, 0))
        if not self.ends[-1]:
            raise ValueError("got no document of two tokens or more; expected text to train on")
        return int(self.ends[-1])

    def _row(self, row: int) -> np.ndarray:
        document = int(np.searchsorted(self.ends, row, side="right"))
        piece = row - (int(self.ends[document - 1]) if document else 0)
        return self.split[document][piece * self.seq_len : (piece + 1) * self.seq_len + 1]


STREAM = 0x52455245
"""Set beside seed and step, so that what is drawn here is not what the batches of the second phase draw."""
TRIES = 8
"""How often a place is drawn for one more passage of a row, until it touches none of those before."""


class RereadRows:
    """Short rows of returning passages for the first steps, then the rows of other batches, some with a passage twice.

        passage gap passage gap new passage …    (B seq_len / T₁, T₁)   the first phase, T₁ = first_len
        … passage … passage …                    (B, seq_len)           a share of the rows of the second phase

    Passages and gaps of the first phase come from random places of the text. In the second, passages of the row are
    written over what stands at their gaps, so that the rest is the row as it was. `batches` begin at their own step 0
    where the first phase ends: no row of theirs is left out.
    """

    def __init__(
        self,
        batches: Callable[[int], Batch],
        take: Callable[[int, int], np.ndarray],
        tokens: int,
        curriculum: RereadCurriculum,
        *,
        steps: int,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        """`take(start, stop)` are tokens of a text of so many `tokens`; each of `steps` has `accumulate` batches."""
        curriculum.check_run(steps, seq_len)
        self.batches, self.take, self.tokens, self.curriculum, self.seed = batches, take, tokens, curriculum, seed
        self.first = curriculum.first_steps * accumulate
        self.second = max(1, (steps - curriculum.first_steps) * accumulate - 1)
        self.rows = batch_size * seq_len // curriculum.first_len
        longest = max(curriculum.first_passages[1], *curriculum.first_gaps)
        if self.first and tokens < longest:
            raise ValueError(
                f"got {tokens:,} tokens to train on and passages or gaps of {longest}; expected a longer text"
            )
        named: Any = batches
        over = f" {self.second}" if isinstance(curriculum.share, tuple) else ""
        self.fingerprint = f"{named.fingerprint} {self.first} {self.rows} {curriculum}{over}"

    def __call__(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, step, STREAM])
        if step >= self.first:
            share = self.curriculum.share_at(min(1.0, (step - self.first) / self.second))
            return self._twice(self.batches(step - self.first), share, rng)
        rows = np.stack([self._short_row(rng) for _ in range(self.rows)])
        return as_batch(input_ids=rows[:, :-1], targets=rows[:, 1:])

    def _short_row(self, rng: np.random.Generator) -> np.ndarray:
        """T₁ + 1 tokens: a passage and a gap in turn, the passage new with a probability, else the last one."""
        chosen, length = self.curriculum, self.curriculum.first_len + 1
        parts, filled, passage = [], 0, None
        while filled < length:
            if passage is None or rng.random() < chosen.first_new:
                passage = self._anywhere(rng, int(rng.integers(chosen.first_passages[0], chosen.first_passages[1] + 1)))
            parts += [passage, self._anywhere(rng, int(rng.choice(chosen.first_gaps)))]
            filled += len(parts[-1]) + len(parts[-2])
        return np.concatenate(parts)[:length]

    def _anywhere(self, rng: np.random.Generator, length: int) -> np.ndarray:
        start = int(rng.integers(0, self.tokens - length + 1))
        return self.take(start, start + length)

    def _twice(self, batch: Batch, share: float, rng: np.random.Generator) -> Batch:
        inputs, targets = batch["input_ids"].clone(), batch["targets"].clone()
        for ids, following in zip(inputs, targets, strict=True):
            count = int((following != IGNORED).sum())  # padding stands at the right
            if rng.random() < share:
                row = torch.cat([ids[:1], following[:count]])
                self._read_again(row, rng)
                ids[:count], following[:count] = row[:-1], row[1:]
        return {**batch, "input_ids": inputs, "targets": targets}

    def _read_again(self, row: Tensor, rng: np.random.Generator) -> None:
        """Write passages of a row over later parts of it, none over another, as far as the row has room for them."""
        shortest, longest = self.curriculum.passages
        longest = min(longest, len(row) // 2)
        if longest < shortest:
            return
        taken = np.zeros(len(row), dtype=bool)
        for _ in range(self.curriculum.repeats):
            for _ in range(TRIES):
                first, again = self._places(rng, len(row), shortest, longest)
                if not (taken[first].any() or taken[again].any()):
                    row[again] = row[first].clone()
                    taken[first] = taken[again] = True
                    break

    def _places(self, rng: np.random.Generator, width: int, shortest: int, longest: int) -> tuple[slice, slice]:
        """Where a passage stands in a row of so many tokens, and where it returns."""
        length = int(rng.integers(shortest, longest + 1))
        room, most = width - 2 * length, self.curriculum.max_gap
        gap = int(rng.integers(0, (room if most is None else min(most, room)) + 1))
        start = int(rng.integers(0, room - gap + 1))
        again = start + length + gap
        return slice(start, start + length), slice(again, again + length)
