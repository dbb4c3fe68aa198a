"""Cross-validation of several classifiers on one file: what `titans genomics evaluate` runs."""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import TRIAL_SEED, Result, Say, best_rate, work
from titans_lm.compare.spent import spent, spent_on
from titans_lm.data.batches import fingerprint
from titans_lm.genomics.contenders import contender, folder_name, is_network, own_rate, shared_size
from titans_lm.genomics.figures import write_plots
from titans_lm.genomics.needed import needed
from titans_lm.genomics.nucleotides import Tokens
from titans_lm.genomics.paired import corrected_t, mcnemar, share_tested
from titans_lm.genomics.records import Sequences, read_sequences
from titans_lm.genomics.scores import confusion, scores
from titans_lm.genomics.settings import EvaluateSettings, GenomicsFit
from titans_lm.genomics.split import folds
from titans_lm.genomics.train import check_network, counted, cut_told, parted, train_classifier
from titans_lm.report.spread import mean_with_spread
from titans_lm.train.files import write_atomically, write_json
from titans_lm.train.run import RunFolder, begun_with
from titans_lm.train.settings import plain_settings

FILE, PREDICTIONS = "results.json", "predictions.tsv"
CHOSEN = "validation_accuracy"
SCORES = ("accuracy", "mcc", "f1")
Rates = dict[tuple[str, int], float]
"""Learning rates by the names of models and the numbers of folds."""
KEPT = ("steps", "best_step", CHOSEN, "seconds", "skipped_steps", "strength", *SCORES)


@dataclass(frozen=True, eq=False)
class FoldJob:
    """A classifier to train on all folds but one, and to test on that one; a trial is not tested at all."""

    name: str
    settings: GenomicsFit
    folder: Path
    data: Sequences
    parts: NDArray[np.int64]
    """The fold of every sequence."""
    fold: int
    counts: bool

    @property
    def rate(self) -> float:
        return self.settings.lr

    def asked(self) -> Result:
        """Tell what the result depends on: all but where it is kept."""
        return {
            "name": self.name,
            "settings": plain_settings(self.settings),
            "fold": self.fold,
            "data": fingerprint([*self.data.tokens, self.data.with_labels().astype(np.uint16)], kind="file"),
            "parts": fingerprint([self.parts.astype(np.uint16)], kind="folds"),
            "classes": list(self.data.classes),
        }

    def begun(self) -> Result | None:
        """Tell what a run that is not done was begun with."""
        return begun_with(self.folder)

    def train(self) -> Result:
        """Train it, from where it stopped if it did, and test it on sequences that it has not seen."""
        if not self.begun():
            RunFolder.create(self.folder, self.asked())
        started = time.perf_counter()
        train, valid = parted(self.data.take(np.flatnonzero(self.parts != self.fold)), self.settings)
        classifier, told = train_classifier(self.settings, train, valid, self.folder)
        kept = {"seconds": time.perf_counter() - started, **told, "parameters": classifier.parameters()}
        if not self.counts:
            return kept
        places = np.flatnonzero(self.parts == self.fold)
        test = self.data.take(places)
        predicted = classifier.probabilities(test.tokens).argmax(1)
        found = scores(confusion(test.with_labels(), predicted, len(test.classes)))
        return {**kept, **found, "places": places.tolist(), "predicted": predicted.tolist()}

    def told(self, result: Result) -> str:
        """Phrase what came out."""
        what = result.get("accuracy", result.get(CHOSEN, 0.0))
        part = "of the fold" if self.counts else "of the validation part"
        return f"{100 * what:.1f} % {part}; {result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"


