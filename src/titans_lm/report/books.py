"""Books read with a memory and without: bits per byte by position, and 95 % confidence intervals over books."""

from functools import partial

from titans_lm.report.plots import Line, Plot
from titans_lm.report.section import COLOURS, Result, Section, short_title, title
from titans_lm.report.table import Column, Table, bold, written

EARLY = 1024
"""Positions before this one make one column of the table."""
Reading = tuple[Result, Result]
"""A model and one of the modes that it read in."""


def heading(result: Result) -> str:
    skipped = result["settings"]["skip_tokens"]
    inside = f", from token {skipped:,} on" if skipped else ""
    return f"Whole books by position: {books_told(result['models'][0], 'held-out book')}{inside}"


def books_told(model: Result, name: str) -> str:
    """Count the books of which something was read: short ones may have been left out as a whole."""
    count = sum(one["tokens"] > 0 for one in model["documents"])
    return f"{count} {name}{'s' * (count != 1)}"


def tables(result: Result) -> list[Table]:
    """Bits per byte by position, and how far positions differ from near ones."""
    rows = readings(result)

    def at(row: Reading, place: int) -> str:
        found = columns(row[1])
        return f"{found[place][1]:.3f}" if place < len(found) else "–"

    by_position = Table(
        columns=[
            *WHO,
            Column("seeds", lambda row: str(row[1]["bits_per_byte"]["seeds"])),
            Column("bits per byte", lambda row: written(row[1]["bits_per_byte"], ".4f")),
            *(Column(name, partial(at, place=place)) for place, (name, _) in enumerate(columns(widest(rows)))),
            Column("tokens/s", lambda row: f"{row[1]['tokens_per_second']:,.0f}"),
        ],
        rows=rows,
        said=said(result),
    )
    return [by_position, differences(result)]


def said(result: Result) -> str:
    settings, first = result["settings"], result["models"][0]
    reading = first["readings"][0]
    cut = "whole" if settings["stretch"] is None else f"in spans of {settings['stretch']:,} tokens"
    most, skipped = settings["max_tokens"], settings["skip_tokens"]
    most = "" if most is None else f", {'' if skipped else 'the first '}{most:,} tokens of each"
    most += f" after its first {skipped:,}" if skipped else ""
    minutes = sum(reading["seconds"] for _, reading in readings(result)) / 60.0
    sizes = ", ".join(f"{title(model['name'])} {model['parameters']:,}" for model in result["models"])
    spans = f"{reading['stretches']:,} span{'s' * (reading['stretches'] > 1)}"
    return (
        f"{books_told(first, 'book')}{most}, read {cut}: {spans}, {reading['bytes']:,} bytes with the tokenizer of "
        f"{title(first['name'])}. Parameters: {sizes}. **on** carries the state through a span; **reset** begins anew "
        "after so many tokens; **off** is the memory frozen (D31), while convolutions and attention go on; **windows** "
        "are what models without a state of constant size read. Columns of positions say how many tokens of the span "
        f"came before. Reading took {minutes:.0f} minutes in all."
    )


def readings(result: Result) -> list[Reading]:
    return [(model, reading) for model in result["models"] for reading in model["readings"]]


def widest(rows: list[Reading]) -> Result:
    return max((reading for _, reading in rows), key=lambda reading: len(reading["by_position"]))


def mode(reading: Result) -> str:
    return reading["mode"] if reading["every"] is None else f"{reading['mode']} {reading['every']:,}"


def columns(reading: Result) -> list[tuple[str, float]]:
    """Bits per byte by position; the early ranges are taken together, by their bytes."""
    parts = reading["by_position"]
    early = [part for part in parts if part["stop"] <= EARLY]
    size = sum(part["bytes"] for part in early)
    bits = sum(part["bytes"] * part["bits_per_byte"]["mean"] for part in early)
    together = [(f"{early[0]['start']:,}–{early[-1]['stop']:,}", bits / size)] if early else []
    late = [part for part in parts if part["stop"] > EARLY]
    return together + [(f"{part['start']:,}–{part['stop']:,}", part["bits_per_byte"]["mean"]) for part in late]


