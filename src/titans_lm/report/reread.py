"""Passages read twice: what the first reading saves at the second, by distance."""

import math
from collections.abc import Callable
from functools import partial

from titans_lm.report.plots import Line, Panels, Plot
from titans_lm.report.section import COLOURS, UNSAID, Result, Section, state_bytes, title
from titans_lm.report.table import Column, Table, bold, written

Reading = tuple[Result, Result, dict[int, Result]]
"""A model, its passages of one length, and what was found of them by distance."""


def tables(result: Result) -> list[Table]:
    """Gains by distance, and their intervals: passages of one length after another."""
    distances = result["settings"]["distances"]
    rows: list[Reading] = [
        (model, {**model["lengths"][place], "tokens": tokens}, by_distance(model, place))
        for place, tokens in enumerate(result["settings"]["lengths"])
        for model in result["models"]
    ]

    def at_each(show: Callable[[Result], str]) -> list[Column]:
        return [Column(f"{d:,}", lambda row, d=d: show(row[2][d]) if d in row[2] else "–") for d in distances]

    def unread(row: Reading, place: int) -> str:
        return written(row[1]["distances"][place]["unread"], ".3f") if row[1]["distances"] else "–"

    who = [
        Column("model", lambda row: bold(title(row[0]["name"]), row[0]["memory"])),
        Column("passage", lambda row: str(row[1]["tokens"])),
    ]
    gains = Table(
        columns=[
            *who,
            Column("seeds", lambda row: str(len(row[0]["runs"]))),
            Column("parameters", lambda row: f"{row[0]['parameters']:,}"),
            Column("state, bytes", lambda row: state_bytes(row[0])),
            *at_each(lambda one: written(one["gain"], ".3f")),
            Column("tokens/s", lambda row: f"{row[1]['tokens_per_second']:,.0f}"),
        ],
        rows=rows,
        said=said(result),
    )
    intervals = Table(
        title="95 % confidence intervals of the gain",
        columns=[
            *who,
            *at_each(lambda one: f"[{one['low']:+.3f}, {one['high']:+.3f}]"),
            Column("unread, first", partial(unread, place=0)),
            Column("unread, last", partial(unread, place=-1)),
        ],
        rows=rows,
        said=(
            "Over passages like these (bootstrap; seeds are averaged). Unread: bits per token of a passage that was "
            f"not read, at {distances[0]:,} tokens and at the longest distance."
        ),
    )
    return [gains, intervals]


def by_distance(model: Result, place: int) -> dict[int, Result]:
    return {one["distance"]: one for one in model["lengths"][place]["distances"]}


def said(result: Result) -> str:
    settings = result["settings"]
    context = f"the first {settings['context']:,} tokens of its book and then " if settings["context"] else ""
    whole = [title(model["name"]) for model in result["models"] if not model["carries"]]
    left = any(length["left_out"] for model in result["models"] for length in model["lengths"])
    grows = (
        f" {', '.join(whole)}: the state grows with the text, so sequences (and this number) are of at most "
        f"{settings['max_len']:,} tokens{', and distances that do not fit are left out (–)' if left else ''}."
        if whole
        else ""
    )
    longest = max(model["state_bytes"]["length"] for model in result["models"])
    minutes = sum(length["seconds"] for model in result["models"] for length in model["lengths"]) / 60.0
    books = min(len(result["documents"]), settings["passages"] // settings["rows"])  # given in turn, a row at a time
    return (
        f"A model reads {context}a passage of {' or '.join(map(str, settings['lengths']))} tokens, then as many tokens "
        "of other books as a column says, then the passage again. Its **gain** in bits per token is what the second "
        "reading costs less than where another passage of the book was read first: 0 is forgotten, higher is better. "
        f"{settings['passages']} passages of each length from {books} held-out book{'s' * (books > 1)}; in the plot "
        "the shade of a single seed is the interval over passages. State is what one sequence carries after "
        f"{longest:,} tokens, in brackets the weights of the memories alone.{grows} Reading took {minutes:.0f} minutes."
    )


def places(distances: list[int]) -> list[float]:
    """Put distances on an axis of their logarithms, and 0 a step to the left of the first."""
    above = [d for d in distances if d]
    step = math.log2(above[1] / above[0]) if len(above) > 1 else 2.0
    return [math.log2(d) if d else math.log2(above[0]) - step if above else 0.0 for d in distances]


def plot(result: Result) -> Panels:
    """Gain by distance, a panel for each length and a line for each model; those without a memory are dashed."""
    settings = result["settings"]
    where = dict(zip(settings["distances"], places(settings["distances"]), strict=True))
    ticks = [f"{d // 1024}K" if d and d % 1024 == 0 else f"{d:,}" for d in where]
    long = [title(model["name"]).replace(UNSAID, "") for model in result["models"]]
    short = [name.partition(" with ")[0] for name in long]
    names = short if len(set(short)) == len(short) else long
    panels = [
        Plot(
            title=f"passage of {length} tokens", x_label="", y_label="", x_labels=ticks, x_places=list(where.values()),
            lines=[
                line(model, names[index], COLOURS[index % len(COLOURS)], by_distance(model, place), where)
                for index, model in enumerate(result["models"])
            ],
        )
        for place, length in enumerate(settings["lengths"])
    ]  # fmt: skip
    return Panels(
        title="What remains of a passage that was read once", x_label="tokens of other books between the two readings",
        y_label="gain at the second reading, bits per token", panels=panels, across=True,
    )  # fmt: skip


def line(model: Result, label: str, colour: str, found: dict[int, Result], where: dict[int, float]) -> Line:
    """Draw one model: a shade of one standard deviation over seeds, or, of a single one, the interval over passages."""
    gains = [one["gain"] for one in found.values()]
    alone = any(gain["sd"] is None for gain in gains)
    return Line(
        label=label,
        x=[where[distance] for distance in found],
        y=[gain["mean"] for gain in gains],
        spread=None if alone else [gain["sd"] for gain in gains],
        band=([one["low"] for one in found.values()], [one["high"] for one in found.values()]) if alone else None,
        colour=colour,
        dashed=not model["memory"],
        marker=True,
    )


SECTION = Section(
    topic=lambda _: "long-context",
    heading=lambda _: "What a model remembers of a passage that it has read once",
    tables=tables,
    plots=lambda result: {"": plot(result)},
)
