"""`titans evaluate perplexity`: models that read books, each with its memory on, reset and frozen."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from titans_lm.backbone import frozen_memory
from titans_lm.evaluate.documents import Book, Encoder, books, spans
from titans_lm.evaluate.positions import (
    Estimate,
    SpanScore,
    by_position,
    complete,
    difference,
    difference_in_differences,
    late_minus_early,
    overall,
    score_spans,
)
from titans_lm.evaluate.stream import has_neural_memory, reader_for
from titans_lm.experiments.reading import Planned, Reader, Reading, costs, run_reading
from titans_lm.experiments.reading_settings import Mode, PerplexitySettings
from titans_lm.experiments.runner import Result, Say
from titans_lm.report.table import mean_with_spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "perplexity.json"
SUMS = ("tokens", "bytes", "bits")


def run_perplexity(settings: PerplexitySettings, command: str, say: Say) -> Result:
    """Measure all models and write OUT/perplexity.json (see `run_reading`)."""
    settings.named()
    return run_reading(Perplexity(settings, books(settings.text)), settings, FILE, command, say)


@dataclass(frozen=True)
class CorpusStats:
    """What a tokenizer makes of the books: documents with their tokens and bytes, and a sum over all of it."""

    encoder: Encoder
    documents: list[Result]
    sum: str


@dataclass(frozen=True)
class Perplexity:
    """Books, read by every model in every mode."""

    settings: PerplexitySettings
    books: list[Book]

    @property
    def cut(self) -> dict[str, Any]:
        told = self.settings
        return {"length": told.stretch, "max_tokens": told.max_tokens, "skip_tokens": told.skip_tokens}

    def prepare(self, tokenizer: "PreTrainedTokenizerBase") -> CorpusStats:
        """Count what there is to predict, a book after another."""
        encoder, digest, documents = Encoder(tokenizer), hashlib.blake2b(digest_size=16), []
        for book in self.books:
            tokens = size = 0
            for stretch in spans([book], encoder, **self.cut):
                digest.update(os.fsencode(f"{book.name} {stretch.start} {stretch.begin.tolist()}"))
                while len((part := stretch.source.take(2**16)).ids):
                    digest.update(part.ids.tobytes() + part.sizes.tobytes())
                    tokens, size = tokens + len(part.ids), size + int(part.sizes.sum())
            file = {"file_bytes": book.path.stat().st_size}
            documents.append({"name": book.name, "tokens": tokens, "bytes": size, **file})
        if not any(one["bytes"] for one in documents):
            raise ValueError(
                f"got texts with nothing to predict behind {self.settings.skip_tokens:,} tokens; expected longer ones, "
                "or a smaller --skip-tokens"
            )
        return CorpusStats(encoder, documents, digest.hexdigest())

    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self.settings, name) for name in ("piece_len", "window", "window_step")}

    def about(self, model: "PreTrainedModel") -> Result:
        return {"carries": reader_for(model, **self._sizes()).constant}

    def plan(self, model: "PreTrainedModel", corpus: CorpusStats, mark: str) -> Iterator[Planned]:
        carries, settings = self.about(model)["carries"], self.settings
        tokens = sum(one["tokens"] for one in corpus.documents)
        modes = settings.modes(carries=carries, remembers=has_neural_memory(model))
        if not modes:
            raise ValueError("got memory='off' for a model without a neural memory; expected on or reset beside it")
        for mode in modes:
            windows = {"window_step": settings.window_step} if mode.kind == "windows" else {}
            spec = {"tokenizer": mark, "text": corpus.sum, "mode": mode.name, "stretch": settings.stretch}
            yield Planned(
                mode, mode.name, {**spec, "max_tokens": settings.max_tokens, **windows}, tokens,
                lambda on_piece, mode=mode: self._measure(model, mode, corpus, on_piece),
            )  # fmt: skip

    def _measure(
        self, model: "PreTrainedModel", mode: Mode, corpus: CorpusStats, on_piece: Callable[[int], None]
    ) -> Result:
        sizes, every = self._sizes(), mode.every if mode.kind == "reset" else None
        if every is not None:
            sizes |= {"window": every, "window_step": every}
        reading = reader_for(model, **sizes)
        with frozen_memory(model, mode.kind == "off"):
            scores = score_spans(
                model, spans(self.books, corpus.encoder, **self.cut), reading, reset_every=every,
                batch_size=self.settings.batch_size, on_piece=on_piece,
            )  # fmt: skip
        return {"stretches": [asdict(score) for score in scores]}

    def describe(self, reading: Reading) -> str:
        score = overall(scores_of(reading))
        return f"{reading.key.name}: {score.bits_per_byte:.4f} bits per byte of {score.bytes:,} bytes"

    def summarize(self, seeds: Sequence[Reader]) -> Result:
        """Put the seeds of a model together: every mode, and the first against each of the others."""
        first, settings = seeds[0], self.settings
        modes = list(zip(*(reader.readings for reader in seeds), strict=True))
        scores = [[scores_of(reading) for reading in readings] for readings in modes]
        return {
            "documents": first.corpus.documents,
            "readings": [
                _mode(readings, found, first.about["carries"], settings)
                for readings, found in zip(modes, scores, strict=True)
            ],
            "differences": [
                {"mode": modes[0][0].key.name, "minus": readings[0].key.name, **_difference(scores[0], found, settings)}
                for readings, found in zip(modes[1:], scores[1:], strict=True)
            ],
        }


def scores_of(reading: Reading) -> list[SpanScore]:
    """Give what every stretch cost."""
    return [
        SpanScore(one["document"], one["start"], **{name: tuple(one[name]) for name in SUMS})
        for one in reading.found["stretches"]
    ]


def _mode(
    seeds: Sequence[Reading], found: list[list[SpanScore]], carries: bool, settings: PerplexitySettings
) -> Result:
    """One mode over all seeds: bits per byte are means over seeds with their spread."""
    mode, alone = seeds[0].key, [overall(scores) for scores in found]
    together = [score for scores in found for score in scores]
    far, *by_seed = (
        late_minus_early(scores, settings.near, settings.far, seed=settings.seed) for scores in (together, *found)
    )
    return {
        "mode": mode.kind,
        "every": mode.every,
        "constant_memory": carries,
        "tokens": alone[0].tokens,
        "bytes": alone[0].bytes,
        "stretches": len(found[0]),
        **_bits(alone),
        **costs(seeds),
        "by_position": [
            {**{name: getattr(part[0], name) for name in ("start", "stop", "tokens", "bytes")}, **_bits(part)}
            for part in zip(*map(by_position, found), strict=True)
        ],
        "far_minus_near": _estimate(far, by_seed),
        "books": list(_books(together, settings)),
    }


def _bits(seeds: Sequence[Any]) -> Result:
    names = ("bits_per_byte", "bits_per_token")
    return {name: mean_with_spread([getattr(one, name) for one in seeds]) for name in names}


def _difference(first: list[list[SpanScore]], other: list[list[SpanScore]], settings: PerplexitySettings) -> Result:
    """The first mode against another, of the same tokens: all positions, and how it changes from near to far ones."""
    a, b = ([score for scores in found for score in scores] for found in (first, other))
    ranges, seed = (settings.near, settings.far), settings.seed
    pairs = [(a, b), *zip(first, other, strict=True)]
    whole, *alone = (difference(x, y, seed=seed) for x, y in pairs)
    change, *by_seed = (difference_in_differences(x, y, *ranges, seed=seed) for x, y in pairs)
    return {"overall": _estimate(whole, alone), "change": _estimate(change, by_seed)}


def _estimate(found: Estimate | None, by_seed: Sequence[Estimate | None]) -> Result | None:
    if found is None:
        return None
    return {**asdict(found), "by_seed": [one.value for one in by_seed if one is not None]}


def _books(scores: Sequence[SpanScore], settings: PerplexitySettings) -> Iterator[Result]:
    """Sums of every book over its stretches and all seeds: what the intervals are made of."""
    for name in dict.fromkeys(score.document for score in scores):
        mine = [score for score in scores if score.document == name]
        whole = complete(mine, settings.far)
        near, far = (
            [sum(x) for x in zip(*(s.between(*r) for s in whole), strict=True)] for r in (settings.near, settings.far)
        )
        sums = {kind: sum(sum(getattr(score, kind)) for score in mine) for kind in ("bits", "bytes")}
        yield {"name": name, **sums, "near": near[:2], "far": far[:2]}
