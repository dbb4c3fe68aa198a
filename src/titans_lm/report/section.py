"""How a kind of result stands on the pages of results and on a terminal, with its command, machine and commits."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_lm.config import MEMORY_ALONE
from titans_lm.report.figures import Drawn, HeatMaps
from titans_lm.report.models import remembers
from titans_lm.report.table import Table, markdown

Result = dict[str, Any]
FORMAT = "titans-lm bench 1"
"""Format of every result that is written with `hardware`."""
PATH = re.compile(r"(?<![\w.:/)\]])(?:/[\w.-]+){2,}")
"""A path from the root of the machine that a result was made on."""


def without_folders(text: str) -> str:
    """Leave the last two names of every path from the root: the rest is about a machine."""
    return PATH.sub(lambda path: "/".join(path[0].split("/")[2:][-2:]), text)


def linked(result: Result, link: str) -> str:
    return f"[{result['file']}]({link}/{result['file']})"


def commits(result: Result, hardware: Result) -> str:
    """Name the commit that numbers were made at, or all where their runs are of several."""
    names = result.get("commits") or [hardware["commit"]]
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def source(result: Result, link: str) -> list[str]:
    """Say in a line which command wrote the numbers, on which machine, with which versions, and when."""
    h = result["hardware"]
    versions = {**h["versions"], **result.get("peers", {})}
    stack = [f"{n} {versions[n]}" for n in ("torch", "transformers", "titans-pytorch") if n in versions]
    on = ", ".join(h["gpus"]) if result.get("device", "cpu") != "cpu" and h["gpus"] else h["processor"]
    machine = [on, f"{h['cores']} cores"]
    quick = ""
    if "threads" in result:
        machine = [on, f"{result['threads']} threads", result["dtype"], f"{h['memory_bytes'] / 2**30:.0f} GiB"]
        stack.append(h["system"])
        quick = " **Tiny sizes: a test of the machinery, no measurement of speed.**" if result["quick"] else ""
    return [
        f"{linked(result, link)}: `{result['command']}` on {', '.join(machine)}; {', '.join(stack)}; "
        f"{commits(result, h)}, {h['date']}.{quick}"
    ]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A topic, a heading, tables with what is said of each, plots, and where the numbers come from.

    Results of one `group` make a section together: the first of them, with `others` for the rest.
    """

    topic: Callable[[Result], str]
    """The page that it stands on."""
    heading: Callable[[Result], str]
    tables: Callable[[Result], list[Table]]
    plots: Callable[[Result], dict[str, Drawn]] = field(default=lambda _: {})
    """By what follows the name of the result's file in theirs."""
    source: Callable[[Result, str], list[str]] = source
    """Lines of small print: the command of a file, its machine and its commit."""
    group: Callable[[Result], str] = field(default=lambda result: result["file"])
    format: str = FORMAT

    def named_plots(self, result: Result) -> dict[str, Drawn]:
        return {f"{Path(result['file']).stem}{name}": drawn for name, drawn in self.plots(result).items()}

    def lines(self, result: Result, link: str, heading: str) -> list[str]:
        """Lay out a result in Markdown: its plots and tables first, then the setup, the commands in small print."""
        parts = [f"## {heading}", "", f"Status: {status(result)}."]
        for name, drawn in self.named_plots(result).items():
            parts += ["", f"![{described(drawn)}]({link}/{name}.png)"]
        for table in self.tables(result):
            parts += ["", f"### {table.title}"] if table.title else []
            parts += ["", *markdown(table)] if table.rows else []
            parts += ["", table.said] if table.said else []
        sources = [line for one in (result, *result.get("others", [])) for line in self.source(one, link)]
        return [*parts, *(line for one in sources for line in ("", f"<small>{one}</small>"))]


def is_earlier(result: Result) -> bool:
    """Whether a result is of before D43 or, where memories alone mix a block's tokens, of before D56."""
    if result.get("parameters_asked_for") is None:
        return False
    contenders = result.get("contenders", [])
    if not all("shape" in one for one in contenders):
        return True
    told = "memory_reads_embeddings" in result["settings"]["train"]["model"]
    return not told and any(remembers(one["name"], MEMORY_ALONE) for one in contenders)


def status(result: Result) -> str:
    """Say how far numbers can be relied on: one seed is a pilot run, and some are of earlier defaults."""
    settings = result.get("settings", {})
    said = []
    if result.get("parameters_asked_for") is not None:
        said.append("earlier defaults" if is_earlier(result) else "current")
    if len(settings.get("seeds", ())) == 1:
        said.append("pilot run of one seed")
    if "scale" in result:
        said.append(f"scale {result['scale']}")
    dates = [h["date"] for h in (one.get("hardware") for one in (result, *result.get("steps", []))) if h]
    return ", ".join([*said, *(date.partition(" ")[0] for date in sorted(dates)[-1:])])


def each_said(results: list[Result], said: Callable[[Result], str]) -> str:
    """Say of results that share a table how far each can be relied on, and what was equal in it."""
    return "\n\n".join(f"**{Path(one['file']).stem}** ({status(one)}): {said(one)}" for one in results)


def described(drawn: Drawn) -> str:
    if isinstance(drawn, HeatMaps):
        return f"{drawn.title}, by {drawn.x_label} and {drawn.y_label}"
    return f"{drawn.title}: {drawn.y_label} by {drawn.x_label}"
