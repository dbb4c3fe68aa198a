"""How memories with keys of their own start, before they are trained: from what a few rows show (D45).

    W_k, b       the first D principal components of the hidden states, all scaled to a mean square of 1
    W            argmin Σ_t c_t ‖m_t W − (o_t − y_t)‖² + λ‖W‖²   for every query head, beyond the window

o is what attention over everything answers, y attention over sinks and window, m what the memory reads. c_t makes rows
of text and rows with returns count the same, though much more is missed in the second: 1 / Σ ‖o − y‖² of the layer,
over the rows of t's kind. Both are solved, not learned: from zero, W would take hundreds of steps to where one solution
puts it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titans_lm.data.batches import Batch
from titans_lm.distill.rows import ReturningRows
from titans_lm.retrofit.attention import FULL, Call, Layer, LayerState, Reach, read, tokens_of
from titans_lm.retrofit.cache import as_base, hidden
from titans_lm.retrofit.memory import LayerMemory
from titans_lm.train.device import to_device

KEY_BATCHES, BATCHES = 4, 8
"""Batches that are read for the keys and for what answers are mapped by."""
RIDGE = 0.01
"""λ, in units of the mean square of what the memory reads."""


@torch.no_grad()
def start_memories(model: Any, rows: ReturningRows) -> dict[int, float]:
    """Start the keys of memories, then what their answers are mapped by.

    Gives by layer the share of Σ ‖o − y‖² that it starts with: which layers are worth a memory.
    """
    layers = [m for m in model.modules() if isinstance(getattr(m, "memory", None), LayerMemory)]
    reach, states = Reach(rows.windows[0], rows.sinks[0]), {layer: [] for layer in layers}

    def look(_: Batch, module: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *__: Any) -> None:
        states[module].append(call.hidden.flatten(0, 1))

    read_watched(model, rows, KEY_BATCHES, reach._replace(memory=False), layers, look)
    for layer in layers:
        layer.memory.start_keys(torch.cat(states.pop(layer)))
        layer.memory.output.copy_(torch.eye(layer.memory.output.shape[-1]))  # m as it is read: readers' gates are 1
    found = {layer: Squares(layer.memory.output) for layer in layers}

    def compare(
        batch: Batch, module: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, full: Tensor
    ) -> None:
        def answers(layer: Layer) -> Tensor:
            tokens = tokens_of(q, k, v, call, layer)
            o, _ = read(tokens, LayerState.start(tokens, layer, whole=False), 0, None, layer)
            return o[:, reach.window :].to(module.memory.output.dtype)

        windowed = answers(Layer(reach, scale, 0.0, None, module.rotation))
        m = answers(Layer(reach, scale, 0.0, module.memory, module.rotation)) - windowed
        found[module].add(m, full[:, reach.window :].to(m.dtype) - windowed, batch["again"].any(1))

    read_watched(model, rows, BATCHES, FULL, layers, compare)
    return {layer.layer_idx: found[layer].solve(layer.memory.output) for layer in layers}


class Squares:
    """Sums of squares of one layer, for rows of text and for rows with returns: what W is solved of."""

    def __init__(self, output: Tensor) -> None:
        self.squares, self.products = output.new_zeros(2, 2, *output.shape)
        self.missed = output.new_zeros(2)

    def add(self, m: Tensor, missing: Tensor, kinds: Tensor) -> None:
        """Add the rows of a batch; `kinds` (B,) says in which of them passages return."""
        for kind in (0, 1):
            mine, other = m[kinds == kind], missing[kinds == kind]
            self.squares[kind] += torch.einsum("bthd,bthe->hde", mine, mine)
            self.products[kind] += torch.einsum("bthd,bthe->hde", mine, other)
            self.missed[kind] += other.square().sum()

    def solve(self, output: Tensor) -> float:
        """Put W in place, and give the share of Σ ‖o − y‖² that it explains: the mean of the two kinds'."""
        weights = torch.where(self.missed > 0, 1.0 / self.missed, 0.0)
        squares, product = (torch.einsum("k,khde->hde", weights, x) for x in (self.squares, self.products))
        mean = squares.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        eye = torch.eye(squares.shape[-1], device=squares.device, dtype=squares.dtype)
        W = torch.linalg.solve(squares + (RIDGE * mean + 1e-12) * eye, product)
        output.copy_(W)
        return float((W * (2.0 * product - squares @ W)).sum() / (weights > 0).sum())


def read_watched(
    model: Any, rows: ReturningRows, count: int, reach: Reach, layers: list[Any], watch: Callable[..., None]
) -> None:
    """Read batches, and show every call of these layers' attention: its batch, q, k, v, what else, and its answer."""
    device = next(model.parameters()).device
    with as_base(model), ExitStack() as stack:
        for layer in layers:
            stack.callback(vars(layer).pop, "watch", None)
        for step in range(count):
            batch = to_device(rows(step), device)
            for layer in layers:
                layer.watch = partial(watch, batch)
            hidden(model, batch["input_ids"], reach)
