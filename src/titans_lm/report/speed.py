"""Speed and memory: cases by device, sides of a comparison, models, long texts, kernels."""

import json
from collections.abc import Callable
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

from titans_lm.report.plots import ACCENT, Drawn, Line, Plot
from titans_lm.report.section import Result, Section
from titans_lm.report.table import Column, Table

COLOURS = (ACCENT, "#e07a1f")
NOT_MEASURED, NOTHING = "not measured", "–"
Cell = Callable[[Any], str]


def failure(row: Result) -> str:
    return f"failed: {row['error']}" if "error" in row else ""


def speed(row: Result) -> str:
    return failure(row) or f"{row['tokens_per_second']:,.0f}"


def share(row: Result) -> str:
    shown = f"{100 * row['share_of_matmul']:.0f} %"
    fastest = row.get("one_dnn_flops_per_second")
    return shown if fastest is None else f"{shown} ({100 * row['flops_per_second'] / fastest:.0f} % of oneDNN)"


def where(name: str, show: Cell) -> Cell:
    return lambda row: show(row) if name in row else NOTHING


def field(title: str, name: str) -> Column:
    return Column(title, lambda row: row.get(name, ""))


def ratio(row: Result, other: str) -> str:
    """Write the speed of a row over that of another side of its comparison."""
    found = row.get("against", {}).get(other)
    return NOTHING if found is None else f"{found['median']:.2f}"


memory = where("peak_memory_bytes", lambda row: f"{row['peak_memory_bytes'] / 2**20:,.0f}")
SPEED = Column("tokens/s", speed)
SHARE = Column("% of peak matmul", where("share_of_matmul", share))
MEMORY = Column("peak MiB", memory)
SPREAD = Column("max/min", where("seconds", lambda row: f"{row['seconds']['max'] / row['seconds']['min']:.2f}"))
FLOPS = Column("GFLOP/s", where("flops_per_second", lambda row: f"{row['flops_per_second'] / 1e9:,.0f}"))
CALL = Column("ms per call", where("seconds", lambda row: f"{row['milliseconds_per_call']:,.2f}"))
MODE = field("mode", "mode")


def gpus(result: Result, what: str = "tokens/s", of: Callable[[Any], Result] = lambda row: row) -> list[Column]:
    """Give a column for each file that was measured on a GPU: its speed in the row of the same case."""

    def column(other: Result) -> Column:
        rows = {same(row): speed(row) for row in other["rows"]}
        return Column(f"{titled('', other)}, {what}", lambda row: rows.get(same(of(row)), NOT_MEASURED))

    return [column(other) for other in result["others"] if other["device"] != "cpu"]


def same(row: Result) -> str:
    """Identify what a row measures, whatever it ran on."""
    return json.dumps([row.get("comparison"), row["label"], row["kind"], row["mode"], row["case"]], sort_keys=True)


def peers(result: Result) -> list[Table]:
    """Give a table per comparison and allocator; ratios are of the row's speed to that of each of our sides."""
    # one after another, as they were measured: forward alone has the title of forward and backward
    groups = groupby(result["rows"], lambda row: (row["comparison"], row["allocator"]))
    return [comparison(result, title, allocator, list(rows)) for (title, allocator), rows in groups]


def comparison(result: Result, title: str, allocator: str, rows: list[Result]) -> Table:
    def of_ours(row: Result, other: str) -> str:
        return ratio(row, other) if row["side"] == "ours" else ""

    parameters = Column("parameters", lambda row: f"{row['parameters']:,}" if "parameters" in row else "")
    theirs = [row["label"] for row in rows if row["side"] != "ours"]
    others = [Column(f"× {name}", partial(of_ours, other=name)) for name in theirs]
    return Table(
        title=f"{title}: {rows[0]['mode'].replace('+', ' + ')}, {allocator} allocator",
        columns=[field("side", "label"), parameters, SPEED, SHARE, MEMORY, SPREAD, *others, *gpus(result)],
        rows=rows,
    )


def ops(result: Result) -> list[Table]:
    case, allocator = field("case", "label"), field("allocator", "allocator")
    columns = [case, MODE, allocator, SPEED, FLOPS, SHARE, CALL, MEMORY, SPREAD, *gpus(result)]
    return [Table(columns=columns, rows=result["rows"])]


def kernels(result: Result) -> list[Table]:
    columns = [field("shape", "comparison"), field("case", "label"), MODE, SPEED, CALL, MEMORY, SPREAD]
    return [Table(columns=columns, rows=result["rows"])]


def in_turn(result: Result) -> list[Table]:
    """Give a line per side of each comparison, and its ratio to the first one."""
    first = {row["comparison"]: row["label"] for row in reversed(result["rows"])}
    by_first = Column("× the first", lambda row: ratio(row, first[row["comparison"]]))
    columns = [field("measured", "comparison"), field("side", "label"), SPEED, by_first, MEMORY, SPREAD]
    return [Table(columns=columns, rows=result["rows"])]


