"""Passages read twice, for the page of results: what the first reading saves at the second, by distance."""

import math
from typing import Any

from titans_lm.bench.compared import COLOURS, UNSAID, title
from titans_lm.report.plots import Line, Panels, Plot
from titans_lm.report.spread import written
from titans_lm.report.table import aligned

Result = dict[str, Any]


def heading(result: Result) -> str:
    """Say what was read."""
    return "What a model remembers of a passage that it has read once"


def rows(result: Result) -> tuple[str, list[str], list[list[str]]]:
    """Say what was read and how, and give the head and the rows of a table: passages of one length after another."""
    distances = result["settings"]["distances"]
    body = []
    for place, length in enumerate(result["settings"]["lengths"]):
        for model in result["models"]:
            mine = model["lengths"][place]
            by_distance = {one["distance"]: one for one in mine["distances"]}
            gains = [written(by_distance[d]["gain"], ".3f") if d in by_distance else "–" for d in distances]
            body.append([shown(model), str(length), *sizes(model), *gains, f"{mine['tokens_per_second']:,.0f}"])
    head = ["model", "passage", "seeds", "parameters", "state, bytes", *(f"{d:,}" for d in distances), "tokens/s"]
    return told(result), head, body


def told(result: Result) -> str:
    """Say in a paragraph what was read, by whom, and what the columns are."""
    settings = result["settings"]
    context = f"the first {settings['context']:,} tokens of its book and then " if settings["context"] else ""
    whole = [title(model["name"]) for model in result["models"] if not model["carries"]]
    left = any(length["left_out"] for model in result["models"] for length in model["lengths"])
    grows = (
        f" {', '.join(whole)}: the state grows with the text, so rows (and this number) are of at most "
        f"{settings['max_len']:,} tokens{', and distances that do not fit are left out (–)' if left else ''}."
        if whole
        else ""
    )
    longest = max(model["state_bytes"]["length"] for model in result["models"])
    minutes = sum(length["seconds"] for model in result["models"] for length in model["lengths"]) / 60.0
    return (
        f"A model reads {context}a passage of {' or '.join(map(str, settings['lengths']))} tokens, then so many tokens "
        "of other books as a column says, then the passage again. Numbers are its **gain** in bits per token: what the "
        "second reading costs where another passage of the same book was read in its place, minus what it costs where "
        "it was read itself. 0 is a passage that is forgotten; higher is better. "
        f"{settings['passages']} passages of each length from {len(result['documents'])} held-out "
        f"book{'s' * (len(result['documents']) > 1)}, mean ± standard deviation over seeds; in the plot the shade "
        "of a single seed is the interval over passages. State is what one row "
        f"carries after {longest:,} tokens, in brackets the weights of the "
        f"memories alone.{grows} Reading took {minutes:.0f} minutes in all."
    )


def shown(model: Result) -> str:
    return f"**{title(model['name'])}**" if model["memory"] else title(model["name"])


def sizes(model: Result) -> list[str]:
    """Write the number of seeds, parameters and bytes of state."""
    state = model["state_bytes"]
    alone = "" if state["memory"] is None else f" ({state['memory']:,})"
    return [str(len(model["runs"])), f"{model['parameters']:,}", f"{state['total']:,}{alone}"]


def more(result: Result) -> tuple[str, list[str], list[list[str]]]:
    """Intervals over passages, and what a passage costs unread."""
    distances = result["settings"]["distances"]
    said = (
        "The gain's 95 % interval over passages like these (bootstrap; seeds are averaged), and bits per token of a "
        f"passage that was not read, at {distances[0]:,} tokens and at the longest distance:"
    )
    body = []
    for place, length in enumerate(result["settings"]["lengths"]):
        for model in result["models"]:
            found = model["lengths"][place]["distances"]
            by_distance = {one["distance"]: one for one in found}
            bounds = [interval(by_distance[d]) if d in by_distance else "–" for d in distances]
            ends = [written(one["unread"], ".3f") for one in (found[:1] + found[-1:])] or ["–", "–"]
            body.append([shown(model), str(length), *bounds, *ends])
    return said, ["model", "passage", *(f"{d:,}" for d in distances), "unread, first", "unread, last"], body


def interval(found: Result) -> str:
    return f"[{found['low']:+.3f}, {found['high']:+.3f}]"


def lines(result: Result) -> list[str]:
    """Write both tables for a terminal."""
    _, head, body = rows(result)
    said, head_more, body_more = more(result)
    return [*aligned(head, body), "", said, *aligned(head_more, body_more)]


def places(distances: list[int]) -> list[float]:
    """Put distances on an axis of their logarithms, and 0 a step to the left of the first."""
    above = [d for d in distances if d]
    step = math.log2(above[1] / above[0]) if len(above) > 1 else 2.0
    return [math.log2(d) if d else math.log2(above[0]) - step if above else 0.0 for d in distances]


def plot(result: Result) -> Panels:
    """Gain by distance, a panel for each length and a line for each model; those without a memory are dashed."""
    settings = result["settings"]
    where = dict(zip(settings["distances"], places(settings["distances"]), strict=True))
    names = labels(result["models"])
    panels = [
        Plot(
            title=f"passage of {length} tokens", x_label="", y_label="", x_labels=[short(d) for d in where],
            x_places=list(where.values()),
            lines=[line(model, names[index], index, place, where) for index, model in enumerate(result["models"])],
        )
        for place, length in enumerate(settings["lengths"])
    ]  # fmt: skip
    return Panels(
        title="What remains of a passage that was read once", x_label="tokens of other books between the two readings",
        y_label="gain at the second reading, bits per token", panels=panels,
    )  # fmt: skip


def labels(models: list[Result]) -> list[str]:
    """Name models where there is little room: without what stands behind their kind, if they differ without it."""
    long = [title(model["name"]).replace(UNSAID, "") for model in models]
    short = [name.partition(" with ")[0] for name in long]
    return short if len(set(short)) == len(short) else long


def line(model: Result, label: str, index: int, place: int, where: dict[int, float]) -> Line:
    """Draw one model: a shade of one standard deviation over seeds, or, of a single one, the interval over passages."""
    found = model["lengths"][place]["distances"]
    gains = [one["gain"] for one in found]
    spread = [gain["sd"] for gain in gains]
    alone = None in spread
    return Line(
        label=label,
        x=[where[one["distance"]] for one in found],
        y=[gain["mean"] for gain in gains],
        spread=None if alone else spread,
        band=([one["low"] for one in found], [one["high"] for one in found]) if alone else None,
        colour=COLOURS[index % len(COLOURS)],
        dashed=not model["memory"],
        marker=True,
    )


def short(distance: int) -> str:
    return f"{distance // 1024}K" if distance and distance % 1024 == 0 else f"{distance:,}"