def differences(result: Result) -> Table:
    """How far positions differ from near ones, with intervals over books."""
    near, far = (thousands(result["settings"][name]) for name in ("near", "far"))
    whole = [reading["far_minus_near"] for _, reading in readings(result) if reading["far_minus_near"]]
    if not whole:
        return Table(said=f"No span reaches the end of the far positions ({far}): nothing is said about them.")

    firsts = {"on" if one["mode"] == "windows" else mode(one) for one in (m["readings"][0] for m in result["models"])}
    against = " or ".join(sorted(firsts))

    def versus(row: Reading, name: str) -> str:
        model, reading = row
        key = "-".join(filter(None, [reading["mode"], str(reading["every"] or "")]))
        found = {one["minus"]: one for one in model["differences"]}.get(key)
        return "" if found is None else interval(found[name])

    return Table(
        title="What reading on is worth",
        columns=[
            *WHO,
            Column(near, lambda row: ranges(row[1])[0]),
            Column(far, lambda row: ranges(row[1])[1]),
            Column(f"{far} − {near}", lambda row: interval(row[1]["far_minus_near"])),
            Column(f"{against} − mode, all positions", partial(versus, name="overall")),
            Column(f"change of {against} − mode", partial(versus, name="change")),
        ],
        rows=readings(result),
        said=(
            f"Bits per byte at {far} tokens minus those at {near}, of {whole[0]['stretches']} spans of "
            f"{whole[0]['books']} books; {bounds_told(whole[0]['books'])}. Seeds are averaged. "
            f"**{against} − mode** compares two readings of the same tokens; its change from near to far is what "
            "reading on is worth there."
        ),
    )


def bounds_told(books: int) -> str:
    """Name the bounds over so many books: all draws of three are one book in more than 2.5 % of the resamples."""
    if books < 2:
        return "one book has no interval"
    bounds = "the smallest and the largest book" if books < 4 else "95 % confidence over books (bootstrap)"
    return f"brackets are {bounds}"


def thousands(positions: list[int]) -> str:
    """16–64K."""
    start, stop = positions
    return f"{start // 1024}–{stop // 1024}K" if start % 1024 == 0 and stop % 1024 == 0 else f"{start:,}–{stop:,}"


def ranges(reading: Result) -> list[str]:
    """Bits per byte of near and of far positions, of the spans that are compared."""
    sums = [[sum(book[name][i] for book in reading["books"] if book[name]) for i in (0, 1)] for name in ("near", "far")]
    return [f"{bits / size:.4f}" if size else "–" for bits, size in sums]


def interval(found: Result | None) -> str:
    if found is None:
        return "–"
    bounds = "" if found["low"] is None else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    return f"{found['value']:+.4f}{bounds}"


def plot(result: Result) -> Plot:
    """Bits per byte by position, a colour for each model: on solid, reset dashed, off dotted."""
    drawn = [
        Line(
            label=f"{short_title(model)}, {mode(reading)}",
            x=range(len(reading["by_position"])),
            y=[part["bits_per_byte"]["mean"] for part in reading["by_position"]],
            colour=COLOURS[index % len(COLOURS)],
            dashed=reading["mode"] == "reset",
            dotted=reading["mode"] == "off",
            marker=reading["mode"] in ("on", "windows"),
        )
        for index, model in enumerate(result["models"])
        for reading in model["readings"]
    ]
    places = [
        f"{p['start']:,}–" if p["start"] < EARLY else f"{p['start'] // 1024}K–"
        for p in widest(readings(result))["by_position"]
    ]
    return Plot(
        title="Bits per byte of held-out books by position", x_label="tokens of the span before",
        y_label="bits per byte", lines=drawn, x_labels=places,
    )  # fmt: skip


WHO = (
    Column("model", lambda row: bold(title(row[0]["name"]), row[0]["memory"])),
    Column("memory", lambda row: mode(row[1])),
)
SECTION = Section(topic=lambda _: "language", heading=heading, tables=tables, plots=lambda result: {"": plot(result)})
