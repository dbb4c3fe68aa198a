"""The pages of results, one for each topic: made of the JSON that the commands wrote, and of nothing else."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from titans_lm.report import books, forecast, gap, genomics, lm_eval, paper, reread, speed, tasks, text
from titans_lm.report.plots import Drawn
from titans_lm.report.section import FORMAT, Result, Section, is_earlier, status, without_folders
from titans_lm.train.files import read_json, write_atomically

SECTIONS: dict[str, Section] = {
    **speed.SECTIONS,
    "compare": text.SECTION,
    "perplexity": books.SECTION,
    "lm-eval": lm_eval.SECTION,
    "task": tasks.SECTION,
    "reread": reread.SECTION,
    "gap": gap.SECTION,
    "forecast": forecast.SECTION,
    "genomics": genomics.SECTION,
    "repro": paper.SECTION,
}
"""Every kind of result by what its files say that they are, in the order of the pages."""
TOPICS = {
    "speed": ("Speed and memory", "throughput, peak memory and time per token, beside peers"),
    "language": ("Language models", "bits per byte on books at equal size, by position, state carried and reset"),
    "recall": ("Recall and state tracking", "accuracy by pairs and length, and what each setting changes"),
    "long-context": ("Long contexts", "needles and facts in books, up to a million tokens; passages read again"),
    "forecast": ("Forecasts of time series", "MSE and MAE by table and horizon"),
    "dna": ("Classification of DNA", "accuracy by cross-validation, with paired tests"),
    "reproduction": ("The paper's tables, repeated", "our numbers over the paper's, at a scale that fits"),
    "earlier": ("Measured at earlier defaults", "comparisons and tasks of before D43 or D56"),
}
"""Titles of the pages, and what each shows."""
MARK = "<!-- Written by `titans bench render` from the JSON files that are named below: edit nothing here. -->"
INTRODUCTION = """Every number was written by a command that stands, with its commit and machine, in small print below
its tables; [findings](findings.md) says what follows, the guides to [benchmarks](guides/bench.md) and
[evaluation](guides/evaluate.md) how each is measured. ± is one standard deviation over seeds, in plots the shade around
a line. Models with a neural memory are bold, in plots solid lines. Bits per byte: lower is better. Comparisons and
tasks of earlier defaults (sizes matched by the width of the MLP alone, [D43](decisions.md)) or of before D56 (memories
that read the residual stream alone) have a page of their own."""
Results = dict[str, list[Result]]


def render_results(results: Path, docs: Path) -> list[Path]:
    """Write the index, a page for each topic into the folder of its name, and the plots; returns what was written.

    ValueError for a folder that is not there, and for a file in it that no command of ours wrote or that lacks parts.
    """
    from titans_lm.report.plots import draw, save_png

    found = read_results(results)
    folder = docs.with_suffix("")
    link = Path(os.path.relpath(results, folder)).as_posix()
    written = pages(found, link, folder.name)
    files = [docs, *(folder / f"{topic}.md" for topic in written if topic)]
    for path, page in zip(files, written.values(), strict=True):
        write_atomically(path, page)
    return [*files, *(save_png(draw(plot), results / f"{name}.png") for name, plot in plots(found).items())]


def read_results(folder: Path) -> Results:
    """Read the files of a folder by kind: float32 on the CPU first, other devices and precisions after it."""
    if not folder.is_dir():
        raise ValueError(f"got --results {folder}, which is no folder; expected one that titans bench wrote to")
    found: Results = {kind: [] for kind in SECTIONS}
    for path in sorted(folder.glob("*.json"), key=lambda path: (len(path.stem), path.stem)):
        result = read_json(path)
        kind = result.get("what") if isinstance(result, dict) else None
        if isinstance(kind, str) and kind not in found and result.get("format") == FORMAT:
            raise ValueError(
                f"got {path}, a result of kind {kind!r}, which no page shows; expected one of {', '.join(found)}: "
                "give it a Section in report/page.py, or move the file elsewhere"
            )
        if not isinstance(kind, str) or kind not in found or result.get("format") != SECTIONS[kind].format:
            raise ValueError(f"got {path}, which is no result of a benchmark; expected format {FORMAT!r} in it")
        found[kind].append({**result, "file": path.name})
        try:  # alone and beside itself
            section, result = SECTIONS[kind], {**found[kind][-1], "others": found[kind][-1:]}
            section.group(result), section.topic(result), section.lines(result, "", section.heading(result))
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"got {path}, a result of kind {kind!r} that lacks a part: {error!r}; expected all that its command "
                "writes: run it again, or move the file elsewhere"
            ) from error
    return found


def sections(found: Results) -> Iterator[tuple[Section, Result]]:
    """Yield the results that make a section each, with the others of their group."""
    for kind, section in SECTIONS.items():
        groups: dict[tuple[bool, str], list[Result]] = {}
        for result in found.get(kind, []):
            groups.setdefault((is_earlier(result), section.group(result)), []).append(result)
        for first, *others in groups.values():
            yield section, {**first, "others": others}


def plots(found: Results) -> dict[str, Drawn]:
    drawn: dict[str, Drawn] = {}
    for section, result in sections(found):
        drawn |= section.named_plots(result)
    return drawn


def pages(found: Results, link: str, folder: str = "results") -> dict[str, str]:
    """Lay out the index (by an empty name) and the page of each topic; `link` leads from these to the JSON files.

    A heading that several results of one page would have names the file; of a machine's paths the last two names stay.
    """
    shown: dict[str, list[tuple[Section, Result]]] = {topic: [] for topic in TOPICS}
    for section, result in sections(found):
        shown["earlier" if is_earlier(result) else section.topic(result)].append((section, result))
    often = Counter((topic, section.heading(result)) for topic, every in shown.items() for section, result in every)
    index = [MARK, "", "# Results", "", INTRODUCTION, "", "| topic | what it shows | status of its first result |",
             "| --- | --- | --- |"]  # fmt: skip
    written = {"": ""}
    for topic, every in shown.items():
        if not every:
            continue
        title, shows = TOPICS[topic]
        index.append(f"| [{title}]({folder}/{topic}.md) | {shows} | {status(every[0][1])} |")
        parts = [MARK, "", f"# {title}"]
        for section, result in every:
            heading = section.heading(result)
            apart = f" ({Path(result['file']).stem})" if often[topic, heading] > 1 else ""
            parts += ["", *section.lines(result, link, f"{heading}{apart}")]
        written[topic] = without_folders("\n".join(parts) + "\n")
    if not any(shown.values()):
        index.append("| nothing is measured yet | | `titans bench all` |")
    written[""] = without_folders("\n".join(index) + "\n")
    return written