def models(result: Result) -> list[Table]:
    """Give one line per model: a training step, a prompt, and a token after each context."""
    by_model: dict[str, list[Result]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["label"], []).append(row)

    def first(rows: list[Result], fits: Callable[[Result], bool]) -> Result:
        return next((row for row in rows if fits(row)), {"error": NOT_MEASURED})

    def of(mode: str, show: Cell) -> Cell:
        return lambda rows: show(first(rows, lambda row: row["mode"] == mode))

    def after(rows: list[Result], context: int) -> str:
        row = first(rows, lambda row: row["case"].get("context") == context)
        return failure(row) or f"{row['milliseconds_per_call']:.2f}"

    contexts = sorted({row["case"]["context"] for row in result["rows"] if "context" in row["case"]})
    columns = [
        Column("model", lambda rows: rows[0]["label"]),
        Column("parameters", lambda rows: next((f"{r['parameters']:,}" for r in rows if "parameters" in r), NOTHING)),
        Column("train tokens/s", of("train", speed)),
        Column("train peak MiB", of("train", memory)),
        Column("prompt tokens/s", of("prefill", speed)),
        Column("prompt peak MiB", of("prefill", memory)),
        *(Column(f"ms per token at {context:,}", partial(after, context=context)) for context in contexts),
        *gpus(result, "train tokens/s", lambda rows: first(rows, lambda row: row["mode"] == "train")),
    ]
    return [Table(columns=columns, rows=list(by_model.values()))]


def scaling(result: Result) -> list[Table]:
    """Give a line per length, and one per model that reads on: memory at the end, and how it began."""

    def streamed(show: Cell) -> Cell:
        return lambda row: NOTHING if "error" in row else show(row)

    lengths = [field("sequences × tokens, forward + backward", "label"), SPEED, SHARE, MEMORY, SPREAD, *gpus(result)]
    streams = [
        field("model that reads on", "label"),
        Column("tokens", lambda row: f"{row['case']['tokens']:,}"),
        SPEED,
        Column("resident MiB", streamed(lambda row: f"{row['windows'][-1]['memory_bytes'] / 2**20:,.0f}")),
        Column("memory × after 100K", streamed(lambda row: f"{row['memory_ratio']:.3f}")),
        Column("speed × second 100K", streamed(lambda row: f"{row['throughput_ratio']:.3f}")),
        *gpus(result),
    ]
    return [
        Table(columns=columns, rows=[row for row in result["rows"] if row["kind"] == kind])
        for columns, kind in ((lengths, "op"), (streams, "stream"))
    ]


def scaling_plots(result: Result) -> dict[str, Drawn]:
    """Speed and memory by length, and the speed of models that read on."""
    rows = [row for row in result["rows"] if "error" not in row]
    single = [row for row in rows if row["kind"] == "op" and row["case"]["rows"] == 1]
    streams = [row for row in rows if row["kind"] == "stream"]
    drawn: dict[str, Drawn] = {}
    if len(single) > 1:
        drawn["-speed"] = by_length("Throughput by length", "tokens/s", single, lambda r: float(r["tokens_per_second"]))
        drawn["-memory"] = by_length("Peak memory by length", "MiB", single, lambda r: r["peak_memory_bytes"] / 2**20)
    return drawn | ({"-stream": stream_plot(streams)} if streams else {})


def by_length(title: str, y_label: str, rows: list[Result], value: Callable[[Result], float]) -> Plot:
    values, names = [value(row) for row in rows], [f"{row['case']['tokens']:,}" for row in rows]
    line = Line(label="op, forward + backward", x=range(len(rows)), y=values, colour=COLOURS[0], marker=True)
    top = 1.15 * max(values)
    return Plot(title=title, x_label="tokens", y_label=y_label, lines=[line], y_range=(0.0, top), x_labels=names)


def stream_plot(rows: list[Result]) -> Plot:
    """Speed of models that read on and on, as a share of their second window's: the median of the rounds."""

    def shares(windows: list[Result]) -> list[float]:
        start = windows[min(1, len(windows) - 1)]["tokens_per_second"]
        return [window["tokens_per_second"] / start for window in windows]

    lines = [
        Line(
            label=row["label"],
            x=[window["tokens"] for window in row["windows"]],
            y=[median(w) for w in zip(*(shares(r["windows"]) for r in row.get("rounds", [row])), strict=True)],
            colour=COLOURS[place % len(COLOURS)],
            marker=True,
        )
        for place, row in enumerate(rows)
    ]
    return Plot(
        title="Reading on", x_label="tokens read", y_label="speed, as a share of the second window's", lines=lines,
        y_range=(0.0, max(1.3, *(1.1 * max(line.y) for line in lines))),
    )  # fmt: skip


def titled(title: str, result: Result) -> str:
    """Name what was measured, with the GPU and the precision where there is one."""
    on = [] if result["device"] == "cpu" else [*result["hardware"]["gpus"][:1], result["dtype"]]
    return ", ".join(part for part in (title, *on) if part)


KINDS: dict[str, tuple[str, Callable[[Result], list[Table]]]] = {
    "scaling": ("Long texts", scaling),
    "peers": ("Beside peers", peers),
    "model": ("Language models", models),
    "ops": ("The op alone", ops),
    "training": ("Training steps", in_turn),
    "tnt": ("TNT beside plain memories", in_turn),
    "kernels": ("The kernels beside the chunked backend", kernels),
}
SECTIONS = {
    kind: Section(
        topic=lambda _: "speed",
        heading=lambda result, title=title: titled(title, result),
        tables=tables,
        plots=scaling_plots if kind == "scaling" else lambda _: {},
        # files of other devices stand in columns; kernels, and models in turn, have a section for each file
        group=lambda result, alone=tables in (kernels, in_turn): result["file"] if alone else "",
    )
    for kind, (title, tables) in KINDS.items()
}
