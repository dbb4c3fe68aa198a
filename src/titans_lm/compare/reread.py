"""What `titans evaluate reread` runs: models that read passages twice, with other books in between."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import Result, Say
from titans_lm.compare.reread_settings import RereadSettings
from titans_lm.compare.settings import NamedModel
from titans_lm.compare.spent import once, spent_on
from titans_lm.compare.trained import check_seeds, kind_of, reading_file, weights_sum
from titans_lm.data.prepared import tokenizer_fingerprint
from titans_lm.evaluate.accuracy import bytes_of_state
from titans_lm.evaluate.documents import Book, Encoder, books
from titans_lm.evaluate.intervals import bounds
from titans_lm.evaluate.reread import Drawing, Passages, draw_passages, fitting_distances, reread
from titans_lm.evaluate.stream import has_neural_memory, reader_for
from titans_lm.report.spread import mean_with_spread
from titans_lm.train.device import commit
from titans_lm.train.files import write_json
from titans_lm.train.options import plain_settings, written_command
from titans_lm.train.progress import TokenReport
from titans_lm.train.run import load_model, load_tokenizer, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "reread.json"
Drawn = dict[int, list[Passages]]
"""By length, what a tokenizer makes of the passages and of what lies between."""


@dataclass(frozen=True)
class Read:
    """One model's readings of the passages of one length, at the distances that it can reach."""

    length: int
    distances: list[int]
    bits: np.ndarray
    """(2, distances, passages): unread, and read before."""
    tokens: int
    seconds: float
    commits: list[str]

    @property
    def gains(self) -> np.ndarray:
        """Bits per token (distances, passages)."""
        return (self.bits[0] - self.bits[1]) / self.length


@dataclass(frozen=True)
class Run:
    """One model, with all of its readings."""

    named: NamedModel
    kind: str
    memory: bool
    carries: bool
    parameters: int
    state: Result
    reads: list[Read]


def run_reread(settings: RereadSettings, command: str, say: Say) -> Result:
    """Measure all models and write OUT/reread.json; stopped, the same call goes on.

    A reading (a model with one length of passages) that is done is kept in a file, whose name depends on all that its
    numbers depend on. Raises ValueError for models and texts that will not do.
    """
    named, found, others = settings.named(), books(settings.text), books(settings.between)
    _check_others(found, others)
    check_seeds(named)
    settings.out.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Drawn] = {}
    runs = [_run(model, found, others, settings, drawn, say) for model in named]
    names = list(dict.fromkeys(model.name for model in named))
    result = {
        "format": FORMAT,
        "what": "reread",
        "command": command,
        "hardware": hardware(),
        "settings": plain_settings(settings),
        "seed": settings.seed,
        **spent_on({"seconds": read.seconds, "commits": read.commits} for run in runs for read in run.reads),
        "documents": [book.name for book in found],
        "between": [book.name for book in others],
        "models": [_model([run for run in runs if run.named.name == name], settings) for name in names],
    }
    write_json(settings.out / FILE, result)
    return result


def _check_others(found: Sequence[Book], others: Sequence[Book]) -> None:
    paths = {book.path.resolve() for book in found}
    for book in others:
        if book.path.resolve() in paths:
            raise ValueError(f"got {str(book.path)!r} as text and as between; expected other books between")


def _run(
    named: NamedModel,
    found: list[Book],
    others: list[Book],
    settings: RereadSettings,
    drawn: dict[str, Drawn],
    say: Say,
) -> Run:
    """Let a model read the passages of every length, but for what has been read before."""
    tokenizer = load_tokenizer(named.path)
    mark = tokenizer_fingerprint(tokenizer)
    if mark not in drawn:
        say(f"drawing passages from {len(found)} books with the tokenizer of {named.name}")
        drawn[mark] = _draw(found, others, Encoder(tokenizer), settings)
    model, weights = load_model(named.path, settings.device), weights_sum(resolve_model(named.path))
    reads = []
    for length, passages in drawn[mark].items():
        reads.append(read := _read(model, named, weights, passages, settings))
        if read.distances:
            told = ", ".join(f"{gain:.3f} at {d:,}" for d, gain in zip(read.distances, read.gains.mean(1), strict=True))
            rate = read.tokens / max(read.seconds, 1e-9)
            say(f"{named.name} ({named.path}), passages of {length}: gain {told} bits per token, {rate:,.0f} tokens/s")
    carries = reader_for(model, piece_len=settings.piece_len, max_len=settings.max_len).constant
    longest = 2 * settings.lengths[-1] + settings.distances[-1] if carries else settings.max_len
    state = {"length": longest, **asdict(bytes_of_state(model, longest))}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Run(named, kind_of(resolve_model(named.path)), has_neural_memory(model), carries, parameters, state, reads)


