"""The demo's plots, and its report: one HTML page that needs nothing but itself."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from titans_lm.demo.books import Opening
from titans_lm.demo.findings import opening_findings, percent, recall_findings, search_findings
from titans_lm.demo.recall import Example, RecallOutcome, Trained
from titans_lm.demo.search import READERS, Asked, Found
from titans_lm.report.figures import Line, Plot
from titans_lm.report.html import Markup, figure, page, paragraphs, section, table, tag

MEMORY, RESET, NONE, CHANCE = "#3451c6", "#e07a1f", "#7a8290", "#b4bac4"
"""Colours, the same in every plot."""
RIGHT, WRONG, LEFT = "#18794e", "#b3261e", "#b4bac4"
"""Colours of answers, and of what nobody asked for any more."""
NAMES = {"memory": "memory file", "reset": "memory reset", "window": "end of the text alone"}
SHOWN = 16
"""Characters of an answer in the table; results.json has all of it."""


def plots(found: Found, recall: RecallOutcome) -> dict[str, Plot]:
    """Give the plots by name: right answers by how long ago it was said, and recall in training."""
    memory = _checked(recall.memory, "memory (LMM)", MEMORY)
    window = _checked(recall.window, f"sliding window of {recall.window.config.window}", NONE)
    chance = Line(
        label="chance", x=(memory.x[0], memory.x[-1]), y=(recall.task.chance,) * 2, colour=CHANCE, dashed=True
    )
    return {
        "distance": _by_distance(found),
        "recall": Plot(
            title=f"Recall over a gap of {recall.task.gap} tokens", x_label="training step", y_label="values named",
            y_range=(-0.02, 1.03), percent=True, lines=[memory, window, chance],
        ),
    }  # fmt: skip


def _checked(trained: Trained, label: str, colour: str) -> Line:
    steps, found = zip(*((check["step"], check["accuracy_over_the_gap"]) for check in trained.checks), strict=True)
    return Line(label=label, x=steps, y=found, colour=colour, marker=True)


def _by_distance(found: Found) -> Plot:
    """Part the questions by how many tokens ago it was said, into up to five parts with as many each."""
    asked = sorted(found.asked, key=lambda one: one.tokens_ago)
    parts = [[asked[i] for i in part] for part in np.array_split(np.arange(len(asked)), min(5, len(asked)))]
    ends = [(part[0].tokens_ago, part[-1].tokens_ago) for part in parts]
    short = asked[-1].tokens_ago < 10_000
    names = [f"{a:,}–{b:,}" if short else f"{a // 1000}–{b // 1000}K" for a, b in ends]
    lines = [
        Line(
            label=NAMES[reader], x=list(range(len(parts))), colour=colour, marker=True,
            y=[sum(one.right(reader) for one in part) / len(part) for part in parts],
            dashed=reader == "window",  # where it is as good as the one before, that one shows between the dashes
        )
        for reader, colour in zip(READERS, (MEMORY, RESET, NONE), strict=True)
    ]  # fmt: skip
    return Plot(
        title="Right answers, by how long ago it was said", x_label="tokens between the sentence and the question",
        y_label="right answers", y_range=(-0.02, 1.03), percent=True, lines=lines, x_labels=names,
    )  # fmt: skip


def report_page(
    found: Found,
    opening: Opening | None,
    recall: RecallOutcome,
    pictures: dict[str, Markup],
    results: dict[str, Any],
    command: str,
) -> str:
    """Put the whole report together; `pictures` are the plots as inline SVG by name."""
    seconds = results["wall_seconds"]
    took = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
    header = tag(
        "header",
        tag("h1", "A memory that keeps learning while it reads"),
        tag(
            "p",
            "What ships with titans-lm reads a long text once. Everything on this page was computed on "
            f"this machine in {took} by ",
            tag("code", command),
            f" on {results['date']}.",
        ),
    )
    beside = tag("p", "The memory files lie beside this page.")
    go_on = section("Go on", beside, tag("pre", "\n".join(results["next"])), id_="next")
    parts = [_search(found, pictures), _questions(found), *([_opening(opening)] if opening else [])]
    return page("titans-lm demo", header, *parts, _recall(recall, pictures), go_on, _run(results), style=STYLE)


def _search(found: Found, pictures: dict[str, Markup]) -> Markup:
    return section(
        "A sentence in a long text",
        tag(
            "p",
            "People walk about: sentences that say so are hidden between those of the text"
            f"{', as are numbers by their names' if len(found.readings) > 1 else ''}. "
            f"{'A small model reads' if len(found.readings) == 1 else 'Two small models read'} all of it once, piece "
            "by piece, into a memory of constant size. "
            "The memory is saved as a file, the text is put away, and the questions are answered from the file alone.",
        ),
        _said(search_findings(found)),
        figure(
            _map(found),
            "The text from its first token (left) to its last: above the line sentences of people"
            f"{', below it numbers' if _has_numbers(found) else ''}; thin lines are where it was asked. Green was "
            "answered right from the memory file, red wrong; grey are places that people had left again before it was "
            "asked.",
        ),
        figure(
            pictures["distance"],
            "All questions. Beside the memory file: the same model with its memory reset, and the same model having "
            f"read the last {found.window:,} tokens alone, which is what a window of that length knows.",
        ),
        id_="search",
    )


def _has_numbers(found: Found) -> bool:
    return any(fact.kind == "number" for fact in found.hidden.facts)


def _map(found: Found) -> Markup:
    """Draw where in the text every sentence stands, and what became of it."""
    verdicts = {(one.question, one.at - one.tokens_ago): one.right("memory") for one in found.asked}
    marks, high = [], 96 if _has_numbers(found) else 49
    for fact, place in zip(found.hidden.facts, found.hidden.places, strict=True):
        right = verdicts.get((fact.question, place))
        top = 8 if fact.kind == "place" else 52
        marks.append(tag(
            "rect", tag("title", f"{fact.sentence} (token {place:,})"), x=f"{1000 * place / found.tokens:.1f}", y=top,
            width=6, height=36, rx=2, fill=LEFT if right is None else RIGHT if right else WRONG,
        ))  # fmt: skip
    ends = [
        tag("rect", x=f"{1000 * end / found.tokens:.1f}", y=0, width=1, height=high, fill=CHANCE)
        for end in found.hidden.ends
    ]
    line = tag("rect", x=0, y=47, width=1006, height=2, fill=NONE)
    return tag("svg", line, *ends, *marks, viewBox=f"0 0 1006 {high}", role="img", aria_label="Map of the text")


def _questions(found: Found) -> Markup:
    def answered(one: Asked, reader: str) -> Markup:
        right, said = one.right(reader), one.answers[reader] or "–"
        said = said if len(said) <= SHOWN else f"{said[:SHOWN]}…"  # without its memory a model may go on and on
        return tag("span", f"{said} {'✓' if right else '✗'}", class_="right" if right else None)

    rows = [
        [one.question, one.expected, *(answered(one, reader) for reader in READERS), f"{one.tokens_ago:,}"]
        for one in found.asked
    ]
    head = ["asked", "it was said", *(NAMES[reader] for reader in READERS), "tokens ago"]
    sizes = [
        [f"pretrained:{r.model}", f"{r.parameters:,}", f"{r.tokens / r.seconds:,.0f}", f"{r.file_bytes:,} bytes"]
        for r in found.readings
    ]
    return section(
        "Every question and every answer",
        tag("div", table(head, rows, numbers=False), class_="wide"),
        table(["model", "parameters", "tokens per second", "memory file"], sizes),
        id_="questions",
    )


def _opening(opening: Opening) -> Markup:
    names = {
        "carried": "learns, carried along",
        "frozen": "frozen (θ = α = 0)",
        "reset": f"thrown away every {opening.reset_every:,} tokens",
    }
    rows = [[names[mode], f"{bits:.4f}"] for mode, bits in opening.bits_per_byte.items()]
    return section(
        "A book model reads",
        tag(
            "p",
            f"A language model of {opening.parameters:,} parameters, trained on novels, reads the start of the same "
            "text. Its memory learns as it reads. Beside it: the same model with its memory frozen, and with its state "
            "thrown away now and then.",
        ),
        _said(opening_findings(opening)),
        table(["memory", "bits per byte"], rows),
        tag("p", "What surprised it, token by token, is on ", tag("code", "surprise.html"), " beside this page."),
        tag("h3", "It goes on writing"),
        tag("p", f"… {opening.before} ", tag("em", opening.written.strip())),
        id_="books",
    )


def _recall(recall: RecallOutcome, pictures: dict[str, Markup]) -> Markup:
    task, config = recall.task, recall.window.config
    rows = [
        [*_size(name, trained), f"{trained.steps:,} steps, {trained.seconds:.0f} s", percent(found.accuracy)]
        for name, trained, found in (
            ("memory (LMM)", recall.memory, recall.memory_recall),
            (f"sliding window of {config.window}", recall.window, recall.window_recall),
        )
    ]
    return section(
        "Learning works here too",
        tag(
            "p",
            f"{task.pairs} pairs of a key and a value, {task.gap} tokens of filler, then every key again: the model "
            f"must name the value. {config.num_hidden_layers} layers of a window of {config.window}, with a short "
            f"convolution of {config.attention_conv_size}, can look {recall.reach} tokens back at most, which is less "
            "than the gap. The memory has no window: what it knows, it has written into its weights while reading.",
        ),
        figure(
            pictures["recall"],
            "Values named right in fresh examples over the whole gap. Both models train on the same batches: with gaps "
            f"of {', '.join(map(str, recall.gaps))} tokens in turn, after a start with the shortest alone.",
        ),
        table(["model", "parameters", "state per sequence", "training", "fresh examples"], rows),
        _said(recall_findings(recall)),
        tag("h3", "One fresh example"),
        _example(recall.example, task.symbols // 2),
        id_="recall",
    )


def _size(name: str, trained: Trained) -> list[str]:
    count = trained.state_bytes
    return [name, f"{trained.parameters:,}", f"{count / 1024:,.0f} KiB" if count >= 10_240 else f"{count:,} bytes"]


def _example(example: Example, half: int) -> Markup:
    """Show which keys were asked after the gap, and what both models answered."""
    asked = [place for place, target in enumerate(example.targets) if target > 0]

    def name(token: int) -> str:
        return "·" if token == 0 else f"k{token}" if token <= half else f"v{token - half}"

    def answers(given: list[int]) -> list[Markup]:
        marks = [(given[place], given[place] == example.targets[place]) for place in asked]
        return [tag("span", f"{name(v)}\u00a0{'✓' if ok else '✗'}", class_="right" if ok else None) for v, ok in marks]

    rows = [
        ["right answer", *(name(example.targets[place]) for place in asked)],
        ["memory", *answers(example.memory)],
        ["sliding window", *answers(example.window)],
    ]
    return table(["asked", *(name(example.tokens[place]) for place in asked)], rows)


def _run(results: dict[str, Any]) -> Markup:
    settings = {**results["settings"], "plan": results["plan"]}
    stages = [
        [name, f"{seconds:.1f} s"] for name, seconds in {**results["stages"], "all": results["wall_seconds"]}.items()
    ]
    about = [
        [name.replace("_", " "), ", ".join(map(str, value)) or "none" if isinstance(value, list) else value]
        for name, value in results["environment"].items()
    ]
    return section(
        "How this was run",
        tag(
            "p",
            "One draw: directions, not results; another draw with --seed. All numbers, with every answer, every step "
            "of training and all settings, are in ",
            tag("code", "results.json"),
            " beside this page.",
        ),
        table(["stage", "time"], stages),
        table(["machine and versions", ""], about, numbers=False),
        tag("details", tag("summary", "Settings"), tag("pre", json.dumps(settings, indent=1))),
        id_="run",
    )


def _said(lines: Sequence[str]) -> Markup:
    """Set findings as paragraphs; a number and its unit stay on one line."""
    return paragraphs(re.sub(r"(\d) (%|kB|s\b)", "\\1\u00a0\\2", line) for line in lines)


STYLE = """
.right { color: #18794e; font-weight: 600; }
@media (min-width: 40rem) { .wide td { white-space: nowrap; } }
@media (max-width: 40rem) { .wide th, .wide td { padding-right: .5rem; font-size: .8rem; } }
"""
