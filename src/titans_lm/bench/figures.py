"""The plots of the page of results."""

from pathlib import Path
from statistics import median
from typing import Any

from titans_lm.bench import classified, compared, forecasted, positions, reread, scored
from titans_lm.report.plots import ACCENT, HeatMaps, Line, Panels, Plot, Ranking

OURS, SECOND = ACCENT, "#e07a1f"
Results = dict[str, list[dict[str, Any]]]


def plots(found: Results) -> dict[str, Plot | Panels | HeatMaps | Ranking]:
    """Give what can be drawn of the first result of each kind, by the name of its file."""
    drawn: dict[str, Plot | Panels | HeatMaps | Ranking] = {
        Path(result["file"]).stem: compared.plot(result) for result in found.get("compare", [])
    }
    drawn |= {Path(result["file"]).stem: scored.plot(result) for result in found.get("task", [])}
    drawn |= {Path(result["file"]).stem: positions.plot(result) for result in found.get("perplexity", [])}
    drawn |= {Path(result["file"]).stem: reread.plot(result) for result in found.get("reread", [])}
    drawn |= {Path(result["file"]).stem: forecasted.plot(result) for result in found.get("forecast", [])}
    drawn |= {Path(result["file"]).stem: classified.plot(result) for result in found.get("genomics", [])}
    for result in found.get("task", []):
        if (heat := scored.heat(result)) is not None:
            drawn[f"{Path(result['file']).stem}-depth"] = heat
    if found["scaling"]:
        rows = [row for row in found["scaling"][0]["rows"] if "error" not in row]
        drawn |= length_plots([row for row in rows if row["kind"] == "op" and row["case"]["rows"] == 1])
        streams = [row for row in rows if row["kind"] == "stream"]
        if streams:
            drawn["scaling-stream"] = stream_plot(streams)
    return drawn


def length_plots(rows: list[dict[str, Any]]) -> dict[str, Plot]:
    """Speed and memory by the tokens of a row."""
    if len(rows) < 2:
        return {}
    places, names = list(range(len(rows))), [f"{row['case']['tokens']:,}" for row in rows]

    def plot(title: str, y_label: str, values: list[float]) -> Plot:
        line = Line(label="op, forward + backward", x=places, y=values, colour=OURS, marker=True)
        top = 1.15 * max(values)
        return Plot(title=title, x_label="tokens", y_label=y_label, lines=[line], y_range=(0.0, top), x_labels=names)

    return {
        "scaling-speed": plot(
            "Speed by length", "tokens per second", [float(row["tokens_per_second"]) for row in rows]
        ),
        "scaling-memory": plot(
            "Peak memory by length", "MiB", [row["peak_memory_bytes"] / 2**20 for row in rows]
        ),
    }  # fmt: skip


def stream_plot(rows: list[dict[str, Any]]) -> Plot:
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


def shares(windows: list[dict[str, Any]]) -> list[float]:
    """The speed of each window against that of the second."""
    start = windows[min(1, len(windows) - 1)]["tokens_per_second"]
    return [window["tokens_per_second"] / start for window in windows]
