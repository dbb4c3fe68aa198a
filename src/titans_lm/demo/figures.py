"""The demo's plots."""

from collections.abc import Callable

from titans_lm.demo.contest import Trained
from titans_lm.demo.language import LanguageOutcome
from titans_lm.demo.recall import RecallOutcome
from titans_lm.evaluate.bits_per_byte import Bucket
from titans_lm.report.plots import Line, Plot, smoothed

MEMORY, RESET, NONE, CHANCE = "#3451c6", "#e07a1f", "#7a8290", "#b4bac4"
"""Colours, the same in every plot and on the page."""


def recall_plot(outcome: RecallOutcome) -> Plot:
    """Accuracy over the whole gap during training, of both models."""

    def line(trained: Trained, label: str, colour: str) -> Line:
        steps, found = zip(*((check["step"], check["accuracy_over_the_gap"]) for check in trained.checks), strict=True)
        return Line(label=label, x=steps, y=found, colour=colour, marker=True)

    ends = [outcome.memory.checks[0]["step"], outcome.memory.checks[-1]["step"]]
    return Plot(
        title=f"Recall over a gap of {outcome.task.gap} tokens",
        x_label="training step",
        y_label="values named",
        lines=[
            line(outcome.memory, "memory (LMM)", MEMORY),
            line(outcome.window, f"sliding window of {outcome.window.config.window}", NONE),
            Line(label="chance", x=ends, y=[outcome.task.chance] * 2, colour=CHANCE, dashed=True),
        ],
        y_range=(-0.02, 1.03),
        percent=True,
    )


def training_plot(outcome: LanguageOutcome) -> Plot:
    """Bits per byte on the training batches, of both byte models."""
    lines = [
        _curve(outcome.no_memory.curve, "bits_per_token", "without memory (segments)", NONE),
        _curve(outcome.memory.curve, "bits_per_token", "with memory (MAC)", MEMORY),
    ]
    return Plot(title="Training on text", x_label="training step", y_label="bits per byte", lines=lines)


def position_plot(outcome: LanguageOutcome) -> Plot:
    """Held-out bits per byte by how far into the document a byte stands."""
    measured = (
        ("without memory", outcome.without.by_position, NONE),
        ("memory reset at every segment", outcome.reset.by_position, RESET),
        ("memory carried", outcome.with_memory.by_position, MEMORY),
    )
    lines = [_by_position(label, buckets, colour, lambda bucket, _: bucket) for label, buckets, colour in measured]
    return Plot(
        title="Held-out text, by position in the document",
        x_label="bytes read before",
        y_label="bits per byte",
        lines=lines,
        x_labels=_names(outcome.with_memory.by_position),
    )


def gain_plot(outcome: LanguageOutcome) -> Plot:
    """What carrying the memory changes against resetting it: the same bytes, the same model."""
    lines = [
        _by_position(
            "memory carried − memory reset",
            outcome.with_memory.by_position,
            MEMORY,
            lambda bucket, i: bucket - outcome.reset.by_position[i].bits_per_token,
        ),
        Line(
            label="no difference",
            x=[0, len(outcome.reset.by_position) - 1],
            y=[0.0, 0.0],
            colour=CHANCE,
            dashed=True,
        ),
    ]
    return Plot(
        title="What carrying the memory saves (below zero) or costs (above)",
        x_label="bytes read before",
        y_label="bits per byte",
        lines=lines,
        x_labels=_names(outcome.with_memory.by_position),
    )


def _curve(curve: list[dict], metric: str, label: str, colour: str) -> Line:
    values = [record[metric] for record in curve]
    return Line(label=label, x=[record["step"] for record in curve], y=smoothed(values), faint=values, colour=colour)


def _by_position(label: str, buckets: tuple[Bucket, ...], colour: str, value: Callable[[float, int], float]) -> Line:
    values = [value(bucket.bits_per_token, index) for index, bucket in enumerate(buckets)]
    return Line(label=label, x=list(range(len(buckets))), y=values, colour=colour, marker=True)


def _names(buckets: tuple[Bucket, ...]) -> list[str]:
    return [f"{bucket.start:,}–{bucket.stop - 1:,}" for bucket in buckets]
