"""One memory of a layer without the maps that make its q, k and v: gates, M_init, LayerNorm, its call of the op."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titans_lm.config import THRESHOLDS, MemoryConfig, Start, SurpriseSizes, log_spaced
from titans_lm.layers import Linear, init_from, init_linear
from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory
from titans_lm.ops.fused import GateForm, clipped_sigmoid, clipped_sigmoids, is_plain
from titans_lm.ops.matmul import linear
from titans_lm.ops.network import ReadAt
from titans_lm.ops.state import PLAIN, state_dtype

Hidden = Float[Tensor, "B T E"]


HIGHER = 20.0
"""What each degree of polynomial keys weighs at the start, in weights of the degree below (D50)."""


class GateProjection(nn.Module):
    """A gate from the token: limit_l · σ(x W + b), per head, per head and layer, or channel-wise (D2, D3).

    With `stretch` ε it is limit_l · clip((1 + 2ε) σ(x W + b) − ε, 0, 1), which can be exactly zero (D33); its gradient
    is that of the middle everywhere, so that no gate is closed for good. With `gates_see_keys` the logits are
    x W + √D k U + b, channel-wise (x W₁ + √D k U) W₂ + b: a key has gone through the convolution and knows the tokens
    before its own (D35).
    """

    def __init__(self, config: MemoryConfig, limits: list[float], starts: list[Start], stretch: float = 0.0) -> None:
        """Set it up with a limit for each memory layer, and the share of it at which the layer's gate starts."""
        super().__init__()
        self.kind, self.heads, self.limits = config.gates, config.num_attention_heads, limits
        self.stretch = stretch
        self.widths = list(config.memory_widths[:-1])
        E, out = config.hidden_size, self.heads * config.gates_per_head
        self.down = Linear(E, config.gate_rank, bias=False) if self.kind == "channel" else nn.Identity()
        self.proj = Linear(config.gate_rank if self.kind == "channel" else E, out)
        self.key_scale = math.sqrt(config.head_dim)  # keys have norm 1: with it their entries have unit size, as x has
        seen = self.proj.in_features if self.kind == "channel" else out
        self.key_proj = Linear(E, seen, bias=False) if config.gates_see_keys else None
        self.starts, self.per_head = starts, config.gates_per_head
        self.proj.init_std = 0.02
        self.spread()
        self.reset_parameters()

    def spread(self, place: int = 0, of: int = 1) -> None:
        """Say where every head starts, as the `place`-th of `of` memories that share a pair's time scales (D2)."""
        counts = self.widths if self.kind == "channel" else [1] * len(self.starts)
        shares = [log_spaced(start, self.heads, place, of) for start in self.starts]
        biases = []
        for of_head in zip(*shares, strict=True):
            at = [(share + self.stretch) / (1.0 + 2.0 * self.stretch) for share in of_head]  # of the sigmoid
            logits = [math.log(share / (1.0 - share)) for share in at]
            biases += [logit for logit, count in zip(logits, counts, strict=True) for _ in range(count)][
                : self.per_head
            ]
        self.proj.init_bias = biases

    def reset_parameters(self) -> None:
        """Gates start at the same share of their limit for every token, and learn to differ."""
        init_linear(self.proj)
        if self.key_proj is not None and self.kind != "channel":
            self.key_proj.init_std = self.proj.init_std
            init_linear(self.key_proj)

    def forward(self, x: Hidden, k: Float[Tensor, "B T H D"]) -> Tensor | tuple[Tensor, ...]:
        """Give the gates of tokens with these keys: (B, T, H, L), or by layer a tuple of (B, T, H, D_{l−1})."""
        seen = None if self.key_proj is None else self.key_proj((self.key_scale * k.flatten(2)).to(x.dtype))
        if self.kind == "channel":
            x, seen = self.down(x) if seen is None else self.down(x) + seen, None
        logits = self.proj(x) if seen is None else self.proj(x) + seen
        logits = logits.unflatten(-1, (self.heads, -1)).to(state_dtype(x.dtype))
        gate = clipped_sigmoid(logits, self.stretch) if self.stretch else torch.sigmoid(logits)
        if self.kind == "channel":
            parts = gate.split(self.widths, dim=-1)
            return tuple(part * limit for part, limit in zip(parts, self.limits, strict=True))
        if self.kind == "head":
            gate = gate.expand(*gate.shape[:-1], len(self.limits))
        if len(set(self.limits)) == 1:
            return gate if self.limits[0] == 1.0 else gate * self.limits[0]
        # Numbers, not a tensor of limits: making one for every call would make a GPU wait.
        parts = gate.unbind(-1)
        return torch.stack([part * limit for part, limit in zip(parts, self.limits, strict=True)], dim=-1)


class JoinedGates(NamedTuple):
    """Several gates of the token, per head and layer, as one linear map."""

    weight: Float[Tensor, "N E"]
    bias: Float[Tensor, " N"]
    forms: tuple[GateForm, ...]
    heads: int

    def __call__(self, x: Hidden) -> tuple[Float[Tensor, "B T H L"], ...]:
        logits = linear(x, self.weight, self.bias).unflatten(-1, (len(self.forms), self.heads, -1))
        return clipped_sigmoids(logits.to(state_dtype(x.dtype)), self.forms)


