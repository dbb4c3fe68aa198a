"""Rows to train an adapter on, by step: text, and text in which passages return that have left the window."""

from typing import Any

import numpy as np
import torch

from titans_lm.data.batches import Batch, fingerprint
from titans_lm.data.prepared import Split, TokenFolder, check_split, is_token_folder, tokenizer_fingerprint
from titans_lm.data.text import Document, load_corpus
from titans_lm.distill.settings import RetrofitSettings

RETURN = 0.5
"""Chance that the next passage of a row with returns is one that was there, where one has left the window."""


class Text:
    """Tokens of documents laid end to end, by the names that a `Split` of a token folder has for them."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids, self.tokens, self.fingerprint = ids, len(ids), fingerprint([ids])

    def take(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def open_texts(settings: RetrofitSettings, tokenizer: Any) -> tuple[Text | Split, Text | Split]:
    """Open the text to train on and the one held out, as tokens of the base; ValueError for what is too short."""
    if settings.data is None:
        raise ValueError("got no data; expected a file, a folder of text, or a folder of titans prepare")
    if is_token_folder(settings.data):
        folder = TokenFolder(settings.data)
        check_split(folder, settings.valid, settings.held_out)
        if folder.tokenizer_fingerprint != tokenizer_fingerprint(tokenizer):
            raise ValueError(
                f"got {settings.data!r}, prepared with another tokenizer than the base's; expected titans prepare "
                f"with --tokenizer {settings.model}"
            )
        texts: tuple[Text | Split, Text | Split] = folder.train, folder.valid
    else:
        corpus = load_corpus(settings.data, held_out=settings.held_out, valid=settings.valid)
        texts = _encoded(corpus.train, tokenizer), _encoded(corpus.held_out, tokenizer)
    for text, what in zip(texts, ("to train on", "held out"), strict=True):
        if text.tokens <= settings.seq_len:
            raise ValueError(
                f"got {text.tokens:,} tokens {what}; expected more than seq_len={settings.seq_len}: give more text, "
                "or shorter rows, which still have to be longer than the window"
            )
    return texts


def _encoded(documents: tuple[Document, ...], tokenizer: Any) -> Text:
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [
        np.array(
            tokenizer(document.data.decode("utf-8", "replace"), add_special_tokens=False, verbose=False).input_ids
            + ends
        )
        for document in documents
    ]
    return Text(np.concatenate(parts).astype(np.int64))


class ReturningRows:
    """Rows of T + 1 tokens, a share of which is made of passages from everywhere that come again further on.

    input_ids, targets   (B, T)    targets are the tokens that follow
    again                (B, T)    where the target was in the text before, and left the window since
    window, sinks        (B,)      those of the batch

    A pure function of seed and step. The distance of a return is more than the window and at most what
    `grow_steps` allows at that step: from twice the window to the row.
    """

    def __init__(self, text: Text | Split, settings: RetrofitSettings) -> None:
        self.text, self.settings = text, settings
        self.windows = settings.windows or (settings.adapter.window,)
        self.sinks = settings.sink_counts or (settings.adapter.sinks,)
        shape = settings.seq_len, settings.batch_size, settings.seed
        drawn = self.windows, self.sinks, settings.returning, settings.passages, settings.grow_steps
        self.fingerprint = f"{text.fingerprint} {shape} {drawn}"

    def __call__(self, step: int) -> Batch:
        rng, s = np.random.default_rng([self.settings.seed, step]), self.settings
        window, sinks = int(rng.choice(self.windows)), int(rng.choice(self.sinks))
        grown = min(1.0, step / s.grow_steps) if s.grow_steps else 1.0
        reach = int(2 * window + grown * max(0, s.seq_len - 2 * window))
        rows = [self.row(rng, window, reach if rng.random() < s.returning else None) for _ in range(s.batch_size)]
        return as_batch(rows, window, sinks)

    def row(self, rng: np.random.Generator, window: int, reach: int | None) -> tuple[np.ndarray, np.ndarray]:
        """T + 1 tokens and whether each was there before; without a reach, plain text in which nothing returns."""
        length = self.settings.seq_len + 1
        again = np.zeros(length, bool)
        if reach is None:
            return self._anywhere(rng, length), again
        row, passages, filled = np.zeros(length, np.int64), dict[int, int](), 0  # the last start of each, and its size
        while filled < length:
            old = [start for start in passages if window < filled - start <= reach]
            if old and rng.random() < RETURN:
                start = old[int(rng.integers(len(old)))]
                size = min(passages.pop(start), length - filled)
                passages[filled] = size
                row[filled : filled + size] = row[start : start + size].copy()
                again[filled + 1 : filled + size] = True  # that it begins cannot be known
            else:
                size = min(int(rng.integers(self.settings.passages[0], self.settings.passages[1] + 1)), length - filled)
                row[filled : filled + size] = self._anywhere(rng, size)
                passages[filled] = size
            filled += size
        return row, again

    def _anywhere(self, rng: np.random.Generator, length: int) -> np.ndarray:
        start = int(rng.integers(0, self.text.tokens - length + 1))
        return self.text.take(start, start + length).astype(np.int64)


def as_batch(rows: list[tuple[np.ndarray, np.ndarray]], window: int, sinks: int) -> Batch:
    """Rows of T + 1 tokens as a batch; see `ReturningRows`."""
    tokens, again = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "again": again[:, 1:].contiguous(),
        "window": torch.full((len(rows),), window),
        "sinks": torch.full((len(rows),), sinks),
    }
