"""Run the demo from start to end and write what came out: a page, PNGs, results.json, the text and its memories."""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from shutil import which
from typing import Any

import torch
from rich.console import Console

from titans_lm.demo.recall import RecallOutcome, run_recall
from titans_lm.demo.report import opening_findings, recall_findings, search_findings
from titans_lm.demo.search import MODELS, TEXT, Found, Opening, make_hidden, read_opening, search
from titans_lm.demo.settings import DemoPlan, DemoSettings, full_plan, quick_plan
from titans_lm.train.device import environment, processor, usable_cores
from titans_lm.train.files import write_atomically, write_json
from titans_lm.train.options import plain_settings, written_command

FORMAT = "titans-lm demo 2"
REPORT, RESULTS = "report.html", "results.json"


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


@contextmanager
def lap(stages: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds that a stage takes."""
    started = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - started


@one_thread()
def run_demo(settings: DemoSettings, *, quiet: bool = False) -> dict[str, Any]:
    """Read, ask, train, report, and tell what is found as it is found; returns what results.json holds.

    Raises ValueError for settings, text or facts that will not do, and Interrupted (a KeyboardInterrupt) on Ctrl-C; the
    report is written at the end.
    """
    check_folder(settings.out)
    console = Console(quiet=quiet)
    seed = int(f"{date.today():%Y%m%d}") if settings.seed is None else settings.seed
    plan = quick_plan(seed) if settings.quick else full_plan(seed)
    started, stages = time.perf_counter(), dict[str, float]()

    def tell(lines: list[str]) -> None:
        for line in lines:
            console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=not console.is_terminal)

    with lap(stages, "making the text"):
        hidden = make_hidden(settings, plan.search, seed)
    begin_folder(settings.out)
    tell([f"Hidden in {hidden.ends[-1]:,} tokens, by the seed {seed}: {hidden.facts[0].sentence} …"])
    with lap(stages, "reading and asking"):
        found = search(settings, plan.search, hidden, seed, quiet=quiet)
    tell([*search_findings(found), ""])
    with lap(stages, "a book model"):
        opening = read_opening(settings.out, plan.books, seed, quiet=quiet)
    if opening is not None:
        tell([*opening_findings(opening), f"It goes on: … {opening.written.strip()}", ""])
    tell([f"Learning, from nothing: recall over a gap of {plan.recall.gap} tokens"])
    with lap(stages, "a small training"):
        recall = run_recall(plan.recall, seed=seed, quiet=quiet)
    tell(recall_findings(recall))
    results = write_outcome(settings, plan, found, opening, recall, stages, started)
    shown = {name: file for name, file in results["files"].items() if not name.startswith(("memory", "opening"))}
    tell(["", *(f"{name}: {settings.out / file}" for name, file in shown.items())])
    tell(["Go on with:", *(f"  {command}" for command in results["next"])])
    return results


def next_commands(found: Found, out: Path) -> list[str]:
    """Name three commands that go on from here, as they can be typed where the demo was."""
    program = "titans" if which("titans") else sys.argv[0]
    ask = shlex.join([program, "ask"])
    asked = []
    for reading in found.readings:
        of = next(one for one in reversed(found.asked) if MODELS[one.kind] == reading.model)
        model = "" if reading.model == "facts" else f" --model pretrained:{reading.model}"
        asked.append(f'{ask} "{of.question}" --memory {shlex.quote(str(out / reading.files[-1]))}{model}')
    again = found.asked[-1]
    if again.kind == "place":  # of the text itself, which is read anew
        asked.append(f'{ask} {shlex.quote(str(out / TEXT))} "{again.question}"')
    return [*asked, f"{shlex.quote(program)} serve"]


def write_outcome(
    settings: DemoSettings,
    plan: DemoPlan,
    found: Found,
    opening: Opening | None,
    recall: RecallOutcome,
    stages: dict[str, float],
    started: float,
) -> dict[str, Any]:
    """Write the plots, the page and the numbers, each file whole or not at all; results.json comes last."""
    from titans_lm.demo.report import plots, report_page
    from titans_lm.report.plots import draw, inline_svg, save_png

    shown = plots(found, recall)
    with lap(stages, "plots"):
        drawn = {name: draw(plot) for name, plot in shown.items()}
        pictures = {
            name: inline_svg(drawn[name], f"Plot: {plot.title}. {plot.y_label} by {plot.x_label}.", name)
            for name, plot in shown.items()
        }
    memories = [file for reading in found.readings for file in reading.files]
    results = {
        "format": FORMAT,
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "findings": [
            *search_findings(found),
            *(opening_findings(opening) if opening else []),
            *recall_findings(recall),
        ],
        "search": found.as_dict(),
        "opening": None if opening is None else dataclasses.asdict(opening),
        "recall": recall.as_dict(),
        "next": next_commands(found, settings.out),
        "wall_seconds": time.perf_counter() - started,
        "stages": stages,
        "environment": {"processor": processor(), "cores": usable_cores(), **environment()},
        "settings": plain_settings(settings),
        "plan": plain_settings(plan),
        "files": {"report": REPORT, "numbers": RESULTS, "text": TEXT}
        | {f"memory {file}": file for file in memories}
        | {f"opening {file}": file for file in (opening.files if opening else [])}
        | {f"plot {n}": f"{n}.png" for n in shown},
    }
    command = written_command("demo", settings=dataclasses.replace(settings, seed=found.seed), out=DemoSettings.out)
    write_atomically(settings.out / REPORT, report_page(found, opening, recall, pictures, results, command))
    for name, figure in drawn.items():
        save_png(figure, settings.out / f"{name}.png")
    write_json(settings.out / RESULTS, results)
    return results


def check_folder(out: Path) -> None:
    """Refuse a folder of something else; an older demo in it is replaced."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"got --out {out}, which is a file; expected a folder to write the report to")
    found = {entry.name for entry in out.iterdir() if not entry.name.startswith(".")} if out.is_dir() else set()
    others = RESULTS in found and _format(out / RESULTS) != FORMAT
    if others or (found and not found & {REPORT, RESULTS}):
        raise ValueError(f"got --out {out}, which holds other files; expected a new folder, or that of an earlier demo")


def begin_folder(out: Path) -> None:
    """Fail before minutes of work where the folder cannot be written.

    A page is the first file that is written, so a folder that holds one is ours even if it was never finished.
    """
    if not (out / REPORT).exists():
        write_atomically(out / REPORT, "<!doctype html><title>titans demo</title><p>It has not come to its end.</p>\n")


def _format(results: Path) -> Any:
    """What a file of results says that it is; None for what is none."""
    try:
        return json.loads(results.read_bytes()).get("format")
    except (ValueError, AttributeError):
        return None
