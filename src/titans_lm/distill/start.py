"""How memories with keys of their own start, before they are trained: from what a few rows show (D45).

    W_k, b       the first D principal components of the hidden states, each with deviation 1
    W            argmin Σ_t ‖m_t W − (o_t − y_t)‖² + λ‖W‖²       for every query head, beyond the window

o is what attention over everything answers, y attention over sinks and window, m what the memory reads. Both are
solved, not learned: from zero, W would take hundreds of steps to where one solution puts it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titans_lm.distill.rows import ReturningRows
from titans_lm.retrofit.attention import FULL, Call, Layer, LayerState, Reach, read, tokens_of
from titans_lm.retrofit.memory import LayerMemory
from titans_lm.retrofit.reading import as_base, hidden

KEY_BATCHES, BATCHES = 4, 8
"""Batches that are read for the keys and for what answers are mapped by."""
RIDGE = 0.01
"""λ, in units of the mean square of what the memory reads."""


@torch.no_grad()
def start_memories(model: Any, rows: ReturningRows) -> dict[int, float]:
    """Start the keys of memories, then what their answers are mapped by.

    Gives by layer the share of Σ ‖o − y‖² that it starts with: which layers copy, and so are worth a memory.
    """
    layers = [m for m in model.modules() if isinstance(getattr(m, "memory", None), LayerMemory)]
    reach, states = Reach(rows.windows[0], rows.sinks[0]), {layer: [] for layer in layers}

    def look(module: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, o: Tensor) -> None:
        states[module].append(call.hidden.flatten(0, 1))

    with watched(layers, look):
        read_rows(model, rows, reach._replace(memory=False), KEY_BATCHES)
    for layer in layers:
        layer.memory.start_keys(torch.cat(states.pop(layer)))
    sums = {layer: [torch.zeros_like(layer.memory.output) for _ in range(2)] for layer in layers}
    missed = dict.fromkeys(layers, 0.0)

    def compare(module: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, full: Tensor) -> None:
        def answers(layer: Layer) -> Tensor:
            tokens = tokens_of(q, k, v, call, layer)
            o, _ = read(tokens, LayerState.start(tokens, layer, whole=False), 0, None, layer)
            return o[:, reach.window :].to(module.memory.output.dtype)

        windowed = answers(Layer(reach, scale, 0.0, None, None))
        m = answers(Layer(reach, scale, 0.0, module.memory, None)) - windowed
        missing = full[:, reach.window :].to(m.dtype) - windowed
        missed[module] += float(missing.square().sum())
        for found, other in zip(sums[module], (m, missing), strict=True):
            found += torch.einsum("bthd,bthe->hde", m, other)

    for layer in layers:  # m as it is read: every gate of readers starts at 1
        layer.memory.output.copy_(torch.eye(layer.memory.output.shape[-1]))
    with watched(layers, compare):
        read_rows(model, rows, FULL, BATCHES)
    shares = {}
    for layer, (squares, products) in sums.items():
        eye = torch.eye(squares.shape[-1], device=squares.device, dtype=squares.dtype)
        mean = squares.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        W = torch.linalg.solve(squares + (RIDGE * mean + 1e-12) * eye, products)
        layer.memory.output.copy_(W)
        shares[layer.layer_idx] = float((W * (2.0 * products - squares @ W)).sum()) / missed[layer]
    return shares


def read_rows(model: Any, rows: ReturningRows, reach: Reach, batches: int) -> None:
    device = next(model.parameters()).device
    with as_base(model):
        for step in range(batches):
            hidden(model, rows(step)["input_ids"].to(device), reach)


@contextmanager
def watched(layers: list[Any], watch: Callable[..., None]) -> Iterator[None]:
    """Show every call of these layers' attention inside the block: q, k, v, what else it was given, and its answer."""
    for layer in layers:
        layer.watch = watch
    try:
        yield
    finally:
        for layer in layers:
            del layer.watch
