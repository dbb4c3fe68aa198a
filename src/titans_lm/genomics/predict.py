"""Trained classifiers: what they predict, how well, the folder that holds one, and `titans genomics predict`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titans_lm.config import BackboneConfig
from titans_lm.evaluate.stream import evaluating
from titans_lm.genomics.batches import padded
from titans_lm.genomics.model import LinearClassifier, NucleotideModel, make_network
from titans_lm.genomics.records import Sequences, Tokens, read_sequences, reverse_complement
from titans_lm.genomics.settings import GenomicsFit, PredictSettings, extra
from titans_lm.report.plots import HeatMaps, draw, save_png
from titans_lm.train.checkpoint import load_weights, save_model
from titans_lm.train.device import choose_device, to_device
from titans_lm.train.files import check_writable, new_folder, read_json, write_atomically, write_json
from titans_lm.train.fresh import size_of
from titans_lm.train.options import merge_settings, plain_settings
from titans_lm.train.run import MODEL, SETTINGS

Labels = NDArray[np.int64]
Correct = NDArray[np.bool_]


def scores(labels: Labels, predicted: Labels, classes: int) -> dict[str, Any]:
    """Give accuracy, Matthews' correlation, macro F1 and the confusion: row i, column j counts class i taken for j.

    Classes are numbers from 0 to `classes` − 1. The correlation is 0 where it is not defined; F1 is 0 for a class that
    is neither there nor predicted.
    """
    metrics, numbers = extra("sklearn.metrics"), range(classes)
    single = len({*labels.tolist(), *predicted.tolist()}) < 2  # scikit-learn gives 0 there too, and warns
    return {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        "mcc": 0.0 if single else float(metrics.matthews_corrcoef(labels, predicted)),
        "f1": float(metrics.f1_score(labels, predicted, labels=numbers, average="macro", zero_division=0.0)),
        "confusion": metrics.confusion_matrix(labels, predicted, labels=numbers).tolist(),
    }


def mcnemar(first: Correct, second: Correct) -> dict[str, Any]:
    """Test whether two models are right equally often, by the sequences on which they differ (McNemar 1947).

        b, c sequences that the first, the second alone got right;   b ~ Binomial(b + c, 1/2), two-sided, exact

    `first` and `second` (R,) say of R sequences, the same for both, whether the model was right.
    It counts each sequence once, as sequences of one fold each are, and takes the models as they are: it knows nothing
    of how they would have come out on other training data. 1 where they never differ.
    """
    b, c = int((first & ~second).sum()), int((second & ~first).sum())
    p = float(extra("scipy.stats").binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0
    return {"first_only": b, "second_only": c, "p": p}


def resampling_ratio(folds: int, held_out: float) -> float:
    """Give the ratio of sequences tested to sequences trained on, where a share of each training part is held out.

    r = (1/k) / ((1 − 1/k) (1 − h)) = 1 / ((k − 1) (1 − h))
    """
    return 1.0 / ((folds - 1) * (1.0 - held_out))


def corrected_t(differences: Sequence[float], ratio: float) -> dict[str, float]:
    """Test whether a mean over folds differs from 0, by the corrected resampled t-test (Nadeau and Bengio 2003).

        t = d̄ / √((1/k + r) s²),   k − 1 degrees of freedom;   d̄, a two-sided p, and the interval of 95 %

    d̄ and s² are mean and variance of the k differences, r is the ratio of sequences tested to sequences trained on
    (`resampling_ratio`): any two folds were trained on mostly the same sequences, so their differences vary
    together and 1/k alone would promise too much. Where all differences are equal p is 1 if they are 0, else 0.
    """
    count = len(differences)
    if count < 2:
        raise ValueError(f"got {count} differences; expected at least two folds")
    middle = mean(differences)
    spread = math.sqrt((1.0 / count + ratio) * variance(differences))
    student = extra("scipy.stats").t(count - 1)
    half = float(student.ppf(0.975)) * spread
    p = float(2.0 * student.sf(abs(middle) / spread)) if spread else float(middle == 0.0)
    return {"difference": middle, "p": p, "low": middle - half, "high": middle + half}


def write_confusion(path: Path, title: str, classes: Sequence[str], panels: dict[str, Any]) -> Path:
    """Draw confusions, a panel for each model, as shares of each true class in per cent into a PNG file."""
    shares = {
        name: [[100.0 * many / max(sum(row), 1) for many in row] for row in counts] for name, counts in panels.items()
    }
    maps = HeatMaps(
        title=title, x_label="predicted", y_label="class", x_labels=list(classes), y_labels=list(classes), panels=shares
    )
    return save_png(draw(maps), path)


def write_own_confusion(path: Path, found: dict[str, Any], classes: Sequence[str]) -> Path:
    """Draw the confusion of one classifier, by its scores."""
    title = f"{100 * found['accuracy']:.1f} % right"
    return write_confusion(path, title, classes, {"of each class, %": found["confusion"]})


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
    return _save(folder, CLASSIFIER, config, classifier.core)


def save_nucleotides(folder: Path, model: NucleotideModel) -> Path:
    """Save a model of nucleotides, for classifiers to start from."""
    encoder = model.encoder
    config = {"model": plain_settings(encoder.backbone.config), "word_size": encoder.word_size}
    return _save(folder, NUCLEOTIDES, config, model)


def _save(folder: Path, kind: str, config: dict[str, Any], model: nn.Module) -> Path:
    with new_folder(folder) as unfinished:
        write_json(unfinished / CONFIG, {"format": FORMAT, "kind": kind, **config})
        save_model(unfinished, model)
    return folder


def load_classifier(path: Path, device: str = "auto") -> Classifier:
    """Load a classifier from a run or from its folder, ready to be used; ValueError where there is none."""
    folder, config = find_model(path, CLASSIFIER)
    settings, classes = merge_settings(GenomicsFit(), config["settings"]), tuple(config["classes"])
    network = make_network(settings, len(classes))
    load_weights(folder, network)
    return Classifier(settings, classes, network.eval().to(choose_device(device)))


def load_nucleotides(path: Path) -> NucleotideModel:
    """Load a model of nucleotides from its run or its folder; ValueError where there is none."""
    folder, config = find_model(path, NUCLEOTIDES)
    model = NucleotideModel(merge_settings(BackboneConfig(), config["model"]), config["word_size"])
    load_weights(folder, model)
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


def predict(settings: PredictSettings) -> dict[str, Any]:
    """Write the classes of all sequences of a file, with probabilities, and say how many there are of each.

    Where the file has classes the result has scores; with `plot` a picture shows the confusion. Raises ValueError for a
    file, a model or a class that will not do; nothing is written then.
    """
    if settings.model is None or settings.data is None:
        raise ValueError("got no model or no data; expected titans genomics predict MODEL DATA")
    check_writable("--out", settings.out)
    if settings.out.resolve() == Path(settings.data).resolve():
        raise ValueError(f"got --out {settings.out}, which holds the sequences; expected another file")
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
