"""Readings of documents by trained models: loaded one after another, read once, kept in files, put together by name.

What an evaluation measures is its own (`books.py`, `reread.py`); that no reading is done twice is here.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from titans_lm.data.prepared import tokenizer_fingerprint
from titans_lm.evaluate.stream import has_neural_memory
from titans_lm.experiments.models import NamedModel, kind_of, read_config, weights_sum
from titans_lm.experiments.reading_settings import ReadingSettings
from titans_lm.experiments.runner import COMMITS, SPEC, WALL, Clock, Result, Say, once, write_record
from titans_lm.train.checkpoint import INCIDENTAL
from titans_lm.train.files import finite, made, read_json, write_json
from titans_lm.train.fresh import size_of
from titans_lm.train.progress import CountReport
from titans_lm.train.run import load_model, load_tokenizer, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

READINGS = "readings"
"""Folder of the readings that are done, a file each."""


class Planned(NamedTuple):
    """A reading that a model is to do."""

    key: Any
    """What tells it from the others of the model: a mode, or a length."""
    name: str
    spec: Result
    """What its numbers depend on beside the weights."""
    tokens: int
    """Tokens that are read in all."""
    measure: Callable[[Callable[[int], None]], Result]
    """Does it, and gives what is kept as JSON; it is called with what is to be told the tokens of every piece."""


@dataclass(frozen=True)
class Reading:
    """A reading that is done, or was before."""

    key: Any
    found: Result
    """What is kept of it."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.found["tokens"] / max(self.found["seconds"], 1e-9)


@dataclass(frozen=True)
class Reader:
    """One model, with all of its readings."""

    named: NamedModel
    about: Result
    """What is said of it in the result."""
    corpus: Any
    readings: list[Reading]


@runtime_checkable
class Evaluation(Protocol):
    """What is to be read, how each model reads it, and what is said of that."""

    def prepare(self, tokenizer: "PreTrainedTokenizerBase") -> Any:
        """Look through the documents with a tokenizer; models with the same one share what this gives."""

    def about(self, model: "PreTrainedModel") -> Result:
        """Say how a model reads, and what of it stands in the result."""

    def plan(self, model: "PreTrainedModel", corpus: Any, mark: str) -> Iterable[Planned]:
        """List the readings of a model; `mark` is the fingerprint of its tokenizer."""

    def describe(self, reading: Reading) -> str:
        """Phrase a reading and what it came to; nothing where it came to nothing."""

    def summarize(self, seeds: Sequence[Reader]) -> Result:
        """Put the seeds of a model together."""


def run_reading(
    evaluation: Evaluation, settings: ReadingSettings, file: str, command: str, say: Say, **found: Any
) -> Result:
    """Let all models read, and write what that came to into `file`, which is named by the kind of evaluation.

    Models of one name are seeds of one model. A reading that is done is kept in a file, whose name depends on all that
    its numbers depend on. ValueError for models that will not do.
    """
    named = settings.named()
    check_seeds(named)
    corpora: dict[str, Any] = {}
    readers: dict[str, list[Reader]] = {}
    with made(settings.out):
        for one in named:
            readers.setdefault(one.name, []).append(_read_with(one, evaluation, settings, corpora, say))
    models = [
        {**seeds[0].about, "runs": [str(reader.named.path) for reader in seeds], **evaluation.summarize(seeds)}
        for seeds in readers.values()
    ]
    done = [reading.found for seeds in readers.values() for reader in seeds for reading in reader.readings]
    parts = [{WALL: one["seconds"], COMMITS: one[COMMITS]} for one in done]
    return write_record(
        settings.out / file, Path(file).stem, command, settings, parts, seed=settings.seed, **found, models=models
    )


def check_seeds(named: Sequence[NamedModel]) -> None:
    """Refuse models of one name that are no seeds of one model, before anything is read."""
    known: dict[str, tuple[Path, Any]] = {}
    for name, path in named:
        config = read_config(resolve_model(path))
        sizes = {key: value for key, value in config.items() if key not in INCIDENTAL}
        found = sizes, tokenizer_fingerprint(load_tokenizer(path))
        first, expected = known.setdefault(name, (path, found))
        if expected != found:
            raise ValueError(
                f"got {first} and {path}, both named {name!r}, with other settings or tokenizers; "
                "expected seeds of one model under one name"
            )


def _read_with(
    named: NamedModel, evaluation: Evaluation, settings: ReadingSettings, corpora: dict[str, Any], say: Say
) -> Reader:
    tokenizer, folder = load_tokenizer(named.path), resolve_model(named.path)
    mark = tokenizer_fingerprint(tokenizer)
    if mark not in corpora:
        say(f"reading through the documents with the tokenizer of {named.name}")
        corpora[mark] = evaluation.prepare(tokenizer)
    model, weights, readings = load_model(named.path, settings.device), weights_sum(folder), []
    for planned in evaluation.plan(model, corpora[mark], mark):
        reading = _read_once(planned, named, weights, settings)
        readings.append(reading)
        if told := evaluation.describe(reading):
            say(f"{named.name} ({named.path}), {told}, {reading.rate:,.0f} tokens/s")
    about = {
        "name": named.name,
        "kind": kind_of(folder),
        "memory": has_neural_memory(model),
        "parameters": size_of(model),
        **evaluation.about(model),
    }
    return Reader(named, about, corpora[mark], readings)


def _read_once(planned: Planned, named: NamedModel, weights: str, settings: ReadingSettings) -> Reading:
    """Take a reading from its file, or do it and keep it."""
    spec = {"weights": weights, **planned.spec}
    plain = re.sub(r"[^\w.-]", "-", f"{named.name}-{planned.name}")
    digest = hashlib.blake2b(json.dumps(spec).encode(), digest_size=8).hexdigest()  # of all that its numbers depend on
    file = settings.out / READINGS / f"{plain}-{digest}.json"
    if not file.is_file():
        clock = Clock()
        with CountReport(quiet=settings.quiet, title=f"{named.name} {planned.name}").start(planned.tokens) as report:
            found = planned.measure(report.read)
        made = clock.read()
        if json.dumps(finite(found)) != json.dumps(found):
            raise ValueError(
                f"got numbers that are not finite from {named.path} in {planned.name}; expected a model that can read "
                "so far: give shorter texts or rows"
            )
        told = {SPEC: spec, "model": str(named.path), "seconds": made[WALL], COMMITS: made[COMMITS]}
        write_json(file, {**told, "tokens": planned.tokens, **found})
    return Reading(planned.key, read_json(file))


def costs(readings: Sequence[Reading]) -> Result:
    """Sum the seconds of one reading by several seeds, and name its commits and speed."""
    return {
        "seconds": sum(reading.found["seconds"] for reading in readings),
        "commits": once(name for reading in readings for name in reading.found["commits"]),
        "tokens_per_second": sum(reading.rate for reading in readings) / len(readings),
    }
