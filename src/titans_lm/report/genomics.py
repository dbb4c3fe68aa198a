"""Classifiers of sequences: accuracy by cross-validation, and paired tests."""

from functools import partial
from pathlib import Path

from titans_lm.report.forecast import rates
from titans_lm.report.plots import Plot
from titans_lm.report.section import PARAMETERS, TITLES, Result, Section, contender_lines, remembers, title
from titans_lm.report.table import Column, Table, bold
from titans_lm.report.tasks import percent, sequences
from titans_lm.report.text import average

BASELINES = {
    "cnn": "CNN",
    "words": "mean of embedded words",
    "kmer-nb": "k-mer naive Bayes",
    "kmer-lr": "k-mer logistic regression",
    "length": "length alone",
}


named = partial(title, names=TITLES | BASELINES)


def short(name: str) -> str:
    base, _, changes = name.partition(":")
    shown = BASELINES[base] if base in BASELINES else TITLES[base].partition(" with ")[0]
    return f"{shown} {changes}".strip()


def heading(result: Result) -> str:
    """Name the file, and how its folds are made where that is not the usual way."""
    overlap = result["settings"]["train"].get("overlap")  # older files do not say
    apart = f", folds apart by {overlap} shared nucleotides" if overlap else ""
    return f"DNA: {Path(result['settings']['data']).name.partition('.')[0].replace('_', ' ')}{apart}"


def tables(result: Result) -> list[Table]:
    """Scores of all models in the order of the settings, and the first of them against each of the others."""
    scores = Table(
        columns=[
            Column("model", lambda one: bold(named(one["name"]), remembers(one["name"]))),
            PARAMETERS,
            Column("learning rates", lambda one: rates(one["rates"] or [])),
            Column("accuracy", lambda one: percent(one["accuracy"])),
            Column("MCC", lambda one: percent(one["mcc"])),
            Column("F1", lambda one: percent(one["f1"])),
            Column("minutes a run", average("seconds", ".1f", 60)),
        ],
        rows=result["contenders"],
        said=said(result),
    )
    return [scores, paired(result)]


def said(result: Result) -> str:
    settings, train = result["settings"], result["settings"]["train"]
    size, cut = result["backbone_parameters"], result["cut_sequences"]
    stacks = ""
    if size is not None:
        stacks = f"Stacks of ours are of equal size, {size:,} parameters with an embedding of nucleotides. "
        stacks += "Words have one on top, as wide as the stack. " if train.get("word_size", 1) > 1 else ""
    tried = ""
    if len(settings["rates"]) > 1:
        several = ", ".join(f"{rate:g}" for rate in settings["rates"])
        tried = f"Each fold has its own learning rate: the best of {several} by trials on what it is trained on. "
    return (
        f"{result['sequences']:,} sequences of {len(result['classes'])} classes in {settings['folds']} folds, each "
        f"tested once a seed by models trained on the others ({len(settings['seeds'])} "
        f"seed{'s' * (len(settings['seeds']) > 1)}); {100 * train['held_out']:g} % of the training data chooses the "
        f"best of {train['steps']:,} steps of {sequences(train)}. {tried}{stacks}The largest class is "
        f"{100 * result['majority']:.1f} % of all. Accuracy and macro F1 in %, Matthews' correlation times 100. Not "
        "comparable with published numbers of GenomicBenchmarks, which are of its official training and test sets."
        + (f" {cut:,} sequences were cut to {train['max_length']:,} nucleotides." if cut else "")
    )


def paired(result: Result) -> Table:
    if not result["paired"]:
        return Table()

    return Table(
        title=f"{named(result['contenders'][0]['name'])} against each of the others",
        columns=[
            Column("against", lambda one: named(one["second"])),
            Column("difference", lambda one: f"{100 * one['folds']['difference']:+.1f}"),
            Column("95 %", lambda one: f"{100 * one['folds']['low']:+.1f} to {100 * one['folds']['high']:+.1f}"),
            Column("p over folds", lambda one: f"{one['folds']['p']:.2g}"),
            Column("p of McNemar", lambda one: f"{one['mcnemar_p']:.2g}"),
        ],
        rows=result["paired"],
        said=(
            "Difference of accuracy in points, mean over folds and seeds, with its 95 % confidence interval and p by "
            f"the corrected resampled t-test over {result['settings']['folds']} folds (Nadeau and Bengio 2003); "
            "McNemar's exact test on all sequences, the largest p of the seeds."
        ),
    )


def plot(result: Result) -> Plot:
    """Accuracy by fold, a line for each model; those without a memory are dashed."""
    drawn = contender_lines(
        result["contenders"],
        lambda one: [{"mean": 100 * value, "sd": None} for value in one["by_fold"]],
        lambda one: short(one["name"]),
    )
    return Plot(
        title=f"{heading(result)}: accuracy by fold", x_label="fold", y_label="accuracy, %", lines=drawn,
        x_labels=[str(fold + 1) for fold in range(result["settings"]["folds"])],
    )  # fmt: skip


SECTION = Section(topic=lambda _: "dna", heading=heading, tables=tables, plots=lambda result: {"": plot(result)})
