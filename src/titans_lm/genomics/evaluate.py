"""Cross-validation of several classifiers on one file: what `titans genomics evaluate` runs."""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from titans_lm.config import BackboneConfig, check_choice
from titans_lm.data.batches import fingerprint
from titans_lm.experiments.models import (
    ARCHITECTURES,
    STACK,
    parse_model,
    plain_name,
    split_changes,
    stack_of,
    weights_sum,
)
from titans_lm.experiments.runner import SPEC, Result, Say, kept, run_jobs, runs_of, shorter, try_rates, write_record
from titans_lm.experiments.settings import TRIAL_SEED
from titans_lm.genomics.batches import Places, folds, held_out
from titans_lm.genomics.fit import check_network, describe_data, train_classifier
from titans_lm.genomics.predict import (
    NUCLEOTIDES,
    corrected_t,
    find_model,
    mcnemar,
    resampling_ratio,
    scores,
    write_confusion,
)
from titans_lm.genomics.records import VOCAB_SIZE, Sequences, read_sequences
from titans_lm.genomics.settings import COUNTED, Baseline, EvaluateSettings, GenomicsFit, extra, small_model
from titans_lm.report.genomics import plot, short
from titans_lm.report.plots import draw, save_png
from titans_lm.report.table import mean_with_spread
from titans_lm.train.files import write_atomically
from titans_lm.train.fresh import count_parameters, match_parameters
from titans_lm.train.options import merge_settings, plain_settings
from titans_lm.train.parallel import check_alone
from titans_lm.train.progress import Outlook, ProgressReport
from titans_lm.train.run import RunFolder, begun_with

FILE, PREDICTIONS = "results.json", "predictions.tsv"
SHORTER = "fewer --steps, --models, --folds or --seeds"
CHOSEN = "validation_accuracy"
SCORES = ("accuracy", "mcc", "f1")
KEPT = ("steps", "best_step", CHOSEN, "seconds", "skipped_steps", "strength", *SCORES)

SEQUENCES = ("max_length", "crop", "reverse_complement", "both_strands")
LEARNING = ("lr", "weight_decay", "steps", "embed_dropout")
VARIED = {
    "cnn": (*SEQUENCES, *LEARNING, "cnn_channels", "cnn_layers", "cnn_kernel"),
    "words": (*SEQUENCES, *LEARNING, "word_size"),
    "kmer-nb": (*SEQUENCES, "k"),
    "kmer-lr": (*SEQUENCES, "k"),
    "length": ("max_length", "crop"),
}
"""Settings that a variant of a baseline may change."""
BACKBONE = (*SEQUENCES, *LEARNING, "pooling", "word_size", "see_length", "pretrain_steps")
"""Settings that a variant of ours may change beside those of the backbone."""
BASES = (*ARCHITECTURES, *get_args(Baseline))


def model_settings(shared: GenomicsFit, name: str, parameters: int | None = None) -> GenomicsFit:
    """Give the settings of a model by its name, from those that all share.

    A backbone gets the width and the MLP that give its stack as many parameters as asked for; all else of it goes by
    `stack_of`, or by the weights that it starts from. ValueError for a name that is not known, and for what cannot be
    varied.
    """
    model = parse_model(name, BASES)
    check_choice("models", model.base, BASES)
    if model.base not in ARCHITECTURES:
        (own,) = split_changes(model, VARIED[model.base])
        fit = merge_settings(shared, own)
        return dataclasses.replace(fit, baseline=model.base, pretrain_steps=0, pretrained=None)  # pyrefly: ignore
    own, stack = split_changes(model, BACKBONE, STACK)
    config = stack_of(shared.model, model.base, stack)
    if shared.pretrained is not None and not stack and shared.model == small_model():
        config = merge_settings(BackboneConfig(), find_model(shared.pretrained, NUCLEOTIDES)[1]["model"])
        if config.architecture != model.base:
            raise ValueError(
                f"got the model {name!r} with pretrained={str(shared.pretrained)!r}; expected {config.architecture}, "
                "which that is"
            )
    elif parameters is not None:
        config = match_parameters(config, VOCAB_SIZE, parameters)
    return merge_settings(dataclasses.replace(shared, model=config, baseline=None, parameters=None), own)


