"""The runs of `titans compare`: language models on the same text."""

import dataclasses
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from titans_lm.compare.jobs import Attempt, Result, final_attempts, trial_attempts
from titans_lm.compare.score import score_run
from titans_lm.compare.settings import CompareSettings, contender
from titans_lm.data.contents import files_sum, text_sum
from titans_lm.train.files import JsonLines, write_json
from titans_lm.train.match import MATCHED_BY
from titans_lm.train.options import plain_settings
from titans_lm.train.run import CONTENTS, METRICS, SETTINGS, begun_with
from titans_lm.train.settings import LanguageSettings

HELD_OUT = "held_out_bits_per_byte"


@dataclass(frozen=True)
class TextJob:
    """A language model to train, and the text to score it on, if any."""

    name: str
    settings: LanguageSettings
    test: Path | None = None
    positions: int = 0
    test_bytes: int = 0

    @property
    def folder(self) -> Path:
        assert self.settings.run is not None
        return self.settings.run

    @property
    def rate(self) -> float:
        return self.settings.lr

    @property
    def counts(self) -> bool:
        return self.test is not None

    def asked(self) -> Result:
        """Tell what the result depends on: all but where it is kept, and what its texts hold."""
        return {**self._told(), "contents": self.contents()}

    def _told(self) -> Result:
        """Tell what it was asked for, without what its texts hold."""
        told = plain_settings(self)
        return {**told, "settings": _without_run(told["settings"]), "matched_by": MATCHED_BY}

    def contents(self) -> dict[str, str]:
        """Sum up what the run reads, by path: its texts, and the config of a baseline that is a folder."""
        texts = {str(text) for text in (self.settings.data, self.settings.valid, self.test) if text is not None}
        found = {text: text_sum(text) for text in sorted(texts)}
        baseline = Path(self.settings.baseline or "")
        config = baseline / "config.json" if baseline.is_dir() else baseline
        return {**found, str(config): files_sum(config)} if self.settings.baseline and config.is_file() else found

    def begun(self) -> Result | None:
        """Tell what a run that is not done was begun with; one of an earlier version does not tell what texts held."""
        settings, noted = begun_with(self.folder), self.folder / CONTENTS
        if settings is None:
            return None
        asked = {**self._told(), "settings": _without_run(settings)}
        return {**asked, "contents": json.loads(noted.read_bytes())} if noted.is_file() else asked

    def train(self) -> Result:
        """Train it, from where it stopped if it did, and score it."""
        from titans_lm.train.language import train_language_model

        begun = (self.folder / SETTINGS).is_file()
        if not begun:
            write_json(self.folder / CONTENTS, self.contents())
        result = train_language_model(self.settings, resume=begun)
        kept = {name: value for name, value in result.items() if name not in ("run", "model", "settings")}
        kept["curve"] = learning_curve(self.folder)
        if self.test is not None:
            sizes = {"positions": self.positions, "most_bytes": self.test_bytes, "reset_every": self.settings.seq_len}
            kept |= score_run(self.folder, self.test, device=self.settings.device, **sizes)
        return kept

    def told(self, result: Result) -> str:
        """Phrase what came out."""
        bits = result.get("test", {}).get("bits_per_byte")
        tested = "" if bits is None else f", {bits:.4f} on the test"
        return (
            f"{result['held_out_bits_per_byte']:.4f} bits per byte held out{tested}; "
            f"{result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"
        )


def learning_curve(run: Path) -> list[Result]:
    """Read what a run's evaluations found, and after how many seconds of training."""
    records = [record for record in JsonLines(run / METRICS).read() if HELD_OUT in record]
    return [{name: record[name] for name in ("step", "seconds", HELD_OUT)} for record in records]


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


def _without_run(settings: Result) -> Result:
    return {name: value for name, value in settings.items() if name != "run"}


def contender_of(settings: CompareSettings, name: str, parameters: int) -> LanguageSettings:
    """Give the settings of one contender, without seed and learning rate."""
    return contender(dataclasses.replace(settings.train, data=settings.data), name, parameters)


def trials(settings: CompareSettings, parameters: int) -> list[TextJob]:
    """List the runs that choose learning rates; what they are tested on is held out of the training data."""
    return [_job(settings, parameters, attempt) for attempt in trial_attempts(settings)]


def finals(settings: CompareSettings, parameters: int, rates: dict[str, float]) -> list[TextJob]:
    """List the runs that count."""
    return [_job(settings, parameters, attempt) for attempt in final_attempts(settings, rates)]


def _job(settings: CompareSettings, parameters: int, attempt: Attempt) -> TextJob:
    base = contender_of(settings, attempt.name, parameters)
    if attempt.steps is None:
        run = dataclasses.replace(attempt.applied(base), run=attempt.folder)
        return TextJob(attempt.name, run, settings.test, settings.positions, settings.test_bytes)
    # a trial has the same share of a curriculum's first phase
    first = base.reread.first_steps * attempt.steps // base.steps
    plain = dataclasses.replace(base, reread=dataclasses.replace(base.reread, first_steps=0))
    phases = dataclasses.replace(base.reread, first_steps=first)
    return TextJob(attempt.name, dataclasses.replace(attempt.applied(plain), run=attempt.folder, reread=phases))
