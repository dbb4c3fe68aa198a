"""The forecaster: a window normalised by itself, tokens of it through a stack of blocks, all steps ahead at once."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.forecast.linear import over_time
from titans_lm.forecast.mixing import make_stack
from titans_lm.forecast.norm import InstanceNorm
from titans_lm.forecast.settings import NetSettings
from titans_lm.layers import start_linear

Past = Float[Tensor, "B L C"]
Future = Float[Tensor, "B H C"]


class Shape(NamedTuple):
    """Sizes of a forecast: L rows of C channels in, H rows out."""

    lookback: int
    horizon: int
    channels: int


class Embedding(nn.Module):
    """Tokens of a window: the steps of a patch through one linear map, and a learned place.

    Patches end where the window ends, so what is left over is its oldest steps. A step is a patch of length 1. `mixed`
    tokens hold all channels, (B, N, E); else each channel is a row of its own, (B · C, N, E).
    """

    def __init__(self, shape: Shape, patch_len: int, stride: int, width: int, *, mixed: bool) -> None:
        super().__init__()
        if patch_len > shape.lookback:
            raise ValueError(
                f"got patch_len={patch_len} and lookback={shape.lookback}; expected a patch no longer than the window"
            )
        self.patch_len, self.stride, self.mixed = patch_len, stride, mixed
        self.tokens = (shape.lookback - patch_len) // stride + 1
        self.skipped = shape.lookback - patch_len - (self.tokens - 1) * stride
        self.proj = nn.Linear(patch_len * (shape.channels if mixed else 1), width)
        self.place = nn.Parameter(torch.empty(self.tokens, width))
        start_linear(self.proj)
        nn.init.normal_(self.place, std=0.1)

    def forward(self, z: Past) -> Float[Tensor, "B2 N E"]:
        patches = z[:, self.skipped :].unfold(1, self.patch_len, self.stride)  # (B, N, C, P)
        patches = patches.flatten(2) if self.mixed else patches.transpose(1, 2).flatten(0, 1)
        return self.proj(patches) + self.place


class Head(nn.Module):
    """All tokens of a window through one linear map to all steps ahead; it starts at zero, beside a shortcut."""

    def __init__(self, shape: Shape, tokens: int, width: int, *, mixed: bool, zero: bool) -> None:
        super().__init__()
        self.horizon, self.channels, self.mixed = shape.horizon, shape.channels, mixed
        self.proj = nn.Linear(tokens * width, shape.horizon * (shape.channels if mixed else 1))
        start_linear(self.proj)
        if zero:
            nn.init.zeros_(self.proj.weight)

    def forward(self, hidden: Float[Tensor, "B2 N E"]) -> Future:
        y = self.proj(hidden.flatten(1))
        return y.unflatten(-1, (self.horizon, self.channels)) if self.mixed else y.unflatten(0, (-1, self.channels)).mT


class Forecaster(nn.Module):
    """Forecast all steps at once from a window: (B, L, C) → (B, H, C).

        z, s = norm(x)                          by the window's own statistics
        h    = stack(embed(z))                  blocks of a memory, or of what stands in its place
        y    = norm⁻¹(head(h) + W z, s)         the head reads all tokens; W z is the shortcut

    `read(x, state)` is the same with the memory that earlier windows have left; a fresh one is None.
    """

    def __init__(self, settings: NetSettings, shape: Shape, *, mamba: bool = False) -> None:
        super().__init__()
        step, config = settings.embedding == "step", settings.backbone
        length, stride = (1, 1) if step else (settings.patch_len, settings.stride)
        self.settings, self.shape = settings, shape
        self.norm = InstanceNorm(settings.instance_norm, shape.channels, affine=settings.affine)
        self.embed = Embedding(shape, length, stride, config.hidden_size, mixed=settings.mixed)
        self.stack = make_stack(config, settings.channel, mamba=mamba)
        self.dropout = nn.Dropout(settings.dropout)
        beside = settings.shortcut != "none"
        self.head = Head(shape, self.embed.tokens, config.hidden_size, mixed=settings.mixed, zero=beside)
        self.shortcut = nn.Linear(shape.lookback, shape.horizon, bias=False) if beside else None
        if self.shortcut is not None:
            weight: Any = self.shortcut.weight
            nn.init.zeros_(weight)
            weight._no_weight_decay = True  # its closed form has a penalty of its own

    @property
    def has_memory(self) -> bool:
        """Whether there is a memory that can be carried, or held still."""
        config = getattr(self.stack, "config", None)
        return config is not None and config.has_memory

    def forward(self, x: Past) -> Future:
        return self.read(x)[0]

    def read(self, x: Past, state: Any = None) -> tuple[Future, Any]:
        """Forecast from a window that is read into a memory; gives the memory after it too.

        The rows of the state are those of the window, channel by channel where channels are rows.
        """
        self._check(x)
        z, found = self.norm(x)
        hidden, state = self.stack(self.dropout(self.embed(z)), state)
        y = self.head(self.dropout(hidden))
        if self.shortcut is not None:
            y = y + over_time(self.shortcut, z)
        return self.norm.inverse(y, found), state

    def _check(self, x: Tensor) -> None:
        expected = (self.shape.lookback, self.shape.channels)
        if x.dim() != 3 or x.shape[1:] != expected:
            raise ValueError(f"got a window {tuple(x.shape)}; expected (B, L, C) with (L, C) = {expected}")
