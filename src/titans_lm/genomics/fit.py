"""Training: classes of sequences (`titans genomics train`), or their next nucleotide (`titans genomics pretrain`)."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from titans_lm.data.batches import IGNORED
from titans_lm.evaluate.stream import evaluating
from titans_lm.genomics.batches import SequenceBatches, held_out, pieces, with_targets
from titans_lm.genomics.model import (
    NucleotideModel,
    SequenceClassifier,
    class_loss,
    fit_baseline,
    fit_part,
    make_network,
    nucleotide_loss,
)
from titans_lm.genomics.predict import (
    Classifier,
    load_classifier,
    load_nucleotides,
    save_classifier,
    save_nucleotides,
    scores,
    write_own_confusion,
)
from titans_lm.genomics.records import VOCAB_SIZE, Sequences, Tokens, read_sequences
from titans_lm.genomics.settings import COUNTED, GenomicsFit, PretrainSettings, TrainSettings, extra, small_model
from titans_lm.train.device import environment, to_device
from titans_lm.train.files import read_json, write_json
from titans_lm.train.fresh import match_parameters, size_of
from titans_lm.train.loop import BestStep, Interrupted, fit
from titans_lm.train.options import as_settings, plain_settings
from titans_lm.train.parallel import check_alone
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import MODEL, SETTINGS, RunFolder

BEST, PRETRAIN, RESULT, CONFUSION = "best.safetensors", "pretrain", "result.json", "confusion.png"
MOST_HELD_OUT = 1024
"""Most pieces that are held out: of a genome a share would take longer to measure than to train on."""
INCIDENTAL = ("out", "resume", "json", "quiet")
"""Settings of a command that say nothing of what is trained."""
Found = dict[str, Any]


def train_on_file(settings: TrainSettings, *, progress: ProgressReport | None = None) -> Found:
    """Train a classifier on a file and say how it did on the part of each class that was held out to choose by.

    A counted baseline is saved as it is after learning from that part too, and judged as it was before. With `resume`
    a run that was stopped goes on, by the same settings; one that was finished stays as it is. ValueError for data or
    settings that will not do, KeyboardInterrupt where it is stopped, and what `fit` raises.
    """
    if settings.data is None or settings.out is None:
        raise ValueError("got no data or no run; expected titans genomics train DATA --out FOLDER")
    check_alone()
    extra("sklearn.metrics")  # scores stand at the end
    shown = ProgressReport(quiet=True) if progress is None else progress
    chosen = as_settings(GenomicsFit, settings)
    data = read_sequences(settings.data, settings.read)
    cut = data.longer_than(settings.max_length)
    data = data.cropped(settings.max_length, settings.crop)
    train, valid = held_out(data, settings.held_out, settings.seed, settings.overlap)
    counted = describe_data(data, cut, chosen)
    shown.say(f"{len(train):,} sequences to train on, {len(valid):,} to choose by: {counted}")
    if not settings.resume:
        check_network(chosen, len(data.classes))
    begin(settings.out, settings, resume=settings.resume)
    if (settings.out / RESULT).is_file():  # it was finished
        return read_json(settings.out / RESULT)
    try:
        classifier, fitted = train_classifier(chosen, train, valid, settings.out, shown)
    except Interrupted as stopped:
        raise KeyboardInterrupt(f"stopped after step {stopped.step}; the same command with --resume goes on") from None
    judged = classifier
    if chosen.baseline in COUNTED:  # it has learned from the validation part
        judged = dataclasses.replace(classifier, core=fit_part(classifier.settings, train, fitted))
    found = scores(valid.with_labels(), judged.probabilities(valid.tokens).argmax(1), len(data.classes))
    write_own_confusion(settings.out / CONFUSION, found, classifier.classes)
    result = {
        "classes": data.counts(),
        "train_sequences": len(train),
        "validation_sequences": len(valid),
        "cut_sequences": cut,
        "parameters": classifier.parameters(),
        **fitted,
        "validation": found,
    }
    return _write_result(settings.out, settings, result)


def describe_data(data: Sequences, cut: int, settings: GenomicsFit) -> str:
    """Write how many sequences each class has, and how many were cut to what."""
    counts = ", ".join(f"{name} {many:,}" for name, many in data.counts().items())
    return counts + (f"; {cut:,} cut to the {settings.crop} {settings.max_length:,} nucleotides" if cut else "")


def begin(path: Path, settings: Any, *, resume: bool) -> None:
    """Make the folder of a run, or check that it was begun with these settings; ValueError where it was not."""
    now = {name: value for name, value in plain_settings(settings).items() if name not in INCIDENTAL}
    if not resume:
        RunFolder.create(path, now)
        return
    RunFolder.open(path)
    before, now = read_json(path / SETTINGS), json.loads(json.dumps(now))
    other = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if other:
        raise ValueError(
            f"got the run {path}, which was begun with {other[0]}={before.get(other[0])!r} and not "
            f"{now.get(other[0])!r}; expected the settings that it was begun with"
        )


def _write_result(run: Path, settings: Any, found: Found) -> Found:
    where = {"run": str(run), "model": str(run / MODEL)}
    result = {**where, **found, "settings": plain_settings(settings), "environment": environment()}
    write_json(run / RESULT, result)
    return result


def train_classifier(
    settings: GenomicsFit, train: Sequences, valid: Sequences, path: Path, progress: ProgressReport | None = None
) -> tuple[Classifier, Found]:
    """Train a classifier in a run folder that is there, from where it stopped if it did.

    The model that is saved and returned is that of the step that did best on `valid`; nothing else is looked at.
    Sequences are cropped already. The numbers beside it are about the training alone.
    """
    shown = ProgressReport(quiet=True) if progress is None else progress
    if settings.baseline not in COUNTED:
        return _train_network(settings, train, valid, path, shown)
    core, chosen = fit_baseline(settings, train, valid)
    classifier = Classifier(settings, train.classes, core)
    save_classifier(path / MODEL, classifier)
    return classifier, chosen


def _train_network(
    settings: GenomicsFit, train: Sequences, valid: Sequences, path: Path, progress: ProgressReport
) -> tuple[Classifier, Found]:
    settings, initial = _resolve_model(settings)
    if settings.pretrain_steps:
        longest = max(2, *map(len, train.tokens))
        before = as_settings(PretrainSettings, settings, steps=settings.pretrain_steps, max_length=longest)
        pretrain(before, train.tokens, path / PRETRAIN, progress, resume=(path / PRETRAIN / SETTINGS).is_file())
        initial = load_nucleotides(path / PRETRAIN).encoder.state_dict()
    torch.manual_seed(settings.seed)
    network = make_network(settings, len(train.classes))
    if initial is not None and isinstance(network, SequenceClassifier):
        network.encoder.load_state_dict(initial)
    progress.say(f"{size_of(network):,} parameters; run folder {path}")
    best = BestStep(
        network, lambda model: _validate(settings, model, valid),
        lambda found: (found["validation_accuracy"], -found["validation_loss"]), steps=settings.steps,
        every=settings.eval_every, patience=settings.patience, path=path / BEST,
    )  # fmt: skip
    batches = SequenceBatches(
        train.tokens, train.with_labels(),
        batch_size=settings.batch_size, seed=settings.seed, strands=settings.reverse_complement,
    )  # fmt: skip
    ended = fit(
        network, batches, class_loss, settings,
        eval_fn=best, on_step=best.on_step, run=RunFolder.open(path), progress=progress,
    )  # fmt: skip
    found = best.restore()
    save_classifier(path / MODEL, Classifier(settings, train.classes, network))
    fitted = {
        "steps": best.steps(ended.step),
        "best_step": found["step"],
        "validation_accuracy": found["validation_accuracy"],
        "seconds": ended.seconds,
        "tokens": ended.tokens,
        "skipped_steps": ended.skipped,
    }
    return load_classifier(path, settings.device), fitted


def check_network(settings: GenomicsFit, classes: int) -> None:
    """Build the network once, so that what will not do is told before anything is trained; ValueError for that."""
    make_network(_resolve_model(settings)[0], classes)


def _resolve_model(settings: GenomicsFit) -> tuple[GenomicsFit, Found | None]:
    """Resolve the sizes of the model: those that are asked for, or those of the weights that it starts from."""
    if settings.parameters is not None and settings.baseline is None:
        model = match_parameters(settings.model, VOCAB_SIZE, settings.parameters)
        settings = dataclasses.replace(settings, model=model, parameters=None)
    if settings.pretrained is None:
        return settings, None
    encoder = load_nucleotides(settings.pretrained).encoder
    config, words = encoder.backbone.config, encoder.word_size
    if settings.model not in (config, small_model()) or settings.word_size not in (words, 1):
        raise ValueError(
            f"got settings of the model beside pretrained={str(settings.pretrained)!r}, which has its own; expected "
            "none, or those that it was pre-trained with"
        )
    return dataclasses.replace(settings, model=config, word_size=words), encoder.state_dict()


def _validate(settings: GenomicsFit, model: nn.Module, valid: Sequences) -> Found:
    """Accuracy and mean −log p of the validation part, predicted as the classifier will be used: in float32."""
    found = Classifier(settings, valid.classes, model).probabilities(valid.tokens)
    labels = valid.with_labels()
    loss = -np.log(np.maximum(found[np.arange(len(labels)), labels], 1e-300)).mean()
    return {"validation_accuracy": float((found.argmax(1) == labels).mean()), "validation_loss": float(loss)}


def pretrain_on_file(settings: PretrainSettings, *, progress: ProgressReport | None = None) -> Found:
    """Train a model of nucleotides on a file, for classifiers to start from; raises what `train_on_file` does."""
    if settings.data is None or settings.out is None:
        raise ValueError("got no data or no run; expected titans genomics pretrain DATA --out FOLDER")
    check_alone()
    shown = ProgressReport(quiet=True) if progress is None else progress
    data = read_sequences(settings.data, settings.read)
    try:
        found = pretrain(settings, data.tokens, settings.out, shown, resume=settings.resume)
    except Interrupted as stopped:
        raise KeyboardInterrupt(f"stopped after step {stopped.step}; the same command with --resume goes on") from None
    return _write_result(settings.out, settings, {"sequences": len(data), **found})


def pretrain(
    settings: PretrainSettings, rows: Sequence[Tokens], path: Path, progress: ProgressReport, *, resume: bool
) -> Found:
    """Train a model of nucleotides on sequences, in a folder of its own; one that is done is not done again.

    Sequences are cut into pieces of `max_length`, of which a share, drawn by the seed, is held out; no more than
    `MOST_HELD_OUT`, and the rest is trained on. ValueError where there are fewer than two pieces, and for a folder that
    was begun with other settings.
    """
    cut = pieces(rows, settings.max_length)
    if len(cut) < 2:
        raise ValueError(
            f"got {len(cut)} pieces of {settings.max_length} nucleotides; expected at least two: give more "
            "sequences or a smaller max_length"
        )
    order = np.random.default_rng([settings.seed, 2]).permutation(len(cut))
    many = min(max(round(len(cut) * settings.held_out), 1), len(cut) - 1, MOST_HELD_OUT)
    test, train = ([cut[place] for place in part] for part in (order[:many], order[many:]))
    begin(path, settings, resume=resume)
    torch.manual_seed(settings.seed)
    model = NucleotideModel(settings.model, settings.word_size, settings.embed_dropout)
    size, seed, strands = settings.batch_size, settings.seed, settings.reverse_complement
    batches = SequenceBatches(train, batch_size=size, seed=seed, strands=strands)
    progress.say(f"pre-training on {len(train):,} pieces, {len(test):,} held out; run folder {path}")
    ended = fit(
        model, batches, nucleotide_loss, settings, run=RunFolder.open(path), progress=progress,
        eval_fn=lambda model: {"held_out_bits_per_nucleotide": bits_per_nucleotide(model, test, size)},
    )  # fmt: skip
    save_nucleotides(path / MODEL, model)
    return {
        "pieces": len(train),
        "held_out_pieces": len(test),
        "parameters": size_of(model),
        "steps": ended.step,
        "tokens": ended.tokens,
        "seconds": ended.seconds,
        **ended.evaluation,
    }


def bits_per_nucleotide(model: nn.Module, rows: Sequence[Tokens], batch_size: int) -> float:
    """Mean −log₂ p of every nucleotide after the first of its piece, N left out; 2 is guessing."""
    total, many = 0.0, 0
    with evaluating(model) as device:
        for start in range(0, len(rows), batch_size):
            batch = to_device(with_targets(rows[start : start + batch_size]), device)
            logits = model(batch["tokens"], batch["valid"]).float().flatten(0, 1)
            targets = batch["targets"].flatten()
            total += float(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"))
            many += int((targets != IGNORED).sum())
    return total / max(many, 1) / math.log(2)
