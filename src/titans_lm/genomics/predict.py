"""Classifiers that were trained: what they predict, the folder that holds one, and `titans genomics predict`.

A folder has config.json and model.safetensors, which say all that prediction needs: the names of the classes, the
settings, and which of two kinds it is: a classifier, or a model of nucleotides that a classifier may start from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from titans_lm.config import BackboneConfig
from titans_lm.evaluate.stream import evaluating
from titans_lm.genomics.baselines import LinearClassifier
from titans_lm.genomics.batches import padded
from titans_lm.genomics.metrics import scores, write_own_confusion
from titans_lm.genomics.model import NucleotideModel, make_network
from titans_lm.genomics.records import Sequences, Tokens, read_sequences, reverse_complement
from titans_lm.genomics.settings import GenomicsFit, PredictSettings, extra
from titans_lm.train.checkpoint import WEIGHTS
from titans_lm.train.device import choose_device, to_device
from titans_lm.train.files import check_writable, new_folder, one_line, read_json, write_atomically, write_json
from titans_lm.train.fresh import size_of
from titans_lm.train.options import merge_settings, plain_settings
from titans_lm.train.run import MODEL, SETTINGS

FORMAT = "titans-lm genomics 1"
CONFIG = "config.json"
CLASSIFIER, NUCLEOTIDES = "classifier", "nucleotides"
Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Classifier:
    """A trained classifier: its settings, the names of its classes, and the network or the linear baseline."""

    settings: GenomicsFit
    classes: tuple[str, ...]
    core: nn.Module

    def probabilities(
        self, rows: Sequence[Tokens], *, batch_size: int = 64, both_strands: bool | None = None
    ) -> Probabilities:
        """Give the probability of every class for every sequence, (rows, K); rows are cropped already.

        With `both_strands` they are the mean of those for a sequence and for its reverse complement; None is as the
        classifier was trained. ValueError for no sequence at all.
        """
        if not len(rows):
            raise ValueError("got no sequences; expected at least one to tell the class of")
        found = self._one_strand(rows, batch_size)
        if not (self.settings.both_strands if both_strands is None else both_strands):
            return found
        return 0.5 * (found + self._one_strand([reverse_complement(row) for row in rows], batch_size))

    def _one_strand(self, rows: Sequence[Tokens], batch_size: int) -> Probabilities:
        """Read sequences of about one length together, in the precision of the weights, however they were trained."""
        if isinstance(self.core, LinearClassifier):
            return self.core.probabilities(rows)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        found: list[Tensor] = []
        with evaluating(self.core) as device, torch.autocast(device.type, enabled=False):
            for start in range(0, len(order), batch_size):
                batch = to_device(padded([rows[place] for place in order[start : start + batch_size]]), device)
                found.append(self.core(batch["tokens"], batch["valid"]).double().softmax(1).cpu())
        return torch.cat(found).numpy()[np.argsort(order)]

    def parameters(self) -> int:
        """Count the numbers that were fitted."""
        return size_of(self.core)


def save_classifier(folder: Path, classifier: Classifier) -> Path:
    """Save a classifier; the folder appears as a whole, in place of an older one."""
    config = {"classes": list(classifier.classes), "settings": plain_settings(classifier.settings)}
    return _save(folder, CLASSIFIER, config, classifier.core.state_dict())


def save_nucleotides(folder: Path, model: NucleotideModel) -> Path:
    """Save a model of nucleotides, for classifiers to start from."""
    encoder = model.encoder
    config = {"model": plain_settings(encoder.backbone.config), "word_size": encoder.word_size}
    return _save(folder, NUCLEOTIDES, config, model.state_dict())


def _save(folder: Path, kind: str, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    with new_folder(folder) as unfinished:
        write_json(unfinished / CONFIG, {"format": FORMAT, "kind": kind, **config})
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        safetensors.torch.save_file(kept, unfinished / WEIGHTS)
    return folder


def load_classifier(path: Path, device: str = "auto") -> Classifier:
    """Load a classifier from a run or from its folder, ready to be used; ValueError where there is none."""
    folder, config = find_model(path, CLASSIFIER)
    settings, classes = merge_settings(GenomicsFit(), config["settings"]), tuple(config["classes"])
    network = _filled(make_network(settings, len(classes)), folder)
    return Classifier(settings, classes, network.eval().to(choose_device(device)))


def load_nucleotides(path: Path) -> NucleotideModel:
    """Load a model of nucleotides from its run or its folder; ValueError where there is none."""
    folder, config = find_model(path, NUCLEOTIDES)
    model = NucleotideModel(merge_settings(BackboneConfig(), config["model"]), config["word_size"])
    _filled(model, folder)
    return model


def find_model(path: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """Find the folder that a path means, and read what it holds."""
    made = "titans genomics train" if kind == CLASSIFIER else "titans genomics pretrain"
    if not path.is_dir():
        raise ValueError(f"got the model {str(path)!r}, which is no folder; expected the run of {made}")
    folder = next((found for found in (path, path / MODEL) if (found / CONFIG).is_file()), None)
    if folder is None:
        found = "a run that is not finished" if (path / SETTINGS).is_file() else "no saved model"
        raise ValueError(f"got the model {str(path)!r}, which holds {found}; expected the run of {made}")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(
            f"got {folder}, which holds no model of sequences in the format {FORMAT!r}; expected one of {made}"
        )
    if config["kind"] != kind:
        raise ValueError(f"got {folder}, which holds a {config['kind']} model; expected the run of {made}")
    return folder, config


def _filled(network: nn.Module, folder: Path) -> nn.Module:
    """Give a model the weights in its folder; ValueError where they cannot be read, or are of another model."""
    try:
        network.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {one_line(error)}") from error
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {one_line(error)}") from error
    return network


def predict(settings: PredictSettings) -> dict[str, Any]:
    """Write the classes of all sequences of a file, with probabilities, and say how many there are of each.

    Where the file has classes the result has scores; with `plot` a picture shows the confusion. Raises ValueError for a
    file, a model or a class that will not do; nothing is written then.
    """
    if settings.model is None or settings.data is None:
        raise ValueError("got no model or no data; expected titans genomics predict MODEL DATA")
    check_writable("--out", settings.out)
    classifier = load_classifier(settings.model, settings.device)
    data = read_sequences(settings.data, settings.read)
    if settings.plot is not None and data.labels is None:
        raise ValueError(
            f"got --plot for {settings.data}, which has no classes to compare with; expected none, or a file that has"
        )
    labels = _labels(data, classifier.classes)
    fit = classifier.settings
    rows = data.cropped(fit.max_length, fit.crop).tokens
    found = classifier.probabilities(rows, batch_size=settings.batch_size, both_strands=settings.both_strands)
    predicted = found.argmax(1)
    result: dict[str, Any] = {
        "model": str(settings.model),
        "sequences": len(data),
        "cut_sequences": data.longer_than(fit.max_length),
        "predicted": {name: int((predicted == number).sum()) for number, name in enumerate(classifier.classes)},
        "out": str(settings.out),
    }
    if labels is not None:
        result |= scores(labels, predicted, len(classifier.classes))
    write_atomically(settings.out, _table(data, classifier.classes, found))
    if settings.plot is not None:
        result["plot"] = str(write_own_confusion(settings.plot, result, classifier.classes))
    return {**result, "settings": plain_settings(settings)}


def _labels(data: Sequences, classes: tuple[str, ...]) -> NDArray[np.int64] | None:
    """Number the classes of a file as the classifier does."""
    if data.labels is None:
        return None
    extra("sklearn.metrics")  # scores stand at the end of what may take long
    strange = [name for name in data.classes if name not in classes]
    if strange:
        raise ValueError(
            f"got the class {strange[0]!r} in the data; expected those of the classifier, {', '.join(classes)}, or none"
        )
    return np.array([classes.index(name) for name in data.classes], np.int64)[data.labels]


def _table(data: Sequences, classes: tuple[str, ...], found: Probabilities) -> Iterator[str]:
    """Write a table: name, class, and the probability of every class."""
    yield "\t".join(["name", "label", *(f"p_{name}" for name in classes)]) + "\n"
    for name, row in zip(data.names, found, strict=True):
        yield "\t".join([name, classes[int(row.argmax())], *(f"{value:.6f}" for value in row)]) + "\n"
