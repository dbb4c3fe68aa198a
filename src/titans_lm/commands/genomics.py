"""titans genomics: DNA sequences to classes."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from titans_lm.commands.show import Chosen, say, write_result
from titans_lm.genomics.settings import EvaluateSettings, PredictSettings, PretrainSettings, TrainSettings
from titans_lm.train.options import written_command

Commands = (
    Annotated[TrainSettings, tyro.conf.subcommand("train", default=TrainSettings())]
    | Annotated[EvaluateSettings, tyro.conf.subcommand("evaluate", default=EvaluateSettings())]
    | Annotated[PredictSettings, tyro.conf.subcommand("predict", default=PredictSettings())]
    | Annotated[PretrainSettings, tyro.conf.subcommand("pretrain", default=PretrainSettings())]
)


@dataclass(frozen=True, kw_only=True)
class Genomics(Chosen):
    """Classify DNA: train, compare by cross-validation, predict, and pre-train on sequences without classes."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Commands], tyro.conf.arg(name="")] = tyro.MISSING


def command_line(settings: EvaluateSettings) -> str:
    """Write the command that the settings came from."""
    return written_command("genomics", "evaluate", str(settings.data), settings=settings, data=None)


def run_genomics(command: Genomics) -> None:
    from titans_lm.train.progress import Outlook, ProgressReport

    settings = command.what
    shown = ProgressReport(quiet=settings.quiet, outlook=Outlook("--steps N"))
    tell = (lambda _: None) if settings.quiet else say
    match settings:
        case TrainSettings():
            from titans_lm.genomics.fit import train_on_file

            result = train_on_file(settings, progress=shown)
            right = 100 * result["validation"]["accuracy"]
            told = f"{right:.1f} % of the part held out are right; model in {result['model']}"
        case PretrainSettings():
            from titans_lm.genomics.fit import pretrain_on_file

            result = pretrain_on_file(settings, progress=shown)
            bits = result["held_out_bits_per_nucleotide"]
            told = f"{bits:.4f} bits per nucleotide held out; model in {result['model']}"
        case EvaluateSettings():
            from titans_lm.genomics.evaluate import FILE, run_evaluation
            from titans_lm.report.genomics import tables
            from titans_lm.report.table import screen

            result = run_evaluation(settings, command_line(settings), tell)
            tell("\n".join(screen(tables(result))))
            told = f"numbers and plots in {settings.out}, first of all {settings.out / FILE}"
        case _:
            from titans_lm.genomics.predict import predict

            result = predict(settings)
            counts = ", ".join(f"{name} {many:,}" for name, many in result["predicted"].items())
            right = f"; {100 * result['accuracy']:.1f} % are right" if "accuracy" in result else ""
            told = f"{result['sequences']:,} sequences: {counts}{right}; classes in {result['out']}"
    write_result(settings.json, result)
    tell(told)
