"""Speed and memory on the page of results: cases by device, sides by comparison, models, long texts, kernels."""

import json
from collections.abc import Callable
from itertools import groupby
from statistics import median
from typing import Any

from titans_lm.report.figures import ACCENT, Drawn, Line, Plot
from titans_lm.report.section import Section, no_plots
from titans_lm.report.sources import Result, source_of_speed
from titans_lm.report.table import Column, Table

OURS, SECOND = ACCENT, "#e07a1f"
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
    """Show what a row has where it has a number of that name."""
    return lambda row: show(row) if name in row else NOTHING


def named(title: str) -> Column:
    return Column(title, lambda row: row["label"])


memory = where("peak_memory_bytes", lambda row: f"{row['peak_memory_bytes'] / 2**20:,.0f}")
SPEED = Column("tokens/s", speed)
SHARE = Column("% of matmul", where("share_of_matmul", share))
MEMORY = Column("peak MiB", memory)
SPREAD = Column("max/min", where("seconds", lambda row: f"{row['seconds']['max'] / row['seconds']['min']:.2f}"))
"""How far apart the runs were: slowest over fastest."""
FLOPS = Column("GFLOP/s", where("flops_per_second", lambda row: f"{row['flops_per_second'] / 1e9:,.0f}"))
CALL = Column("ms per call", where("seconds", lambda row: f"{row['milliseconds_per_call']:,.2f}"))
MODE = Column("mode", lambda row: row["mode"])
ALLOCATOR = Column("allocator", lambda row: row["allocator"])
SHAPE = Column("shape", lambda row: row.get("comparison", ""))


def gpus(result: Result, what: str = "tokens/s", of: Callable[[Any], Result] = lambda row: row) -> list[Column]:
    """Give a column for each file that was measured on a GPU: its speed in the row of the same case."""

    def column(other: Result) -> Column:
        rows = {same(row): row for row in other["rows"]}
        name = ", ".join([*other["hardware"]["gpus"][:1], other["dtype"]])
        return Column(
            f"{name}, {what}",
            lambda row: speed(rows[same(of(row))]) if same(of(row)) in rows else NOT_MEASURED,
        )

    return [column(other) for other in result.get("others", []) if other["device"] != "cpu"]


def same(row: Result) -> str:
    """Identify what a row measures, whatever it ran on."""
    return json.dumps([row.get("comparison"), row["label"], row["kind"], row["mode"], row["case"]], sort_keys=True)


def peers(result: Result) -> list[Table]:
    """Give a table per comparison and allocator; ratios are of the row's speed to that of each of our sides."""
    # one after another, as they were measured: forward alone has the title of forward and backward
    groups = groupby(result["rows"], lambda row: (row["comparison"], row["allocator"]))
    return [comparison(result, title, allocator, list(rows)) for (title, allocator), rows in groups]


def comparison(result: Result, title: str, allocator: str, rows: list[Result]) -> Table:
    def ratio(name: str) -> Cell:
        def show(row: Result) -> str:
            found = row.get("against", {}).get(name)
            return NOTHING if found is None else f"{found['median']:.2f}"

        return lambda row: show(row) if row["side"] == "ours" else ""

    others = [Column(f"× {row['label']}", ratio(row["label"])) for row in rows if row["side"] != "ours"]
    mode = rows[0]["mode"].replace("+", " + ")
    return Table(
        said=f"### {title}: {mode}, {allocator} allocator",
        columns=[named("side"), SPEED, SHARE, MEMORY, SPREAD, *others, *gpus(result)],
        rows=rows,
    )


def ops(result: Result) -> list[Table]:
    """Give a line per case."""
    columns = [named("case"), MODE, ALLOCATOR, SPEED, FLOPS, SHARE, CALL, MEMORY, SPREAD, *gpus(result)]
    return [Table(columns=columns, rows=result["rows"])]


def kernels(result: Result) -> list[Table]:
    """Give a line per shape and side."""
    return [Table(columns=[SHAPE, named("case"), MODE, SPEED, CALL, MEMORY, SPREAD], rows=result["rows"])]


def models(result: Result) -> list[Table]:
    """Give one line per model: a training step, a prompt, and a token after each context."""
    by_model: dict[str, list[Result]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["label"], []).append(row)

    def found(rows: list[Result], where: Callable[[Result], bool]) -> Result:
        return next((row for row in rows if where(row)), {"error": NOT_MEASURED})

    def of(mode: str, show: Callable[[Result], str]) -> Cell:
        return lambda rows: show(found(rows, lambda row: row["mode"] == mode))

    def after(context: int) -> Cell:
        def show(row: Result) -> str:
            return failure(row) or f"{row['milliseconds_per_call']:.2f}"

        return lambda rows: show(found(rows, lambda row: row["case"].get("context") == context))

    contexts = sorted({row["case"]["context"] for row in result["rows"] if "context" in row["case"]})
    columns = [
        Column("model", lambda rows: rows[0]["label"]),
        Column("parameters", lambda rows: next((f"{r['parameters']:,}" for r in rows if "parameters" in r), NOTHING)),
        Column("train tokens/s", of("train", speed)),
        Column("train peak MiB", of("train", memory)),
        Column("prompt tokens/s", of("prefill", speed)),
        Column("prompt peak MiB", of("prefill", memory)),
        *(Column(f"ms per token at {context:,}", after(context)) for context in contexts),
        *gpus(result, "train tokens/s", lambda rows: found(rows, lambda row: row["mode"] == "train")),
    ]
    return [Table(columns=columns, rows=list(by_model.values()))]