def run_evaluation(settings: EvaluateSettings, command: str, say: Say) -> dict[str, Any]:
    """Train and test all models fold by fold and write OUT/results.json; stopped, the same call goes on.

    Every sequence is tested once a seed, by a model that was trained on the other folds; its best step, and its
    learning rate where there are several, were chosen on a part of those: rates are tried fold by fold, and no trial
    reads the fold that its rate is for. Sequences that are copies before or after any model's cut are of one fold.
    predictions.tsv holds what each sequence was taken for. `command` is what the file says it came from. Raises
    ValueError for data or a model that will not do, before anything is trained.
    """
    if settings.data is None:
        raise ValueError("got no data; expected titans genomics evaluate DATA")
    if len(settings.models) > 1:
        needed("scipy.stats")  # the paired tests stand at the end of hours
    data = read_sequences(settings.data, settings.read)
    size = shared_size(settings.train, settings.models)
    fits = {name: contender(settings.train, name, size) for name in settings.models}
    read = _as_read(data, fits)
    parts = folds(data, settings.folds, settings.fold_seed, *read, overlap=settings.train.overlap)
    for fit in fits.values():
        check_network(fit, len(data.classes))
    cut = data.longer_than(settings.train.max_length)
    say(f"{len(data):,} sequences: {counted(data)}{cut_told(cut, settings.train)}")
    settings.out.mkdir(parents=True, exist_ok=True)
    tuning, rates = _tune(settings, fits, data, parts, say)
    jobs = list(finals(settings, fits, data, parts, rates))
    ran = work(jobs, settings.jobs, say)
    contenders = [_contender(name, tuning.get(name, []), ran, data) for name in settings.models]
    told = {name: told_classes(ran, name, len(data)) for name in settings.models}
    first, *others = settings.models
    result = {
        "format": FORMAT,
        "what": "genomics",
        "command": command,
        "hardware": hardware(),
        **spent_on(part for one in contenders for part in [*one["tuning"], *one["runs"]]),
        "settings": plain_settings(settings),
        "sequences": len(data),
        "classes": data.counts(),
        "cut_sequences": cut,
        "majority": max(data.counts().values()) / len(data),
        "backbone_parameters": size,
        "contenders": contenders,
        "paired": [_paired(settings, contenders, told, data, first, other) for other in others],
    }
    write_json(settings.out / FILE, result)
    write_atomically(settings.out / PREDICTIONS, _lines(data, parts, told, settings.seeds))
    write_plots(result, settings.out)
    return result


def _as_read(data: Sequences, fits: dict[str, GenomicsFit]) -> list[tuple[Tokens, ...]]:
    """Give the sequences in every form that a model reads them in, where it is not the whole."""
    cuts = dict.fromkeys((fit.max_length, fit.crop) for fit in fits.values() if data.longer_than(fit.max_length))
    return [data.cropped(*cut).tokens for cut in cuts]


def _job(
    name: str, settings: GenomicsFit, folder: Path, data: Sequences, parts: NDArray[np.int64], fold: int, counts: bool
) -> FoldJob:
    return FoldJob(name, settings, folder, data.cropped(settings.max_length, settings.crop), parts, fold, counts)


def finals(
    settings: EvaluateSettings,
    fits: dict[str, GenomicsFit],
    data: Sequences,
    parts: NDArray[np.int64],
    rates: Rates,
) -> Iterator[FoldJob]:
    """List the runs that count: seed by seed and fold by fold, so that all models are as far as another."""
    for seed in settings.seeds:
        for fold in range(settings.folds):
            for name, base in fits.items():
                folder = settings.out / "runs" / f"{folder_name(name)}-fold{fold}-seed{seed}"
                run = dataclasses.replace(base, lr=rates[name, fold], seed=seed)
                yield _job(name, run, folder, data, parts, fold, counts=True)