def shared_size(shared: GenomicsFit, names: tuple[str, ...]) -> int | None:
    """Count the parameters that all backbones shall have, as `match_parameters` counts: those of the first."""
    if shared.parameters is not None:
        return shared.parameters
    first = next((name for name in names if parse_model(name, BASES).base in ARCHITECTURES), None)
    return None if first is None else count_parameters(model_settings(shared, first).model, VOCAB_SIZE)


def is_network(name: str) -> bool:
    """Tell whether a model learns by steps."""
    return parse_model(name, BASES).base not in COUNTED


@dataclass(frozen=True, eq=False)
class FoldJob:
    """A classifier to train on all folds but one, and to test on that one; a trial is not tested at all."""

    name: str
    settings: GenomicsFit
    folder: Path
    data: Sequences
    """All sequences of the file; they are cropped for this classifier here."""
    parts: Places
    """The fold of every sequence."""
    fold: int
    counts: bool

    @property
    def place(self) -> str:
        """What has a learning rate of its own."""
        return f"{self.name} in fold {self.fold}"

    @property
    def rate(self) -> float:
        return self.settings.lr

    @property
    def work(self) -> int:
        return self.settings.steps if is_network(self.name) else 0

    def cropped(self) -> Sequences:
        return self.data.cropped(self.settings.max_length, self.settings.crop)

    def spec(self) -> Result:
        """Give what the result depends on: all but where it is kept; weights may change behind one path."""
        data, pretrained = self.cropped(), self.settings.pretrained
        start = {} if pretrained is None else {"weights": weights_sum(find_model(pretrained, NUCLEOTIDES)[0])}
        return {
            **start,
            "name": self.name,
            "settings": plain_settings(self.settings),
            "fold": self.fold,
            "data": fingerprint([*data.tokens, data.with_labels().astype(np.uint16)], kind="file"),
            "parts": fingerprint([self.parts.astype(np.uint16)], kind="folds"),
            "classes": list(data.classes),
        }

    def train(self, outlook: Outlook | None = None) -> Result:
        """Train it, from where it stopped if it did, and test it on sequences that it has not seen."""
        started, data, settings = time.perf_counter(), self.cropped(), self.settings
        others = data.take(np.flatnonzero(self.parts != self.fold))
        parts = held_out(others, settings.held_out, settings.seed, settings.overlap)  # refuses, so it comes first
        if not begun_with(self.folder):
            RunFolder.create(self.folder, self.spec())
        classifier, fitted = train_classifier(
            settings, *parts, self.folder, ProgressReport(quiet=True, outlook=outlook)
        )
        result = {"seconds": time.perf_counter() - started, **fitted, "parameters": classifier.parameters()}
        if not self.counts:
            return result
        places = np.flatnonzero(self.parts == self.fold)
        test = data.take(places)
        predicted = classifier.probabilities(test.tokens).argmax(1)
        found = scores(test.with_labels(), predicted, len(test.classes))
        return {**result, **found, "places": places.tolist(), "predicted": predicted.tolist()}

    def describe(self, result: Result) -> str:
        what = result.get("accuracy", result.get(CHOSEN, 0.0))
        part = "of the fold" if self.counts else "of the validation part"
        return f"{100 * what:.1f} % {part}; {result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"


