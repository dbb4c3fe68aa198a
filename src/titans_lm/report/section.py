"""How kinds of results, and models by their names, stand on the pages of results, in plots and on a terminal."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_lm.config import MEMORY_ALONE, MEMORY_BLOCKS
from titans_lm.report.plots import Drawn, HeatMaps, Line
from titans_lm.report.table import Column, Table, bold, markdown
from titans_lm.train.settings import RULES

COLOURS = ("#3451c6", "#0f9d8a", "#8a4fd3", "#c2417c", "#e07a1f", "#9a6a00", "#5b6472", "#2f7d32", "#b3261e", "#00788a")
TITLES = {
    "lmm": "LMM", "mac": "MAC", "mag": "MAG", "mal": "MAL", "tnt": "TNT", "hybrid": "hybrid",
    "attention": "Transformer++ with short convolution (ours, no memory)",
    "sliding": "sliding window with short convolution (ours, no memory)",
    "segment": "segments with short convolution (ours, no memory)",
    "llama": "Transformer++ (Llama)", "mistral": "sliding window (Mistral)", "mamba": "Mamba", "mamba2": "Mamba2",
    "qwen3-next": "Gated DeltaNet + attention (Qwen3-Next)",
    "delta-net": "DeltaNet (its rule by our op, in our block and from our start)",
    "gated-delta-net": "Gated DeltaNet (its rule by our op, in our block and from our start)",
}  # fmt: skip

UNSAID = " (ours, no memory)"
"""What titles leave out where there is little room."""
DELTA = "chunk_size=1,momentum=false,forget_to=zero,theta_bound=0.5"
TTT = "momentum=false,decay=false,memory_norm=true,memory_residual=true"
FAMILY = {DELTA: "the op as Gated DeltaNet", f"{DELTA},decay=false": "the op as DeltaNet", TTT: "the op as TTT"}
"""Settings that make another model's update of the op (docs/family.md), as results have them from before
DeltaNet and Gated DeltaNet were contenders by name; its gradient was taken at the memory before it forgot.
2 θ is DeltaNet's β."""
SIGMOIDS = (",theta_stretch=0", ",alpha_stretch=0")
"""What results say of θ and α where they are sigmoids; those from before D33, where they always were, do not."""


def title(name: str, names: Mapping[str, str] = TITLES) -> str:
    """Name a contender for a reader, a varied one by what was varied."""
    base, changes = parts(name, names)
    return ", ".join(filter(None, [names.get(base, base), changes]))


def title_of(one: Mapping[str, Any]) -> str:
    """Name a contender of a result for a reader, a trained one by its own name and what it is."""
    start = one.get("start")
    return title(one["name"]) if start is None else f"{start['name']}, trained {title(start['kind'])}"


def has_memory(one: Mapping[str, Any]) -> bool:
    start = one.get("start")
    return remembers(one.get("kind", one["name"]) if start is None else start["kind"])


def parts(name: str, names: Mapping[str, str] = TITLES) -> tuple[str, str]:
    """Part the name of a contender into what it is and what is varied: a switch by its name, or with a "no"."""
    base, colon, changes = name.partition(":")
    if not colon or base not in names:
        return name, ""
    plain = changes
    for sigmoid in SIGMOIDS:
        plain = plain.replace(sigmoid, "")
    changes = re.sub(r"(\w+)=true", r"\1", re.sub(r"(\w+)=false", r"no \1", changes))
    return base, FAMILY.get(plain) or changes.replace(",", ", ").replace("=", " ").replace("_", " ")


def remembers(name: str, kinds: tuple[str, ...] = MEMORY_BLOCKS) -> bool:
    """Tell whether one of a contender's blocks has a memory, or is of some kinds with one, by its name."""
    base, _, changes = name.partition(":")
    listed = re.search(r"layer_types=\[([^\]]*)\]", changes)
    if listed is not None:
        return any(block in listed[1] for block in kinds)
    return base in (*kinds, "hybrid", *RULES)


MODEL = Column("model", lambda one: bold(title_of(one), has_memory(one)))
PARAMETERS = Column("parameters", lambda one: f"{one['parameters']:,}")


def state_bytes(one: Mapping[str, Any]) -> str:
    """Write the bytes of a state, in brackets those of the memories' weights; of none a dash."""
    state = one["state_bytes"]
    if state["total"] is None:
        return "–"
    return f"{state['total']:,}" + ("" if state["memory"] is None else f" ({state['memory']:,})")


def short_title(one: Mapping[str, Any]) -> str:
    return title_of(one).replace(UNSAID, "")


def contender_lines(
    contenders: list[dict[str, Any]],
    values: Callable[[dict[str, Any]], list[dict[str, Any]]],
    label: Callable[[dict[str, Any]], str] = short_title,
) -> list[Line]:
    """Give every contender a line through its means, with their spread; those without a memory are dashed."""
    return [
        Line(
            label=label(one),
            x=range(len(places)),
            y=[place["mean"] for place in places],
            spread=None if None in (sds := [place["sd"] for place in places]) else sds,
            colour=COLOURS[index % len(COLOURS)],
            dashed=not has_memory(one),
            marker=True,
        )
        for index, (one, places) in enumerate((one, values(one)) for one in contenders)
    ]


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
