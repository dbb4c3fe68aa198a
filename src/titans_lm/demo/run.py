"""Run the demo from start to end and write what came out: report.html, PNGs, results.json, the trained byte model."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.demo.findings import language_findings, reading_findings, recall_findings
from titans_lm.demo.language import LanguageOutcome, run_language
from titans_lm.demo.reading import Reading, read_and_continue
from titans_lm.demo.recall import RecallOutcome, run_recall
from titans_lm.demo.settings import DemoPlan, DemoSettings, fast_plan, full_plan
from titans_lm.train.checkpoint import save_model
from titans_lm.train.device import environment
from titans_lm.train.files import new_folder, write_atomically, write_json
from titans_lm.train.options import plain_settings
from titans_lm.train.run import MODEL

FORMAT = "titans-lm demo 1"
REPORT, RESULTS = "report.html", "results.json"
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


def run_demo(settings: DemoSettings, *, quiet: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train, measure, read, report. Returns what results.json holds; `console` receives what is found, as it is found.

    Raises ValueError for settings or data that will not do, and Interrupted (a KeyboardInterrupt) on Ctrl-C; the folder
    is written at the end, so an interruption leaves what was there before.
    """
    check_folder(settings.out)
    with one_thread():
        return _run(settings, quiet, console or Console(quiet=quiet))


def _run(settings: DemoSettings, quiet: bool, console: Console) -> dict[str, Any]:
    plan = fast_plan(settings.seed) if settings.fast else full_plan(settings.seed)
    stages = Stages()
    _say(console, "Associative recall", f"a memory against a sliding window, over a gap of {plan.recall.gap} tokens")
    with stages.lap("associative recall"):
        recall = run_recall(plan.recall, seed=settings.seed, quiet=quiet)
    _tell(console, recall_findings(recall))

    _say(console, "Byte models", f"with and without a memory, on {text_name(settings.data)}")
    with stages.lap("byte models"):
        left = 60.0 * settings.minutes - stages.total - AFTER_TRAINING
        language = run_language(plan.language, settings.data, seconds=left, quiet=quiet)
    _tell(console, language_findings(language))

    with stages.lap("reading and writing on"):
        reading = read_and_continue(language.memory.model, language.corpus, plan.reading, seed=settings.seed)
    _say(console, "Reading on", f"{len(reading.data):,} bytes of {reading.name}, then the model writes")
    console.print(reading.prompt_tail[-160:], style="dim", end="", markup=False, highlight=False)
    console.print(reading.continuation.text, style="bold", markup=False, highlight=False)
    console.print()
    _tell(console, reading_findings(reading))

    results = write_outcome(settings, plan, (recall, language, reading), stages)
    console.print()
    _tell(console, [f"{name}: {settings.out / file}" for name, file in results["files"].items()])
    _tell(console, [f"Go on writing with: titans generate {settings.out} --prompt 'def '"])
    return results


def write_outcome(
    settings: DemoSettings, plan: DemoPlan, outcome: tuple[RecallOutcome, LanguageOutcome, Reading], stages: Stages
) -> dict[str, Any]:
    """Write the plots, the page, the model and the numbers, each file whole or not at all; results.json comes last."""
    from titans_lm.demo import figures
    from titans_lm.demo.page import Facts, report_page
    from titans_lm.report.plots import draw, inline_svg, save_png

    recall, language, reading = outcome
    plots = {
        "recall": figures.recall_plot(recall),
        "position": figures.position_plot(language),
        "gain": figures.gain_plot(language),
        "training": figures.training_plot(language),
    }
    with stages.lap("plots"):
        drawn = {name: draw(plot) for name, plot in plots.items()}
        pictures = {
            name: inline_svg(drawn[name], f"Plot: {plot.title}. {plot.y_label} by {plot.x_label}.", name)
            for name, plot in plots.items()
        }
    facts = Facts(
        text_name=text_name(settings.data),
        command=" ".join(["titans demo", *(["--fast"] if settings.fast else [])]),
        date=f"{datetime.now():%Y-%m-%d %H:%M}",
        wall_seconds=stages.total,
        stages=dict(stages.seconds),
        environment={"processor": processor(), "cores": usable_cores(), **environment()},
        settings={**plain_settings(settings), **_plan_settings(plan)},
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
        "recall": recall.as_dict(),
        "language": language.as_dict(),
        "reading": reading.as_dict(),
        "wall_seconds": facts.wall_seconds,
        "stages": facts.stages,
        "environment": facts.environment,
        "settings": plain_settings(settings),
        "plan": {name: plain_settings(getattr(plan, name)) for name in ("recall", "language", "reading")},
        "files": {"report": REPORT, "numbers": RESULTS, "model": MODEL} | {f"plot {n}": f"{n}.png" for n in plots},
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


def processor() -> str:
    """Name the processor as the system knows it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plan_settings(plan: DemoPlan) -> dict[str, Any]:
    """List what the plan sets beside the models, flat, for people."""
    flat = {}
    for part in ("recall", "language", "reading"):
        for name, value in plain_settings(getattr(plan, part)).items():
            if name == "fit":
                flat |= {f"{part}.fit.{key}": setting for key, setting in value.items()}
            elif not isinstance(value, dict):
                flat[f"{part}.{name}"] = value
    return flat


def _say(console: Console, title: str, text: str) -> None:
    console.print()
    console.print(f"[bold]{title}[/bold]", highlight=False, end="")
    console.print(f": {text}", markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _tell(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
