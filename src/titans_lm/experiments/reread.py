"""`titans evaluate reread`: models that read passages twice, with other books in between."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from titans_lm.evaluate.accuracy import bytes_of_state
from titans_lm.evaluate.documents import Book, Encoder, books
from titans_lm.evaluate.positions import bounds
from titans_lm.evaluate.reread import Drawing, Passages, draw_passages, fitting_distances, reread
from titans_lm.evaluate.stream import reader_for
from titans_lm.experiments.reading import Planned, Reader, Reading, costs, run_reading
from titans_lm.experiments.reading_settings import RereadSettings
from titans_lm.experiments.runner import Result, Say
from titans_lm.report.table import mean_with_spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "reread.json"
Drawn = dict[int, list[Passages]]
"""By length, what a tokenizer makes of the passages and of what lies between."""


def run_reread(settings: RereadSettings, command: str, say: Say) -> Result:
    """Measure all models and write OUT/reread.json (see `run_reading`)."""
    settings.named()
    evaluation = Rereading(settings, books(settings.text), books(settings.between))
    paths = {book.path.resolve() for book in evaluation.books}
    for book in evaluation.others:
        if book.path.resolve() in paths:
            raise ValueError(f"got {str(book.path)!r} as text and as between; expected other books between")
    documents, between = ([book.name for book in found] for found in (evaluation.books, evaluation.others))
    return run_reading(evaluation, settings, FILE, command, say, documents=documents, between=between)


@dataclass(frozen=True)
class Rereading:
    """Passages of books, read twice by every model with other books in between."""

    settings: RereadSettings
    books: list[Book]
    others: list[Book]

    def prepare(self, tokenizer: "PreTrainedTokenizerBase") -> Drawn:
        told, encoder = self.settings, Encoder(tokenizer)
        shared = {name: getattr(told, name) for name in ("passages", "rows", "context", "skip_tokens", "seed")}
        return {
            length: list(
                draw_passages(self.books, self.others, encoder, Drawing(length, distance=told.distances[-1], **shared))
            )
            for length in told.lengths
        }

    def about(self, model: "PreTrainedModel") -> Result:
        told = self.settings
        carries = reader_for(model, piece_len=told.piece_len, max_len=told.max_len).constant
        longest = 2 * told.lengths[-1] + told.distances[-1] if carries else told.max_len
        return {"carries": carries, "state_bytes": {"length": longest, **asdict(bytes_of_state(model, longest))}}

    def plan(self, model: "PreTrainedModel", corpus: Drawn, mark: str) -> Iterator[Planned]:
        """List the lengths of passages, each at the distances that the model can reach."""
        told = self.settings
        reading = reader_for(model, piece_len=told.piece_len, max_len=told.max_len)
        for length, drawn in corpus.items():
            distances = list(told.distances)
            if not reading.constant:
                distances = fitting_distances(drawn[0], distances, told.max_len)
            tokens = sum(_tokens(one, distances) for one in drawn)

            def measure(
                on_piece: Callable[[int], None], drawn: list[Passages] = drawn, distances: list[int] = distances
            ) -> Result:
                bits = [reread(model, one, distances, reading, on_piece=on_piece) for one in drawn]
                places = [{"document": one.document, "start": start} for one in drawn for start in one.starts]
                return {"places": places, "bits": np.concatenate(bits, axis=-1).tolist()}

            spec = {"passages": _sum_of(drawn), "distances": distances}
            yield Planned((length, distances), str(length), spec, tokens, measure)

    def describe(self, reading: Reading) -> str:
        if not reading.key[1]:
            return ""
        gains = zip(reading.key[1], gains_of(reading).mean(1), strict=True)
        told = ", ".join(f"{gain:.3f} at {distance:,}" for distance, gain in gains)
        return f"passages of {reading.key[0]}: gain {told} bits per token"

    def summarize(self, seeds: Sequence[Reader]) -> Result:
        return {"lengths": [_length(one, self.settings) for one in zip(*(of.readings for of in seeds), strict=True)]}


def gains_of(reading: Reading) -> np.ndarray:
    """Bits per token that the first reading saves at the second, (distances, passages)."""
    unread, read = np.array(reading.found["bits"])
    return (unread - read) / reading.key[0]


def _tokens(drawn: Passages, distances: Sequence[int]) -> int:
    """Count the tokens that are read in all: one is kept back, and every distance has two readings of a passage."""
    rows, length = drawn.ids.shape
    return rows * (len(drawn.before) + length - 1 + max(distances, default=0) + 2 * length * len(distances))


def _sum_of(drawn: list[Passages]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for one in drawn:
        for part in (one.before, one.ids, one.between):
            digest.update(f"{part.shape}".encode() + np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _length(seeds: Sequence[Reading], settings: RereadSettings) -> Result:
    """Passages of one length over all seeds."""
    length, distances = seeds[0].key
    return {
        "length": length,
        "passages": settings.passages,
        "left_out": [distance for distance in settings.distances if distance not in distances],
        **costs(seeds),
        "distances": [_distance(seeds, place, settings.seed) for place in range(len(distances))],
    }


def _distance(seeds: Sequence[Reading], place: int, seed: int) -> Result:
    """Gains at one distance: over seeds their spread, over passages an interval in which seeds are averaged."""
    length, distances = seeds[0].key
    gains = np.stack([gains_of(reading)[place] for reading in seeds])
    count = gains.shape[1]
    low, high = bounds(gains.mean(0), lambda sums: sums / count, seed)
    costs = [np.array(reading.found["bits"])[:, place].mean(1) / length for reading in seeds]
    return {
        "distance": distances[place],
        "gain": mean_with_spread([float(gain) for gain in gains.mean(1)]),
        "low": low,
        "high": high,
        "unread": mean_with_spread([float(cost[0]) for cost in costs]),
        "read": mean_with_spread([float(cost[1]) for cost in costs]),
    }
