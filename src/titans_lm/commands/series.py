"""titans forecast, genomics: numbers over time, and DNA."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from titans_lm.commands.show import Chosen, lines_of, one_of, output_of
from titans_lm.forecast.settings import EvaluateForecasters, PredictSettings, TrainForecaster
from titans_lm.genomics import settings as dna
from titans_lm.train.options import written_command

Forecasting: Any = one_of({"train": TrainForecaster, "evaluate": EvaluateForecasters, "predict": PredictSettings})
Classifying: Any = one_of(
    {"train": dna.TrainSettings, "evaluate": dna.EvaluateSettings, "predict": dna.PredictSettings,
     "pretrain": dna.PretrainSettings}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Forecast(Chosen):
    """Forecast time series: fit models to CSV files, compare their errors, and write forecasts with a plot."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Forecasting], tyro.conf.arg(name="")] = tyro.MISSING


@dataclass(frozen=True, kw_only=True)
class Genomics(Chosen):
    """Classify DNA: train, compare by cross-validation, predict, and pre-train on sequences without classes."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Classifying], tyro.conf.arg(name="")] = tyro.MISSING


def run_forecast(command: Forecast) -> None:
    from titans_lm.forecast import evaluate, predict, table

    settings, output = command.what, output_of(command.what)
    table.check_pandas()
    if isinstance(settings, TrainForecaster):
        result = evaluate.train_forecaster(settings, output.say)
        lines = [f"model in {result['model']}; go on with: titans forecast predict {settings.out} {settings.data}"]
    elif isinstance(settings, EvaluateForecasters):
        result = evaluate.evaluate_forecasters(settings, output.say)
        lines = [*evaluate.lines(result), f"numbers in {settings.out / evaluate.FILE}"]
    else:
        result = predict.predict(settings)
        lines = lines_of(result)
    output.write(result)
    output.say("\n".join(lines))


def command_line(settings: dna.EvaluateSettings) -> str:
    """Write the command that the settings came from."""
    return written_command("genomics", "evaluate", str(settings.data), settings=settings, data=None)


def run_genomics(command: Genomics) -> None:
    from titans_lm.train.progress import Outlook, ProgressReport

    settings, output = command.what, output_of(command.what)
    shown = ProgressReport(quiet=settings.quiet, outlook=Outlook("--steps N"))
    match settings:
        case dna.TrainSettings():
            from titans_lm.genomics.fit import train_on_file

            result = train_on_file(settings, progress=shown)
            right = 100 * result["validation"]["accuracy"]
            told = f"{right:.1f} % of the part held out are right; model in {result['model']}"
        case dna.PretrainSettings():
            from titans_lm.genomics.fit import pretrain_on_file

            result = pretrain_on_file(settings, progress=shown)
            bits = result["held_out_bits_per_nucleotide"]
            told = f"{bits:.4f} bits per nucleotide held out; model in {result['model']}"
        case dna.EvaluateSettings():
            from titans_lm.genomics.evaluate import FILE, run_evaluation
            from titans_lm.report.genomics import tables
            from titans_lm.report.table import screen

            result = run_evaluation(settings, command_line(settings), output.say)
            output.say("\n".join(screen(tables(result))))
            told = f"numbers and plots in {settings.out}, first of all {settings.out / FILE}"
        case _:
            from titans_lm.genomics.predict import predict

            result = predict(settings)
            counts = ", ".join(f"{name} {many:,}" for name, many in result["predicted"].items())
            right = f"; {100 * result['accuracy']:.1f} % are right" if "accuracy" in result else ""
            told = f"{result['sequences']:,} sequences: {counts}{right}; classes in {result['out']}"
    output.write(result)
    output.say(told)
