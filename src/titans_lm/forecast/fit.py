"""Errors over all windows, streaming forecasts, and a model fitted to the training windows, best on validation."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.backbone import frozen_memory
from titans_lm.config import check_at_least, check_choice
from titans_lm.data.batches import Batch
from titans_lm.forecast.baselines import Linear
from titans_lm.forecast.model import Forecaster, Future
from titans_lm.forecast.settings import Memory, Normalisation, TrainSettings
from titans_lm.forecast.windows import Prepared, WindowBatches, Windows, windows_at_once
from titans_lm.ops.state import map_state
from titans_lm.train.device import choose_device
from titans_lm.train.loop import BestStep, fit
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import RunFolder

Found = dict[str, Any]
AT_ONCE, CHAINS = 256, 64
"""Most windows, and most chains of them, that are read at once; fewer of many channels."""


class Score(NamedTuple):
    """Mean squared and mean absolute error on scaled values, and of how many windows."""

    mse: float
    mae: float
    windows: int


def score(model: nn.Module, windows: Windows, device: torch.device) -> Score:
    """Measure a model on every window of a part, each read with a fresh memory."""
    batches = windows.in_order(windows_at_once(windows.channels, AT_ONCE))
    return _mean(model, ((model(batch["past"].to(device)), batch["future"].to(device)) for batch in batches))


def score_streamed(model: nn.Module, data: Prepared, part: str, memory: Memory, device: torch.device) -> Score:
    """Measure the same windows in the order of time, with a memory that goes on learning, or is frozen."""
    windows, steps = data.parts[part], torch.arange(data.parts[part].horizon)
    first = data.borders[part].start + windows.lookback
    found = streamed(model, data.scaled, range(first, first + len(windows)), memory, device=device)
    return _mean(model, ((y, data.scaled[chosen[:, None] + steps].to(device)) for chosen, y in found))


def _mean(model: nn.Module, pairs: Iterator[tuple[Future, Future]]) -> Score:
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


def streamed(
    model: nn.Module,
    series: Tensor,
    origins: range,
    memory: Memory,
    *,
    device: torch.device,
    warm_up: int = 0,
) -> Iterator[tuple[Int[Tensor, " B"], Future]]:
    """Forecast at every origin t, the first row that is not known yet; gives origins (B,) and forecasts (B, H, C).

        "fresh"     the memory has read [t − L, t)
        "carried"   it has read the windows before too, back to the first origin, and `warm_up` windows before that
        "still"     it is frozen: M stays M_init (D31)

    A window is normalised by itself, so windows that overlap show the same rows as different numbers, and a memory that
    read all of them would read every row L times. So there are L chains, t mod L: each reads windows that follow one
    another without a gap or an overlap, …, [t − 2L, t − L), [t − L, t), and is a row of a batch.
    The model is to be in eval mode. Raises ValueError for another word, for a model without a memory, and for origins
    without a whole window before them.
    """
    check_choice("memory", memory, get_args(Memory))
    if not (isinstance(model, Forecaster) and (memory == "fresh" or model.has_memory)):
        raise ValueError(
            f'got memory="{memory}" for a model without a memory; expected a stack with lmm, mac, mag, mal or tnt in '
            'it, or memory="fresh"'
        )
    check_at_least("warm_up", warm_up, 0)
    L, first, stop = model.shape.lookback, origins.start, origins.stop
    if origins.step != 1 or first < L or stop > len(series) + 1:
        raise ValueError(
            f"got origins {first} … {stop - 1} in {len(series)} rows; expected numbers from {L}, the lookback, to "
            f"{len(series)}"
        )
    window, before = torch.arange(-L, 0), min(warm_up, first // L - 1) if memory == "carried" else 0
    for group in torch.arange(first, min(first + L, stop)).split(windows_at_once(series.shape[1], CHAINS)):
        state: Any = None
        for turn in range(-before, -(-(stop - int(group[0])) // L)):
            chosen = group + turn * L
            chosen = chosen[chosen < stop]
            past = series[chosen[:, None] + window].to(device)
            if state is not None:  # chains that end are the last ones
                rows = len(chosen) * past.shape[-1]
                state = map_state(lambda x, rows=rows: x[:rows], state)
            with torch.no_grad(), frozen_memory(model, memory == "still"):
                forecast, after = model.read(past, state)
            state = after if memory == "carried" else None
            if turn >= 0:
                yield chosen, forecast


def window_loss(model: Any, batch: Batch, settings: TrainSettings) -> tuple[Tensor, Found]:
    """The mean error of forecasts on scaled values; where a row is several windows, of the forecasts of all of them."""
    error = F.mse_loss if settings.loss == "mse" else F.l1_loss
    past, future = batch["past"], batch["future"]
    if settings.windows == 1:
        return error(model(past), future), {}
    rows, losses, state = torch.cat([past, future], dim=1), [], None
    horizon, lookback = future.shape[1], past.shape[1] // settings.windows
    for stop in range(lookback, past.shape[1] + 1, lookback):
        forecast, state = model.read(rows[:, stop - lookback : stop], state)
        losses.append(error(forecast, rows[:, stop : stop + horizon]))
    return torch.stack(losses).mean(), {}


class Fitted(NamedTuple):
    """How a fit ended: the model has the weights that were best on validation."""

    validation: Score
    steps: int = 0
    best_step: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    ridge: float | None = None
    """Penalty of the closed form, where there is one."""


def fit_model(
    model: nn.Module,
    data: Prepared,
    settings: TrainSettings,
    *,
    seed: int = 0,
    run: RunFolder | None = None,
    progress: ProgressReport | None = None,
) -> Fitted:
    """Fit a model in place; it ends with the weights that were best on validation. The test part is not read.

    Models without parameters are measured. A linear map has its closed form, with the penalty that is best on
    validation; a shortcut starts from it. What has other parameters is then trained by `train.loop.fit`, and evaluated
    on validation `evaluations` times an epoch until `patience` of them brought nothing. With a run folder a run
    that was stopped goes on. Raises what `fit` raises.
    """
    device, validation, penalty = choose_device(settings.device), data.parts["validation"], None
    model.to(device)
    if isinstance(model, Linear):
        penalty = closed_form(model.map, model.norm.kind, data, settings)
    elif isinstance(model, Forecaster) and model.shortcut is not None and model.settings.shortcut == "ridge":
        penalty = closed_form(model.shortcut, model.norm.kind, data, settings)
    if isinstance(model, Linear) or not any(parameter.requires_grad for parameter in model.parameters()):
        return Fitted(score(model, validation, device), ridge=penalty)

    def measure(model: nn.Module) -> Found:
        # in float32, as the test part is, whatever the precision of training
        if settings.windows > 1:
            found = score_streamed(model, data, "validation", "carried", device)
        else:
            found = score(model, validation, device)
        return {"validation_mse": found.mse, "validation_mae": found.mae}

    def rank(found: Found) -> float:
        return -math.inf if math.isnan(found["validation_mse"]) else -found["validation_mse"]

    windows = data.parts["train"].spanning(settings.windows)
    batches = WindowBatches(windows, batch_size=settings.batch_size, seed=seed)
    every, steps = max(1, batches.steps // settings.evaluations), settings.epochs * batches.steps
    path = None if run is None else run.path / "best.safetensors"
    best = BestStep(model, measure, rank, steps=steps, every=every, patience=settings.patience, path=path)
    if best.found is None:
        best.evaluate(0)  # a shortcut from its closed form may be the best there is
    ended = fit(
        model, batches, partial(window_loss, settings=settings), settings.loop(steps=steps, seed=seed, every=every),
        eval_fn=best, on_step=best.on_step, run=run, progress=progress,
    )  # fmt: skip
    found = best.restore()
    chosen = Score(found["validation_mse"], found["validation_mae"], len(validation))
    return Fitted(chosen, best.steps(ended.step), found["step"], ended.seconds, ended.skipped, penalty)


class NormalEquations:
    """Sums over all windows and channels, from which a linear map follows for any penalty.

        minimise Σ ‖W a + w − b‖² + λ ‖W‖²,   a = x − centre, b = y − centre
        [W w] = (Σ b [a 1]ᵀ) (Σ [a 1] [a 1]ᵀ + λ [I 0])⁻¹,     λ = penalty · mean of the diagonal of Σ a aᵀ

    With z the L + H values of a window, [a b] = (I − 1 cᵀ) z, where cᵀ z is its centre: only Σ z zᵀ is summed up.

    A window's scale is left out: without w the map is linear, so it would divide and multiply, and errors would be
    weighed by it, while they are measured without.
    """

    def __init__(self, windows: Windows, kind: Normalisation, *, bias: bool) -> None:
        L, reach = windows.lookback, windows.lookback + windows.horizon
        self.count, self.bias = len(windows) * windows.channels, bias
        series, centre = windows.series.double(), torch.zeros(reach, dtype=torch.float64)
        if kind != "none":
            series = series - series[0]  # a centre takes any constant out, and small numbers lose fewer digits
            centre[:L] = 1.0 / L if kind == "mean" else (torch.arange(L) == L - 1).double()
        without = torch.eye(reach, dtype=torch.float64) - centre
        products = without @ products_of_windows(series, reach) @ without.T
        self.inputs, self.outputs = products[:L, :L], products[L:, :L]
        self.squares = float(products[L:, L:].trace())
        if bias:
            sums = without @ series.sum(1).unfold(0, len(windows), 1).sum(1)
            edge = torch.cat([sums[:L], sums.new_tensor([self.count])])
            self.inputs = torch.cat([torch.cat([self.inputs, sums[None, :L]]), edge[:, None]], dim=1)
            self.outputs = torch.cat([self.outputs, sums[L:, None]], dim=1)

    def solved(self, penalty: float) -> Float[Tensor, "H L1"]:
        """Solve for the map, [W w] with a bias and W without."""
        pull = torch.zeros(len(self.inputs), dtype=torch.float64)
        L = len(pull) - self.bias
        pull[:L] = penalty * (float(self.inputs.diagonal()[:L].mean()) or 1.0)  # of a constant series: W = 0
        return torch.linalg.solve(self.inputs + pull.diag(), self.outputs.T).T

    def error(self, found: Float[Tensor, "H L1"]) -> float:
        """Mean squared error of a map on the windows that were summed up."""
        inner = (found @ self.inputs * found).sum() - 2.0 * (found * self.outputs).sum()
        return (float(inner) + self.squares) / (self.count * len(found))


def products_of_windows(series: Float[Tensor, "R C"], reach: int) -> Float[Tensor, "W W"]:
    """Σ z zᵀ over all windows z of `reach` rows and all channels.

        P_0j = Σ_t x_t x_{t+j},     P_{i+1,j+1} = P_ij + x_{N+i} x_{N+j} − x_i x_j     for N windows

    The first row is a correlation, by FFT; the others follow, as a window's row i + 1 is row i of the next one.
    """
    R = len(series)
    N = R - reach + 1
    spectrum = torch.fft.rfft(series[:N], n=R, dim=0).conj() * torch.fft.rfft(series, dim=0)
    found = torch.zeros(reach, reach, dtype=series.dtype)
    found[0] = torch.fft.irfft(spectrum, n=R, dim=0)[:reach].sum(1)
    first, last = series[: reach - 1], series[N:]
    change = last @ last.T - first @ first.T
    for i in range(reach - 1):
        found[i + 1, i + 1 :] = found[i, i:-1] + change[i, i:]
    return found.triu() + found.triu(1).T


def closed_form(linear: nn.Linear, kind: Normalisation, data: Prepared, settings: TrainSettings) -> float:
    """Solve for a linear map of windows, as they are normalised; gives the penalty, the best on validation."""
    train, validation = (
        NormalEquations(data.parts[part], kind, bias=linear.bias is not None) for part in ("train", "validation")
    )
    maps = {penalty: train.solved(penalty) for penalty in settings.ridge}
    best = min(maps, key=lambda penalty: validation.error(maps[penalty]))
    with torch.no_grad():
        linear.weight.copy_(maps[best][:, : linear.in_features])
        if linear.bias is not None:
            linear.bias.copy_(maps[best][:, -1])
    return best
