"""What the memories of a model do while it reads: gates, surprise, and the norms of what they have become."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from titans_lm.config import BackboneConfig
from titans_lm.evaluate.accuracy import parts_of
from titans_lm.memory_rule import MemoryRule
from titans_lm.ops import MemoryState

GATES = ("theta", "eta", "alpha")
SIZES = ("momentary", "past", "forgotten")
ByLayer = list[list[float]]
"""A number for each block with a memory and each layer of that memory."""


@torch.no_grad()
def memory_numbers(model: Any, input_ids: Int[Tensor, "B T"]) -> dict[str, dict[str, ByLayer]]:
    """Read a text from its start and report on the memories; nothing for a model without one.

    Under "memory" there are the means over tokens and heads of θ, η and α, of the sizes of momentary surprise
    ‖∇ℓ‖, past surprise ‖η S‖ and what was forgotten ‖α (M − B)‖, and the norms ‖M‖ and ‖S‖ after the last token, each
    by memory and layer: one memory for each block, in TNT first the global one and then its local ones. Sizes are those
    of all memories of a block together.
    """
    memories = [module for module in model.modules() if isinstance(module, MemoryRule)]
    if not memories:
        return {}
    with _listening(memories) as heard:
        out = model(input_ids=input_ids, return_state=True, use_cache=False, output_surprise="parts")
    sizes = [size.flatten(0, 2).double().mean(0) for size in out.surprise]  # (L, 3) of each block
    found: dict[str, ByLayer] = {name: [means.get(name, []) for means in heard] for name in GATES}
    found |= {name: [size[:, i].tolist() for size in sizes] for i, name in enumerate(SIZES)}
    states = [part for part in parts_of(out.state.layers) if isinstance(part, MemoryState)]
    for name in ("M", "S"):
        found[f"{name}_norm"] = [[_norm(weight) for weight in getattr(state, name)] for state in states]
    return {"memory": found}


def _norm(weights: Tensor) -> float:
    """The norm of one layer, mean over rows and heads."""
    return float(weights.double().flatten(2).norm(dim=-1).mean())


@contextmanager
def _listening(memories: list[MemoryRule]) -> Iterator[list[dict[str, list[float]]]]:
    """Collect what the gates say: at the end, for each memory the mean of each gate that it has, by layer."""
    found: list[dict[str, list[float]]] = [{} for _ in memories]
    heard: dict[tuple[int, str], list[tuple[int, Tensor]]] = defaultdict(list)

    def hear(index: int, name: str, module: nn.Module, given: Any, out: Any) -> None:
        parts = out if isinstance(out, tuple) else out.unbind(-1)
        means = torch.stack([part.double().mean() for part in parts])
        heard[index, name].append((parts[0].shape[1], means))

    with ExitStack() as hooks:
        for index, name in product(range(len(memories)), GATES):
            gate = getattr(memories[index], f"{name}_proj")
            if gate is not None:
                hooks.callback(gate.register_forward_hook(partial(hear, index, name)).remove)
        yield found
    for (index, name), calls in heard.items():
        config = memories[index].config  # its first call reads the persistent tokens in some stacks (D16), not the text
        calls = calls[int(isinstance(config, BackboneConfig) and config.memory_begins_persistent) :]
        counts = torch.tensor([float(count) for count, _ in calls], dtype=torch.float64, device=calls[0][1].device)
        found[index][name] = (counts @ torch.stack([means for _, means in calls]) / counts.sum()).tolist()
