"""How far forecasts are from what came: exact means over all windows, steps and channels, on scaled values."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.forecast.settings import Memory
from titans_lm.forecast.streaming import streamed, windows_at_once
from titans_lm.forecast.windows import Prepared, Windows

AT_ONCE = 256
"""Most windows of a batch that is measured; fewer of many channels."""


class Score(NamedTuple):
    """Mean squared and mean absolute error, and of how many windows."""

    mse: float
    mae: float
    windows: int


def score(model: nn.Module, windows: Windows, device: torch.device) -> Score:
    """Measure a model on every window of a part, each read with a fresh memory."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in windows.in_order(windows_at_once(windows.channels, AT_ONCE)):
            yield model(batch["past"].to(device)), batch["future"].to(device)

    return _mean(model, pairs())


def score_streamed(
    model: nn.Module, data: Prepared, part: str, memory: Memory, device: torch.device, *, warm_up: int = 0
) -> Score:
    """Measure the same windows in the order of time, with a memory that goes on learning, or is held still."""
    windows, border = data.parts[part], data.borders[part]
    first = border.start + windows.lookback
    steps = torch.arange(windows.horizon)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        origins = range(first, first + len(windows))
        for chosen, forecast in streamed(model, data.scaled, origins, memory, device=device, warm_up=warm_up):
            yield forecast, data.scaled[chosen[:, None] + steps].to(device)

    return _mean(model, pairs())


def _mean(model: nn.Module, pairs: Iterator[tuple[Float[Tensor, "B H C"], Float[Tensor, "B H C"]]]) -> Score:
    """Add up errors in float64 and divide once, so that a last batch of another size weighs what it should."""
    squared, absolute, count, windows = 0.0, 0.0, 0, 0
    training = model.training
    model.eval()
    with torch.no_grad():
        for forecast, future in pairs:
            error = forecast.double() - future.double()
            squared += float(error.square().sum())
            absolute += float(error.abs().sum())
            count, windows = count + error.numel(), windows + len(error)
    model.train(training)
    return Score(squared / count, absolute / count, windows)