def _draw(found: list[Book], others: list[Book], encoder: Encoder, settings: RereadSettings) -> Drawn:
    shared = {name: getattr(settings, name) for name in ("passages", "rows", "context", "skip_tokens", "seed")}
    return {
        length: list(draw_passages(found, others, encoder, Drawing(length, distance=settings.distances[-1], **shared)))
        for length in settings.lengths
    }


def _read(
    model: "PreTrainedModel", named: NamedModel, weights: str, drawn: list[Passages], settings: RereadSettings
) -> Read:
    """Take a reading from its file, or do it and keep it."""
    length = drawn[0].ids.shape[1]
    reading = reader_for(model, piece_len=settings.piece_len, max_len=settings.max_len)
    distances = list(settings.distances)
    if not reading.constant:
        distances = fitting_distances(drawn[0], distances, settings.max_len)
    asked = {"weights": weights, "passages": _sum_of(drawn), "distances": distances}
    file = reading_file(settings.out, f"{named.name}-{length}", asked)
    if file.is_file():
        kept = json.loads(file.read_bytes())
        return Read(length, distances, np.array(kept["bits"]), kept["tokens"], kept["seconds"], kept["commits"])
    first, began = commit(), time.monotonic()
    tokens = sum(_tokens(one, distances) for one in drawn)
    with TokenReport(quiet=settings.quiet, title=f"{named.name} {length}").start(tokens) as report:
        bits = [reread(model, one, distances, reading, on_piece=report.read) for one in drawn]
    seconds, commits = time.monotonic() - began, once([first, commit()])
    read = Read(length, distances, np.concatenate(bits, axis=-1), tokens, seconds, commits)
    told = {"asked": asked, "model": str(named.path), "seconds": seconds, "tokens": tokens, "commits": commits}
    places = [{"document": one.document, "start": start} for one in drawn for start in one.starts]
    write_json(file, {**told, "places": places, "bits": read.bits.tolist()})
    return read


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


def _model(runs: Sequence[Run], settings: RereadSettings) -> Result:
    """Put the seeds of a model together."""
    first = runs[0]
    return {
        "name": first.named.name,
        "kind": first.kind,
        "memory": first.memory,
        "carries": first.carries,
        "parameters": first.parameters,
        "state_bytes": first.state,
        "runs": [str(run.named.path) for run in runs],
        "lengths": [_length(seeds, settings) for seeds in zip(*(run.reads for run in runs), strict=True)],
    }


def _length(seeds: Sequence[Read], settings: RereadSettings) -> Result:
    """Passages of one length over all seeds."""
    first = seeds[0]
    rates = [read.tokens / max(read.seconds, 1e-9) for read in seeds]
    return {
        "length": first.length,
        "passages": settings.passages,
        "left_out": [distance for distance in settings.distances if distance not in first.distances],
        "seconds": sum(read.seconds for read in seeds),
        "commits": once(name for read in seeds for name in read.commits),
        "tokens_per_second": sum(rates) / len(rates),
        "distances": [_distance(seeds, place, settings.seed) for place in range(len(first.distances))],
    }


def _distance(seeds: Sequence[Read], place: int, seed: int) -> Result:
    """Gains at one distance: over seeds their spread, over passages an interval in which seeds are averaged."""
    gains = np.stack([read.gains[place] for read in seeds])
    count = gains.shape[1]
    low, high = bounds(gains.mean(0), lambda sums: sums / count, seed)
    costs = [read.bits[:, place].mean(1) / read.length for read in seeds]
    return {
        "distance": seeds[0].distances[place],
        "gain": mean_with_spread([float(gain) for gain in gains.mean(1)]),
        "low": low,
        "high": high,
        "unread": mean_with_spread([float(cost[0]) for cost in costs]),
        "read": mean_with_spread([float(cost[1]) for cost in costs]),
    }


def command_line(settings: RereadSettings) -> str:
    """Write the command that the settings came from."""
    unsaid = {"models": (), "json": None, "quiet": False}
    return written_command("evaluate", "reread", *settings.models, settings=settings, **unsaid)
