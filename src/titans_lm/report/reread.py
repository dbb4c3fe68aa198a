"""Passages read twice, on the page of results: what the first reading saves at the second, by distance."""

import math
from collections.abc import Callable

from titans_lm.report.figures import Line, Panels, Plot
from titans_lm.report.models import COLOURS, UNSAID, state_bytes, title
from titans_lm.report.section import Section
from titans_lm.report.sources import Result
from titans_lm.report.spread import written
from titans_lm.report.table import Column, Table, bold


def heading(result: Result) -> str:
    """Say what was read."""
    return "What a model remembers of a passage that it has read once"


Reading = tuple[Result, Result, Result]
"""A model, its passages of one length, and what was found of them by distance."""


def tables(result: Result) -> list[Table]:
    """Gains by distance, and their intervals: passages of one length after another."""
    distances = result["settings"]["distances"]
    rows: list[Reading] = [
        (model, length, {one["distance"]: one for one in length["distances"]})
        for place in range(len(result["settings"]["lengths"]))
        for model in result["models"]
        for length in [{**model["lengths"][place], "tokens": result["settings"]["lengths"][place]}]
    ]

    def by_distance(show: Callable[[Result], str]) -> list[Column]:
        return [Column(f"{d:,}", lambda row, d=d: show(row[2][d]) if d in row[2] else "–") for d in distances]

    def unread(place: int) -> Callable[[Reading], str]:
        return lambda row: written(row[1]["distances"][place]["unread"], ".3f") if row[1]["distances"] else "–"

    who = [
        Column("model", lambda row: bold(title(row[0]["name"]), row[0]["memory"])),
        Column("passage", lambda row: str(row[1]["tokens"])),
    ]
    gains = Table(
        said=told(result),
        columns=[
            *who,
            Column("seeds", lambda row: str(len(row[0]["runs"]))),
            Column("parameters", lambda row: f"{row[0]['parameters']:,}"),
            Column("state, bytes", lambda row: state_bytes(row[0])),
            *by_distance(lambda one: written(one["gain"], ".3f")),
            Column("tokens/s", lambda row: f"{row[1]['tokens_per_second']:,.0f}"),
        ],
        rows=rows,
    )
    intervals = Table(
        said=(
            "The gain's 95 % interval over passages like these (bootstrap; seeds are averaged), and bits per token of "
            f"a passage that was not read, at {distances[0]:,} tokens and at the longest distance:"
        ),
        columns=[*who, *by_distance(interval), Column("unread, first", unread(0)), Column("unread, last", unread(-1))],
        rows=rows,
        said_on_screen=True,
    )
    return [gains, intervals]


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


def interval(found: Result) -> str:
    return f"[{found['low']:+.3f}, {found['high']:+.3f}]"


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


SECTION = Section(heading=heading, tables=tables, plots=lambda result: {"": plot(result)})
