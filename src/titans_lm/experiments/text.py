"""`titans compare`: language models of equal size on the same text, and their bits per byte of a test text by position.

Learning rates are chosen by the held-out part of the training data; the test text is read by runs that count alone.
"""

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from titans_lm.data.contents import files_sum, text_sum
from titans_lm.data.prepared import prepared_from
from titans_lm.data.text import Document, overlap, read_documents
from titans_lm.data.tokenizer import TokenIds, count_ids, encode_document, is_byte_tokenizer
from titans_lm.evaluate.bits_per_byte import buckets, token_bits
from titans_lm.evaluate.documents import first_token
from titans_lm.evaluate.stream import check_positions, has_state
from titans_lm.experiments.models import OURS, kind_of, model_settings
from titans_lm.experiments.runner import CONTENTS, SPEC, Result, Run, Say, kept, run_experiment, runs_of, write_record
from titans_lm.experiments.settings import CompareSettings
from titans_lm.report.table import mean_with_spread
from titans_lm.train.baselines import baseline_names
from titans_lm.train.files import JsonLines, read_json, write_json
from titans_lm.train.fresh import MATCHED_BY, special_ids
from titans_lm.train.language import language_data, train_language_model
from titans_lm.train.options import plain_settings, written_command
from titans_lm.train.progress import Outlook, ProgressReport
from titans_lm.train.run import CONTENTS as CONTENTS_FILE
from titans_lm.train.run import METRICS, SETTINGS, begun_with, load_model, load_tokenizer
from titans_lm.train.settings import LanguageSettings
from titans_lm.train.sized import own_size, sized_model
from titans_lm.train.trainer import Diverged

