"""titans demo, bench, compare, evaluate, repro, forecast, genomics: what memories and models can do, measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from titans_lm.bench.registry import benchmarks
from titans_lm.bench.settings import AllSettings, RenderSettings
from titans_lm.commands.show import Chosen, Configured, lines_of, one_of, output_of
from titans_lm.demo.settings import DemoSettings
from titans_lm.experiments.reading_settings import GapSettings, PerplexitySettings, QuestionSettings, RereadSettings
from titans_lm.experiments.settings import TASK_EXPERIMENTS, CompareSettings
from titans_lm.forecast.settings import EvaluateForecasters, PredictSettings, TrainForecaster
from titans_lm.genomics import settings as dna
from titans_lm.train.options import as_settings, written_command

BENCHMARKS = {name: one.settings for name, one in benchmarks().items()}
EVALUATIONS = {
    "perplexity": PerplexitySettings, "reread": RereadSettings, **TASK_EXPERIMENTS, "gap": GapSettings,
    "lm-eval": QuestionSettings,
}  # fmt: skip
"""Every evaluation by its word behind `titans evaluate`."""
Measured: Any = one_of({**BENCHMARKS, "all": AllSettings, "render": RenderSettings})
Evaluated: Any = one_of(EVALUATIONS)


@dataclass(frozen=True, kw_only=True)
class Demo(Configured, DemoSettings):
    """Hide facts in a long text, read it once with what ships, ask its memory files, and write a report."""


@dataclass(frozen=True, kw_only=True)
class Bench(Chosen):
    """Measure time and memory of the op and of models, beside peers and beside the machine's own limit."""

    what: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Measured]] = tyro.MISSING


@dataclass(frozen=True, kw_only=True)
class Compare(Configured, CompareSettings):
    """Train models of equal size on the same tokens, from several seeds, and say which predicts a test text best.

    Begin with `titans compare data/books --test book.txt`; stopped, the same command goes on.
    """

    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None


@dataclass(frozen=True, kw_only=True)
class Evaluate(Chosen):
    """Measure what models can do: books by position, passages read twice, recall, needles, lm-eval's tasks."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Evaluated], tyro.conf.arg(name="")] = tyro.MISSING


@dataclass(frozen=True, kw_only=True)
class Repro(Configured):
    """Run a table or figure of the paper at a scale that fits, with the paper's numbers beside ours.

    Begin with `titans repro table5 --scale tiny --dry-run`; without a table, those that there are are listed. Stopped,
    the same command goes on.
    """

    table: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TABLE]")] = None
    """table1 to table5, or figure6 to figure9."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: two CPU cores. small: one GPU. paper: commands with their parameters and tokens are printed."""
    data: str | None = None
    """What to train on, as titans train takes it; the Python library's source if not set. For paper, tokens. For table3
    and table4 the folder of their data sets, which are not fetched."""
    test: Path | None = None
    """Text that decides, or that facts are hidden in to decide; not in the data. A file of torch if not set."""
    local: Path | None = None
    """Folder of questions (titans evaluate lm-eval --local) that the models of table 1 are asked."""
    out: Path | None = None
    """Folder of all runs and of repro.json; by default runs/repro/TABLE-SCALE."""
    dry_run: bool = False
    """Show the commands with their parameters and tokens, and run none."""


def run_demo(command: Demo) -> None:
    from titans_lm.demo.run import run_demo

    command.write(run_demo(as_settings(DemoSettings, command), quiet=command.quiet))


def run_bench(command: Bench) -> None:
    settings, output = command.what, output_of(command.what)
    if isinstance(settings, RenderSettings):
        from titans_lm.report.page import render_results

        written = [str(path) for path in render_results(settings.results, settings.docs)]
        output.say("\n".join(written))
        output.write({"files": written})
    else:
        from titans_lm.bench.run import run_bench

        output.write(run_bench(settings, output.say))


def run_compare(command: Compare) -> None:
    from titans_lm.experiments.text import FILE, run_compare
    from titans_lm.report.section import title
    from titans_lm.report.table import written

    settings = as_settings(CompareSettings, command)
    result = run_compare(settings, command.say)
    command.write(result)
    for one in sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"]):
        command.say(f"{title(one['name'])}: {written(one['test_bits_per_byte'], '.4f')} bits per byte of the test text")
    command.say(f"numbers in {settings.out / FILE}")


def command_line(settings: Any) -> str:
    """Write the command of an evaluation."""
    word = next(name for name, kind in EVALUATIONS.items() if type(settings) is kind)
    if word in TASK_EXPERIMENTS:
        return written_command("evaluate", word, settings=settings)
    unsaid = {"models": (), **({"samples": None} if word == "lm-eval" else {})}
    return written_command("evaluate", word, *settings.models, settings=settings, **unsaid)


def run_evaluate(command: Evaluate) -> None:
    from titans_lm.report.table import screen

    settings, output = command.what, output_of(command.what)
    command_words, lines = command_line(settings), []
    match settings:
        case PerplexitySettings():
            from titans_lm.experiments.books import FILE, run_perplexity
            from titans_lm.report.books import tables

            result, written = run_perplexity(settings, command_words, output.say), settings.out / FILE
        case RereadSettings():
            from titans_lm.experiments.reread import FILE, run_reread
            from titans_lm.report.reread import tables

            result, written = run_reread(settings, command_words, output.say), settings.out / FILE
        case GapSettings():
            from titans_lm.experiments.gap import FILE, run_gap
            from titans_lm.report.gap import tables

            result, written = run_gap(settings, command_words, output.say), settings.out / FILE
        case QuestionSettings():
            from titans_lm.experiments.lm_eval import run_questions
            from titans_lm.report.lm_eval import tables

            result, written = run_questions(settings, command_words, output.say), settings.json
        case _:
            from titans_lm.experiments.tasks import FILE, run_task
            from titans_lm.report.tasks import guessed, tables

            result, written = run_task(settings, command_words, output.say), settings.out / FILE
            lines = [guessed(result)]
    if not isinstance(settings, QuestionSettings):
        output.write(result)
    output.say("\n".join([*screen(tables(result)), *lines]))
    if written is not None:
        output.say(f"numbers in {written}")


def run_repro(command: Repro) -> None:
    from titans_lm.repro.plans import list_tables, make_plan

    if command.table is None:
        command.say("\n".join(["titans repro TABLE --scale tiny|small|paper, where TABLE is one of", *list_tables()]))
        return

    from titans_lm.repro.run import FILE, run_plan
    from titans_lm.repro.show import plain_plan, plan_lines, result_lines

    plan = make_plan(
        command.table, command.scale, out=command.out, data=command.data, test=command.test, questions=command.local
    )
    if command.dry_run or not plan.runs:
        if command.json is not None:  # parameters are counted on models, which takes seconds
            command.write(plain_plan(plan))
        if not command.quiet:
            command.say("\n".join(plan_lines(plan)))
        return
    result = run_plan(plan, command.say, quiet=command.quiet)
    command.write(result)
    command.say("\n".join(["", *result_lines(result), "", f"numbers in {plan.out / FILE}"]))


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
    from titans_lm.forecast import evaluate, predict

    settings, output = command.what, output_of(command.what)
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


def genomics_command(settings: dna.EvaluateSettings) -> str:
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

            result = run_evaluation(settings, genomics_command(settings), output.say)
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
