"""One memory of a layer without the maps that make its tokens: its gates, M_init, LayerNorm, and its call of the op."""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.config import THRESHOLDS, MemoryConfig, SurpriseSizes
from titans_lm.memory_gates import GateProjection, JoinedGates, WindowProjection, join_gates
from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory
from titans_lm.ops.network import ReadAt
from titans_lm.ops.state import PLAIN

Hidden = Float[Tensor, "B T E"]


class InitialWeights(nn.ParameterList):
    """M_init by layers, before its scale (D14): N(0, 1), or zero for a memory that starts empty.

    A module with a start of its own: transformers draws what a file lacks module by module.
    """

    def __init__(self, heads: int, widths: tuple[int, ...], empty: bool) -> None:
        super().__init__(nn.Parameter(torch.empty(heads, a, b)) for a, b in pairwise(widths))
        self.empty = empty
        self.reset_parameters()

    __call__ = nn.Module.__call__  # torch's lists refuse to be called

    def forward(self, _: None = None) -> tuple[Tensor, ...]:
        """The weights; called and not read, so that who wraps the module has a say: accelerate, or PEFT, which passes
        on the argument that it expects every module to have."""
        return tuple(self)

    def reset_parameters(self) -> None:
        """M_init starts at N(0, 1) times its scale, a linear memory at zero: what it knows before reading is noise."""
        for weight in self:
            if self.empty:
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight)


class MemoryRule(nn.Module):
    """One memory per head with its gates: what is trained of it, and how the op is called with it."""

    read_at: ReadAt = "token"

    def __init__(self, config: MemoryConfig) -> None:
        """Note the settings; whoever has other parts calls `add_parts` in their place among these."""
        super().__init__()
        self.config = config

    def add_parts(self) -> None:
        """Make the gates, M_init and the LayerNorm."""
        config = self.config
        H, D, L = config.num_attention_heads, config.head_dim, config.memory_depth
        bounds = [config.theta_max * scale for scale in config.theta_scales]
        self.theta_proj = GateProjection(config, bounds, config.theta_starts, config.theta_stretch)
        self.eta_proj = GateProjection(config, [config.eta_max] * L, [config.eta_init] * L) if config.momentum else None
        self.alpha_proj = None
        if config.decay:
            limits, starts = [config.alpha_max] * L, [config.alpha_start] * L
            self.alpha_proj = GateProjection(config, limits, starts, config.alpha_stretch)
        self.threshold_proj = None
        if config.memory_objective in THRESHOLDS:  # of the loss, which all layers of a memory share
            per_head = dataclasses.replace(config, gates="head")
            self.threshold_proj = GateProjection(per_head, [config.threshold_max], [config.threshold_init])
        self.window_proj = WindowProjection(config) if config.omega_window > 1 else None
        self.initial = InitialWeights(H, config.memory_widths, self.starts_empty)
        self.init_scales = [1.0 / D if self.starts_empty else 1.0]
        self.init_scales += [width**-0.5 for width in config.memory_widths[1:-1]]
        self.norm_weight = nn.Parameter(torch.empty(H, D)) if config.use_norm else None
        self.norm_bias = nn.Parameter(torch.empty(H, D)) if config.use_norm else None

    def reset_parameters(self) -> None:
        """Start the norm as ones and zeros."""
        if self.norm_weight is not None and self.norm_bias is not None:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.norm_bias)

    def spread(self, place: int, of: int) -> None:
        """Take the `place`-th of `of` time scales that a head's share of a pair is cut into (D2)."""
        for gate in (self.theta_proj, self.eta_proj, self.alpha_proj, self.threshold_proj):
            if gate is not None:
                gate.spread(place, of)

    @property
    def coefficients(self) -> Tensor | None:
        """Those of polynomial keys; a rule alone is given keys as they are."""
        return None

    @property
    def starts_empty(self) -> bool:
        """Whether the memory is linear, M(x) = x W, and so starts at W = 0."""
        return self.config.memory_depth == 1 and not self.config.use_norm

    @property
    def initial_weights(self) -> tuple[Tensor, ...]:
        """M_init (D14): keys have norm 1, so W_1 has scale 1, and W_l after it 1 / √fan-in.

        The scale stands outside the parameter, so that one step of the outer optimiser moves every layer alike. A
        linear memory has 1 / D: it starts at zero, and must not outgrow within a few steps what a token writes.
        """
        weights = zip(self.initial(None), self.init_scales, strict=True)
        return tuple([weight if scale == 1.0 else weight * scale for weight, scale in weights])

    @property
    def network(self) -> MemoryNetwork:
        """The memory's network as the ops know it."""
        c = self.config
        initial = self.initial_weights if c.forget_to == "init" else None
        return MemoryNetwork(
            c.memory_activation, c.use_residual, self.norm_weight, self.norm_bias, c.memory_objective, c.forget_to,
            initial, self.read_at, self.coefficients,
        )  # fmt: skip

    def initial_memory(self, batch_size: int) -> MemoryState:
        """M_init in every row, no surprise; no window reaches before a document."""
        memory = MemoryState.initial(self.initial_weights, batch_size)
        if self.window_proj is None:
            return memory
        W, (_, H, first, _), D = self.config.omega_window - 1, memory.M[0].shape, memory.M[-1].shape[-1]
        return memory._replace(tail=tuple(memory.M[0].new_zeros(batch_size, W, H, width) for width in (first, D)))

    def gates(
        self, x: Hidden, k: Float[Tensor, "B T H D"], frozen: bool, joined: JoinedGates | None = None
    ) -> tuple[Any, Any, Any]:
        """θ, η and α of tokens; where the memory is frozen, nothing is written and nothing forgotten."""
        several = self.theta_proj, self.eta_proj, self.alpha_proj
        joined = None if frozen else joined or join_gates(*several)
        if joined is not None:
            theta, eta, alpha = joined(x)
            return theta, eta, alpha
        found = []
        for gate in several:
            shut = gate is None or (frozen and gate is not self.eta_proj)
            found.append(k.new_zeros(k.shape[:3]) if shut else gate(x, k))
        theta, eta, alpha = found
        return theta, eta, alpha

    def per_token(self, x: Hidden, k: Float[Tensor, "B T H D"]) -> PerToken:
        """What the op asks of tokens besides their gates; rounding makes no threshold 0."""
        if self.threshold_proj is None and self.window_proj is None:
            return PLAIN
        window = None if self.window_proj is None else self.window_proj(x)
        if self.threshold_proj is None:
            return PerToken(None, window)
        threshold = self.threshold_proj(x, k).squeeze(-1)
        return PerToken(threshold.clamp(min=torch.finfo(threshold.dtype).tiny), window)

    def op(self, surprise: SurpriseSizes) -> Callable[..., tuple]:
        """The op of this memory, to be called with tokens, gates and a state."""
        c = self.config
        return partial(
            neural_memory, network=self.network, chunk_size=c.chunk_size, backend=c.memory_backend,
            return_surprise=surprise,
        )  # fmt: skip
