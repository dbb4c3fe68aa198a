"""The page of results: made of the JSON that the commands wrote, and of nothing else."""

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from titans_lm.bench import repeated
from titans_lm.bench.run import FORMAT
from titans_lm.train.files import write_atomically

KINDS = ("peers", "ops", "model", "scaling")
KERNELS = {"ops-triton": "The kernels beside others", "kernels": "The kernels beside the chunked backend"}
"""Kinds that are on the page only where somebody has measured them: they need a GPU."""
LEARNED = ("reread", "compare", "perplexity", "task", "forecast", "genomics", "lm-eval")
"""Kinds of results about what models have learned."""
REPEATED = "repro"
"""Kind of results that are tables of the paper."""
MARK = "<!-- Written by `titans bench render` from the JSON files that are named below: edit nothing here. -->"
NOT_MEASURED = "not measured"
Result = dict[str, Any]
Results = dict[str, list[Result]]


def render_results(results: Path, docs: Path) -> list[Path]:
    """Write the page and its plots; returns what was written.

    ValueError for a folder that is not there, and for a file in it that no benchmark wrote.
    """
    from titans_lm.bench.figures import plots
    from titans_lm.report.plots import draw, save_png

    found = read_results(results)
    written = [save_png(draw(plot), results / f"{name}.png") for name, plot in plots(found).items()]
    write_atomically(docs, page(found, Path(os.path.relpath(results, docs.parent)).as_posix()))
    return [docs, *written]


def read_results(folder: Path) -> Results:
    """Read the files of a folder by kind: float32 on the CPU first, other devices and precisions after it."""
    if not folder.is_dir():
        raise ValueError(f"got --results {folder}, which is no folder; expected one that titans bench wrote to")
    found: Results = {kind: [] for kind in (*KINDS, *KERNELS, *LEARNED, REPEATED)}
    for path in sorted(folder.glob("*.json"), key=lambda path: (len(path.stem), path.stem)):
        try:
            result = json.loads(path.read_bytes())
        except json.JSONDecodeError as error:
            raise ValueError(f"got {path}, which is not JSON: {error}") from error
        kind = result.get("what") if isinstance(result, dict) else None
        if kind not in found or result.get("format") != (repeated.FORMAT if kind == REPEATED else FORMAT):
            raise ValueError(f"got {path}, which is no result of a benchmark; expected format {FORMAT!r} in it")
        found[result["what"]].append({**result, "file": path.name})
    return found


def page(found: Results, link: str) -> str:
    """Lay out the whole page; `link` leads from it to the folder of the JSON files."""
    from titans_lm.bench.figures import plots

    drawn = plots(found)
    parts = [MARK, "", "# Results", "", INTRODUCTION]
    for kind in KINDS:
        parts += ["", f"## {TITLES[kind]}", ""]
        if not found[kind]:
            parts.append(f"Not measured yet: `titans bench {kind}`.")
            continue
        first = found[kind][0]
        parts += [origin(result, link) for result in found[kind]]
        parts += ["", *TABLES[kind](first, gpu_columns(found[kind]))]
        for name, plot in drawn.items():
            if name.startswith(kind):
                parts += ["", f"![{plot.title}: {plot.y_label} by {plot.x_label}]({link}/{name}.png)"]
    for kind, title in KERNELS.items():
        for result in found.get(kind, []):
            parts += ["", f"## {title}", "", origin(result, link), "", *kernels_table(result)]
    for lines in sections(found, link):
        parts += ["", *lines]
    for result in found.get(REPEATED, []):
        parts += ["", *repeated.section(result, link, table)]
    return "\n".join(parts) + "\n"


def sections(found: Results, link: str) -> list[list[str]]:
    """Lay out what models have learned; a heading that several would have names the file."""
    results = [result for kind in LEARNED for result in found.get(kind, [])]
    laid = [learned(result, link) for result in results]
    often = Counter(lines[0] for lines in laid)
    return [
        [f"{head} ({Path(result['file']).stem})" if often[head] > 1 else head, *lines]
        for result, (head, *lines) in zip(results, laid, strict=True)
    ]


def learned(result: Result, link: str) -> list[str]:
    """Lay out passages read twice, models on text, books by position, a task, series, DNA or questions (no plot)."""
    from titans_lm.bench import answered, classified, compared, forecasted, positions, reread, scored

    sections = {
        "reread": reread, "compare": compared, "perplexity": positions, "task": scored, "forecast": forecasted,
        "genomics": classified, "lm-eval": answered,
    }  # fmt: skip
    section: Any = sections[result["what"]]
    said, head, body = section.rows(result)
    h = result["hardware"]
    source = (
        f"[{result['file']}]({link}/{result['file']}): `{result['command']}` on {h['processor']}, {h['cores']} cores; "
        f"torch {h['versions']['torch']}, transformers {h['versions']['transformers']}; {repeated.commits(result, h)}, "
        f"{h['date']}."
    )
    lines = [f"## {section.heading(result)}", "", source, "", said, "", *table(head, body)]
    lines += further(*section.more(result)) if hasattr(section, "more") else []
    name = Path(result["file"]).stem
    if hasattr(section, "plot"):
        drawn = section.plot(result)
        lines += ["", f"![{drawn.title}: {drawn.y_label} by {drawn.x_label}]({link}/{name}.png)"]
    heat = section.heat(result) if hasattr(section, "heat") else None
    if heat is not None:
        lines += ["", f"![{heat.title}, by {heat.x_label} and {heat.y_label}]({link}/{name}-depth.png)"]
    return lines


