"""titans-lm: sequence models whose memory keeps learning while they read."""

from titans_lm.backbone import Backbone, BackboneState
from titans_lm.config import BackboneConfig, MemoryConfig
from titans_lm.memory import NeuralMemory
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read

__all__ = [
    "Backbone",
    "BackboneConfig",
    "BackboneState",
    "MemoryConfig",
    "MemoryNetwork",
    "MemoryState",
    "NeuralMemory",
    "neural_memory",
    "read",
]
__version__ = "0.1.0"