def join_gates(*gates: GateProjection | None) -> JoinedGates | None:
    """Gates side by side; None where they are of other forms, or have to be called."""
    forms, projs, heads = [], [], 0
    for gate in gates:
        if gate is None or gate.kind != "layer" or gate.key_proj is not None or len(set(gate.limits)) > 1:
            return None
        hooked = gate._forward_hooks or gate._forward_pre_hooks or gate._backward_hooks or gate._backward_pre_hooks
        if hooked or "forward" in vars(gate) or not is_plain(gate.proj):
            return None
        forms.append((gate.stretch, gate.limits[0]))
        projs.append(gate.proj)
        heads = gate.heads
    weight, bias = torch.cat([proj.weight for proj in projs]), torch.cat([proj.bias for proj in projs])
    return JoinedGates(weight, bias, tuple(forms), heads)


class WindowProjection(nn.Module):
    """The shares of the last c tokens' errors in what a token writes, its own first: softmax(x W + b), per head (D49).

    They sum to one, so that a window writes no more than its token alone would; each starts at half of the one before.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        heads, c = config.num_attention_heads, config.omega_window
        self.heads = heads
        self.proj = Linear(config.hidden_size, heads * c)
        self.proj.init_std, self.proj.init_bias = 0.02, [-i * math.log(2.0) for i in range(c)] * heads
        init_linear(self.proj)

    def forward(self, x: Hidden) -> Float[Tensor, "B T H c"]:
        return self.proj(x).unflatten(-1, (self.heads, -1)).to(state_dtype(x.dtype)).softmax(-1)


class PolynomialKeys(nn.Module):
    """The a_i of φ(q) · φ(k) = Σ_i a_i (q · k)^i, learned per head, which start as 20^i (D50).

    The a_i are shares of one, so that φ of a key of norm 1 has norm 1; a factor of all is one of θ.
    """

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.degree = config.key_degree
        self.log_shares = nn.Parameter(torch.empty(config.num_attention_heads, self.degree + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start = torch.arange(self.degree + 1) * math.log(HIGHER)
        init_from(self.log_shares, start.expand_as(self.log_shares))

    def forward(self, _: None = None) -> Float[Tensor, "H P"]:
        """The a_i; called and not read, as M_init is."""
        return self.log_shares.to(state_dtype(self.log_shares.dtype)).softmax(-1)


class InitialWeights(nn.ParameterList):
    """M_init by layers, before its scale (D14): N(0, 1), or zero for a memory that starts empty.

    A module with a start of its own: transformers draws what a file lacks module by module.
    """

    def __init__(self, heads: int, widths: tuple[int, ...], empty: bool) -> None:
        dtype = state_dtype(torch.get_default_dtype())  # as states are, whatever a config is made in
        super().__init__(nn.Parameter(torch.empty(heads, a, b, dtype=dtype)) for a, b in pairwise(widths))
        self.empty = empty
        self.reset_parameters()

    __call__ = nn.Module.__call__  # torch's lists refuse to be called

    def forward(self, _: None = None) -> tuple[Tensor, ...]:
        """The weights; called and not read, so that who wraps the module has a say: accelerate, or PEFT, which passes
        on the argument that it expects every module to have."""
        return tuple(self)

    def reset_parameters(self) -> None:
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
        starts = [config.theta_init] + [config.theta_later_init] * (L - 1)  # one for all starts as the first
        self.theta_proj = GateProjection(config, bounds, starts, config.theta_stretch)
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
    ) -> tuple[Any, ...]:
        """θ, η and α of tokens; all zero where the memory is frozen, so that past surprise does not move it either."""
        several = self.theta_proj, self.eta_proj, self.alpha_proj
        joined = None if frozen else joined or join_gates(*several)
        if joined is not None:
            return joined(x)
        found = []
        for gate in several:
            found.append(k.new_zeros(k.shape[:3]) if gate is None or frozen else gate(x, k))
        return tuple(found)

    def per_token(self, x: Hidden, k: Float[Tensor, "B T H D"]) -> PerToken:
        """What the op asks of tokens besides their gates; rounding makes no threshold 0, and NaN, which x brings to the
        output anyway, none that the op refuses."""
        if self.threshold_proj is None and self.window_proj is None:
            return PLAIN
        window = None if self.window_proj is None else self.window_proj(x)
        if self.threshold_proj is None:
            return PerToken(None, window)
        threshold = self.threshold_proj(x, k).squeeze(-1)
        return PerToken(threshold.nan_to_num(1.0).clamp(min=torch.finfo(threshold.dtype).tiny), window)

    def op(self, surprise: SurpriseSizes) -> Callable[..., tuple]:
        """The op of this memory, to be called with tokens, gates and a state."""
        c = self.config
        return partial(
            neural_memory, network=self.network, chunk_size=c.chunk_size, backend=c.memory_backend,
            return_surprise=surprise,
        )  # fmt: skip
