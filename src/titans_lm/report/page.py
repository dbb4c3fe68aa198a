"""The page of results: made of the JSON that the commands wrote, and of nothing else."""

import json
import os
import re
from collections import Counter
from pathlib import Path

from titans_lm.report import books, forecast, genomics, lm_eval, paper, reread, speed, tasks, text
from titans_lm.report.section import Drawn, Section
from titans_lm.report.sources import FORMAT, Result
from titans_lm.train.files import write_atomically

SECTIONS: dict[str, Section] = {
    **speed.SECTIONS,
    "reread": reread.SECTION,
    "compare": text.SECTION,
    "perplexity": books.SECTION,
    "task": tasks.SECTION,
    "forecast": forecast.SECTION,
    "genomics": genomics.SECTION,
    "lm-eval": lm_eval.SECTION,
    "repro": paper.SECTION,
}
"""Every kind of result by what its files say that they are, in the order of the page."""
MARK = "<!-- Written by `titans bench render` from the JSON files that are named below: edit nothing here. -->"
INTRODUCTION = """Every number on this page was written by `titans bench`, `titans compare`, `titans evaluate`,
`titans forecast evaluate`, `titans genomics evaluate` or `titans repro`; the guides to [benchmarks](guides/bench.md)
and [evaluation](guides/evaluate.md) say what each command measures and how, and [findings](findings.md) what follows.
"% of matmul" is the share of the floating point operations per second that a large square matrix product of torch's
reaches in the same process, right before and after; where torch gives it to MKL and our products go to oneDNN, which
is faster on some CPUs, the share of oneDNN's is in brackets. Peak memory is the growth of the process above what it
had after its imports (on a GPU: of the device's memory), "max/min" the slowest run over the fastest. Where sides are
compared they took turns; "× name" is our speed over that side's, the median of the rounds. In plots a shade around a
line is one standard deviation over seeds to either side."""
PATH = re.compile(r"(?<![\w.:/)\]])(?:/[\w.-]+){2,}")
"""A path from the root of the machine that a result was made on."""
Results = dict[str, list[Result]]


def render_results(results: Path, docs: Path) -> list[Path]:
    """Write the page and its plots; returns what was written.

    ValueError for a folder that is not there, and for a file in it that no benchmark wrote.
    """
    from titans_lm.report.plots import draw, save_png

    found = read_results(results)
    written = [save_png(draw(plot), results / f"{name}.png") for name, plot in plots(found).items()]
    write_atomically(docs, page(found, Path(os.path.relpath(results, docs.parent)).as_posix()))
    return [docs, *written]


def read_results(folder: Path) -> Results:
    """Read the files of a folder by kind: float32 on the CPU first, other devices and precisions after it."""
    if not folder.is_dir():
        raise ValueError(f"got --results {folder}, which is no folder; expected one that titans bench wrote to")
    found: Results = {kind: [] for kind in SECTIONS}
    for path in sorted(folder.glob("*.json"), key=lambda path: (len(path.stem), path.stem)):
        try:
            result = json.loads(path.read_bytes())
        except json.JSONDecodeError as error:
            raise ValueError(f"got {path}, which is not JSON: {error}") from error
        kind = result.get("what") if isinstance(result, dict) else None
        if kind not in found or result.get("format") != SECTIONS[kind].format:
            raise ValueError(f"got {path}, which is no result of a benchmark; expected format {FORMAT!r} in it")
        found[kind].append({**result, "file": path.name})
    return found


def grouped(found: Results) -> dict[str, list[Result]]:
    """Give the results that make a section each, by kind."""
    shown = {kind: found.get(kind, []) for kind in SECTIONS}
    return {
        kind: [{**results[0], "others": results[1:]}] if results and SECTIONS[kind].together else results
        for kind, results in shown.items()
    }


def plots(found: Results) -> dict[str, Drawn]:
    """Give what can be drawn, by the name of its file."""
    drawn = {}
    for kind, results in grouped(found).items():
        for result in results:
            drawn |= SECTIONS[kind].named_plots(result)
    return drawn


def page(found: Results, link: str) -> str:
    """Lay out the whole page; `link` leads from it to the folder of the JSON files.

    A heading that several results would have names the file; of paths of a machine the last two names are shown.
    """
    shown = grouped(found)
    often = Counter(SECTIONS[kind].heading(result) for kind, results in shown.items() for result in results)
    parts = [MARK, "", "# Results", "", INTRODUCTION]
    for kind, results in shown.items():
        section = SECTIONS[kind]
        if section.expected and not results:
            parts += ["", f"## {section.heading({})}", "", f"Not measured yet: `titans bench {kind}`."]
        for result in results:
            heading = section.heading(result)
            apart = f" ({Path(result['file']).stem})" if often[heading] > 1 else ""
            parts += ["", *section.lines(result, link, f"{heading}{apart}")]
    return without_folders("\n".join(parts) + "\n")


def without_folders(text: str) -> str:
    """Leave the last two names of every path from the root: the rest is about a machine."""
    return PATH.sub(lambda path: "/".join(path[0].split("/")[2:][-2:]), text)
