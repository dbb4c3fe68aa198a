"""Models of results by their names: how a reader knows them, and how plots draw them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from titans_lm.config import MEMORY_BLOCKS
from titans_lm.report.figures import Line
from titans_lm.report.table import Column, bold
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
    return remembers(one["name"] if start is None else start["kind"])


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