def further(said: str, head: list[str], body: list[list[str]]) -> list[str]:
    """Lay out the second table of a section, where it has one."""
    return [*(["", said] if said else []), *(["", *table(head, body)] if body else [])]


INTRODUCTION = """Every number on this page was written by `titans bench`, `titans compare`, `titans evaluate`,
`titans forecast evaluate`, `titans genomics evaluate` or `titans repro`; the guides to [benchmarks](guides/bench.md)
and [evaluation](guides/evaluate.md) say what each command measures and how, and [findings](findings.md) what follows.
"% of matmul" is the share of the floating point operations per second that a large square matrix product of torch's
reaches in the same process, right before and after; where torch gives it to MKL and our products go to oneDNN, which
is faster on some CPUs, the share of oneDNN's is in brackets. Peak memory is the growth of the process above what it
had after its imports (on a GPU: of the device's memory), "max/min" the slowest run over the fastest. Where sides are
compared they took turns; "× name" is our speed over that side's, the median of the rounds. In plots a shade around a
line is one standard deviation over seeds to either side."""

TITLES = {
    "peers": "Beside peers",
    "ops": "The op alone",
    "model": "Language models",
    "scaling": "Long texts",
}


def origin(result: Result, link: str) -> str:
    """Say in a line where the numbers come from."""
    h = result["hardware"]
    where = ", ".join(h["gpus"]) if result["device"] != "cpu" and h["gpus"] else h["processor"]
    versions = {**h["versions"], **result.get("peers", {})}
    stack = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    stack += f", titans-pytorch {versions['titans-pytorch']}" if "titans-pytorch" in versions else ""
    quick = " **Tiny sizes: a test of the machinery, no measurement of speed.**" if result["quick"] else ""
    return (
        f"[{result['file']}]({link}/{result['file']}): `{result['command']}` on {where}, {result['threads']} threads, "
        f"{result['dtype']}, {h['memory_bytes'] / 2**30:.0f} GiB; {stack}; {h['system']}; commit {h['commit']}, "
        f"{h['date']}, {result['wall_seconds'] / 60:.1f} minutes.{quick}"
    )


class Column:
    """The column of a GPU: the rows of its file by what they measure, or no file at all."""

    def __init__(self, result: Result | None) -> None:
        name = "GPU" if result is None else ", ".join([*result["hardware"]["gpus"][:1], result["dtype"]])
        self.title = name
        self.rows = {} if result is None else {same(row): row for row in result["rows"]}

    def cell(self, row: Result, show: Callable[[Result], str]) -> str:
        """Show the row of the same case."""
        other = self.rows.get(same(row))
        return NOT_MEASURED if other is None else show(other)


def same(row: Result) -> str:
    """Identify what a row measures, whatever it ran on."""
    return json.dumps([row.get("comparison"), row["label"], row["kind"], row["mode"], row["case"]], sort_keys=True)


def gpu_columns(results: list[Result]) -> list[Column]:
    """Give a column per file that was measured on a GPU, and an empty one where there is none."""
    return [Column(result) for result in results if result["device"] != "cpu"] or [Column(None)]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lay out a Markdown table: the first column to the left, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def speed(row: Result) -> str:
    return f"failed: {row['error']}" if "error" in row else f"{row['tokens_per_second']:,.0f}"


def share(row: Result) -> str:
    if "share_of_matmul" not in row:
        return "–"
    shown = f"{100 * row['share_of_matmul']:.0f} %"
    fastest = row.get("one_dnn_flops_per_second")
    return shown if fastest is None else f"{shown} ({100 * row['flops_per_second'] / fastest:.0f} % of oneDNN)"


def memory(row: Result) -> str:
    return f"{row['peak_memory_bytes'] / 2**20:,.0f}" if "peak_memory_bytes" in row else "–"


def spread(row: Result) -> str:
    """Show how far apart the runs were: slowest over fastest."""
    return f"{row['seconds']['max'] / row['seconds']['min']:.2f}" if "seconds" in row else "–"


