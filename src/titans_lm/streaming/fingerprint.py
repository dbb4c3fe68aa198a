"""Which model a memory belongs to: states of equal shapes from other weights mean nothing."""

import hashlib
import json
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.config import former_settings

INCIDENTAL = {"memory_backend"}
"""Settings that change no result: backends agree with each other."""

_known: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of a model's settings and of its weights, and the precision that the weights were read in."""

    config: str
    weights: str
    dtype: str

    def difference(self, other: "Fingerprint") -> str | None:
        """Say in what another fingerprint differs, or None."""
        if self.config != other.config:
            return "its settings are others"
        if self.dtype != other.dtype:
            return f"its weights were in {self.dtype}, and are in {other.dtype} now"
        return None if self.weights == other.weights else "its weights are others"


def fingerprint(model: nn.Module) -> Fingerprint:
    """Compute a model's fingerprint; weights are hashed again only where a tensor was changed or replaced."""
    owner: Any = model
    config = owner.config.backbone_config()
    settings = former_settings(config.decay_first) | {k: v for k, v in asdict(config).items() if k not in INCIDENTAL}
    settings["vocab_size"] = owner.config.vocab_size
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    tensors = dict(sorted(model.state_dict().items()))
    marks = tuple((name, x.data_ptr(), x._version, x.dtype) for name, x in tensors.items())
    known = _known.get(model)
    if known is None or known[0] != marks:
        known = (marks, hash_tensors(tensors))
        _known[model] = known
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Fingerprint(digest, known[1], dtype)


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, precisions, shapes and contents."""
    digest = hashlib.sha256()
    for name, x in tensors.items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        plain = x.detach().to("cpu").contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
