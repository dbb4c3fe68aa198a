"""Streaming forecasts: a memory that goes on learning from the series it reads, next to a fresh one and a still one.

A window [t − L, t) is normalised by itself, so windows that overlap show the same rows as different numbers, and a
memory that read all of them would read every row L times. So there are L chains, t mod L: each reads windows that
follow one another without a gap or an overlap,

    …, [t − 2L, t − L), [t − L, t)

and a forecast at t is made with the memory that its chain has left, from rows before t alone.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titans_lm.config import check_at_least, check_choice
from titans_lm.forecast.model import Forecaster
from titans_lm.forecast.settings import Memory
from titans_lm.memory import held_still
from titans_lm.ops.state import map_state

ROWS = 2048
"""Rows (windows of one channel) that are read at once: changes speed and memory, and no number but by rounding."""
CHAINS = 64
"""Most chains that are read at once."""
Chosen = Int[Tensor, " B"]
Forecast = Float[Tensor, "B H C"]


def streamed(
    model: nn.Module,
    series: Float[Tensor, "R C"],
    origins: range,
    memory: Memory,
    *,
    device: torch.device,
    warm_up: int = 0,
    at_once: int | None = None,
) -> Iterator[tuple[Chosen, Forecast]]:
    """Forecast at every origin t, the first row that is not known yet; gives origins (B,) and forecasts (B, H, C).

        "fresh"     the memory has read [t − L, t)
        "carried"   it has read the windows before too, back to the first origin, and `warm_up` windows before that
        "still"     it learns nothing: M stays M_init (D31)

    Every chain is a row of a batch, and as many channels as there are rows of their own; `at_once` chains go together,
    by default as many as a machine has room for. The model is to be in eval mode: dropout is active otherwise. Raises
    ValueError for another word, for a model without a memory, and for origins without a whole window before them.
    """
    check_choice("memory", memory, get_args(Memory))
    if not (isinstance(model, Forecaster) and (memory == "fresh" or model.has_memory)):
        raise ValueError(
            f'got memory="{memory}" for a model without a memory; expected a stack with lmm, mac, mag or mal in it, '
            'or memory="fresh"'
        )
    check_at_least("warm_up", warm_up, 0)
    L = model.shape.lookback
    if origins.step != 1 or origins.start < L or origins.stop > len(series) + 1:
        raise ValueError(
            f"got origins {origins.start} … {origins.stop - 1} in {len(series)} rows; expected numbers from {L}, the "
            f"lookback, to {len(series)}"
        )
    at_once = at_once or windows_at_once(series.shape[1], CHAINS)
    return _chains(model, series, origins, memory, device, min(warm_up, origins.start // L - 1), at_once)


def _chains(
    model: Forecaster,
    series: Tensor,
    origins: range,
    memory: Memory,
    device: torch.device,
    warm_up: int,
    at_once: int,
) -> Iterator[tuple[Chosen, Forecast]]:
    L = model.shape.lookback
    window = torch.arange(-L, 0)
    phases = torch.arange(origins.start, min(origins.start + L, origins.stop))
    still = memory == "still"
    for group in phases.split(at_once):
        state: Any = None
        for turn in range(-warm_up if memory == "carried" else 0, -(-(origins.stop - int(group[0])) // L)):
            chosen = group + turn * L
            chosen = chosen[chosen < origins.stop]
            past = series[chosen[:, None] + window].to(device)
            state = _rows(state, len(chosen) * (1 if model.settings.mixed else past.shape[-1]))
            with torch.no_grad(), held_still(model) if still else nullcontext():
                forecast, state = model.read(past, state)
            if memory != "carried":
                state = None
            if turn >= 0:
                yield chosen, forecast


def windows_at_once(channels: int, most: int) -> int:
    """Windows of all channels that are read at once, so that a table of many channels takes no more memory."""
    return max(1, min(most, ROWS // channels))


def _rows(state: Any, count: int) -> Any:
    """The first rows of a state: the chains that go on."""
    return None if state is None else map_state(lambda x: x[:count], state)