def run_evaluation(settings: EvaluateSettings, command: str, say: Say) -> Result:
    """Train and test all models fold by fold and write OUT/results.json; stopped, the same call goes on.

    Every sequence is tested once a seed, by a model that was trained on the other folds; its best step, and its
    learning rate where there are several, were chosen on a part of those. Sequences that are copies before or after any
    model's cut are of one fold. predictions.tsv holds what each was taken for. `command` is what the file says it came
    from. ValueError for data or a model that will not do, before anything is trained.
    """
    if settings.data is None:
        raise ValueError("got no data; expected titans genomics evaluate DATA")
    check_alone()
    for module in ("scipy.stats", "sklearn.metrics"):
        extra(module)  # the paired tests stand at the end of hours
    data = read_sequences(settings.data, settings.read)
    size = shared_size(settings.train, settings.models)
    fits = {name: model_settings(settings.train, name, size) for name in settings.models}
    crops = dict.fromkeys((fit.max_length, fit.crop) for fit in fits.values() if data.longer_than(fit.max_length))
    cropped = [data.cropped(*crop).tokens for crop in crops]
    parts = folds(data, settings.folds, settings.fold_seed, *cropped, overlap=settings.train.overlap)
    for fit in fits.values():
        check_network(fit, len(data.classes))
    cut = data.longer_than(settings.train.max_length)
    say(f"{len(data):,} sequences: {describe_data(data, cut, settings.train)}")
    settings.out.mkdir(parents=True, exist_ok=True)
    tuning, rates = _tune(settings, fits, data, parts, say)
    ran = run_jobs(final_jobs(settings, fits, data, parts, rates), settings.jobs, say, Outlook(SHORTER, say=say))
    by_model = {name: [result for result in ran if result["name"] == name] for name in settings.models}
    predicted = {name: _predicted(results, len(data)) for name, results in by_model.items()}
    models = [_summary(name, tuning[name], by_model[name], data, predicted[name]) for name in settings.models]
    result = write_record(
        settings.out / FILE, "genomics", command, settings, runs_of(models), sequences=len(data),
        classes=data.counts(), cut_sequences=cut, majority=max(data.counts().values()) / len(data),
        backbone_parameters=size, contenders=models,
        paired=[_paired(settings, models[0], other, predicted, data.with_labels()) for other in models[1:]],
    )  # fmt: skip
    write_atomically(settings.out / PREDICTIONS, _table(data, parts, predicted))
    save_png(draw(plot(result)), settings.out / "folds.png")
    panels = {short(one["name"]): one["confusion"] for one in models}
    title = "Confusion: which class is predicted for which, % of each class"
    write_confusion(settings.out / "confusion.png", title, data.classes, panels)
    return result


def final_jobs(
    settings: EvaluateSettings,
    fits: dict[str, GenomicsFit],
    data: Sequences,
    parts: Places,
    rates: dict[tuple[str, int], float],
) -> list[FoldJob]:
    """List the runs that count: seed by seed and fold by fold, so that all models are as far as another."""
    return [
        FoldJob(
            name, dataclasses.replace(base, lr=rates[name, fold], seed=seed),
            settings.out / "runs" / f"{plain_name(name)}-fold{fold}-seed{seed}", data, parts, fold, counts=True,
        )
        for seed in settings.seeds for fold in range(settings.folds) for name, base in fits.items()
    ]  # fmt: skip


def _tune(
    settings: EvaluateSettings, fits: dict[str, GenomicsFit], data: Sequences, parts: Places, say: Say
) -> tuple[dict[str, list[Result]], dict[tuple[str, int], float]]:
    """Try every network with all rates in every fold, as another's training part holds it; give trials and rates."""
    every = range(settings.folds)
    tuned = [name for name in fits if is_network(name) and "lr" not in parse_model(name, BASES).changes]
    rates = {
        (name, fold): settings.rates[0] if name in tuned and settings.rates else fit.lr
        for name, fit in fits.items() for fold in every
    }  # fmt: skip
    if len(settings.rates) < 2:
        return {name: [] for name in fits}, rates
    jobs = [
        FoldJob(
            name, shorter(fits[name], settings.tune_steps, lr=rate, seed=TRIAL_SEED),
            settings.out / "trials" / f"{plain_name(name)}-fold{fold}-{rate:.15g}", data, parts, fold, counts=False,
        )
        for name, fold, rate in product(tuned, every, settings.rates)
    ]  # fmt: skip
    networks = [fit.steps for name, fit in fits.items() if is_network(name)]
    outlook = Outlook(SHORTER, say=say, later=sum(networks) * len(settings.seeds) * settings.folds)
    trials, best = try_rates(jobs, settings.jobs, say, CHOSEN, outlook, most=True)
    by_model: dict[str, list[Result]] = {name: [] for name in fits}
    for (name, fold), (place, found) in zip(product(tuned, every), trials.items(), strict=True):
        rates[name, fold] = best[place]
        by_model[name] += [{"fold": fold, **trial} for trial in found]
    for name in tuned:
        say(f"learning rates of {name} by fold: " + ", ".join(f"{rates[name, fold]:g}" for fold in every))
    return by_model, rates


