"""`titans evaluate gap`: how much of what a window costs a pretrained model its memory wins back.

    share = (windowed − ours) / (windowed − full)      nats per token at positions beyond the window

The base with its window is 0, the base with full attention 1. Rows of books are read from nothing, each with every
window; the adapter reads them a second time with its memory frozen, which says what the rest of it is worth.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titans_lm.backbone import frozen_memory
from titans_lm.evaluate.documents import Book, Encoder, TokenSource, books
from titans_lm.evaluate.positions import bounds
from titans_lm.evaluate.stream import ENDLESS
from titans_lm.experiments.models import kind_of
from titans_lm.experiments.reading import Planned, Reader, Reading, costs, run_reading
from titans_lm.experiments.reading_settings import GapSettings
from titans_lm.experiments.runner import Result, Say
from titans_lm.report.table import mean_with_spread
from titans_lm.train.fresh import size_of
from titans_lm.train.run import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "gap.json"
READ = ("full", "windowed", "ours", "frozen")
"""How a row is read: the base as it was, with its window, and with the adapter, whose memory learns or is frozen."""


def run_gap(settings: GapSettings, command: str, say: Say) -> Result:
    """Measure all adapters and write OUT/gap.json (see `run_reading`)."""
    from titans_lm.retrofit.saving import FORMAT

    for _, path in settings.named():  # before the books are tokenised
        if kind_of(resolve_model(path)) != FORMAT:
            raise ValueError(
                f"got the model {str(path)!r} without an adapter; expected a model of titans retrofit: others have no "
                "gap to win back"
            )
    return run_reading(Gaps(settings, books(settings.text)), settings, FILE, command, say)


@dataclass(frozen=True)
class Gaps:
    """Rows of books, read by every adapter in four ways."""

    settings: GapSettings
    books: list[Book]

    def prepare(self, tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
        """Cut rows of T + 1 tokens out of the books in turn, (R, T + 1), spread evenly over each."""
        told, encoder, rows = self.settings, Encoder(tokenizer), []
        for index, book in enumerate(self.books):
            count = len(range(index, told.rows, len(self.books)))
            if not count:
                continue
            source = TokenSource(encoder.tokens(book))
            source.take(told.skip_tokens)
            tokens, size = source.take(ENDLESS).ids, told.seq_len + 1
            if len(tokens) < count * size:
                raise ValueError(
                    f"got {count} rows of {size:,} tokens from {book.name!r}, which has {len(tokens):,} tokens after "
                    f"{told.skip_tokens:,} left out; expected longer books, or fewer or shorter rows"
                )
            starts = np.linspace(0, len(tokens) - size, count).astype(int)
            rows += [tokens[start : start + size] for start in starts]
        return np.stack(rows)

    def about(self, model: "PreTrainedModel") -> Result:
        from titans_lm.retrofit import adapter_of

        own: Any = model
        trained = size_of(adapter_of(model))
        return {
            "base": own.config._name_or_path, "window": own.retrofit.window, "sinks": own.retrofit.sinks,
            "adapter_parameters": trained,
        }  # fmt: skip

    def plan(self, model: "PreTrainedModel", corpus: np.ndarray, mark: str) -> Iterator[Planned]:
        """List one reading: all rows, in the four ways and with every window."""
        from titans_lm.retrofit.add import check_windows
        from titans_lm.retrofit.cache import check_head

        own: Any = model
        windows = self.settings.windows or (own.retrofit.window,)
        check_head(own)
        check_windows(model, windows)
        if max(windows) >= self.settings.seq_len:
            raise ValueError(
                f"got a window of {max(windows)} and rows of {self.settings.seq_len}; expected longer rows"
            )
        rows = hashlib.blake2b(corpus.tobytes(), digest_size=16).hexdigest()
        spec = {"rows": rows, "windows": list(windows), "read": READ}
        tokens = corpus.shape[0] * self.settings.seq_len * (1 + 3 * len(windows))

        def measure(on_piece: Callable[[int], None]) -> Result:
            found = [self._row(own, torch.from_numpy(row[None]), windows, on_piece) for row in corpus]
            return {"nats": np.array(found).transpose(1, 2, 0).tolist()}

        yield Planned(tuple(windows), "rows", spec, tokens, measure)

    def _row(
        self, model: Any, row: torch.Tensor, windows: Sequence[int], on_piece: Callable[[int], None]
    ) -> list[list[float]]:
        """Nats per token of one row beyond every window, in the order of READ."""
        from titans_lm.retrofit import FULL, Reach
        from titans_lm.retrofit.cache import as_base, nats

        ids, targets = row[:, :-1].to(model.device), row[:, 1:].to(model.device)

        def read(reach: Reach) -> torch.Tensor:
            cost = nats(model, ids, targets, reach)[0]
            on_piece(len(cost))
            return cost

        with as_base(model):
            full = read(FULL)
        found = []
        for window in windows:
            reach = Reach(window, model.retrofit.sinks)
            with as_base(model):
                windowed = read(reach._replace(memory=False))
            learning = read(reach)
            with frozen_memory(model):
                costs = full, windowed, learning, read(reach)
            found.append([float(cost[window:].double().mean()) for cost in costs])
        return found

    def describe(self, reading: Reading) -> str:
        shares = (share_of(one) for one in np.array(reading.found["nats"]))
        return "share of the gap recovered: " + ", ".join(
            f"{share:.1%} with a window of {window}" for window, share in zip(reading.key, shares, strict=True)
        )

    def summarize(self, seeds: Sequence[Reader]) -> Result:
        readings = [seed.readings[0] for seed in seeds]
        windows = [_window(readings, place, self.settings.seed) for place in range(len(readings[0].key))]
        return {**costs(readings), "windows": windows}


def share_of(nats: np.ndarray) -> float:
    """The share of the gap that the adapter recovers, of rows (4, R)."""
    full, windowed, ours, _ = nats.mean(1)
    return float((windowed - ours) / (windowed - full))


def _window(readings: Sequence[Reading], place: int, seed: int) -> Result:
    """One window: means over rows and seeds, and an interval over rows in which seeds are averaged."""
    nats = np.array([reading.found["nats"][place] for reading in readings])  # (seeds, 4, R)
    full, windowed, ours, _ = nats.mean(0)
    low, high = bounds(np.stack((windowed - ours, windowed - full)), lambda sums: sums[0] / sums[1], seed)
    return {
        "window": readings[0].key[place],
        "rows": nats.shape[2],
        **{name: mean_with_spread([float(x) for x in nats[:, way].mean(1)]) for way, name in enumerate(READ)},
        "share": mean_with_spread([share_of(one) for one in nats]),
        "low": low,
        "high": high,
    }
