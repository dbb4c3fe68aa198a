"""The forecaster: a window normalised by itself, tokens of it through a stack of blocks, all steps ahead at once."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.forecast.settings import NetSettings, Normalisation
from titans_lm.layers import RMSNorm, SwiGLU, init_linear

Past = Float[Tensor, "B L C"]
Future = Float[Tensor, "B H C"]
Hidden = Float[Tensor, "B2 N E"]
Statistics = tuple[Float[Tensor, "B 1 C"], Float[Tensor, "B 1 C"]]
"""Centre and scale of a window."""


class Shape(NamedTuple):
    """Sizes of a forecast: L rows of C channels in, H rows out."""

    lookback: int
    horizon: int
    channels: int


class InstanceNorm(nn.Module):
    """Normalise each window and channel by itself, z = (x − centre) / scale; `inverse` is the way back.

    "mean"   centre = mean over time, scale = √(variance + 10⁻⁵)   (RevIN: Kim et al., ICLR 2022)
    "last"   centre = the last value, scale = 1                    (NLinear: Zeng et al., arXiv 2205.13504)
    "none"   centre = 0, scale = 1
    """

    def __init__(self, kind: Normalisation) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Past) -> tuple[Past, Statistics]:
        centre, scale = x[:, -1:], torch.ones_like(x[:, :1])
        if self.kind == "mean":
            variance, centre = torch.var_mean(x, dim=1, keepdim=True, correction=0)
            scale = torch.sqrt(variance + 1e-5)
        elif self.kind == "none":
            centre = torch.zeros_like(scale)
        return (x - centre) / scale, (centre, scale)

    def inverse(self, z: Future, statistics: Statistics) -> Future:
        """Bring normalised values back, with what `forward` gave beside them."""
        centre, scale = statistics
        return z * scale + centre


def over_time(linear: nn.Module, x: Past) -> Future:
    """Apply a map of L values to H values to each channel."""
    return linear(x.mT).mT


class Embedding(nn.Module):
    """Tokens of a window: the steps of a patch through one linear map, and a learned place; a row per channel.

    Patches end where the window ends, so what is left over is its oldest steps.
    """

    def __init__(self, shape: Shape, patch_len: int, stride: int, width: int) -> None:
        super().__init__()
        if patch_len > shape.lookback:
            raise ValueError(
                f"got patch_len={patch_len} and lookback={shape.lookback}; expected a patch no longer than the window"
            )
        self.patch_len, self.stride = patch_len, stride
        self.tokens = (shape.lookback - patch_len) // stride + 1
        self.skipped = (shape.lookback - patch_len) % stride
        self.proj = nn.Linear(patch_len, width)
        self.place = nn.Parameter(torch.empty(self.tokens, width))
        init_linear(self.proj)
        nn.init.normal_(self.place, std=0.1)

    def forward(self, z: Past) -> Hidden:
        patches = z[:, self.skipped :].unfold(1, self.patch_len, self.stride)  # (B, N, C, P)
        return self.proj(patches.transpose(1, 2).flatten(0, 1)) + self.place


class MambaBlock(nn.Module):
    """Simba's block, x + mamba(norm(x)), then x + mlp(norm(x)); the mixer is transformers', norm and MLP are ours."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        from transformers import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        width = config.hidden_size
        self.mixer_norm, self.mlp_norm = RMSNorm(width, config.norm_eps), RMSNorm(width, config.norm_eps)
        mamba = MambaConfig(hidden_size=width, state_size=64, conv_kernel=4, expand=2, num_hidden_layers=1)
        self.mixer = MambaMixer(mamba, layer_idx=0)
        self.mlp = SwiGLU(width, config.mlp_width)

    def forward(self, x: Hidden) -> Hidden:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MambaStack(nn.Module):
    """A stack of them with a final norm; it carries no state from call to call."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        for mlp in (module for module in self.modules() if isinstance(module, SwiGLU)):
            mlp.apply(lambda module: init_linear(module) if isinstance(module, nn.Linear) else None)

    def forward(self, x: Hidden, state: None = None) -> tuple[Hidden, None]:
        for block in self.layers:
            x = block(x)
        return self.norm(x), state


class Forecaster(nn.Module):
    """Forecast all steps at once from a window: (B, L, C) → (B, H, C).

        z, s = norm(x)                          by the window's own statistics
        h    = stack(embed(z))                  blocks x + mix(norm(x)), then x + mlp(norm(x)); or Mamba's
        y    = norm⁻¹(head(h) + W z, s)         the head reads all tokens; W z is the shortcut

    `read(x, state)` is the same with the memory that earlier windows have left; a fresh one is None.
    """

    def __init__(self, settings: NetSettings, shape: Shape, *, mamba: bool = False) -> None:
        super().__init__()
        config = settings.backbone
        self.settings, self.shape = settings, shape
        self.norm = InstanceNorm(settings.instance_norm)
        self.embed = Embedding(shape, settings.patch_len, settings.stride, config.hidden_size)
        self.stack = MambaStack(config) if mamba else Backbone(config)
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(self.embed.tokens * config.hidden_size, shape.horizon)
        init_linear(self.head)
        self.shortcut = None
        if settings.shortcut != "none":
            self.shortcut = nn.Linear(shape.lookback, shape.horizon, bias=False)
            nn.init.zeros_(self.head.weight)  # the stack begins as good as the linear map beside it
            weight: Any = self.shortcut.weight
            nn.init.zeros_(weight)
            weight._no_weight_decay = True  # its closed form has a penalty of its own

    @property
    def has_memory(self) -> bool:
        """Whether there is a memory that can be carried, or frozen."""
        return isinstance(self.stack, Backbone) and self.stack.config.has_memory

    def forward(self, x: Past) -> Future:
        return self.read(x)[0]

    def read(self, x: Past, state: Any = None) -> tuple[Future, Any]:
        """Forecast from a window that is read into a memory, a row per channel; gives the memory after it too."""
        expected = (self.shape.lookback, self.shape.channels)
        if x.dim() != 3 or x.shape[1:] != expected:
            raise ValueError(f"got a window {tuple(x.shape)}; expected (B, L, C) with (L, C) = {expected}")
        z, statistics = self.norm(x)
        hidden, state = self.stack(self.dropout(self.embed(z)), state)
        y = self.head(self.dropout(hidden).flatten(1)).unflatten(0, (-1, self.shape.channels)).mT
        if self.shortcut is not None:
            y = y + over_time(self.shortcut, z)
        return self.norm.inverse(y, statistics), state