def peers_table(result: Result, gpus: list[Column]) -> list[str]:
    """Give a table per comparison and allocator; ratios are of the row's speed to that of each of our sides."""
    lines: list[str] = []
    # one after another, as they were measured: forward alone has the title of forward and backward
    for (title, allocator), group in groupby(result["rows"], lambda row: (row["comparison"], row["allocator"])):
        rows = list(group)
        ours = [row["label"] for row in rows if row["side"] == "ours"]
        others = [row["label"] for row in rows if row["side"] != "ours"]
        head = ["side", "tokens/s", "% of matmul", "peak MiB", "max/min", *(f"× {name}" for name in others)]
        body = [
            [
                row["label"], speed(row), share(row), memory(row), spread(row),
                *(against(row, name) if row["label"] in ours else "" for name in others),
                *(gpu.cell(row, speed) for gpu in gpus),
            ]
            for row in rows
        ]  # fmt: skip
        mode = rows[0]["mode"].replace("+", " + ")
        lines += ["", f"### {title}: {mode}, {allocator} allocator", ""]
        lines += table([*head, *(f"{gpu.title}, tokens/s" for gpu in gpus)], body)
    return lines[1:]


def against(row: Result, name: str) -> str:
    found = row.get("against", {}).get(name)
    return "–" if found is None else f"{found['median']:.2f}"


def ops_table(result: Result, gpus: list[Column]) -> list[str]:
    head = ["case", "mode", "allocator", "tokens/s", "GFLOP/s", "% of matmul", "ms per call", "peak MiB", "max/min"]
    body = [
        [
            row["label"], row["mode"], row["allocator"], speed(row),
            f"{row['flops_per_second'] / 1e9:,.0f}" if "flops_per_second" in row else "–", share(row),
            f"{row['milliseconds_per_call']:,.2f}" if "seconds" in row else "–", memory(row), spread(row),
            *(gpu.cell(row, speed) for gpu in gpus),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return table([*head, *(f"{gpu.title}, tokens/s" for gpu in gpus)], body)


def kernels_table(result: Result) -> list[str]:
    body = [
        [
            row.get("comparison", ""), row["label"], row["mode"], speed(row),
            f"{row['milliseconds_per_call']:,.2f}" if "seconds" in row else "–", memory(row), spread(row),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return table(["shape", "case", "mode", "tokens/s", "ms per call", "peak MiB", "max/min"], body)


def model_table(result: Result, gpus: list[Column]) -> list[str]:
    """Give one line per model: a training step, a prompt, and a token after each context."""
    models: dict[str, list[Result]] = {}
    for row in result["rows"]:
        models.setdefault(row["label"], []).append(row)
    contexts = sorted({row["case"]["context"] for row in result["rows"] if "context" in row["case"]})
    head = ["model", "parameters", "train tokens/s", "train peak MiB", "prompt tokens/s", "prompt peak MiB"]
    head += [f"ms per token at {context:,}" for context in contexts]
    body = []
    for name, rows in models.items():
        train, prompt = (next((row for row in rows if row["mode"] == mode), {}) for mode in ("train", "prefill"))
        count = next((f"{row['parameters']:,}" for row in rows if "parameters" in row), "–")
        line = [name, count, speed(train), memory(train), speed(prompt), memory(prompt)]
        for context in contexts:
            row = next((row for row in rows if row["case"].get("context") == context), {"error": NOT_MEASURED})
            line.append(f"failed: {row['error']}" if "error" in row else f"{row['milliseconds_per_call']:.2f}")
        body.append([*line, *(gpu.cell(train, speed) for gpu in gpus)])
    return table([*head, *(f"{gpu.title}, train tokens/s" for gpu in gpus)], body)


def scaling_table(result: Result, gpus: list[Column]) -> list[str]:
    lengths = [row for row in result["rows"] if row["kind"] == "op"]
    head = ["rows × tokens, forward + backward", "tokens/s", "% of matmul", "peak MiB", "max/min"]
    body = [
        [row["label"], speed(row), share(row), memory(row), spread(row), *(gpu.cell(row, speed) for gpu in gpus)]
        for row in lengths
    ]
    lines = table([*head, *(f"{gpu.title}, tokens/s" for gpu in gpus)], body)
    streams = [row for row in result["rows"] if row["kind"] == "stream"]
    head = ["model that reads on", "tokens", "tokens/s", "resident MiB", "× first window", "speed × second window"]
    body = [
        [
            row["label"],
            f"{row['case']['tokens']:,}",
            speed(row),
            *stream_cells(row),
            *(g.cell(row, speed) for g in gpus),
        ]
        for row in streams
    ]
    return [*lines, "", *table([*head, *(f"{gpu.title}, tokens/s" for gpu in gpus)], body)] if body else lines


def stream_cells(row: Result) -> list[str]:
    """Show the memory at the end, and how it and the speed compare with the beginning."""
    if "error" in row:
        return ["–"] * 3
    end = row["windows"][-1]["memory_bytes"] / 2**20
    return [f"{end:,.0f}", f"{row['memory_ratio']:.3f}", f"{row['throughput_ratio']:.3f}"]


TABLES = {"peers": peers_table, "ops": ops_table, "model": model_table, "scaling": scaling_table}