FILE = "compare.json"
HELD_OUT = "held_out_bits_per_byte"
KEPT = (
    "parameters", "steps", "tokens", "seconds", "tokens_per_second", "skipped_steps", HELD_OUT, "curve", "test",
    "reset",
)  # fmt: skip
TESTED = ("test", "positions", "test_bytes")
"""Settings of the text that decides."""
EDGES = (0, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
PIECE = 512
"""Tokens that a model with a state reads at once."""


def run_compare(settings: CompareSettings, say: Say) -> Result:
    """Compare models and write OUT/compare.json; stopped, the same call goes on.

    All have as many parameters as the first (or as `train.parameters`), read the same batches, and are tried with the
    same learning rates for as many steps (where there are several rates). Raises ValueError for data, a text or a model
    that will not do, before anything is trained.
    """
    if settings.data is None or settings.test is None:
        raise ValueError("got no data or no test; expected titans compare DATA --test TEXT")
    if not settings.test.exists():
        raise ValueError(f"got the test text {str(settings.test)!r}, which does not exist; expected a file or folder")
    valid = settings.train.valid
    sources = [("data", settings.data), ("validation text", valid)]
    sources += [("text of the prepared data", source) for source in prepared_from(settings.data)]
    for what, other in sources:
        if other is not None and overlap(other, settings.test):
            told = f"got the {what} {str(other)!r} and the test text {str(settings.test)!r}, one in the other"
            raise ValueError(f"{told}; expected a text that nobody is trained or tuned on")
    size = check_models(settings, say)
    rates, trials, results = run_experiment(settings, lambda run: text_job(settings, size, run), say, HELD_OUT)
    models = [_summary(name, rates[name], trials[name], results[name]) for name in settings.models]
    quickest = min(models, key=lambda one: mean(run["seconds"] for run in one["runs"]))
    seconds, fastest = max(run["seconds"] for run in quickest["runs"]), quickest["name"]  # when all its runs were done
    for one in models:
        found = [bits_at(run["curve"], seconds) for run in one["runs"]]
        one["at_equal_time"] = None if None in found else mean_with_spread(found)
    equal = {"seconds": seconds, "fastest": fastest}
    return write_record(
        settings.out / FILE, "compare", command_line(settings), settings, runs_of(models),
        parameters_asked_for=size, equal_time=equal, contenders=models,
    )  # fmt: skip


def command_line(settings: CompareSettings) -> str:
    """Write the command that the settings came from, as far as they are not the defaults."""
    return written_command("compare", str(settings.data), settings=settings, data=None)


def language_settings(settings: CompareSettings, name: str, parameters: int) -> LanguageSettings:
    """Give the settings of one model, without seed and learning rate."""
    return model_settings(dataclasses.replace(settings.train, data=settings.data), name, parameters)


def check_models(settings: CompareSettings, say: Say) -> int:
    """Find how many parameters all shall have, and that there is a text and every model can have as many."""
    first = language_settings(settings, settings.models[0], 1)
    tokenizer, parameters = language_data(first).tokenizer, settings.train.parameters
    if parameters is None:
        parameters = own_size(first, count_ids(tokenizer), **special_ids(tokenizer))
    assert settings.test is not None
    read_texts(settings.test, tokenizer, settings.test_bytes)  # fails now, and not after the first run
    for name in settings.models:
        sized = sized_model(language_settings(settings, name, parameters), tokenizer)
        check_positions(sized.model, settings.train.seq_len, "--seq-len {} or fewer")
        check_positions(sized.model, settings.positions, "--positions {} or fewer")
        say(f"{name}: {sized.describe()}")
    return parameters


@dataclass(frozen=True)
class TextJob(Run):
    """A language model to train, and where it counts a text to score it on."""

    settings: LanguageSettings
    test: Path | None = None
    positions: int = 0
    test_bytes: int = 0

    @property
    def work(self) -> int:
        return self.settings.steps

    def spec(self) -> Result:
        return {**self._spec(plain_settings(self.settings)), CONTENTS: self.contents()}

    def _spec(self, settings: Result) -> Result:
        own = {name: settings[name] for name in settings if name != "out"}
        tested = {name: value for name, value in plain_settings(self).items() if name in TESTED}
        return {"name": self.name, "settings": own, **tested, "matched_by": MATCHED_BY}

    def contents(self) -> dict[str, str]:
        """Sum up what the run reads, by path: its texts, and the config of a baseline that is a folder."""
        texts = {str(text) for text in (self.settings.data, self.settings.valid, self.test) if text is not None}
        found = {text: text_sum(text) for text in sorted(texts)}
        baseline = Path(self.settings.baseline or "")
        config = baseline / "config.json" if baseline.is_dir() else baseline
        return {**found, str(config): files_sum(config)} if self.settings.baseline and config.is_file() else found

    def saved_spec(self) -> Result | None:
        settings, noted = begun_with(self.folder), self.folder / CONTENTS_FILE
        if settings is None:
            return None
        return {**self._spec(settings), CONTENTS: read_json(noted) if noted.is_file() else {}}

    def train(self, outlook: Outlook | None = None) -> Result:
        begun = (self.folder / SETTINGS).is_file()
        if not begun:
            write_json(self.folder / CONTENTS_FILE, self.contents())
        progress = ProgressReport(quiet=True, outlook=outlook)
        result = train_language_model(self.settings, resume=begun, progress=progress)
        if not math.isfinite(result[HELD_OUT]):
            raise Diverged(f"{self.name}: its loss on held-out text is {result[HELD_OUT]}; give lower --rates")
        kept = {name: value for name, value in result.items() if name not in ("run", "model", "settings")}
        records = [record for record in JsonLines(self.folder / METRICS) if record.get(HELD_OUT) is not None]
        kept["curve"] = [{name: record[name] for name in ("step", "seconds", HELD_OUT)} for record in records]
        return kept if self.test is None else {**kept, **self._score(self.test)}

    def _score(self, source: Path) -> Result:
        """Score the finished model on the start of a text, one with a state with that state reset as well."""
        model, tokenizer = load_model(self.folder, self.settings.device), load_tokenizer(self.folder)
        (texts, count), every = read_texts(source, tokenizer, self.test_bytes), self.settings.seq_len
        found: Result = {"test": score(model, texts, count, self.positions)}
        if not math.isfinite(found["test"]["bits_per_byte"]):
            raise Diverged(f"{self.name}: its loss on the test text is not finite; give lower --rates or --positions")
        if has_state(model):  # thrown away every so many tokens
            pieces = [piece for text in texts for piece in stretches(text, self.positions)]
            bits = token_bits(model, pieces, reset_every=every, piece_len=PIECE, batch_size=4)
            found["reset"] = {"every": every, "bits_per_byte": _total(bits) / count}
        return found

    def describe(self, result: Result) -> str:
        bits = result.get("test", {}).get("bits_per_byte")
        tested = "" if bits is None else f", {bits:.4f} on the test"
        return (
            f"{result[HELD_OUT]:.4f} bits per byte held out{tested}; "
            f"{result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"
        )


def text_job(settings: CompareSettings, parameters: int, run: Run) -> TextJob:
    """Make the job of a run; a trial has the same share of a curriculum's first phase, and reads no test text."""
    base = language_settings(settings, run.name, parameters)
    if run.steps is None:
        final = dataclasses.replace(run.fit(base), out=run.folder)
        return TextJob(**vars(run), settings=final, **{name: getattr(settings, name) for name in TESTED})
    first = base.reread.first_steps * run.steps // base.steps
    plain = dataclasses.replace(base, reread=dataclasses.replace(base.reread, first_steps=0))
    phases = dataclasses.replace(base.reread, first_steps=first)
    return TextJob(**vars(run), settings=dataclasses.replace(run.fit(plain), out=run.folder, reread=phases))


def bits_at(curve: list[Result], seconds: float) -> float | None:
    """Bits per byte held out after so many seconds, on the straight line between two evaluations.

    Learning curves are convex, so that line is above the curve by a little. None before the first evaluation.
    """
    if not curve or seconds < curve[0]["seconds"]:
        return None
    for one, after in pairwise(curve):
        if seconds < after["seconds"]:
            share = (seconds - one["seconds"]) / (after["seconds"] - one["seconds"])
            return one[HELD_OUT] + share * (after[HELD_OUT] - one[HELD_OUT])
    return curve[-1][HELD_OUT]


def _summary(name: str, rate: float, trials: list[Result], results: list[Result]) -> Result:
    runs = [{"seed": result[SPEC]["settings"]["seed"], **kept(result, *KEPT)} for result in results]
    return {
        "name": name,
        **({"kind": kind_of(Path(name))} if _is_folder(name) else {}),
        "parameters": runs[0]["parameters"],
        "shape": results[0]["shape"],
        "rate": rate,
        "tuning": trials,
        "runs": runs,
        "test_bits_per_byte": mean_with_spread([run["test"]["bits_per_byte"] for run in runs]),
    }


def _is_folder(name: str) -> bool:
    """Whether a model is named by its folder: a name that is known means no folder that happens to lie there."""
    return name.partition(":")[0] not in (*OURS, *baseline_names()) and Path(name).is_dir()


def score(model: Any, texts: list[TokenIds], count: int, positions: int) -> Result:
    """Measure bits per byte of texts of `count` bytes, cut into stretches of `positions` tokens, and by position there.

    Every stretch begins with the token that begins a document, and is read from its start to its end: models with a
    state carry it along, others see all of the stretch at once. Bits per byte by position are bits per token times the
    tokens per byte of the whole text.
    """
    pieces = [piece for text in texts for piece in stretches(text, positions)]
    if has_state(model):
        bits = token_bits(model, pieces, piece_len=PIECE, batch_size=4)
    else:
        bits = token_bits(model, pieces, reset_every=positions, batch_size=1)
    tokens = sum(map(len, bits))
    edges = [edge for edge in EDGES if edge < positions] + [positions]
    found = [{**b, "bits_per_byte": b["bits_per_token"] * tokens / count} for b in buckets(bits, edges)]
    return {"bits_per_byte": _total(bits) / count, "bytes": count, "tokens": tokens, "by_position": found}


def _total(bits: list[np.ndarray]) -> float:
    return float(sum(row.sum() for row in bits))


def read_texts(source: Path, tokenizer: Any, most_bytes: int) -> tuple[list[TokenIds], int]:
    """Encode documents until `most_bytes` are used up, the last up to a character; gives the bytes used as well.

    ValueError where there is nothing to predict, and for bytes that are not UTF-8 with a tokenizer that needs text.
    """
    texts, count = [], 0
    for document in read_documents(source)[0]:
        data = document.data[: _whole(document.data, most_bytes - count)]
        if data:
            texts.append(_encoded(Document(document.name, data), source, tokenizer))
            count += len(data)
    if not texts:
        raise ValueError(f"got the test text {str(source)!r}, which holds nothing to predict; expected text")
    return texts, count


def _encoded(document: Document, source: Path, tokenizer: Any) -> TokenIds:
    if is_byte_tokenizer(tokenizer):
        return encode_document(document.data, eos=False)
    words = tokenizer(document.text(source), add_special_tokens=False).input_ids
    if not words:
        raise ValueError(f"got {document.name!r}, of which the tokenizer keeps nothing; expected at least one token")
    return np.array([first_token(tokenizer), *words], np.int64)


def _whole(data: bytes, most: int) -> int:
    """Where to cut UTF-8 before `most` bytes without tearing a character."""
    if most >= len(data):
        return len(data)
    while most > 0 and data[most] & 0xC0 == 0x80:
        most -= 1
    return max(most, 0)


def stretches(text: TokenIds, positions: int) -> list[np.ndarray]:
    """Cut the tokens of a text into stretches, each after the token that the text began with."""
    begin, ids = text[:1], text[1:]
    return [np.concatenate([begin, ids[start : start + positions]]) for start in range(0, len(ids), positions)]
