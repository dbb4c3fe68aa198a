"""Memory caching after training: a model whose memories also answer from what they were at the ends of segments."""

import copy
import dataclasses
from typing import Any

from torch import nn

from titans_lm.backbone import Backbone
from titans_lm.caching_config import CachingConfig
from titans_lm.checks import check_known
from titans_lm.config import CACHING_BLOCKS
from titans_lm.memory import NeuralMemory
from titans_lm.tnt import TNTMemory


def with_caching(model: nn.Module, **settings: Any) -> nn.Module:
    """Give the model with memory caching (D52), as another module with the same parameters; `model` is not touched.

    `settings` are those of a config: memory_caching, caching_segment and so on. Segments are weighed by the memory's
    own queries, as there is no map that was trained for it; the open one has the logit `caching_open` besides. In a
    mixed stack lmm, mag and mal have it. Raises ValueError for other settings, and for a model without one of them.
    """
    check_known(CachingConfig, settings)
    settings = {"memory_caching": "grm", **settings}
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, memo=shared)
    found = 0
    for module in other.modules():
        block = getattr(getattr(module, "config", None), "architecture", None)  # None of a layer alone
        able = isinstance(module, NeuralMemory) and not isinstance(module, TNTMemory)
        if able and block in (None, *CACHING_BLOCKS):
            module.config = dataclasses.replace(module.config, **settings)
            found += 1
        if isinstance(module, Backbone):
            module.forget_layout()
            module._compiled = None  # single tokens are read with the settings of before
    if not found:
        raise ValueError(
            f"got caching for a {type(model).__name__} without a memory that can; expected lmm, mag, mal, or a stack "
            "with one of them"
        )
    return other
