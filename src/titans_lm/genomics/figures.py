"""Pictures of what classifiers do: accuracy by fold, and which class is taken for which."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titans_lm.report.plots import HeatMaps

FOLDS, CONFUSION = "folds.png", "confusion.png"
PANEL = "of each class, %"


def title(found: dict[str, Any]) -> str:
    """Name a picture of one classifier."""
    return f"{100 * found['accuracy']:.1f} % right"


def confusion_maps(heading: str, classes: Sequence[str], panels: dict[str, Sequence[Sequence[int]]]) -> HeatMaps:
    """Show counts (true class by told class) as shares of each true class in per cent, a panel for each model."""
    return HeatMaps(
        title=heading, x_label="taken for", y_label="class", x_labels=list(classes), y_labels=list(classes),
        panels={name: [_shares(row) for row in counts] for name, counts in panels.items()},
    )  # fmt: skip


def _shares(row: Sequence[int]) -> list[float]:
    return [100.0 * many / max(sum(row), 1) for many in row]


def write_confusion(path: Path, heading: str, classes: Sequence[str], panels: dict[str, Any]) -> Path:
    """Draw which class was taken for which into a PNG file."""
    from titans_lm.report.plots import draw, save_png

    return save_png(draw(confusion_maps(heading, classes, panels)), path)


def write_plots(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw accuracy by fold and the confusions of an evaluation."""
    from titans_lm.report.genomics import plot, short
    from titans_lm.report.plots import draw, save_png

    panels = {short(one["name"]): one["confusion"] for one in result["contenders"]}
    heading = "Which class is taken for which, % of each class"
    return [
        save_png(draw(plot(result)), folder / FOLDS),
        write_confusion(folder / CONFUSION, heading, list(result["classes"]), panels),
    ]