def _predicted(results: list[Result], count: int) -> dict[int, NDArray[np.int64]]:
    """Put together what a model took every sequence for, over all folds, by seed."""
    found: dict[int, NDArray[np.int64]] = {}
    for result in results:
        whole = found.setdefault(result[SPEC]["settings"]["seed"], np.full(count, -1, np.int64))
        whole[result["places"]] = result["predicted"]
    return found


def _summary(
    name: str, tuning: list[Result], results: list[Result], data: Sequences, predicted: dict[int, NDArray[np.int64]]
) -> Result:
    runs = [
        {
            "seed": result[SPEC]["settings"]["seed"],
            "fold": result[SPEC]["fold"],
            "rate": result[SPEC]["settings"]["lr"] if is_network(name) else None,
            **kept(result, *KEPT),
        }
        for result in results
    ]
    whole = [scores(data.with_labels(), found, len(data.classes)) for found in predicted.values()]
    by_fold = [[run for run in runs if run["fold"] == fold] for fold in sorted({run["fold"] for run in runs})]
    return {
        "name": name,
        "parameters": results[0]["parameters"],
        "rates": [same[0]["rate"] for same in by_fold] if is_network(name) else None,
        "tuning": tuning,
        "runs": runs,
        # Every sequence once a seed: scores of all folds together, their spread that of seeds.
        **{key: mean_with_spread([one[key] for one in whole]) for key in SCORES},
        "by_fold": [mean(run["accuracy"] for run in same) for same in by_fold],
        "confusion": np.sum([one["confusion"] for one in whole], axis=0).tolist(),
    }


def _paired(
    settings: EvaluateSettings, first: Result, other: Result, predicted: dict[str, Any], labels: NDArray[np.int64]
) -> Result:
    """Compare two models: McNemar's test seed by seed, and the corrected t-test over folds, means over seeds."""
    names = first["name"], other["name"]
    by_seed = [
        {"seed": seed, **mcnemar(*(predicted[name][seed] == labels for name in names))} for seed in settings.seeds
    ]
    differences = [a - b for a, b in zip(first["by_fold"], other["by_fold"], strict=True)]
    # What counts words learns from the held-out share too; of two ratios the larger one promises less.
    held = settings.train.held_out if any(map(is_network, names)) else 0.0
    return {
        "first": names[0],
        "second": names[1],
        "mcnemar": by_seed,
        "mcnemar_p": max(found["p"] for found in by_seed),
        "folds": corrected_t(differences, resampling_ratio(settings.folds, held)),
    }


def _table(data: Sequences, parts: Places, predicted: dict[str, dict[int, NDArray[np.int64]]]) -> Iterator[str]:
    """Write a table: a line for each sequence, a column for each model and seed."""
    columns = {f"{name} seed {seed}": found for name, seeds in predicted.items() for seed, found in seeds.items()}
    yield "\t".join(["name", "fold", "label", *columns]) + "\n"
    for name, part, *numbers in zip(data.names, parts, data.with_labels(), *columns.values(), strict=True):
        yield "\t".join([name, str(part), *(data.classes[number] for number in numbers)]) + "\n"
