"""Reading a file and writing down what surprised the memory: surprise.html, surprise.png and surprise.jsonl."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from titans_lm.config import check_at_least
from titans_lm.report.plots import Line, Panels, Plot, draw, save_png, smoothed
from titans_lm.report.surprise.page import COLOURS, NAMES, Facts, surprise_page
from titans_lm.report.surprise.text import TokenText, by_piece, read_file
from titans_lm.streaming import load_memory
from titans_lm.surprise import PARTS, Surprise, check_surprised, measure_surprise
from titans_lm.train.files import check_writable, write_atomically
from titans_lm.train.progress import CountReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLACES = 1500
"""Points of a line of the plot; longer texts are averaged to as many."""
APART = 24
"""Pieces between two of the most surprising, so that one place does not fill the list."""


def write_surprise(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    file: Path,
    out: Path,
    *,
    name: str = "",
    memory: Path | None = None,
    max_tokens: int = 20_000,
    piece_len: int = 512,
    quiet: bool = True,
) -> dict[str, Any]:
    """Read a file as a document of its own, and write into `out` what surprised the memory; return a summary.

    With a `memory` file the document follows what it has read. The page shows the first `max_tokens` tokens, plot and
    JSON lines have all; `name` is what the page calls the model. Files of these names are replaced. Raises ValueError
    for a file or a memory that cannot be read, and for a model without memory, before anything is written.
    """
    check_at_least("max_tokens", max_tokens, 1)
    check_surprised(model)
    paths = {kind: out / f"surprise.{kind}" for kind in ("html", "png", "jsonl")}
    for path in paths.values():
        check_writable("the file", path)
    began = time.perf_counter()
    known = None if memory is None else load_memory(memory, model)
    text = read_file(file, tokenizer, after_open_document=known is not None and any(known.open))
    with CountReport(quiet=quiet, title="reading").start(len(text.ids)) as report:
        found = measure_surprise(model, text.ids, piece_len=piece_len, memory=known, on_piece=report.reach)
    owner: Any = model
    config = owner.config.backbone_config()
    facts = Facts(
        model=name or type(model).__name__,
        architecture=", ".join(config.blocks) if config.is_mixed else config.architecture,
        forget_to=config.forget_to,
        memory=None if memory is None else str(memory),
        memory_tokens=0 if known is None else sum(known.tokens),
    )
    page, figure = surprise_page(found, text, facts, max_tokens), surprise_figure(found, text.name)
    write_atomically(paths["html"], page)
    save_png(figure, paths["png"])
    write_atomically(paths["jsonl"], lines_of(found, text))
    known_bits = found.bits[np.isfinite(found.bits)]
    return {
        "file": str(file),
        "memory": facts.memory,
        "tokens": len(text.ids),
        "tokens_on_page": int(text.starts[text.pieces_within(max_tokens)]),
        "bits_per_token": round(float(known_bits.mean()), 4) if len(known_bits) else None,
        **{kind: str(path) for kind, path in paths.items()},
        "html_bytes": paths["html"].stat().st_size,
        "seconds": round(time.perf_counter() - began, 3),
        "most_surprising": most_surprising(found, text),
    }


def lines_of(surprise: Surprise, text: TokenText) -> Iterator[str]:
    """A line of JSON for every token: its place, id and text, its bits, and the sizes by block, head and layer."""
    parts = {what: surprise.part(what) for what in PARTS}
    for place, (token, said, bits) in enumerate(zip(text.ids.tolist(), text.says, surprise.bits.tolist(), strict=True)):
        record = {"position": place, "token": token, "text": said, "bits": _short(bits)}
        record |= {what: _short(part[place].tolist()) for what, part in parts.items()}
        yield json.dumps(record, ensure_ascii=False) + "\n"


def _short(value: Any) -> Any:
    """Six digits of every number, which is what single precision has; None for what JSON has no number for."""
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if math.isfinite(value) else None


def surprise_figure(surprise: Surprise, name: str) -> Figure:
    """Draw the three sizes and the bits along the text: means of neighbours, and a running mean of these."""
    series = {what: surprise.summary(what) for what in PARTS} | {"bits": surprise.bits}
    edges = np.linspace(0, len(surprise.tokens), min(len(surprise.tokens), PLACES) + 1).astype(int)
    plots = []
    for what, values in series.items():
        points = by_piece(np.where(np.isfinite(values), values, 0.0), edges).tolist()  # the first token has no bits
        line = Line(
            label=NAMES[what], x=edges[:-1].tolist(), y=smoothed(points, 0.95), faint=points,
            colour="#{:02x}{:02x}{:02x}".format(*(round(0.8 * part) for part in COLOURS[what])),
        )  # fmt: skip
        unit, below = ("bits", "token") if what == "bits" else ("× median", "")
        plots.append(Plot(title=NAMES[what], x_label=below, y_label=unit, lines=[line]))
    return draw(Panels(title=name, panels=plots))


def most_surprising(surprise: Surprise, text: TokenText, count: int = 8) -> list[dict[str, Any]]:
    """The pieces of the text with the largest momentary surprise, each with its neighbours and its numbers."""
    series = {what: by_piece(surprise.summary(what), text.starts) for what in PARTS}
    bits = by_piece(surprise.bits, text.starts, total=True)
    taken: list[int] = []
    for i in np.argsort(-series["momentary"], kind="stable").tolist():
        if i >= text.marks and all(abs(i - other) >= APART for other in taken):
            taken.append(i)
        if len(taken) == count:
            break
    return [
        {
            "position": int(text.starts[i]),
            "text": text.pieces[i],
            "context": _context(text, i),
            **{what: _short(float(values[i])) for what, values in series.items()},
            "bits": _short(float(bits[i])),
        }
        for i in taken
    ]


def _context(text: TokenText, i: int) -> str:
    before, after = text.pieces[max(text.marks, i - 32) : i], text.pieces[i + 1 : i + 13]
    return f"{''.join(before)}[{text.pieces[i]}]{''.join(after)}".replace("\n", "↵").replace("\t", " ")
