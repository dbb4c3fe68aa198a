"""Classes of sequences that a trained classifier has not seen: what `titans genomics predict` runs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titans_lm.genomics.figures import PANEL, title, write_confusion
from titans_lm.genomics.records import Sequences, read_sequences
from titans_lm.genomics.saved import Classifier, load_classifier
from titans_lm.genomics.scores import confusion, scores
from titans_lm.genomics.settings import PredictSettings
from titans_lm.train.files import write_atomically
from titans_lm.train.settings import plain_settings


def predict(settings: PredictSettings) -> dict[str, Any]:
    """Write the classes of all sequences of a file, with probabilities, and say how many there are of each.

    Where the file has classes the result says how many were told; with `plot` a picture shows which was taken for
    which. Raises ValueError for a file, a model or a class that will not do; nothing is written then.
    """
    if settings.model is None or settings.data is None or settings.out is None:
        raise ValueError("got no model, no data or no out; expected titans genomics predict MODEL DATA --out FILE.tsv")
    classifier = load_classifier(settings.model, settings.device)
    data = read_sequences(settings.data, settings.read)
    if settings.plot is not None and data.labels is None:
        raise ValueError(
            f"got --plot for {settings.data}, which has no classes to compare with; expected none, or a file that has"
        )
    numbers = None if data.labels is None else _numbers(data, classifier)
    chosen = classifier.settings
    rows = data.cropped(chosen.max_length, chosen.crop).tokens
    found = classifier.probabilities(rows, batch_size=settings.batch_size, both_strands=settings.both_strands)
    told = found.argmax(1)
    result: dict[str, Any] = {
        "model": str(settings.model),
        "sequences": len(data),
        "cut_sequences": data.longer_than(chosen.max_length),
        "predicted": {name: int((told == number).sum()) for number, name in enumerate(classifier.classes)},
        "out": str(settings.out),
    }
    if numbers is not None:
        result |= scores(confusion(numbers, told, len(classifier.classes)))
    write_atomically(settings.out, _lines(data, classifier, found))
    if settings.plot is not None:
        write_confusion(settings.plot, title(result), classifier.classes, {PANEL: result["confusion"]})
        result["plot"] = str(settings.plot)
    return {**result, "settings": plain_settings(settings)}


def _numbers(data: Sequences, classifier: Classifier) -> NDArray[np.int64]:
    """Number the classes of a file as the classifier does."""
    known = {name: number for number, name in enumerate(classifier.classes)}
    strange = [name for name in data.classes if name not in known]
    if strange:
        raise ValueError(
            f"got the class {strange[0]!r} in the data; expected those of the classifier, {', '.join(known)}, or none"
        )
    assert data.labels is not None
    return np.array([known[name] for name in data.classes], np.int64)[data.labels]


def _lines(data: Sequences, classifier: Classifier, found: NDArray[np.float64]) -> Iterator[str]:
    """Write a table: name, class, and the probability of every class."""
    yield "\t".join(["name", "label", *(f"p_{name}" for name in classifier.classes)]) + "\n"
    for name, row in zip(data.names, found, strict=True):
        yield "\t".join([name, classifier.classes[int(row.argmax())], *(f"{value:.6f}" for value in row)]) + "\n"
