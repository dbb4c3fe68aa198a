"""The demo's plots, and its report: one HTML page that needs nothing but itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titans_lm.demo.findings import language_findings, percent, reading_findings, recall_findings
from titans_lm.demo.language import LanguageOutcome
from titans_lm.demo.reading import Reading
from titans_lm.demo.recall import Example, RecallOutcome
from titans_lm.demo.training import Trained
from titans_lm.report.figures import Line, Plot
from titans_lm.report.heat import coloured_text, heat_style, levels
from titans_lm.report.html import Markup, figure, join, page, paragraphs, section, table, tag
from titans_lm.report.plots import smoothed

MEMORY, RESET, NONE, CHANCE = "#3451c6", "#e07a1f", "#7a8290", "#b4bac4"
"""Colours, the same in every plot."""
SURPRISE, BITS = (214, 84, 20), (52, 81, 198)
"""Colours of the memory's surprise and of the model's own."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the page says about the run itself."""

    text_name: str
    """The text in words, for the middle of a sentence."""
    command: str
    date: str
    wall_seconds: float
    stages: dict[str, float]
    environment: dict[str, Any]
    settings: dict[str, Any]


def plots(recall: RecallOutcome, language: LanguageOutcome) -> dict[str, Plot]:
    """Give the plots by name: recall in training, held-out text by position, what carrying saves, training."""
    with_memory, reset, without = (
        [bucket.bits_per_token for bucket in found.by_position]
        for found in (language.with_memory, language.reset, language.without)
    )
    gap = f"Recall over a gap of {recall.task.gap} tokens"
    names = [f"{bucket.start:,}–{bucket.stop - 1:,}" for bucket in language.reset.by_position]
    read = {"x_label": "bytes read before", "y_label": "bits per byte", "x_labels": names}

    def checked(trained: Trained, label: str, colour: str) -> Line:
        steps, found = zip(*((check["step"], check["accuracy_over_the_gap"]) for check in trained.checks), strict=True)
        return Line(label=label, x=steps, y=found, colour=colour, marker=True)

    def along(label: str, values: list[float], colour: str) -> Line:
        return Line(label=label, x=list(range(len(values))), y=values, colour=colour, marker=True)

    def level(label: str, value: float, ends: Sequence[float]) -> Line:
        return Line(label=label, x=(ends[0], ends[-1]), y=(value, value), colour=CHANCE, dashed=True)

    def trained(one: Trained, label: str, colour: str) -> Line:
        bits = [record["bits_per_token"] for record in one.curve]
        steps = [record["step"] for record in one.curve]
        return Line(label=label, x=steps, y=smoothed(bits), faint=bits, colour=colour)

    memory = checked(recall.memory, "memory (LMM)", MEMORY)
    window = checked(recall.window, f"sliding window of {recall.window.config.window}", NONE)
    carried = along("memory carried − memory reset", [a - b for a, b in zip(with_memory, reset, strict=True)], MEMORY)
    return {
        "recall": Plot(
            title=gap, x_label="training step", y_label="values named", y_range=(-0.02, 1.03), percent=True,
            lines=[memory, window, level("chance", recall.task.chance, memory.x)],
        ),
        "position": Plot(
            title="Held-out text, by position in the document",
            lines=[
                along("without memory", without, NONE),
                along("memory reset at every segment", reset, RESET),
                along("memory carried", with_memory, MEMORY),
            ],
            **read,
        ),
        "gain": Plot(
            title="What carrying the memory saves (below zero) or costs (above)",
            lines=[carried, level("no difference", 0.0, carried.x)],
            **read,
        ),
        "training": Plot(
            title="Training on text", x_label="training step", y_label="bits per byte",
            lines=[
                trained(language.no_memory, "without memory (segments)", NONE),
                trained(language.memory, "with memory (MAC)", MEMORY),
            ],
        ),
    }  # fmt: skip