def scaling(result: Result) -> list[Table]:
    """Give a line per length, and one per model that reads on: memory at the end, and how it began."""

    def streamed(show: Callable[[Result], str]) -> Cell:
        return lambda row: NOTHING if "error" in row else show(row)

    lengths = [named("rows × tokens, forward + backward"), SPEED, SHARE, MEMORY, SPREAD, *gpus(result)]
    streams = [
        named("model that reads on"),
        Column("tokens", lambda row: f"{row['case']['tokens']:,}"),
        SPEED,
        Column("resident MiB", streamed(lambda row: f"{row['windows'][-1]['memory_bytes'] / 2**20:,.0f}")),
        Column("× first window", streamed(lambda row: f"{row['memory_ratio']:.3f}")),
        Column("speed × second window", streamed(lambda row: f"{row['throughput_ratio']:.3f}")),
        *gpus(result),
    ]
    return [
        Table(columns=columns, rows=[row for row in result["rows"] if row["kind"] == kind])
        for columns, kind in ((lengths, "op"), (streams, "stream"))
    ]


def scaling_plots(result: Result) -> dict[str, Drawn]:
    """Speed and memory by length, and the speed of models that read on."""
    rows = [row for row in result["rows"] if "error" not in row]
    drawn: dict[str, Drawn] = {**length_plots([r for r in rows if r["kind"] == "op" and r["case"]["rows"] == 1])}
    streams = [row for row in rows if row["kind"] == "stream"]
    return {**drawn, "-stream": stream_plot(streams)} if streams else drawn


def length_plots(rows: list[Result]) -> dict[str, Plot]:
    """Speed and memory by the tokens of a row."""
    if len(rows) < 2:
        return {}
    places, names = list(range(len(rows))), [f"{row['case']['tokens']:,}" for row in rows]

    def plot(title: str, y_label: str, values: list[float]) -> Plot:
        line = Line(label="op, forward + backward", x=places, y=values, colour=OURS, marker=True)
        top = 1.15 * max(values)
        return Plot(title=title, x_label="tokens", y_label=y_label, lines=[line], y_range=(0.0, top), x_labels=names)

    return {
        "-speed": plot(
            "Speed by length", "tokens per second", [float(row["tokens_per_second"]) for row in rows]
        ),
        "-memory": plot(
            "Peak memory by length", "MiB", [row["peak_memory_bytes"] / 2**20 for row in rows]
        ),
    }  # fmt: skip


def stream_plot(rows: list[Result]) -> Plot:
    """Speed of models that read on and on, as a share of their second window's: the median of the rounds."""
    lines, top = [], 1.3
    for row, colour in zip(rows, (OURS, SECOND) * len(rows), strict=False):
        rounds = [shares(each["windows"]) for each in row.get("rounds", [row])]
        y = [median(window) for window in zip(*rounds, strict=True)]
        top = max(top, 1.1 * max(y))
        x = [window["tokens"] for window in row["windows"]]
        lines.append(Line(label=row["label"], x=x, y=y, colour=colour, marker=True))
    return Plot(
        title="Reading on", x_label="tokens read", y_label="speed, as a share of the second window's", lines=lines,
        y_range=(0.0, top),
    )  # fmt: skip


def shares(windows: list[Result]) -> list[float]:
    """The speed of each window against that of the second."""
    start = windows[min(1, len(windows) - 1)]["tokens_per_second"]
    return [window["tokens_per_second"] / start for window in windows]


def section(
    title: str,
    tables: Callable[[Result], list[Table]],
    plots: Callable[[Result], dict[str, Drawn]] = no_plots,
    *,
    needs_gpu: bool = False,
) -> Section:
    """Declare a kind; one that needs a GPU is on the page only where somebody has measured it, file by file."""
    return Section(
        heading=lambda _: title, tables=tables, plots=plots, source=source_of_speed, together=not needs_gpu,
        expected=not needs_gpu,
    )  # fmt: skip


SECTIONS = {
    "peers": section("Beside peers", peers),
    "ops": section("The op alone", ops),
    "model": section("Language models", models),
    "scaling": section("Long texts", scaling, scaling_plots),
    "ops-triton": section("The kernels beside others", kernels, needs_gpu=True),
    "kernels": section("The kernels beside the chunked backend", kernels, needs_gpu=True),
}