def _tune(
    settings: EvaluateSettings, fits: dict[str, GenomicsFit], data: Sequences, parts: NDArray[np.int64], say: Say
) -> tuple[dict[str, list[Result]], Rates]:
    """Try every network with every learning rate in every fold, on its training part; the fold is not looked at.

    Another fold's training part holds this fold, so each has trials of its own. A variant that names its own rate has
    that, and without several rates there is nothing to try. Baselines that count words have none.
    """
    every = range(settings.folds)
    usual = {name: fit.lr if own_rate(name) else [*settings.rates, fit.lr][0] for name, fit in fits.items()}
    rates = {(name, fold): rate for name, rate in usual.items() for fold in every}
    tried = [name for name in fits if is_network(name) and not own_rate(name) and len(settings.rates) > 1]
    jobs = []
    for name, fold, rate in product(tried, every, settings.rates):
        steps = settings.tune_steps
        short = {"steps": steps, "warmup_steps": min(fits[name].warmup_steps, steps // 4), "lr": rate}
        run = dataclasses.replace(fits[name], seed=TRIAL_SEED, **short)
        folder = settings.out / "trials" / f"{folder_name(name)}-fold{fold}-{rate:g}"
        jobs.append(_job(name, run, folder, data, parts, fold, counts=False))
    tuning: dict[str, list[Result]] = {name: [] for name in tried}
    for job, result in zip(jobs, work(jobs, settings.jobs, say), strict=True):
        tuning[job.name].append({"fold": job.fold, "rate": job.rate, CHOSEN: result.get(CHOSEN), **spent(result)})
    for name, fold in product(tried, every):
        found = [one for one in tuning[name] if one["fold"] == fold]
        rates[name, fold] = best_rate(f"{name} in fold {fold}", found, CHOSEN, most=True)
    for name in tried:
        say(f"learning rates of {name} by fold: " + ", ".join(f"{rates[name, fold]:g}" for fold in every))
    return tuning, rates


def told_classes(ran: list[Result], name: str, count: int) -> dict[int, NDArray[np.int64]]:
    """Put together what a model took every sequence for, over all folds, by seed."""
    found: dict[int, NDArray[np.int64]] = {}
    for result in ran:
        if result["name"] == name:
            whole = found.setdefault(result["asked"]["settings"]["seed"], np.full(count, -1, np.int64))
            whole[result["places"]] = result["predicted"]
    return found


def _contender(name: str, tuning: list[Result], ran: list[Result], data: Sequences) -> Result:
    mine = [result for result in ran if result["name"] == name]
    runs = [
        {
            "seed": result["asked"]["settings"]["seed"],
            "fold": result["asked"]["fold"],
            "rate": result["asked"]["settings"]["lr"] if is_network(name) else None,
            **{key: result[key] for key in KEPT if key in result},
            **spent(result),
        }
        for result in mine
    ]
    whole = [
        scores(confusion(data.with_labels(), told, len(data.classes)))
        for told in told_classes(ran, name, len(data)).values()
    ]
    folds = sorted({run["fold"] for run in runs})
    rates = {run["fold"]: run["rate"] for run in runs}
    return {
        "name": name,
        "parameters": mine[0]["parameters"],
        "rates": [rates[fold] for fold in folds] if is_network(name) else None,
        "tuning": tuning,
        "runs": runs,
        # Every sequence once a seed: scores of all folds together, their spread that of seeds.
        **{key: mean_with_spread([one[key] for one in whole]) for key in SCORES},
        "by_fold": [mean(run["accuracy"] for run in runs if run["fold"] == fold) for fold in folds],
        "confusion": np.sum([one["confusion"] for one in whole], axis=0).tolist(),
    }


def _paired(
    settings: EvaluateSettings, contenders: list[Result], told: dict[str, Any], data: Sequences, first: str, other: str
) -> Result:
    """Compare two models: McNemar's test seed by seed, and the corrected t-test over folds, means over seeds."""
    labels = data.with_labels()
    by_seed = [mcnemar(told[first][seed] == labels, told[other][seed] == labels) for seed in settings.seeds]
    by_fold = {one["name"]: one["by_fold"] for one in contenders}
    differences = [a - b for a, b in zip(by_fold[first], by_fold[other], strict=True)]
    # What counts words learns from the held-out share too; of two ratios the larger one promises less.
    held = settings.train.held_out if is_network(first) or is_network(other) else 0.0
    return {
        "first": first,
        "second": other,
        "mcnemar": [{"seed": seed, **asdict(found)} for seed, found in zip(settings.seeds, by_seed, strict=True)],
        "mcnemar_p": max(found.p for found in by_seed),
        "folds": asdict(corrected_t(differences, share_tested(settings.folds, held))),
    }


def _lines(data: Sequences, parts: NDArray[np.int64], told: dict[str, Any], seeds: tuple[int, ...]) -> Iterator[str]:
    """Write a table: a line for each sequence, a column for each model and seed."""
    columns = [(f"{name} seed {seed}", told[name][seed]) for name in told for seed in seeds]
    yield "\t".join(["name", "fold", "label", *(head for head, _ in columns)]) + "\n"
    labels = data.with_labels()
    for place, name in enumerate(data.names):
        taken = [data.classes[values[place]] for _, values in columns]
        yield "\t".join([name, str(parts[place]), data.classes[labels[place]], *taken]) + "\n"
