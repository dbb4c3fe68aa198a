"""Classifiers on disk: a folder with config.json and model.safetensors, which says all that prediction needs.

config.json holds the names of the classes, the settings of the classifier (what it reads of a sequence and how), and
which of two kinds it is: a classifier, or a model of nucleotides that a classifier may start from.
"""

import json
from collections.abc import Sequence
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
from titans_lm.genomics.batches import padded
from titans_lm.genomics.kmers import WordClassifier
from titans_lm.genomics.lengths import LengthClassifier
from titans_lm.genomics.model import NucleotideModel, evaluating, make_network
from titans_lm.genomics.nucleotides import Tokens, reverse_complement
from titans_lm.genomics.settings import COUNTED, GenomicsFit
from titans_lm.train.checkpoint import WEIGHTS
from titans_lm.train.device import choose_device, to_device
from titans_lm.train.files import new_folder, write_json
from titans_lm.train.run import MODEL, SETTINGS
from titans_lm.train.settings import merge_settings, plain_settings

FORMAT = "titans-lm genomics 1"
CONFIG = "config.json"
CLASSIFIER, NUCLEOTIDES = "classifier", "nucleotides"
Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Classifier:
    """A trained classifier: what it is made of, the names of its classes, and the network or what was counted."""

    settings: GenomicsFit
    classes: tuple[str, ...]
    core: nn.Module | WordClassifier | LengthClassifier

    def probabilities(
        self, rows: Sequence[Tokens], *, batch_size: int = 64, both_strands: bool | None = None
    ) -> Probabilities:
        """Give the probability of every class for every sequence, (rows, K); rows are cropped already.

        With `both_strands` they are the mean of those for a sequence and for its reverse complement; None is as the
        classifier was trained. ValueError for no sequence at all.
        """
        if not len(rows):
            raise ValueError("got no sequences; expected at least one to tell the class of")
        twice = self.settings.both_strands if both_strands is None else both_strands
        found = self._one_strand(rows, batch_size)
        if not twice:
            return found
        return 0.5 * (found + self._one_strand([reverse_complement(row) for row in rows], batch_size))

    def _one_strand(self, rows: Sequence[Tokens], batch_size: int) -> Probabilities:
        if not isinstance(self.core, nn.Module):
            return self.core.probabilities(rows)
        return network_probabilities(self.core, rows, batch_size)

    def parameters(self) -> int:
        """Count the numbers that were fitted."""
        if not isinstance(self.core, nn.Module):
            return self.core.weight.size + self.core.bias.size
        return sum(parameter.numel() for parameter in self.core.parameters())


def network_probabilities(network: nn.Module, rows: Sequence[Tokens], batch_size: int) -> Probabilities:
    """Give the probability of every class for every sequence, (rows, K); those of about one length are read together.

    In the precision of the weights, whatever the precision of training is: what is chosen on validation and what is
    tested are measured alike. The network is left in the mode that it was in.
    """
    device = next(network.parameters()).device
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    found: list[Tensor] = []
    with evaluating(network), torch.autocast(device.type, enabled=False):
        for start in range(0, len(order), batch_size):
            batch = to_device(padded([rows[place] for place in order[start : start + batch_size]]), device)
            found.append(network(batch["tokens"], batch["valid"]).double().softmax(1).cpu())
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return torch.cat(found).numpy()[back]


def save_classifier(folder: Path, classifier: Classifier) -> Path:
    """Save a classifier; the folder appears as a whole, in place of an older one."""
    core = classifier.core
    config: dict[str, Any] = {"k": core.k, "shares": core.shares} if isinstance(core, WordClassifier) else {}
    if isinstance(core, nn.Module):
        weights = core.state_dict()
    else:
        weights = {"weight": torch.from_numpy(core.weight), "bias": torch.from_numpy(core.bias)}
    config |= {"classes": list(classifier.classes), "settings": plain_settings(classifier.settings)}
    return _save(folder, CLASSIFIER, config, weights)


def save_nucleotides(folder: Path, model: NucleotideModel) -> Path:
    """Save a model of nucleotides, for classifiers to start from."""
    encoder = model.encoder
    sizes = {"stem_size": encoder.stem_size, "word_size": encoder.word_size}
    config = {"model": plain_settings(encoder.backbone.config), **sizes}
    return _save(folder, NUCLEOTIDES, config, model.state_dict())


def _save(folder: Path, kind: str, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    with new_folder(folder) as unfinished:
        write_json(unfinished / CONFIG, {"format": FORMAT, "kind": kind, **config})
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        safetensors.torch.save_file(kept, unfinished / WEIGHTS)
    return folder


def load_classifier(path: Path, device: str = "auto") -> Classifier:
    """Load a classifier from a run or from its folder, ready to be used; ValueError where there is none."""
    folder, config = _config(path, CLASSIFIER)
    settings = merge_settings(GenomicsFit(), config["settings"])
    weights = _weights(folder)
    if settings.baseline in COUNTED:
        return Classifier(settings, tuple(config["classes"]), _counted(settings, config, weights))
    network = make_network(settings, len(config["classes"]))
    _fill(network, weights, folder)
    return Classifier(settings, tuple(config["classes"]), network.eval().to(choose_device(device)))


def _counted(
    settings: GenomicsFit, config: dict[str, Any], weights: dict[str, Tensor]
) -> WordClassifier | LengthClassifier:
    weight, bias = weights["weight"].numpy(), weights["bias"].numpy()
    if settings.baseline == "length":
        return LengthClassifier(weight, bias)
    return WordClassifier(config["k"], weight, bias, config["shares"])


def load_nucleotides(path: Path) -> NucleotideModel:
    """Load a model of nucleotides from its run or its folder; ValueError where there is none."""
    folder, config = _config(path, NUCLEOTIDES)
    sizes = config["stem_size"], config.get("word_size", 1)
    model = NucleotideModel(merge_settings(BackboneConfig(), config["model"]), *sizes)
    _fill(model, _weights(folder), folder)
    return model


def _config(path: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """Find the folder that a path means, and read what it holds."""
    made = "titans genomics train" if kind == CLASSIFIER else "titans genomics pretrain"
    if not path.is_dir():
        raise ValueError(f"got the model {str(path)!r}, which is no folder; expected the run of {made}")
    folder = next((found for found in (path, path / MODEL) if (found / CONFIG).is_file()), None)
    if folder is None:
        found = "a run that is not finished" if (path / SETTINGS).is_file() else "no saved model"
        raise ValueError(f"got the model {str(path)!r}, which holds {found}; expected the run of {made}")
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ValueError(f"got {folder / CONFIG}, which is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(
            f"got {folder}, which holds no model of sequences in the format {FORMAT!r}; expected one of {made}"
        )
    if config["kind"] != kind:
        raise ValueError(f"got {folder}, which holds a {config['kind']} model; expected the run of {made}")
    return folder, config


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {' '.join(str(error).split())[:300]}") from error


def _fill(network: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {reason}") from error
