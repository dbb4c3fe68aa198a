"""Train a classifier of sequences: files in, a folder with a model out. What `titans genomics train` runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from titans_lm.genomics.batches import ClassBatches
from titans_lm.genomics.best import Best
from titans_lm.genomics.figures import CONFUSION, PANEL, title, write_confusion
from titans_lm.genomics.kmers import fit_counted, fit_part
from titans_lm.genomics.model import SequenceClassifier, class_loss, make_network
from titans_lm.genomics.nucleotides import VOCAB_SIZE
from titans_lm.genomics.pretrain import pretrain_rows
from titans_lm.genomics.records import Sequences, read_sequences
from titans_lm.genomics.saved import Classifier, load_classifier, load_nucleotides, save_classifier
from titans_lm.genomics.scores import confusion, scores
from titans_lm.genomics.settings import COUNTED, GenomicsFit, PretrainSettings, TrainSettings, fit_settings, small_model
from titans_lm.genomics.split import held_out
from titans_lm.train.device import environment
from titans_lm.train.files import write_json
from titans_lm.train.log import ProgressReport
from titans_lm.train.loop import Interrupted, fit
from titans_lm.train.match import match_parameters
from titans_lm.train.parallel import World, joined_world
from titans_lm.train.run import MODEL, SETTINGS, RunFolder
from titans_lm.train.settings import plain_settings

BEST, PRETRAIN, RESULT = "best", "pretrain", "result.json"


def train_on_file(
    settings: TrainSettings, *, resume: bool = False, progress: ProgressReport | None = None
) -> dict[str, Any]:
    """Train a classifier on a file and say how it did on the part of each class that was held out to choose by.

    The run folder then holds the model, what was found (result.json), and a picture of which class was taken for which.
    A counted baseline is saved as it is after learning from that part too, and judged as it was before. `resume` goes
    on with a run that was stopped, by the same settings; one that was finished stays as it is. Raises ValueError for
    data or settings that will not do, KeyboardInterrupt where it is stopped, and what `fit` raises.
    """
    if settings.data is None or settings.run is None:
        raise ValueError("got no data or no run; expected titans genomics train DATA --run FOLDER")
    shown = ProgressReport(quiet=True) if progress is None else progress
    chosen = fit_settings(settings)
    data = read_sequences(settings.data, settings.read)
    cut = data.longer_than(settings.max_length)
    data = data.cropped(settings.max_length, settings.crop)
    train, valid = parted(data, chosen)
    shown.say(
        f"{len(train):,} sequences to train on, {len(valid):,} to choose by: {counted(data)}{cut_told(cut, settings)}"
    )
    asked = {name: value for name, value in plain_settings(settings).items() if name != "run"}
    if not resume:
        check_network(chosen, len(data.classes))
    begin(settings.run, asked, resume=resume)
    if (settings.run / RESULT).is_file():  # it was finished
        return json.loads((settings.run / RESULT).read_bytes())
    try:
        classifier, told = train_classifier(chosen, train, valid, settings.run, shown)
    except Interrupted as stopped:
        raise KeyboardInterrupt(f"stopped after step {stopped.step}; the same command with --resume goes on") from None
    found = judged(_before_refit(classifier, train, told), valid)
    result = {
        "run": str(settings.run),
        "model": str(settings.run / MODEL),
        "classes": data.counts(),
        "train_sequences": len(train),
        "validation_sequences": len(valid),
        "cut_sequences": cut,
        "parameters": classifier.parameters(),
        **told,
        "validation": found,
        "settings": plain_settings(settings),
        "environment": environment(),
    }
    write_confusion(settings.run / CONFUSION, title(found), classifier.classes, {PANEL: found["confusion"]})
    write_json(settings.run / RESULT, result)
    return result


def parted(data: Sequences, settings: GenomicsFit) -> tuple[Sequences, Sequences]:
    """Part sequences into those to train on and those to choose the best step by."""
    train, valid = held_out(data, settings.held_out, settings.seed, settings.overlap)
    return data.take(train), data.take(valid)


def counted(data: Sequences) -> str:
    """Write how many sequences each class has."""
    return ", ".join(f"{name} {many:,}" for name, many in data.counts().items())


def cut_told(cut: int, settings: GenomicsFit) -> str:
    """Say how many sequences were cut, and to what."""
    return f"; {cut:,} cut to the {settings.crop} {settings.max_length:,} nucleotides" if cut else ""


def begin(path: Path, asked: dict[str, Any], *, resume: bool) -> None:
    """Make the folder of a run, or check that it was begun with these settings.

    ValueError for a folder with something else in it, and for settings that differ.
    """
    if not resume:
        RunFolder.create(path, asked)
        return
    RunFolder.open(path)
    before, now = json.loads((path / SETTINGS).read_bytes()), json.loads(json.dumps(asked))
    other = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if other:
        raise ValueError(
            f"got the run {path}, which was begun with {other[0]}={before.get(other[0])!r} and not "
            f"{now.get(other[0])!r}; expected the settings that it was begun with"
        )


def train_classifier(
    settings: GenomicsFit, train: Sequences, valid: Sequences, path: Path, progress: ProgressReport | None = None
) -> tuple[Classifier, dict[str, Any]]:
    """Train a classifier in a run folder that is there, from where it stopped if it did.

    The model that is saved and returned is that of the step that did best on `valid`; nothing else is looked at.
    Sequences are cropped already. The numbers beside it are about the training alone.
    """
    shown = ProgressReport(quiet=True) if progress is None else progress
    with joined_world(settings.device) as world:
        if settings.baseline in COUNTED:
            fitted, told = fit_counted(settings, train, valid)
            classifier = Classifier(settings, train.classes, fitted)
            world.first(lambda: save_classifier(path / MODEL, classifier))
            return classifier, told
        return _train_network(settings, train, valid, path, shown, world)


def _train_network(
    settings: GenomicsFit, train: Sequences, valid: Sequences, path: Path, progress: ProgressReport, world: World
) -> tuple[Classifier, dict[str, Any]]:
    world.share(settings.batch_size)
    settings, begun = _started(settings, train, path, progress)
    torch.manual_seed(settings.seed)
    network = make_network(settings, len(train.classes))
    if begun is not None and isinstance(network, SequenceClassifier):
        network.encoder.load_state_dict(begun)
    progress.say(f"{sum(p.numel() for p in network.parameters()):,} parameters; run folder {path}")
    best = Best(path / BEST, network, lambda model: _look(settings, model, valid), settings, writes=world.main)
    strands = settings.reverse_complement
    batches = ClassBatches(train, batch_size=settings.batch_size, seed=settings.seed, strands=strands)
    ended = fit(
        network, batches, class_loss, settings,
        eval_fn=best, on_step=best.on_step, run=RunFolder.open(path), progress=progress,
    )  # fmt: skip
    found = best.found
    assert found is not None

    def save() -> None:
        best.load(network)
        save_classifier(path / MODEL, Classifier(settings, train.classes, network))

    world.first(save)
    told = {
        "steps": best.steps(ended.step),
        "best_step": found["step"],
        "validation_accuracy": found["validation_accuracy"],
        "seconds": ended.seconds,
        "tokens": ended.tokens,
        "skipped_steps": ended.skipped,
    }
    return load_classifier(path, settings.device), told


def check_network(settings: GenomicsFit, classes: int) -> None:
    """Build the network once, so that what will not do is told before anything is trained; ValueError for that."""
    if settings.baseline not in COUNTED:
        make_network(_settled(settings)[0], classes)


def _started(
    settings: GenomicsFit, train: Sequences, path: Path, progress: ProgressReport
) -> tuple[GenomicsFit, dict[str, Any] | None]:
    """Settle the sizes of the model, and pre-train it or find the weights that it starts from."""
    settings, begun = _settled(settings)
    if settings.pretrain_steps:
        longest = max(map(len, train.tokens))
        pretrain_rows(_pretraining(settings, max(longest, 2)), train.tokens, path / PRETRAIN, progress)
        begun = load_nucleotides(path / PRETRAIN).encoder.state_dict()
    return settings, begun


def _settled(settings: GenomicsFit) -> tuple[GenomicsFit, dict[str, Any] | None]:
    """Settle the sizes of the model: those that are asked for, or those of the weights that it starts from."""
    if settings.parameters is not None and settings.baseline is None:
        model = match_parameters(settings.model, VOCAB_SIZE, settings.parameters)
        settings = dataclasses.replace(settings, model=model, parameters=None)
    if settings.pretrained is None:
        return settings, None
    encoder = load_nucleotides(settings.pretrained).encoder
    config, stem, words = encoder.backbone.config, encoder.stem_size, encoder.word_size
    own = settings.stem_size not in (stem, 1) or settings.word_size not in (words, 1)
    if settings.model not in (config, small_model()) or own:
        raise ValueError(
            f"got settings of the model beside pretrained={str(settings.pretrained)!r}, which has its own; expected "
            "none, or those that it was pre-trained with"
        )
    return dataclasses.replace(settings, model=config, stem_size=stem, word_size=words), encoder.state_dict()


def _pretraining(settings: GenomicsFit, max_length: int) -> PretrainSettings:
    names = {item.name for item in dataclasses.fields(PretrainSettings)} - {"data", "run", "read"}
    shared = {item.name: getattr(settings, item.name) for item in dataclasses.fields(GenomicsFit) if item.name in names}
    return PretrainSettings(**{**shared, "steps": settings.pretrain_steps, "max_length": max_length})


def _look(settings: GenomicsFit, model: nn.Module, valid: Sequences) -> dict[str, Any]:
    """Accuracy and mean −log p of the validation part, predicted as the classifier will be used: in float32."""
    found = Classifier(settings, valid.classes, model).probabilities(valid.tokens)
    labels = valid.with_labels()
    loss = -np.log(np.maximum(found[np.arange(len(labels)), labels], 1e-300)).mean()
    return {"validation_accuracy": float((found.argmax(1) == labels).mean()), "validation_loss": float(loss)}


def _before_refit(classifier: Classifier, train: Sequences, told: dict[str, Any]) -> Classifier:
    """Give the classifier that has not seen the validation part: a counted one learns from it in the end."""
    if classifier.settings.baseline not in COUNTED:
        return classifier
    return dataclasses.replace(classifier, core=fit_part(classifier.settings, train, told))


def judged(classifier: Classifier, data: Sequences) -> dict[str, Any]:
    """Score a classifier on sequences with classes."""
    predicted = classifier.probabilities(data.tokens).argmax(1)
    return scores(confusion(data.with_labels(), predicted, len(data.classes)))
