"""titans-lm: sequence models whose memory keeps learning while they read.

Names are imported when they are first used, so that `titans --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_lm.backbone import Backbone, BackboneState
    from titans_lm.config import BackboneConfig, MemoryConfig
    from titans_lm.memory import LayerState, NeuralMemory
    from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory, read

_HOME = {
    "Backbone": "backbone",
    "BackboneConfig": "config",
    "BackboneState": "backbone",
    "LayerState": "memory",
    "MemoryConfig": "config",
    "MemoryNetwork": "ops",
    "MemoryState": "ops",
    "PerToken": "ops",
    "NeuralMemory": "memory",
    "neural_memory": "ops",
    "read": "ops",
}
__all__ = [
    "Backbone",
    "BackboneConfig",
    "BackboneState",
    "LayerState",
    "MemoryConfig",
    "MemoryNetwork",
    "MemoryState",
    "NeuralMemory",
    "PerToken",
    "neural_memory",
    "pretrained",
    "read",
]
__version__ = "0.1.0"


def pretrained(name: str) -> Any:
    """Load a model that comes with the package, and its tokenizer: `model, tokenizer = pretrained("facts")`.

    ValueError for a name that none has, with the nearest.
    """
    return import_module("titans_lm.train.run").pretrained(name)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'titans_lm' has no attribute {name!r}")
    return getattr(import_module(f"titans_lm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
