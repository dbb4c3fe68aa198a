"""Books read with a memory and without, for the page of results: bits per byte by position, and how sure that is."""

from collections.abc import Callable

from titans_lm.report.figures import Line, Plot
from titans_lm.report.models import COLOURS, short_title, title
from titans_lm.report.section import Section
from titans_lm.report.sources import Result
from titans_lm.report.spread import written
from titans_lm.report.table import Column, Table, bold

EARLY = 1024
"""Positions before this one make one column of the table."""
Reading = tuple[Result, Result]
"""A model and one of the modes that it read in."""


def heading(result: Result) -> str:
    """Say what was read."""
    skipped = result["settings"]["skip_tokens"]
    inside = f", from token {skipped:,} on" if skipped else ""
    return f"Whole books by position: {len(result['models'][0]['documents'])} held-out books{inside}"


def tables(result: Result) -> list[Table]:
    """Bits per byte by position, and how far positions differ from near ones."""
    rows = readings(result)
    widest = max((reading for _, reading in rows), key=lambda reading: len(reading["by_position"]))

    def at(place: int) -> Callable[[Reading], str]:
        def cell(row: Reading) -> str:
            found = columns(row[1])
            return f"{found[place][1]:.3f}" if place < len(found) else "–"

        return cell

    by_position = Table(
        said=told(result),
        columns=[
            *WHO,
            Column("seeds", lambda row: str(row[1]["bits_per_byte"]["seeds"])),
            Column("bits per byte", lambda row: written(row[1]["bits_per_byte"], ".4f")),
            *(Column(name, at(place)) for place, (name, _) in enumerate(columns(widest))),
            Column("tokens/s", lambda row: f"{row[1]['tokens_per_second']:,.0f}"),
        ],
        rows=rows,
    )
    return [by_position, differences(result)]


def told(result: Result) -> str:
    """Say in a paragraph what was read, by whom, and what the columns are."""
    settings, first = result["settings"], result["models"][0]
    books, reading = first["documents"], first["readings"][0]
    cut = "whole" if settings["stretch"] is None else f"in stretches of {settings['stretch']:,} tokens"
    most, skipped = settings["max_tokens"], settings["skip_tokens"]
    most = "" if most is None else f", {'' if skipped else 'the first '}{most:,} tokens of each"
    most += f" after its first {skipped:,}" if skipped else ""
    minutes = sum(reading["seconds"] for _, reading in readings(result)) / 60.0
    sizes = ", ".join(f"{title(model['name'])} {model['parameters']:,}" for model in result["models"])
    return (
        f"{len(books)} books{most}, read {cut} from nothing: {reading['stretches']} stretches, {reading['bytes']:,} "
        f"bytes with the tokenizer of {title(first['name'])}. Parameters: {sizes}. **on** carries the state through a "
        "stretch; **reset** begins anew after so many tokens, from the last of them; **off** holds the memory still: "
        "it reads and never learns (D31), while convolutions and attention go on; **windows** are what models without "
        "a state of constant size read. Numbers are bits per byte, lower is better, bytes counted token by token; mean "
        "± standard deviation over seeds; the columns with positions say how many tokens of the stretch came before. "
        f"Reading took {minutes:.0f} minutes in all."
    )


def readings(result: Result) -> list[Reading]:
    """List every model with every of its modes."""
    return [(model, reading) for model in result["models"] for reading in model["readings"]]


def mode(reading: Result) -> str:
    """Name a mode for a reader."""
    every = "" if reading["every"] is None else f"{reading['every']:,}"
    return {"on": "on", "off": "off", "reset": f"reset {every}", "windows": f"windows {every}"}[reading["mode"]]


def columns(reading: Result) -> list[tuple[str, float]]:
    """Bits per byte by position; the early ranges are taken together, by their bytes."""
    parts = reading["by_position"]
    early = [part for part in parts if part["stop"] <= EARLY]
    size = sum(part["bytes"] for part in early)
    bits = sum(part["bytes"] * part["bits_per_byte"]["mean"] for part in early)
    together = [(f"{early[0]['start']:,}–{early[-1]['stop']:,}", bits / size)] if early else []
    return together + [(places(part), part["bits_per_byte"]["mean"]) for part in parts if part["stop"] > EARLY]


def places(part: Result) -> str:
    return f"{part['start']:,}–{part['stop']:,}"


