"""The demo's page: plots, sentences that are computed from the numbers, and one HTML file that needs nothing else."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from titans_lm.data.tasks.stories import ROOMS
from titans_lm.demo.hidden import Kind
from titans_lm.demo.recall import Example, RecallOutcome, Trained
from titans_lm.demo.search import READERS, Asked, Found, Opening
from titans_lm.evaluate.accuracy import Recall
from titans_lm.report.html import Markup, figure, page, paragraphs, section, table, tag
from titans_lm.report.plots import Line, Plot

LEARNED = 0.95
"""Accuracy from which recall counts as learned."""


def percent(share: float) -> str:
    """Write a share as percent; only exactly all is 100 %."""
    return "100 %" if share == 1.0 else f"{min(100 * share, 99.9):.1f} %"


def recall_findings(outcome: RecallOutcome) -> list[str]:
    """Say who remembers over the gap, and by how much it differs from guessing."""
    memory, window, task = outcome.memory_recall, outcome.window_recall, outcome.task
    config = outcome.window.config
    lines = [
        f"The memory names {percent(memory.accuracy)} of the values after a gap of {task.gap} filler tokens: "
        f"{_standing(memory)}.",
        f"The sliding window of {config.window} tokens, which in {config.num_hidden_layers} layers can look "
        f"{outcome.reach} tokens back at most, names {percent(window.accuracy)}: {_standing(window)}.",
    ]
    if memory.accuracy <= window.accuracy:
        lines.append("So on this run the memory is no better than the window.")
    elif memory.interval[0] <= window.interval[1]:
        lines.append("So on this run the memory cannot be told from the window.")
    elif memory.accuracy < LEARNED:
        lines.append("So the memory bridges the gap, but it has not learned the task in these steps.")
    else:
        lines.append("So what was read before the gap is in the memory, and nowhere within reach of the window.")
    return lines


def _standing(recall: Recall) -> str:
    chance = f"guessing gives {percent(recall.chance)}"
    if recall.at_chance:
        return f"no better than chance ({chance})"
    if recall.accuracy < recall.chance:
        return f"worse than chance ({chance})"
    return f"learned ({chance})" if recall.accuracy >= LEARNED else f"above chance, but not learned ({chance})"


def opening_findings(opening: Opening) -> list[str]:
    """Say what the book model's memory was worth on the start of the text."""
    bits = opening.bits_per_byte
    order = sorted(bits, key=bits.__getitem__)
    said = {
        "carried": "with its memory carried along",
        "frozen": "with its memory frozen",
        "reset": f"with its state thrown away every {opening.reset_every:,} tokens",
    }
    verdict = "The memory helped." if order[0] == "carried" else "So the memory did not help here."
    return [
        f"pretrained:{opening.model}, {opening.parameters:,} parameters, read the first {opening.tokens:,} tokens of "
        f"the text: {bits['carried']:.3f} bits per byte {said['carried']}, {bits['frozen']:.3f} {said['frozen']}, "
        f"{bits['reset']:.3f} {said['reset']}. {verdict}"
    ]


def search_findings(found: Found) -> list[str]:
    """Say what was answered from the memory files, and by those that stand beside them."""
    lines = [
        f"{found.tokens:,} tokens of {found.source} were read, with {_many(len(found.hidden.facts), 'sentence')} of "
        f"{'your own' if found.own else f'the draw {found.seed}'} hidden in them."
    ]
    for reading in found.readings:
        lines.append(
            f"pretrained:{reading.model}, {reading.parameters:,} parameters, read them in "
            f"{reading.seconds:.0f} s; its memory stayed at {reading.state_bytes / 1000:.0f} kB, and is a file of "
            f"{reading.file_bytes / 1000:.0f} kB."
        )
    for kind, what in (("place", "where people are"), ("number", "what a secret number is")):
        right, asked = found.score(kind, "memory")
        if asked:
            lines.append(_answers(found, kind, what, right, asked))
    if found.hidden.split:
        words = ", ".join(found.hidden.split)
        lines.append(f"The models were not taught the words {words}, and spell them: what they say may be lost.")
    return lines


def _answers(found: Found, kind: Kind, what: str, right: int, asked: int) -> str:
    furthest = max((one.tokens_ago for one in found.asked if one.kind == kind and one.right("memory")), default=0)
    others = [found.score(kind, reader)[0] for reader in ("reset", "window")]
    guessing = f"guessing gives {asked / len(ROOMS):.1f}" if kind == "place" else "guessing gives none"
    from_where = f", the furthest from {furthest:,} tokens before" if right else ""
    verdict = "" if right > max(others) else " So the memory is no better than they are here."
    return (
        f"Asked {_many(asked, 'time')} {what}, the memory file alone is right {_many(right, 'time')} "
        f"({percent(right / asked)}){from_where}; the same model with its memory reset {others[0]}, and having read "
        f"the last {found.window:,} tokens alone {others[1]} ({guessing}).{verdict}"
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


MEMORY, RESET, NONE, CHANCE = "#3451c6", "#e07a1f", "#7a8290", "#b4bac4"
"""Colours, the same in every plot."""
RIGHT, WRONG, LEFT = "#18794e", "#b3261e", "#b4bac4"
"""Colours of answers, and of what nobody asked for any more."""
NAMES = {"memory": "memory file", "reset": "memory reset", "window": "end of the text alone"}
WALK = "People walk about: sentences that say so are hidden between those of the text"
HIDDEN = "Numbers by their names are hidden between the sentences of the text"
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
    people, numbers = _has(found, "place"), _has(found, "number")
    above = ["above the line sentences of people"] if people else []
    below = [f"below {'it' if people else 'the line'} numbers"] if numbers else []
    left = "; grey are places that people had left again before it was asked" if people else ""
    return section(
        "A sentence in a long text",
        tag(
            "p",
            f"{WALK if people else HIDDEN}{', as are numbers by their names' if people and numbers else ''}. "
            f"{'A small model reads' if len(found.readings) == 1 else 'Two small models read'} all of it once, piece "
            "by piece, into a memory of constant size. "
            "The memory is saved as a file, the text is put away, and the questions are answered from the file alone.",
        ),
        _said(search_findings(found)),
        figure(
            _map(found),
            f"The text from its first token (left) to its last: {', '.join(above + below)}; thin lines are where "
            f"it was asked. Green was answered right from the memory file, red wrong{left}.",
        ),
        figure(
            pictures["distance"],
            "All questions. Beside the memory file: the same model with its memory reset, and the same model having "
            f"read the last {found.window:,} tokens alone, which is what a window of that length knows.",
        ),
        id_="search",
    )


def _has(found: Found, kind: Kind) -> bool:
    return any(fact.kind == kind for fact in found.hidden.facts)


def _map(found: Found) -> Markup:
    """Draw where in the text every sentence stands, and what became of it."""
    verdicts = {(one.question, one.at - one.tokens_ago): one.right("memory") for one in found.asked}
    marks, high = [], 96 if _has(found, "number") else 49
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
