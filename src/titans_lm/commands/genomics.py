"""titans genomics: DNA sequences to classes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from titans_lm.commands.show import Output, say, write_result
from titans_lm.genomics.settings import EvaluateSettings, PredictSettings, PretrainSettings, TrainSettings
from titans_lm.train.options import as_settings, written_command


@dataclass(frozen=True, kw_only=True)
class Fitted(Output):
    """What training takes beside its settings."""

    data: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    resume: bool = False
    """Go on with --run where it was stopped, by the same settings."""


@dataclass(frozen=True, kw_only=True)
class TrainClassifier(Fitted, TrainSettings):
    """Train a classifier on sequences with classes: titans genomics train DATA --run runs/dna."""


@dataclass(frozen=True, kw_only=True)
class Pretrain(Fitted, PretrainSettings):
    """Learn to predict the next nucleotide; titans genomics train DATA --pretrained RUN starts from it."""


@dataclass(frozen=True, kw_only=True)
class EvaluateClassifiers(EvaluateSettings):
    """Compare classifiers on a file by cross-validation, with paired tests; stopped, the same command goes on."""

    data: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None


@dataclass(frozen=True, kw_only=True)
class Predict(PredictSettings):
    """Write classes and probabilities: titans genomics predict RUN DATA --out classes.tsv."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    data: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None


Commands = (
    Annotated[TrainClassifier, tyro.conf.subcommand("train", default=TrainClassifier())]
    | Annotated[EvaluateClassifiers, tyro.conf.subcommand("evaluate", default=EvaluateClassifiers())]
    | Annotated[Predict, tyro.conf.subcommand("predict", default=Predict())]
    | Annotated[Pretrain, tyro.conf.subcommand("pretrain", default=Pretrain())]
)


@dataclass(frozen=True, kw_only=True)
class Genomics:
    """Classify DNA: train, compare by cross-validation, predict, and pre-train on sequences without classes."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Commands], tyro.conf.arg(name="")] = tyro.MISSING


def run_genomics(command: Genomics) -> None:
    what = command.what
    tell = (lambda _: None) if what.quiet else say
    if isinstance(what, TrainClassifier | Pretrain):
        train(what, tell)
    elif isinstance(what, EvaluateClassifiers):
        evaluate(what, tell)
    else:
        predict_classes(what, tell)


def train(command: TrainClassifier | Pretrain, tell: Callable[[str], None]) -> None:
    from titans_lm.genomics.fit import pretrain_on_file, train_on_file
    from titans_lm.train.progress import ProgressReport

    how: dict[str, Any] = {"resume": command.resume, "progress": ProgressReport(quiet=command.quiet)}
    if isinstance(command, TrainClassifier):
        result = train_on_file(as_settings(TrainSettings, command), **how)
        found = f"{100 * result['validation']['accuracy']:.1f} % of the part held out are right"
    else:
        result = pretrain_on_file(as_settings(PretrainSettings, command), **how)
        found = f"{result['held_out_bits_per_nucleotide']:.4f} bits per nucleotide held out"
    command.write(result)
    tell(f"{found}; model in {result['model']}")


def command_line(settings: EvaluateSettings) -> str:
    """Write the command that the settings came from."""
    unsaid: dict[str, Any] = {"data": None, "json": None, "quiet": False}
    return written_command("genomics", "evaluate", str(settings.data), settings=settings, **unsaid)


def evaluate(command: EvaluateClassifiers, tell: Callable[[str], None]) -> None:
    from titans_lm.genomics.evaluate import FILE, run_evaluation
    from titans_lm.report.genomics import tables
    from titans_lm.report.table import screen

    settings = as_settings(EvaluateSettings, command)
    result = run_evaluation(settings, command_line(settings), tell)
    write_result(command.json, result)
    tell("\n".join(screen(tables(result))))
    tell(f"numbers and plots in {settings.out}, first of all {settings.out / FILE}")


def predict_classes(command: Predict, tell: Callable[[str], None]) -> None:
    from titans_lm.genomics.predict import predict

    result = predict(as_settings(PredictSettings, command))
    write_result(command.json, result)
    counts = ", ".join(f"{name} {many:,}" for name, many in result["predicted"].items())
    right = f"; {100 * result['accuracy']:.1f} % are right" if "accuracy" in result else ""
    tell(f"{result['sequences']:,} sequences: {counts}{right}; classes in {result['out']}")
