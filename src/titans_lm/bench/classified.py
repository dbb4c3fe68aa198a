"""Classifiers of sequences on the page of results: accuracy by cross-validation, and paired tests."""

from pathlib import Path
from statistics import mean
from typing import Any

from titans_lm.bench import compared
from titans_lm.bench.compared import TITLES, contender_lines, remembers
from titans_lm.bench.scored import percent
from titans_lm.report.plots import Plot
from titans_lm.report.table import aligned

BASELINES = {
    "cnn": "CNN",
    "words": "mean of embedded words",
    "kmer-nb": "k-mer naive Bayes",
    "kmer-lr": "k-mer logistic regression",
    "length": "length alone",
}


def named(name: str) -> str:
    """Name a contender for a reader, a varied one by what was varied."""
    return compared.named(name, BASELINES)


def short(name: str) -> str:
    """Name a contender where there is little room."""
    base, _, changes = name.partition(":")
    shown = BASELINES[base] if base in BASELINES else TITLES[base].partition(" with ")[0]
    return f"{shown} {changes}".strip()


def heading(result: dict[str, Any]) -> str:
    """Name the file, and how its folds are made where that is not the usual way."""
    overlap = result["settings"]["train"].get("overlap")  # older files do not say
    apart = f", folds apart by {overlap} shared nucleotides" if overlap else ""
    return f"DNA: {Path(result['settings']['data']).name.partition('.')[0].replace('_', ' ')}{apart}"


def rows(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Say what was equal, and give the head and the rows of a table, in the order of the settings."""
    told, train = result["settings"], result["settings"]["train"]
    size = result["backbone_parameters"]
    stacks = "" if size is None else f"Stacks of ours are of equal size, {size:,} parameters with an embedding. "
    cut = result["cut_sequences"]
    tried = ""
    if len(told["rates"]) > 1:
        rates = ", ".join(f"{rate:g}" for rate in told["rates"])
        tried = f"Each fold has its own learning rate: the best of {rates} by trials on what it is trained on. "
    said = (
        f"{result['sequences']:,} sequences of {len(result['classes'])} classes in {told['folds']} folds, each tested "
        f"once a seed by models trained on the others ({len(told['seeds'])} seed{'s' * (len(told['seeds']) > 1)}); "
        f"{100 * train['held_out']:g} % of what is trained on chooses the best of {train['steps']:,} steps of "
        f"{train['batch_size']} sequences. {tried}{stacks}"
        f"The largest class is {100 * result['majority']:.1f} % of all. "
        f"Accuracy and macro F1 in %, Matthews' correlation times 100, mean ± standard deviation over seeds."
        " Published numbers of GenomicBenchmarks are from all of its training sets, on its official test sets: not "
        "comparable with folds of one file."
        + (f" {cut:,} sequences were cut to {train['max_length']:,} nucleotides." if cut else "")
    )
    head = ["model", "parameters", "learning rates", "accuracy", "MCC", "F1", "minutes a run"]
    body = []
    for one in result["contenders"]:
        name = named(one["name"])
        row = [f"**{name}**" if remembers(one["name"]) else name, f"{one['parameters']:,}"]
        row += [_rates(one)]
        row += [percent(one[key]) for key in ("accuracy", "mcc", "f1")]
        body.append([*row, f"{mean(run['seconds'] for run in one['runs']) / 60:.1f}"])
    return said, head, body


def _rates(one: dict[str, Any]) -> str:
    """Write the learning rates of all folds, each once."""
    found = one["rates"] if "rates" in one else [one["rate"]]  # older files have one for all folds
    return ", ".join(f"{rate:g}" for rate in sorted({rate for rate in found or () if rate is not None})) or "–"


def more(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Say how the first model compares with each of the others."""
    folds = result["settings"]["folds"]
    said = (
        f"{named(result['contenders'][0]['name'])} against each of the others. Difference of accuracy in points, mean "
        f"over folds and seeds, with its interval of 95 % and p by the corrected resampled t-test over {folds} folds "
        "(Nadeau and Bengio 2003); McNemar's exact test on all sequences, the largest p of the seeds."
    )
    head = ["against", "difference", "95 %", "p over folds", "p of McNemar"]
    body = [
        [
            named(one["second"]),
            f"{100 * one['folds']['difference']:+.1f}",
            f"{100 * one['folds']['low']:+.1f} to {100 * one['folds']['high']:+.1f}",
            f"{one['folds']['p']:.2g}",
            f"{one['mcnemar_p']:.2g}",
        ]
        for one in result["paired"]
    ]
    return said if body else "", head, body


def lines(result: dict[str, Any]) -> list[str]:
    """Write both tables for a terminal."""
    _, head, body = rows(result)
    _, tests, compared = more(result)
    return [*aligned(head, body), *(["", *aligned(tests, compared)] if compared else [])]


def plot(result: dict[str, Any]) -> Plot:
    """Accuracy by fold, a line for each contender; those without a memory are dashed."""
    drawn = contender_lines(
        result["contenders"],
        lambda one: [{"mean": 100 * value, "sd": None} for value in one["by_fold"]],
        lambda one: short(one["name"]),
    )
    return Plot(
        title=f"{heading(result)}: accuracy by fold", x_label="fold", y_label="accuracy, %", lines=drawn,
        x_labels=[str(fold + 1) for fold in range(result["settings"]["folds"])],
    )  # fmt: skip