def report_page(
    recall: RecallOutcome, language: LanguageOutcome, reading: Reading, pictures: dict[str, Markup], facts: Facts
) -> str:
    """Put the whole report together; `pictures` are the plots as inline SVG by name."""
    seconds = facts.wall_seconds
    took = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
    header = tag(
        "header",
        tag("h1", "A memory that keeps learning while it reads"),
        tag(
            "p",
            "Small Titans models, trained from nothing on this machine a moment ago, beside models of equal size "
            f"without a memory. Everything on this page was computed in {took} by ",
            tag("code", facts.command),
            f" on {facts.date}.",
        ),
    )
    return page(
        "titans-lm demo",
        header,
        _recall(recall, pictures),
        _language(language, pictures, facts),
        _surprise(reading),
        _continuation(reading),
        _run(facts),
        style=STYLE + heat_style({"#by-surprise:checked ~ .heat": SURPRISE, "#by-bits:checked ~ .heat": BITS}),
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
        "1  Remembering over a gap",
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
        return [tag("span", f"{name(v)} {'✓' if ok else '✗'}", class_="right" if ok else None) for v, ok in marks]

    rows = [
        ["right answer", *(name(example.targets[place]) for place in asked)],
        ["memory", *answers(example.memory)],
        ["sliding window", *answers(example.window)],
    ]
    return table(["asked", *(name(example.tokens[place]) for place in asked)], rows)


def _language(language: LanguageOutcome, pictures: dict[str, Markup], facts: Facts) -> Markup:
    kinds = (
        ("memory carried through the document", language.memory, language.with_memory),
        (f"the same model, reset every {language.segment_len} bytes", language.memory, language.reset),
        ("no memory: segments alone", language.no_memory, language.without),
    )
    rows = [[*_size(name, t), f"{t.seconds:.0f} s", f"{found.bits_per_byte:.3f}"] for name, t, found in kinds]
    counts, trained = language.corpus.describe(), language.memory
    return section(
        "2  Reading real text",
        tag(
            "p",
            f"A byte model with memory as context (MAC) was trained on {facts.text_name}: {trained.steps:,} steps, "
            f"{trained.tokens:,} of {counts['train_bytes']:,} bytes. Its attention sees a segment of "
            f"{language.segment_len} bytes; what is older reaches it through the memory only. It is measured on the "
            f"first bytes of {len(language.with_memory.by_document)} documents that were held out, "
            f"{language.with_memory.bytes:,} bytes in all. Text stored as it is costs 8 bits per byte.",
        ),
        table(["", "parameters", "state per sequence", "training", "bits per byte"], rows),
        _said(language_findings(language)),
        figure(
            pictures["position"],
            "Every point compares the same bytes; which documents reach a position, and what stands there (a licence, "
            "imports, code), differs from point to point.",
        ),
        figure(pictures["gain"], "The same model on the same bytes, with and without what earlier segments left."),
        figure(pictures["training"], "Training batches, both models on the same ones: single steps and running mean."),
        id_="text",
    )


def _surprise(reading: Reading) -> Markup:
    shown = reading.data[: reading.plan.shown_bytes]
    summary, bits = (x[1 : len(shown) + 1] for x in (reading.surprise.summary(), reading.surprise.bits))

    def note(place: slice) -> str:
        return f"‖∇ℓ‖ {summary[place].mean():.2f} × median   ·   {bits[place].sum():.2f} bits"

    def choice(id_: str, label: str, checked: str | None) -> Markup:
        button = tag("input", type="radio", name="shade", id=id_, checked=checked)
        return join([button, tag("label", label, for_=id_)])

    return section(
        "3  What surprised the memory",
        tag(
            "p",
            f"The start of {reading.name}, which no model here was trained on. The colour of a byte is the size of the "
            "gradient ‖∇ℓ‖ that the memory wrote it with, averaged over all memories of the model, from the least "
            "surprising sixteenth to the most. Point at a byte for its numbers.",
        ),
        tag(
            "div",
            choice("by-surprise", "the memory’s surprise ‖∇ℓ‖", "checked"),
            choice("by-bits", "the model’s own: bits needed", None),
            tag("p", *(tag("span", class_=f"s0-{i} s1-{i}") for i in range(16)), class_="heat legend"),
            coloured_text(shown, [levels(summary), levels(bits)], note, label=f"{reading.name}, coloured by surprise"),
            class_="views",
        ),
        _said(reading_findings(reading)),
        id_="surprise",
    )


def _continuation(reading: Reading) -> Markup:
    said = (
        f"The model read {len(reading.data):,} bytes of {reading.name} and wrote what stands in colour, "
        f"{reading.continuation.tokens:,} tokens sampled at temperature {reading.plan.temperature:g}. After minutes of "
        "training a model writes the shape of such text, not sense."
    )
    text = tag("pre", reading.prompt_tail, tag("span", reading.continuation.text, class_="written"))
    return section("4  Reading on", tag("p", said), text, id_="continuation")


def _run(facts: Facts) -> Markup:
    stages = [[name, f"{seconds:.1f} s"] for name, seconds in {**facts.stages, "all": facts.wall_seconds}.items()]
    about = [
        [name.replace("_", " "), ", ".join(map(str, value)) or "none" if isinstance(value, list) else value]
        for name, value in facts.environment.items()
    ]
    return section(
        "How this was run",
        tag(
            "p",
            "One seed, small models, minutes of training: directions, not results. Intervals are over held-out "
            "documents, not over seeds. All numbers, with every step of training and all settings, are in ",
            tag("code", "results.json"),
            " beside this page.",
        ),
        table(["stage", "time"], stages),
        table(["machine and versions", ""], about, numbers=False),
        tag("details", tag("summary", "Settings"), tag("pre", json.dumps(facts.settings, indent=1))),
        id_="run",
    )


def _said(lines: Sequence[str]) -> Markup:
    """Set findings as paragraphs; a number and its percent sign stay on one line."""
    return paragraphs(line.replace(" %", "\u00a0%") for line in lines)


STYLE = """
.right { color: #18794e; font-weight: 600; }
.written { background: #e4e9fb; color: #22368a; border-radius: 3px; }
.views input { accent-color: var(--accent); margin: 0 .4rem 0 0; }
.views label { margin-right: 1.5rem; font-size: .925rem; }
.legend { display: flex; border: 0; margin: .75rem 0; max-width: 16rem; }
.legend span { flex: 1; height: .8rem; }
.legend span:hover { outline: 0; }
"""
