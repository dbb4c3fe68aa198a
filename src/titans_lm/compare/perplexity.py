"""What `titans evaluate perplexity` runs: models that read books, each with its memory on, reset and held still."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from titans_lm.backbone import frozen_memory
from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import Result, Say
from titans_lm.compare.perplexity_settings import Mode, PerplexitySettings
from titans_lm.compare.settings import NamedModel
from titans_lm.compare.spent import once, spent_on
from titans_lm.compare.trained import check_seeds, kind_of, reading_file, weights_sum
from titans_lm.data.prepared import tokenizer_fingerprint
from titans_lm.evaluate.carried import choose_reading, remembers
from titans_lm.evaluate.intervals import Estimate, complete, did_change, difference, far_minus_near
from titans_lm.evaluate.positions import PositionBits, StretchScore, by_position, overall, score_stretches
from titans_lm.evaluate.texts import Book, Encoder, books, stretches
from titans_lm.report.spread import mean_with_spread
from titans_lm.train.device import commit
from titans_lm.train.files import write_json
from titans_lm.train.log import TokenReport
from titans_lm.train.run import UNKNOWN, load_model, load_tokenizer, resolve_model
from titans_lm.train.settings import plain_settings, written_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "perplexity.json"


@dataclass(frozen=True)
class Survey:
    """What a tokenizer makes of the books: documents with their tokens and bytes, and a sum over all of it."""

    documents: tuple[Result, ...]
    tokens: int
    sum: str


@dataclass(frozen=True)
class Read:
    """A reading of one model: what it depends on, and what every stretch cost."""

    mode: Mode
    constant: bool
    seconds: float
    commits: list[str]
    """Commits of the sources when it began and when it ended; one where they are the same."""
    scores: list[StretchScore]

    @property
    def tokens(self) -> int:
        return sum(sum(score.tokens) for score in self.scores)


@dataclass(frozen=True)
class Run:
    """One model, with all of its readings."""

    named: NamedModel
    kind: str
    memory: bool
    carries: bool
    parameters: int
    survey: Survey
    reads: list[Read]


def run_perplexity(settings: PerplexitySettings, command: str, say: Say) -> Result:
    """Measure all models and write OUT/perplexity.json; stopped, the same call goes on.

    A reading (a model with one memory mode) that is done is kept in a file, whose name depends on all that its numbers
    depend on: weights, tokenizer, text, mode. Raises ValueError for models and texts that will not do.
    """
    named, found = settings.named(), books(settings.text)
    check_seeds(named)
    settings.out.mkdir(parents=True, exist_ok=True)
    surveys: dict[str, Survey] = {}
    runs = [_run(model, found, settings, surveys, say) for model in named]
    names = list(dict.fromkeys(model.name for model in named))
    result = {
        "format": FORMAT,
        "what": "perplexity",
        "command": command,
        "hardware": hardware(),
        "settings": plain_settings(settings),
        "seed": settings.seed,
        **spent_on({"seconds": read.seconds, "commits": read.commits} for run in runs for read in run.reads),
        "models": [_model([run for run in runs if run.named.name == name], settings) for name in names],
    }
    write_json(settings.out / FILE, result)
    return result


def _run(
    named: NamedModel, found: list[Book], settings: PerplexitySettings, surveys: dict[str, Survey], say: Say
) -> Run:
    """Let a model read in every mode, but for what has been read before."""
    tokenizer = load_tokenizer(named.path)
    encoder, mark = Encoder(tokenizer), tokenizer_fingerprint(tokenizer)
    if mark not in surveys:
        say(f"reading through {len(found)} books with the tokenizer of {named.name}")
        surveys[mark] = _survey(found, encoder, settings)
    survey, model = surveys[mark], load_model(named.path, settings.device)
    sizes = {"piece_len": settings.piece_len, "window": settings.window, "window_step": settings.window_step}
    carries = choose_reading(model, **sizes).constant
    weights = weights_sum(resolve_model(named.path))
    reads = []
    for mode in settings.modes(carries=carries, remembers=remembers(model)):
        asked = {"weights": weights, "tokenizer": mark, "text": survey.sum, **_told(mode, settings)}
        read = _read(model, named, mode, found, encoder, survey, asked, settings)
        score = overall(read.scores)
        say(
            f"{named.name} ({named.path}), {mode.name}: {score.bits_per_byte:.4f} bits per byte of {score.bytes:,} "
            f"bytes, {read.tokens / max(read.seconds, 1e-9):,.0f} tokens/s"
        )
        reads.append(read)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Run(named, kind_of(resolve_model(named.path)), remembers(model), carries, parameters, survey, reads)


def _told(mode: Mode, settings: PerplexitySettings) -> Result:
    """Tell what the numbers of a mode depend on beside the model and the text."""
    windows = {"window_step": settings.window_step} if mode.kind == "windows" else {}
    return {"mode": mode.name, "stretch": settings.stretch, "max_tokens": settings.max_tokens, **windows}


def _read(
    model: "PreTrainedModel",
    named: NamedModel,
    mode: Mode,
    found: list[Book],
    encoder: Encoder,
    survey: Survey,
    asked: Result,
    settings: PerplexitySettings,
) -> Read:
    """Take a reading from its file, or do it and keep it."""
    file = reading_file(settings.out, f"{named.name}-{mode.name}", asked)
    window = mode.every if mode.kind == "reset" and mode.every is not None else settings.window
    step = window if mode.kind == "reset" else settings.window_step
    reading = choose_reading(model, piece_len=settings.piece_len, window=window, window_step=step)
    if file.is_file():
        kept = json.loads(file.read_bytes())
        commits = kept.get("commits", [kept.get("commit", UNKNOWN)])
        return Read(mode, reading.constant, kept["seconds"], commits, [_score(one) for one in kept["stretches"]])
    cut = stretches(found, encoder, **_cut(settings))
    first, began = commit(), time.monotonic()
    still = frozen_memory(model) if mode.kind == "off" else nullcontext()
    with TokenReport(quiet=settings.quiet, title=f"{named.name} {mode.name}").start(survey.tokens) as report, still:
        every = mode.every if mode.kind == "reset" else None
        scores = score_stretches(
            model, cut, reading, reset_every=every, batch_size=settings.batch_size, on_piece=report.read
        )
    # A reading may be older than the results that it ends up in.
    read = Read(mode, reading.constant, time.monotonic() - began, once([first, commit()]), scores)
    told = {"asked": asked, "model": str(named.path), "seconds": read.seconds, "tokens": read.tokens}
    write_json(file, {**told, "commits": read.commits, "stretches": [asdict(score) for score in scores]})
    return read


def _cut(settings: PerplexitySettings) -> dict[str, Any]:
    return {"length": settings.stretch, "max_tokens": settings.max_tokens, "skip_tokens": settings.skip_tokens}


def _score(kept: Result) -> StretchScore:
    rows = {name: tuple(kept[name]) for name in ("tokens", "bytes", "bits")}
    return StretchScore(kept["document"], kept["start"], **rows)


def _survey(found: list[Book], encoder: Encoder, settings: PerplexitySettings) -> Survey:
    """Count what there is to predict, a book after another."""
    digest, documents = hashlib.blake2b(digest_size=16), []
    for book in found:
        tokens = size = 0
        for stretch in stretches([book], encoder, **_cut(settings)):
            digest.update(f"{book.name} {stretch.start} {stretch.begin.tolist()}".encode())
            while len((part := stretch.take(2**16)).ids):
                digest.update(part.ids.tobytes() + part.sizes.tobytes())
                tokens, size = tokens + len(part.ids), size + int(part.sizes.sum())
        documents.append({"name": book.name, "tokens": tokens, "bytes": size, "file_bytes": book.path.stat().st_size})
    return Survey(tuple(documents), sum(one["tokens"] for one in documents), digest.hexdigest())


def _model(runs: Sequence[Run], settings: PerplexitySettings) -> Result:
    """Put the seeds of a model together."""
    first = runs[0]
    together = list(zip(*(run.reads for run in runs), strict=True))
    return {
        "name": first.named.name,
        "kind": first.kind,
        "memory": first.memory,
        "carries": first.carries,
        "parameters": first.parameters,
        "runs": [str(run.named.path) for run in runs],
        "documents": list(first.survey.documents),
        "readings": [_reading(seeds, settings) for seeds in together],
        "differences": [_difference(together[0], seeds, settings) for seeds in together[1:]],
    }


def _reading(seeds: Sequence[Read], settings: PerplexitySettings) -> Result:
    """One mode over all seeds: bits per byte are means over seeds with their spread."""
    first, alone = seeds[0], [overall(read.scores) for read in seeds]
    ranges = list(zip(*(by_position(read.scores) for read in seeds), strict=True))
    rates = [read.tokens / max(read.seconds, 1e-9) for read in seeds]
    scores = [score for read in seeds for score in read.scores]
    far = far_minus_near(scores, settings.near, settings.far, seed=settings.seed)
    by_seed = [far_minus_near(read.scores, settings.near, settings.far, seed=settings.seed) for read in seeds]
    return {
        "mode": first.mode.kind,
        "every": first.mode.every,
        "constant_memory": first.constant,
        "tokens": alone[0].tokens,
        "bytes": alone[0].bytes,
        "stretches": len(first.scores),
        "bits_per_byte": mean_with_spread([one.bits_per_byte for one in alone]),
        "bits_per_token": mean_with_spread([one.bits_per_token for one in alone]),
        "seconds": sum(read.seconds for read in seeds),
        "commits": once(name for read in seeds for name in read.commits),
        "tokens_per_second": sum(rates) / len(rates),
        "by_position": [_position(part) for part in ranges],
        "far_minus_near": _estimate(far, by_seed),
        "books": list(_books(scores, settings)),
    }


def _position(seeds: Sequence[PositionBits]) -> Result:
    first = seeds[0]
    return {
        "start": first.start,
        "stop": first.stop,
        "tokens": first.tokens,
        "bytes": first.bytes,
        "bits_per_byte": mean_with_spread([one.bits_per_byte for one in seeds]),
        "bits_per_token": mean_with_spread([one.bits_per_token for one in seeds]),
    }


def _difference(firsts: Sequence[Read], others: Sequence[Read], settings: PerplexitySettings) -> Result:
    """The first mode against another, of the same tokens: all positions, and how it changes from near to far ones."""
    a, b = ([score for read in reads for score in read.scores] for reads in (firsts, others))
    ranges = settings.near, settings.far
    change = did_change(a, b, *ranges, seed=settings.seed)
    pairs = list(zip(firsts, others, strict=True))
    by_seed = [did_change(x.scores, y.scores, *ranges, seed=settings.seed) for x, y in pairs]
    alone = [difference(x.scores, y.scores, seed=settings.seed) for x, y in pairs]
    return {
        "mode": firsts[0].mode.name,
        "minus": others[0].mode.name,
        "overall": _estimate(difference(a, b, seed=settings.seed), alone),
        "change": _estimate(change, by_seed),
    }


def _estimate(found: Estimate | None, by_seed: Sequence[Estimate | None]) -> Result | None:
    if found is None:
        return None
    return {**asdict(found), "by_seed": [one.value for one in by_seed if one is not None]}


def _books(scores: Sequence[StretchScore], settings: PerplexitySettings) -> Iterator[Result]:
    """Sums of every book over its stretches and all seeds: what the intervals are made of."""
    for name in dict.fromkeys(score.document for score in scores):
        mine = [score for score in scores if score.document == name]
        whole = complete(mine, settings.far)
        near, far = (
            [sum(x) for x in zip(*(s.between(*r) for s in whole), strict=True)] for r in (settings.near, settings.far)
        )
        yield {
            "name": name,
            "bits": sum(sum(score.bits) for score in mine),
            "bytes": sum(sum(score.bytes) for score in mine),
            "near": near[:2],
            "far": far[:2],
        }


def command_line(settings: PerplexitySettings) -> str:
    """Write the command that the settings came from."""
    unsaid = {"models": (), "json": None, "quiet": False}
    return written_command("evaluate", "perplexity", *settings.models, settings=settings, **unsaid)
