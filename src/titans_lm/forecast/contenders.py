"""Who forecasts: models by name, varied by settings, made for the sizes of a forecast."""

import dataclasses
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.compare.settings import read_changes, stack_of
from titans_lm.config import Architecture, BackboneConfig, nearest
from titans_lm.forecast.linear import DLinear, Linear, RepeatLast, SeasonalNaive
from titans_lm.forecast.model import Forecaster, Shape
from titans_lm.forecast.norm import InstanceNorm
from titans_lm.forecast.settings import ForecastSettings, NetSettings, TrainSettings
from titans_lm.train.settings import merge_settings

STACKS = (*get_args(Architecture), "mamba")
TRAINED = (*STACKS, "patchtst", "dlinear")
MODELS = (*TRAINED, "nlinear", "seasonal", "repeat")


class Contender(NamedTuple):
    """A model by its name, with the settings that are its own."""

    name: str
    base: str
    net: NetSettings
    train: TrainSettings
    own_rate: bool = False
    """Whether its name says its learning rate, which then stands."""

    @property
    def trained(self) -> bool:
        """Whether it is trained by gradients, so that seeds and learning rates matter."""
        return self.base in TRAINED

    @property
    def has_memory(self) -> bool:
        """Whether it has a memory that can be carried, or held still."""
        return self.base != "mamba" and self.base in STACKS and self.net.backbone.has_memory


def contender(name: str, shared: ForecastSettings) -> Contender:
    """Read the name of a model: "lmm", or "lmm:memory_depth=1,patch_len=8,lr=0.003", over the settings that all share.

    What it says of a stack goes by `stack_of`. ValueError for unknown names, and for settings that a model does not
    have.
    """
    base, colon, told = name.partition(":")
    if base not in MODELS:
        raise ValueError(f"got the model {name!r}; {nearest(base, MODELS)}")
    changes = read_changes(name, told) if colon else {}
    if changes and base not in TRAINED:
        raise ValueError(f"got the model {name!r}; {base} has no settings of its own: expected {base!r}")
    net, train = _changed(name, base, changes, shared)
    return Contender(name, base, net, train, own_rate="lr" in changes)


def _changed(
    name: str, base: str, changes: dict[str, Any], shared: ForecastSettings
) -> tuple[NetSettings, TrainSettings]:
    """Share out changes to what they belong to: the stack, the net around it, its training."""
    own: dict[type, set[str]] = {TrainSettings: _names(TrainSettings) - {"ridge"}}
    if base in (*STACKS, "patchtst"):
        own |= {NetSettings: _names(NetSettings) - {"backbone"}, BackboneConfig: _names(BackboneConfig)}
    known = set().union(*own.values()) - {"architecture"}
    for setting in changes:
        if setting not in known:
            raise ValueError(f"got {setting!r} in the model {name!r}; {nearest(setting, known)}")
    shares = {kind: {key: changes[key] for key in changes if key in names} for kind, names in own.items()}
    net = merge_settings(shared.net, shares.get(NetSettings, {}))
    varied = shares.get(BackboneConfig, {})
    ours = base in get_args(Architecture)
    backbone = stack_of(net.backbone, base, varied) if ours else merge_settings(net.backbone, varied)
    return dataclasses.replace(net, backbone=backbone), merge_settings(shared.train, shares[TrainSettings])


def _names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def make_model(base: str, net: NetSettings, shape: Shape, season: int | None) -> nn.Module:
    """Make a model of a kind with fresh weights; ValueError where settings do not go with the sizes."""
    L, H, C = shape
    if base == "repeat":
        return RepeatLast(H)
    if base == "seasonal":
        if season is None:
            raise ValueError("got no season for the model 'seasonal', and dates that tell none; expected table.period")
        return SeasonalNaive(season, L, H)
    if base == "nlinear":
        return Linear(L, H, C)
    if base == "dlinear":
        return DLinear(L, H)
    if base == "patchtst":
        return PatchTST(net, shape)
    return Forecaster(net, shape, mamba=base == "mamba")


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
        self.norm = InstanceNorm(net.instance_norm, shape.channels, affine=net.affine)
        self.model = PatchTSTForPrediction(config)

    def forward(self, x: Float[Tensor, "B L C"]) -> Float[Tensor, "B H C"]:
        z, found = self.norm(x)
        y: torch.Tensor = self.model(past_values=z).prediction_outputs
        return self.norm.inverse(y, found)
