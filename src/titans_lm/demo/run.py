"""Run the demo from start to end and write what came out: report.html, PNGs, results.json, the trained byte model."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from titans_lm.bench.hardware import processor, usable_cores
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.demo.findings import language_findings, reading_findings, recall_findings
from titans_lm.demo.language import LanguageOutcome, run_language
from titans_lm.demo.reading import Reading, read_and_continue
from titans_lm.demo.recall import RecallOutcome, run_recall
from titans_lm.demo.settings import DemoPlan, DemoSettings, full_plan, quick_plan
from titans_lm.train.checkpoint import save_model
from titans_lm.train.device import environment
from titans_lm.train.files import new_folder, write_atomically, write_json
from titans_lm.train.options import plain_settings
from titans_lm.train.run import MODEL

FORMAT = "titans-lm demo 1"
REPORT, RESULTS = "report.html", "results.json"
PARTS = ("recall", "language", "reading")
AFTER_TRAINING = 35.0
"""Seconds kept for what follows the training: measuring, reading, writing the report."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, and with as many as before afterwards.

    The models are so small that a second thread gains little; where something else runs on the machine it costs up to
    a hundred times as much, because the threads wait for each other thousands of times a step. With one thread the
    numbers do not depend on how many cores there are, either.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Stages:
    """A stopwatch with named laps."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    @property
    def total(self) -> float:
        return time.perf_counter() - self.started


def run_demo(settings: DemoSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Train, measure, read, report, and tell what is found as it is found; returns what results.json holds.

    Raises ValueError for settings or data that will not do, and Interrupted (a KeyboardInterrupt) on Ctrl-C; the folder
    is written at the end, so an interruption leaves what was there before.
    """
    check_folder(settings.out)
    with one_thread():
        return _run(settings, quiet, Console(quiet=quiet))


def _run(settings: DemoSettings, quiet: bool, console: Console) -> dict[str, Any]:
    plan = quick_plan(settings.seed) if settings.quick else full_plan(settings.seed)
    stages = Stages()

    def say(title: str, text: str) -> None:
        console.print(f"\n[bold]{title}[/bold]", highlight=False, end="")
        console.print(f": {text}", markup=False, highlight=False, soft_wrap=not console.is_terminal)

    def tell(lines: list[str]) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)

    say("Associative recall", f"a memory against a sliding window, over a gap of {plan.recall.gap} tokens")
    with stages.lap("associative recall"):
        recall = run_recall(plan.recall, seed=settings.seed, quiet=quiet)
    tell(recall_findings(recall))

    say("Byte models", f"with and without a memory, on {text_name(settings.data)}")
    with stages.lap("byte models"):
        left = 60.0 * settings.minutes - stages.total - AFTER_TRAINING
        language = run_language(plan.language, settings.data, seconds=left, quiet=quiet)
    tell(language_findings(language))

    with stages.lap("reading and writing on"):
        reading = read_and_continue(language.memory.model, language.corpus, plan.reading, seed=settings.seed)
    say("Reading on", f"{len(reading.data):,} bytes of {reading.name}, then the model writes")
    console.print(reading.prompt_tail[-160:], style="dim", end="", markup=False, highlight=False)
    console.print(f"{reading.continuation.text}\n", style="bold", markup=False, highlight=False)
    tell(reading_findings(reading))

    results = write_outcome(settings, plan, recall, language, reading, stages)
    tell(["", *(f"{name}: {settings.out / file}" for name, file in results["files"].items())])
    tell([f"Go on writing with: titans generate {settings.out} --prompt 'def '"])
    return results


def write_outcome(
    settings: DemoSettings,
    plan: DemoPlan,
    recall: RecallOutcome,
    language: LanguageOutcome,
    reading: Reading,
    stages: Stages,
) -> dict[str, Any]:
    """Write the plots, the page, the model and the numbers, each file whole or not at all; results.json comes last."""
    from titans_lm.demo.report import Facts, plots, report_page
    from titans_lm.report.plots import draw, inline_svg, save_png

    shown = plots(recall, language)
    with stages.lap("plots"):
        drawn = {name: draw(plot) for name, plot in shown.items()}
        pictures = {
            name: inline_svg(drawn[name], f"Plot: {plot.title}. {plot.y_label} by {plot.x_label}.", name)
            for name, plot in shown.items()
        }
    plain = {part: plain_settings(getattr(plan, part)) for part in PARTS}
    facts = Facts(
        text_name=text_name(settings.data),
        command=" ".join(["titans demo", *(["--quick"] if settings.quick else [])]),
        date=f"{datetime.now():%Y-%m-%d %H:%M}",
        wall_seconds=stages.total,
        stages=dict(stages.seconds),
        environment={"processor": processor(), "cores": usable_cores(), **environment()},
        settings={**plain_settings(settings), "plan": plain},
    )
    write_atomically(settings.out / REPORT, report_page(recall, language, reading, pictures, facts))
    for name, figure in drawn.items():
        save_png(figure, settings.out / f"{name}.png")
    with new_folder(settings.out / MODEL) as folder:
        save_model(folder, language.memory.model, byte_tokenizer())
    results = {
        "format": FORMAT,
        "date": facts.date,
        "findings": [*recall_findings(recall), *language_findings(language), *reading_findings(reading)],
        **{part: one.as_dict() for part, one in zip(PARTS, (recall, language, reading), strict=True)},
        "wall_seconds": facts.wall_seconds,
        "stages": facts.stages,
        "environment": facts.environment,
        "settings": plain_settings(settings),
        "plan": plain,
        "files": {"report": REPORT, "numbers": RESULTS, "model": MODEL} | {f"plot {n}": f"{n}.png" for n in shown},
    }
    write_json(settings.out / RESULTS, results)
    return results


def check_folder(out: Path) -> None:
    """Fail before minutes of work where the folder cannot be written; an older demo in it is replaced.

    The report is the first file that is written, so a folder that holds one is ours even if it was never finished.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"got --out {out}, which is a file; expected a folder to write the report to")
    found = {entry.name for entry in out.iterdir() if not entry.name.startswith(".")} if out.is_dir() else set()
    if found and not found & {REPORT, RESULTS}:
        raise ValueError(f"got --out {out}, which holds other files; expected a new folder, or that of an earlier demo")
    out.mkdir(parents=True, exist_ok=True)


def text_name(data: str) -> str:
    """Name the text for the middle of a sentence."""
    return "the source of the Python standard library" if data == "stdlib" else data
