"""The demo's report: one HTML page that needs nothing but itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titans_lm.demo import figures
from titans_lm.demo.findings import language_findings, percent, reading_findings, recall_findings
from titans_lm.demo.language import LanguageOutcome
from titans_lm.demo.reading import Reading
from titans_lm.demo.recall import Example, RecallOutcome
from titans_lm.report.heat import coloured_text, heat_style, levels
from titans_lm.report.html import Markup, figure, join, page, paragraphs, section, table, tag

SURPRISE, BITS = (214, 84, 20), (52, 81, 198)
"""Colours of the memory's surprise and of the model's own."""
DELTA, TIMES = "‖∇ℓ‖", "×"


@dataclass(frozen=True)
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


def report_page(
    recall: RecallOutcome, language: LanguageOutcome, reading: Reading, pictures: dict[str, Markup], facts: Facts
) -> str:
    """Put the whole report together; `pictures` are the plots as inline SVG by name."""
    return page(
        "titans-lm demo",
        _header(facts),
        tag("div", _recall_card(recall), _text_card(language), class_="cards"),
        _recall_section(recall, pictures),
        _language_section(language, pictures, facts),
        _surprise_section(reading),
        _continuation_section(reading),
        _run_section(recall, language, facts),
        style=STYLE + heat_style({"#by-surprise:checked ~ .heat": SURPRISE, "#by-bits:checked ~ .heat": BITS}),
    )


def _header(facts: Facts) -> Markup:
    return tag(
        "header",
        tag("h1", "A memory that keeps learning while it reads"),
        tag(
            "p",
            "Small Titans models, trained from nothing on this machine a moment ago, beside models of equal size "
            f"without a memory. Everything on this page was computed in {_minutes(facts.wall_seconds)} by ",
            tag("code", facts.command),
            f" on {facts.date}.",
        ),
    )


def _bars(rows: Sequence[tuple[str, float, str, str]], full: float) -> Markup:
    """Draw labelled bars: (label, length, text of the value, colour), `full` being the whole width."""
    return join(
        tag(
            "div",
            tag("span", label, class_="bar-label"),
            tag("span", tag("span", style=_bar(value / full, colour), class_="fill"), class_="track"),
            tag("span", shown, class_="bar-value"),
            class_="bar",
        )
        for label, value, shown, colour in rows
    )


def _bar(share: float, colour: str) -> str:
    return f"width: {100 * min(max(share, 0.0), 1.0):.2f}%; background: {colour}"


def _recall_card(recall: RecallOutcome) -> Markup:
    memory, window, chance = recall.memory_recall.accuracy, recall.window_recall.accuracy, recall.task.chance
    rows = [
        ("memory", memory, percent(memory), figures.MEMORY),
        ("sliding window", window, percent(window), figures.NONE),
        ("guessing", chance, percent(chance), figures.CHANCE),
    ]
    return tag(
        "div",
        tag("h2", f"Recall over a gap of {recall.task.gap} tokens"),
        _bars(rows, 1.0),
        tag("p", "Values named correctly; more is better.", class_="note"),
        class_="card",
    )


def _text_card(language: LanguageOutcome) -> Markup:
    bits = [m.bits_per_byte for m in (language.with_memory, language.reset, language.without)]
    labels = ("memory", "memory reset", "no memory")
    colours = (figures.MEMORY, figures.RESET, figures.NONE)
    rows = [(a, b, f"{b:.3f}", c) for a, b, c in zip(labels, bits, colours, strict=True)]
    return tag(
        "div",
        tag("h2", "Bits per byte of held-out text"),
        _bars(rows, max(*bits, 1e-9) * 1.02),
        tag("p", "Less is better; text stored as it is costs 8.", class_="note"),
        class_="card",
    )


def _recall_section(recall: RecallOutcome, pictures: dict[str, Markup]) -> Markup:
    task, window = recall.task, recall.window.config
    rows = [
        _model_row("memory (LMM)", recall.memory, percent(recall.memory_recall.accuracy)),
        _model_row(f"sliding window of {window.window}", recall.window, percent(recall.window_recall.accuracy)),
    ]
    return section(
        "1  Remembering over a gap",
        tag(
            "p",
            f"{task.pairs} pairs of a key and a value, {task.gap} tokens of filler, then every key again: the model "
            f"must name the value. {window.num_hidden_layers} layers of a window of {window.window}, with a short "
            f"convolution of {window.attention_conv_size}, can look {recall.reach} tokens back at most, which is less "
            "than the gap. The memory has no window: what it knows, it has written into its weights while reading.",
        ),
        figure(
            pictures["recall"],
            "Values named right in fresh examples over the whole gap. Both models train on the same batches: with gaps "
            f"of {', '.join(map(str, recall.gaps))} tokens in turn, after a start with the shortest alone.",
        ),
        table(["model", "parameters", "state per sequence", "training", "fresh examples"], rows),
        _told(recall_findings(recall)),
        tag("h3", "One fresh example"),
        _example(recall.example, task.symbols, task.gap),
        id_="recall",
    )


def _model_row(name: str, trained: Any, last: str) -> list[str]:
    return [
        name,
        f"{trained.parameters:,}",
        _bytes(trained.state_bytes),
        f"{trained.steps:,} steps, {trained.seconds:.0f} s",
        last,
    ]


def _example(example: Example, symbols: int, gap: int) -> Markup:
    """Show what was read as chips, and what was asked as a table of answers."""
    half = symbols // 2

    def name(token: int) -> str:
        return "·" if token == 0 else f"k{token}" if token <= half else f"v{token - half}"

    def answer(given: int, right: int) -> Markup:
        return tag("span", f"{name(given)} {'✓' if given == right else '✗'}", class_="right" if given == right else "")

    asked = [place for place, target in enumerate(example.targets) if target > 0]
    head = example.tokens[: len(asked) * 2]
    chips = [tag("span", name(t), class_="chip key" if t <= half else "chip value") for t in head]
    read = tag("p", *chips, tag("span", f"{gap} × filler", class_="chip gap"), class_="chips")
    rows = [
        ["right answer", *(name(example.targets[place]) for place in asked)],
        ["memory", *(answer(example.memory[place], example.targets[place]) for place in asked)],
        ["sliding window", *(answer(example.window[place], example.targets[place]) for place in asked)],
    ]
    return join([read, table(["asked", *(name(example.tokens[place]) for place in asked)], rows)])


def _language_section(language: LanguageOutcome, pictures: dict[str, Markup], facts: Facts) -> Markup:
    kinds = (
        ("memory carried through the document", language.memory, language.with_memory),
        (f"the same model, reset every {language.segment_len} bytes", language.memory, language.reset),
        ("no memory: segments alone", language.no_memory, language.without),
    )
    rows = [
        [name, f"{t.parameters:,}", _bytes(t.state_bytes), f"{t.seconds:.0f} s", f"{m.bits_per_byte:.3f}"]
        for name, t, m in kinds
    ]
    counts, trained = language.corpus.describe(), language.memory
    return section(
        "2  Reading real text",
        tag(
            "p",
            f"A byte model with memory as context (MAC) was trained on {facts.text_name}: {trained.steps:,} steps, "
            f"{trained.tokens:,} of {counts['train_bytes']:,} bytes. Its attention sees a segment of "
            f"{language.segment_len} bytes; what is older reaches it through the memory only. It is measured on the "
            f"first bytes of {len(language.with_memory.by_document)} documents that were held out, "
            f"{language.with_memory.bytes:,} bytes in all.",
        ),
        table(["", "parameters", "state per sequence", "training", "bits per byte"], rows),
        _told(language_findings(language)),
        figure(
            pictures["position"],
            "Every point compares the same bytes; which documents reach a position, and what stands there (a licence, "
            "imports, code), differs from point to point.",
        ),
        figure(pictures["gain"], "The same model on the same bytes, with and without what earlier segments left."),
        figure(pictures["training"], "Training batches, both models on the same ones: single steps and running mean."),
        id_="text",
    )


def _surprise_section(reading: Reading) -> Markup:
    shown = reading.data[: reading.shown_bytes]
    summary, bits = (x[1 : len(shown) + 1] for x in (reading.surprise.summary(), reading.surprise.bits))

    def note(place: slice) -> str:
        return f"{DELTA} {summary[place].mean():.2f} {TIMES} median   ·   {bits[place].sum():.2f} bits"

    def choice(id_: str, label: str, checked: str | None) -> list[Markup]:
        return [
            tag("input", type="radio", name="shade", id=id_, checked=checked),
            tag("label", label, for_=id_),
        ]

    return section(
        "3  What surprised the memory",
        tag(
            "p",
            f"The start of {reading.name}, which no model here was trained on. The colour of a byte is the size of the "
            f"gradient {DELTA} that the memory wrote it with, averaged over all memories of the model, from the least "
            "surprising sixteenth to the most. Point at a byte for its numbers.",
        ),
        tag(
            "div",
            *choice("by-surprise", f"the memory’s surprise {DELTA}", "checked"),
            *choice("by-bits", "the model’s own: bits needed", None),
            tag("p", *(tag("span", class_=f"s0-{i} s1-{i}") for i in range(16)), class_="heat legend"),
            coloured_text(shown, [levels(summary), levels(bits)], note, label=f"{reading.name}, coloured by surprise"),
            class_="views",
        ),
        _told(reading_findings(reading)),
        id_="surprise",
    )


def _continuation_section(reading: Reading) -> Markup:
    return section(
        "4  Reading on",
        tag(
            "p",
            f"The model read {len(reading.data):,} bytes of {reading.name} and wrote what "
            f"stands in colour, {reading.continuation.tokens:,} tokens sampled at temperature {reading.temperature:g}. "
            "After minutes of training a model writes the shape of such text, not sense.",
        ),
        tag("pre", reading.prompt_tail, tag("span", reading.continuation.text, class_="written")),
        id_="continuation",
    )


def _run_section(recall: RecallOutcome, language: LanguageOutcome, facts: Facts) -> Markup:
    stages = [[name, f"{seconds:.1f} s"] for name, seconds in facts.stages.items()]
    about = [[name.replace("_", " "), _plain(value)] for name, value in facts.environment.items()]
    return section(
        "How this was run",
        tag(
            "p",
            "One seed, small models, minutes of training: directions, not results. Intervals are over held-out "
            "documents, not over seeds. All numbers, with every step of training and all settings, are in ",
            tag("code", "results.json"),
            " beside this page.",
        ),
        table(["stage", "time"], [*stages, ["all", f"{facts.wall_seconds:.1f} s"]]),
        table(["machine and versions", ""], about, numbers=False),
        tag("details", tag("summary", "Settings"), tag("pre", _settings(recall, language, facts))),
        id_="run",
    )


def _settings(recall: RecallOutcome, language: LanguageOutcome, facts: Facts) -> str:
    lines = [f"{name}: {value}" for name, value in facts.settings.items()]
    for trained in (recall.memory, recall.window, language.memory, language.no_memory):
        lines += ["", f"model {trained.name!r}"]
        lines += [f"  {name}: {value}" for name, value in vars(trained.config).items()]
    return "\n".join(lines)


def _told(lines: Sequence[str]) -> Markup:
    """Set findings as paragraphs; a number and its percent sign stay on one line."""
    return paragraphs(line.replace(" %", "\u00a0%") for line in lines)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _bytes(count: int) -> str:
    return f"{count / 1024:,.0f} KiB" if count >= 10_240 else f"{count:,} bytes"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"


STYLE = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 1.5rem; margin-top: 2rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 1.5rem 1.75rem; }
.card h2 { font-size: 1.05rem; }
.note { color: var(--soft); font-size: .875rem; margin: .75rem 0 0; }
.bar { display: grid; grid-template-columns: 7.5rem 1fr 4rem; align-items: center; gap: .75rem; margin: .4rem 0; }
.bar-label { font-size: .925rem; }
.bar-value { text-align: right; font-weight: 600; font-variant-numeric: tabular-nums; }
.track { background: var(--ground); border-radius: 4px; height: 1.1rem; overflow: hidden; }
.fill { display: block; height: 100%; border-radius: 4px; min-width: 2px; }
.chips { display: flex; flex-wrap: wrap; gap: .25rem; max-width: none; }
.chip { font: 600 .75rem/1 ui-monospace, Menlo, Consolas, monospace; padding: .4rem; border-radius: 6px; }
.key { background: #e4e9fb; color: #2a42a3; }
.value { background: #fdeedd; color: #9a4a06; margin-right: .35rem; }
.gap { background: var(--ground); color: var(--soft); }
.right { color: #18794e; font-weight: 600; }
.written { background: #e4e9fb; color: #22368a; border-radius: 3px; }
.views input { accent-color: var(--accent); margin: 0 .4rem 0 0; }
.views label { margin-right: 1.5rem; font-size: .925rem; }
.legend { display: flex; border: 0; margin: .75rem 0; max-width: 16rem; }
.legend span { flex: 1; height: .8rem; }
.legend span:hover { outline: 0; }
"""
