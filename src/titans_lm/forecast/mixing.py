"""What mixes tokens and channels beside the blocks of this package: EinFFT, and Mamba in Simba's block."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.forecast.settings import Channel
from titans_lm.layers import RMSNorm, SwiGLU, start_linear

Hidden = Float[Tensor, "B T E"]
BLOCKS, SHRINK = 4, 0.01
"""Blocks that EinFFT cuts the channels into, and what its soft-shrink takes away, both as Simba has them."""


class EinFFT(nn.Module):
    """Mix channels in the frequencies of tokens and blocks of channels (Simba: Patro and Agneeswaran, 2403.15360).

        X = FFT2(x as (T, 4, E / 4))                 over tokens and blocks, orthonormal
        Y = shrink(relu(X ∘ W₁ + b₁) ∘ W₂ + b₂)      complex, block-diagonal; relu on real and imaginary parts
        y = Re FFT2⁻¹(Y)

    Every token sees every other one, later ones too: for a forecaster, whose window is all past, and for no
    language model.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if width % BLOCKS:
            raise ValueError(f"got hidden_size={width} with channel='einfft'; expected a multiple of {BLOCKS}")
        size = width // BLOCKS
        self.weight = nn.Parameter(torch.empty(2, BLOCKS, size, size, 2))
        self.bias = nn.Parameter(torch.zeros(2, BLOCKS, size, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw complex weights of variance 1 / fan-in."""
        nn.init.normal_(self.weight, std=(2 * self.weight.shape[-2]) ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Hidden) -> Hidden:
        with torch.autocast(x.device.type, enabled=False):  # there is no FFT in bfloat16
            blocks = x.float().unflatten(-1, (BLOCKS, -1))
            z = torch.fft.fft2(blocks, dim=(1, 2), norm="ortho")
            weight, bias = torch.view_as_complex(self.weight.float()), torch.view_as_complex(self.bias.float())
            z = torch.einsum("btki,kio->btko", z, weight[0]) + bias[0]
            z = torch.complex(F.relu(z.real), F.relu(z.imag))
            z = torch.einsum("btki,kio->btko", z, weight[1]) + bias[1]
            z = torch.complex(F.softshrink(z.real, SHRINK), F.softshrink(z.imag, SHRINK))
            return torch.fft.ifft2(z, dim=(1, 2), norm="ortho").real.flatten(2).to(x.dtype)


class MambaBlock(nn.Module):
    """Simba's block as published, x + mamba(norm(x)), then x + channel(norm(x)); the mixer is transformers'."""

    def __init__(self, config: BackboneConfig, channel: Channel) -> None:
        super().__init__()
        from transformers import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        width = config.hidden_size
        self.mixer_norm, self.mlp_norm = RMSNorm(width, config.norm_eps), RMSNorm(width, config.norm_eps)
        mamba = MambaConfig(hidden_size=width, state_size=64, conv_kernel=4, expand=2, num_hidden_layers=1)
        self.mixer = MambaMixer(mamba, layer_idx=0)
        self.mlp = EinFFT(width) if channel == "einfft" else SwiGLU(width, config.mlp_width)

    def forward(self, x: Hidden) -> Hidden:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MambaStack(nn.Module):
    """A stack of them with a final norm; it carries no state from call to call."""

    def __init__(self, config: BackboneConfig, channel: Channel) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MambaBlock(config, channel) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        for block in self.layers:
            if isinstance(block.mlp, SwiGLU):
                block.mlp.apply(lambda module: start_linear(module) if isinstance(module, nn.Linear) else None)

    def forward(self, x: Hidden, state: None = None) -> tuple[Hidden, None]:
        for block in self.layers:
            x = block(x)
        return self.norm(x), state


def make_stack(config: BackboneConfig, channel: Channel, *, mamba: bool = False) -> nn.Module:
    """Make a stack of blocks, x + mix(norm(x)) then x + channel(norm(x)): ours, or with Mamba in the memory's place."""
    if mamba:
        return MambaStack(config, channel)
    stack = Backbone(config)
    if channel == "einfft":
        blocks: Any = stack.layers
        for block in blocks:
            block.mlp = EinFFT(config.hidden_size)
    return stack
