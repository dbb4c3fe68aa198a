"""Models by name: stacks of ours beside repeat-last, seasonal naive, NLinear in closed form, DLinear and PatchTST."""

import dataclasses
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import BackboneConfig, nearest
from titans_lm.experiments.models import ARCHITECTURES, parse_model, split_changes, stack_of
from titans_lm.forecast.model import Forecaster, Future, InstanceNorm, Past, Shape, over_time
from titans_lm.forecast.settings import ForecastSettings, NetSettings, Normalisation, TrainSettings
from titans_lm.forecast.windows import Windows
from titans_lm.train.options import merge_settings

STACKS = (*ARCHITECTURES, "mamba")
TRAINED = (*STACKS, "patchtst", "dlinear")
MODELS = (*TRAINED, "nlinear", "seasonal", "repeat")


class SeasonalNaive(nn.Module):
    """The last season of each channel, over and over: of one row the last value, which any forecast has to beat."""

    def __init__(self, period: int, lookback: int, horizon: int) -> None:
        super().__init__()
        if not 1 <= period <= lookback:
            raise ValueError(
                f"got a season of {period} rows and a lookback of {lookback}; expected a lookback of a season or more"
            )
        self.register_buffer("places", lookback - period + torch.arange(horizon) % period, persistent=False)

    def forward(self, x: Past) -> Future:
        return x[:, self.places]


class Linear(nn.Module):
    """A linear map over time, the same for all channels, of a window that is normalised by itself.

    Normalised by its last value it is NLinear (Zeng et al., arXiv 2205.13504).
    """

    def __init__(self, lookback: int, horizon: int, kind: Normalisation = "last", *, bias: bool = True) -> None:
        super().__init__()
        self.norm = InstanceNorm(kind)
        self.map = nn.Linear(lookback, horizon, bias=bias)

    def forward(self, x: Past) -> Future:
        z, statistics = self.norm(x)
        return self.norm.inverse(over_time(self.map, z), statistics)


class DLinear(nn.Module):
    """Trend and rest, each by a linear map over time shared by all channels (Zeng et al., arXiv 2205.13504).

    The trend is a moving average of `kernel` steps, the window's ends repeated; both maps start as the window's mean.
    """

    def __init__(self, lookback: int, horizon: int, kernel: int = 25) -> None:
        super().__init__()
        self.kernel = kernel
        self.trend, self.rest = nn.Linear(lookback, horizon), nn.Linear(lookback, horizon)
        for part in (self.trend, self.rest):
            nn.init.constant_(part.weight, 1.0 / lookback)

    def forward(self, x: Past) -> Future:
        before = (self.kernel - 1) // 2
        padded = F.pad(x.mT, (before, self.kernel - 1 - before), mode="replicate")
        trend = F.avg_pool1d(padded, self.kernel, stride=1).mT
        return over_time(self.trend, trend) + over_time(self.rest, x - trend)


class PatchTST(nn.Module):
    """PatchTST (Nie et al., ICLR 2023) as transformers has it, between our instance normalisation and its inverse.

    Width, depth, heads, patches and dropout are those of our stack; everything else is what transformers ships.
    """

    def __init__(self, net: NetSettings, shape: Shape) -> None:
        super().__init__()
        from transformers import PatchTSTConfig, PatchTSTForPrediction

        if net.patch_len > shape.lookback:
            raise ValueError(
                f"got patch_len={net.patch_len} and lookback={shape.lookback}; expected a patch no longer than that"
            )
        stack = net.backbone
        config = PatchTSTConfig(
            num_input_channels=shape.channels, context_length=shape.lookback, prediction_length=shape.horizon,
            patch_length=net.patch_len, patch_stride=net.stride, d_model=stack.hidden_size,
            num_hidden_layers=stack.num_hidden_layers, num_attention_heads=stack.num_attention_heads,
            ffn_dim=stack.mlp_width, attention_dropout=net.dropout, ff_dropout=net.dropout, head_dropout=net.dropout,
            scaling=None, do_mask_input=False, pooling_type=None,
        )  # fmt: skip
        self.norm = InstanceNorm(net.instance_norm)
        self.model = PatchTSTForPrediction(config)

    def forward(self, x: Past) -> Future:
        z, statistics = self.norm(x)
        y: Tensor = self.model(past_values=z).prediction_outputs
        return self.norm.inverse(y, statistics)


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


class ModelSpec(NamedTuple):
    """A model by its name, with the settings that are its own."""

    name: str
    base: str
    net: NetSettings
    train: TrainSettings
    own_rate: bool
    """Whether its name says its learning rate, which then stands."""

    @property
    def trained(self) -> bool:
        """Whether it is trained by gradients, so that seeds and learning rates matter."""
        return self.base in TRAINED

    @property
    def has_memory(self) -> bool:
        """Whether it has a memory that can be carried, or frozen."""
        return self.base in ARCHITECTURES and self.net.backbone.has_memory


def model_spec(name: str, shared: ForecastSettings) -> ModelSpec:
    """Read the name of a model: "lmm", or "lmm:memory_depth=1,patch_len=8,lr=0.003", over the settings that all share.

    What it says of a stack goes by `stack_of`. ValueError for unknown names, and for settings that a model does not
    have.
    """
    model = parse_model(name, TRAINED)
    base = model.base
    if base not in MODELS:
        raise ValueError(f"got the model {name!r}; {nearest(base, MODELS)}")
    blocks = base in (*STACKS, "patchtst")
    train, net, stack = split_changes(
        model,
        _names(TrainSettings, "ridge"),
        _names(NetSettings, "backbone") if blocks else (),
        _names(BackboneConfig, "architecture") if blocks else (),
    )
    given = merge_settings(shared.net, net)
    ours = base in ARCHITECTURES
    backbone = stack_of(given.backbone, base, stack) if ours else merge_settings(given.backbone, stack)
    own = merge_settings(shared.train, train)
    return ModelSpec(name, base, dataclasses.replace(given, backbone=backbone), own, own_rate="lr" in train)


def _names(settings: Any, left_out: str) -> list[str]:
    return [field.name for field in dataclasses.fields(settings) if field.name != left_out]


def make_model(base: str, net: NetSettings, shape: Shape, season: int | None) -> nn.Module:
    """Make a model of a kind with fresh weights; ValueError where settings do not go with the sizes."""
    L, H, _ = shape
    match base:
        case "repeat":
            return SeasonalNaive(1, L, H)
        case "seasonal":
            if season is None:
                raise ValueError(
                    "got no season for the model 'seasonal', and dates that tell none; expected table.period"
                )
            return SeasonalNaive(season, L, H)
        case "nlinear":
            return Linear(L, H)
        case "dlinear":
            return DLinear(L, H)
        case "patchtst":
            return PatchTST(net, shape)
    return Forecaster(net, shape, mamba=base == "mamba")