def differences(result: Result) -> Table:
    """How far positions differ from near ones, with intervals over books."""
    near, far = (thousands(result["settings"][name]) for name in ("near", "far"))
    whole = [reading["far_minus_near"] for _, reading in readings(result) if reading["far_minus_near"]]
    if not whole:
        return Table(said=f"No stretch reaches the end of the far positions ({far}): nothing is said about them.")

    def versus(name: str) -> Callable[[Reading], str]:
        def cell(row: Reading) -> str:
            model, reading = row
            found = {one["minus"]: one for one in model["differences"]}.get(named(reading))
            return "" if found is None else interval(found[name])

        return cell

    return Table(
        said=(
            f"Bits per byte at {far} tokens minus those at {near}, of {whole[0]['stretches']} stretches of "
            f"{whole[0]['books']} books, in brackets the 95 % interval over books (bootstrap; a book's stretches stay "
            "together, seeds are averaged). Below 0 a model predicts better the more it has read, or the text is "
            "easier there. **on − mode** (windows − mode, for models without a state) takes the text out: both read "
            "the same tokens; its change from near to far is what reading on is worth there. "
            f"{verdict(result)}"
        ),
        columns=[
            *WHO,
            Column(near, lambda row: ranges(row[1])[0]),
            Column(far, lambda row: ranges(row[1])[1]),
            Column(f"{far} − {near}", lambda row: interval(row[1]["far_minus_near"])),
            Column("on − mode, all positions", versus("overall")),
            Column("change of on − mode", versus("change")),
        ],
        rows=readings(result),
    )


def named(reading: Result) -> str:
    return reading["mode"] if reading["every"] is None else f"{reading['mode']}-{reading['every']}"


def thousands(positions: list[int]) -> str:
    """Write positions short: 16–64K."""
    start, stop = positions
    return f"{start // 1024}–{stop // 1024}K" if start % 1024 == 0 and stop % 1024 == 0 else f"{start:,}–{stop:,}"


def ranges(reading: Result) -> list[str]:
    """Bits per byte of near and of far positions, of the stretches that are compared."""
    sums = [[sum(book[name][i] for book in reading["books"] if book[name]) for i in (0, 1)] for name in ("near", "far")]
    return [f"{bits / size:.4f}" if size else "–" for bits, size in sums]


def interval(found: Result | None) -> str:
    """Write an estimate with its bounds."""
    if found is None:
        return "–"
    bounds = "" if found["low"] is None else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    return f"{found['value']:+.4f}{bounds}"


def verdict(result: Result) -> str:
    """Say for every model with a memory whether far positions are as good as near ones, and what reading on did."""
    said = []
    for model in result["models"]:
        found = next((one["far_minus_near"] for one in model["readings"] if one["mode"] == "on"), None)
        if not model["memory"] or found is None:
            continue
        resets = [one for one in model["differences"] if one["minus"].startswith("reset")]
        alone = f"; against {spoken(resets[0]['minus'])} {interval(resets[0]['change'])}" if resets else ""
        said.append(f"{title(model['name'])} {judged(found)} ({interval(found)}{alone})")
    if not said:
        return ""
    return (
        "The goal is that far positions are no worse than near ones with the memory on, and, which is the stricter "
        f"question, that they gain on a memory that is reset. {'; '.join(said)}."
    )


def judged(found: Result) -> str:
    """Say whether a difference is below 0, and whether its interval is."""
    met = "reaches it" if found["value"] <= 0.0 else "misses it"
    sure = found["low"] is not None and (found["high"] <= 0.0 or found["low"] > 0.0)
    return met if sure else f"{met} in the mean, not for certain"


def spoken(name: str) -> str:
    """Write the name of a mode for a reader."""
    kind, _, every = name.partition("-")
    return f"{kind} {int(every):,}" if every else kind


def plot(result: Result) -> Plot:
    """Bits per byte by position, a colour for each model: on solid, reset dashed, off dotted."""
    most = max((reading["by_position"] for _, reading in readings(result)), key=lambda parts: len(parts))
    drawn = [
        Line(
            label=f"{short_title(model)}, {mode(reading)}",
            x=list(range(len(reading["by_position"]))),
            y=[part["bits_per_byte"]["mean"] for part in reading["by_position"]],
            colour=COLOURS[index % len(COLOURS)],
            dashed=reading["mode"] == "reset",
            dotted=reading["mode"] == "off",
            marker=reading["mode"] in ("on", "windows"),
        )
        for index, model in enumerate(result["models"])
        for reading in model["readings"]
    ]
    return Plot(
        title="Bits per byte of held-out books by position", x_label="tokens of the stretch before",
        y_label="bits per byte", lines=drawn, x_labels=[short(part) for part in most],
    )  # fmt: skip


def short(part: Result) -> str:
    """Name a range in the plot, where there is little room."""
    return f"{part['start']:,}–" if part["start"] < EARLY else f"{part['start'] // 1024}K–"


WHO = (
    Column("model", lambda row: bold(title(row[0]["name"]), row[0]["memory"])),
    Column("memory", lambda row: mode(row[1])),
)
SECTION = Section(heading=heading, tables=tables, plots=lambda result: {"": plot(result)})
