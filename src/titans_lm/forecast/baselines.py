"""Models by name: stacks of ours beside repeat-last, seasonal naive, NLinear in closed form, DLinear and PatchTST."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import BackboneConfig, nearest
from titans_lm.experiments.models import ARCHITECTURES, parse_model, split_changes, stack_of
from titans_lm.forecast.model import Forecaster, Future, InstanceNorm, Past, Shape, over_time
from titans_lm.forecast.settings import ForecastSettings, NetSettings, Normalisation, TrainSettings
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

    The trend is a moving average of `kernel` steps, the window's ends repeated; the weights of both maps start as
    the window's mean.
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
