"""What a layer does to one row, written out: loops over tokens and lists of visible rows, from the layer's parameters.

Nothing of layers.py, attention.py or memory.py computes here; of the package only the token-by-token reference of the
memory does, which tests/ops checks on its own. x is (T, E), one row of a batch from the start of its document.
"""

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.attention import QKVProjection
from titans_lm.config import BackboneConfig, MemoryConfig
from titans_lm.layers import RMSNorm, ShortConvolution
from titans_lm.memory import NeuralMemory
from titans_lm.memory_rule import GateProjection
from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory
from titans_lm.ops.state import PLAIN

Pair = tuple[Tensor, Tensor]


def rms(x: Tensor, norm: RMSNorm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def convolve(x: Tensor, conv: ShortConvolution) -> Tensor:
    """y_t = SiLU(Σ_i w_i ∘ x_{t−i}), where weight[-1] meets the token itself."""
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[0])
        for back in range(min(conv.kernel, t + 1)):
            y = y + conv.weight[conv.kernel - 1 - back] * x[t - back]
        rows.append(y * torch.sigmoid(y))
    return torch.stack(rows)


def turn(x: Tensor, position: int, config: BackboneConfig) -> Tensor:
    """Rotate channels (i, i + R/2) of every head (H, D) as complex numbers; the channels from R on stay."""
    half = config.rotary_dim // 2
    y = x.clone()
    for i in range(half):
        angle = position * config.rope_theta ** (-2 * i / config.rotary_dim)
        z = torch.complex(x[:, i], x[:, i + half]) * complex(math.cos(angle), math.sin(angle))
        y[:, i], y[:, i + half] = z.real, z.imag
    return y


class AttentionByHand:
    """Rows of q, k, v of an attention layer, and a softmax over an explicit list of (key, value) rows."""

    def __init__(self, layer: QKVProjection, config: BackboneConfig, memory: NeuralMemory | None = None) -> None:
        self.layer, self.config, self.heads = layer, config, config.num_attention_heads
        self.owner: Any = memory if config.shared_qkv else layer

    def qkv(self, x: Tensor, positions: list[int], before: Tensor | None = None) -> tuple[list[Tensor], list[Pair]]:
        """Turned queries, and (turned key, value) pairs, (H, D) each; shared streams go on after the rows `before`."""
        a, shared = self.owner, self.config.shared_qkv
        past = x[:0] if before is None or not shared else before
        streams = [torch.cat([past, x]) @ proj.weight.T for proj in (a.q_proj, a.k_proj, a.v_proj)]
        if (self.config.conv_size if shared else self.config.attention_conv_size) > 1:
            streams = [convolve(y, conv) for y, conv in zip(streams, a.convs, strict=True)]
        streams = [y[len(past) :] for y in streams]
        if shared:
            streams = [y * own.weight + own.bias for y, own in zip(streams, self.layer.affine, strict=True)]
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in streams)
        turned = [[turn(y[t], p, self.config) for t, p in enumerate(positions)] for y in (q, k)]
        return turned[0], list(zip(turned[1], v, strict=True))

    def key_values(self, x: Tensor) -> Pair:
        """Keys and values of rows that are no tokens: without convolution, not yet turned."""
        k, v = x @ self.owner.k_proj.weight.T, x @ self.owner.v_proj.weight.T
        if self.config.shared_qkv:
            k, v = k * self.layer.affine[1].weight, v * self.layer.affine[2].weight
        return k.unflatten(-1, (self.heads, -1)), v.unflatten(-1, (self.heads, -1))

    def prefix(self, persistent: Tensor) -> list[Pair]:
        """Persistent rows: what would turn in their keys is zero."""
        k, v = self.key_values(persistent)
        k = k.clone()
        k[..., : self.config.rotary_dim] = 0.0
        return list(zip(k, v, strict=True))

    def recalled(self, h: Tensor, positions: list[int]) -> list[Pair]:
        """Recalled rows: keys at the position of the token they were recalled for."""
        k, v = self.key_values(h)
        return [(turn(k[t], p, self.config), v[t]) for t, p in enumerate(positions)]

    def look(self, q: Tensor, rows: list[Pair]) -> Tensor:
        """softmax(q kᵀ / √D) v of one token over the rows it sees, and the output projection."""
        scores = torch.stack([(q * k).sum(-1) / math.sqrt(q.shape[-1]) for k, _ in rows])
        weights = scores.exp() / scores.exp().sum(0)
        y = sum(w[:, None] * v for w, (_, v) in zip(weights, rows, strict=True))
        return y.flatten() @ self.layer.o_proj.weight.T


def gate_by_hand(
    x: Tensor, k: Tensor, gate: GateProjection | None, config: MemoryConfig, limits: list[float]
) -> Tensor | tuple[Tensor, ...]:
    """limit_l · σ(x W + √D k U + b), with what D33 says of θ and α, in the shape that the ops take, for one row."""
    H, L = config.num_attention_heads, config.memory_depth
    if gate is None:
        return torch.zeros(1, len(x), H, dtype=x.dtype)
    down = x @ gate.down.weight.T if config.gates == "channel" else x
    seen = torch.zeros_like(down[:, :1])
    if config.gates_see_keys:
        seen = math.sqrt(config.head_dim) * k.reshape(len(x), -1) @ gate.key_proj.weight.T
    logits = (down + seen) @ gate.proj.weight.T if config.gates == "channel" else down @ gate.proj.weight.T + seen
    share = torch.sigmoid(logits + gate.proj.bias).view(1, len(x), H, -1)
    if gate.stretch:
        share = torch.clip((1 + 2 * gate.stretch) * share - gate.stretch, 0.0, 1.0)
    if config.gates == "layer":
        return torch.stack([limits[i] * share[..., i] for i in range(L)], dim=-1)
    if config.gates == "head":
        return torch.stack([limits[i] * share[..., 0] for i in range(L)], dim=-1)
    ends = [sum(config.memory_widths[: i + 1]) for i in range(L)]
    return tuple(limits[i] * share[..., end - config.memory_widths[i] : end] for i, end in enumerate(ends))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, start: MemoryState
) -> tuple[Tensor, MemoryState]:
    """Forget, then step from there: M ← (1 − α) M, S ← η S + 2 θ kᵀ (v − k M), M ← M + S; streams are (T, H, D)."""
    M, S = start.M[0][0], start.S[0][0]
    outputs = []
    for t in range(len(q)):
        forget, keep, write = (gate[t].view(-1, 1, 1) for gate in (alpha, eta, theta))
        M = (1 - forget) * M
        error = v[t] - torch.einsum("hd,hde->he", k[t], M)
        S = keep * S + 2 * write * k[t][:, :, None] * error[:, None, :]
        M = M + S
        outputs.append(torch.einsum("hd,hde->he", q[t], M))
    return torch.stack(outputs), MemoryState((M[None],), (S[None],), (M[None],), start.offset)


class MemoryByHand:
    """The memory layer on one row, read from its document's start in one go."""

    def __init__(self, layer: NeuralMemory) -> None:
        self.layer, self.config = layer, layer.config

    def stream(self, i: int, x: Tensor) -> Tensor:
        """q, k or v (1, T, H, D): projected, convolved, normalised."""
        m, c = self.layer, self.config
        y = x @ (m.q_proj, m.k_proj, m.v_proj)[i].weight.T
        y = convolve(y, m.convs[i]) if c.conv_size > 1 else y
        y = y.view(1, len(x), c.num_attention_heads, c.head_dim)
        if i < 2:
            return y / y.norm(dim=-1, keepdim=True)
        return y / (y.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()

    def start(self) -> MemoryState:
        c = self.config
        state = MemoryState.initial(self.layer.initial_weights, 1)
        if c.omega_window == 1:
            return state
        lead = 1, c.omega_window - 1, c.num_attention_heads
        tail = (torch.zeros(*lead, width, dtype=state.M[0].dtype) for width in (state.M[0].shape[2], c.head_dim))
        return state._replace(tail=tuple(tail))

    def write(self, x: Tensor) -> tuple[Tensor, MemoryState]:
        """o (T, E) and the state after the last token."""
        c, widths = self.config, self.config.memory_widths
        q, k, v = (self.stream(i, x) for i in range(3))
        by_fan_in = c.memory_norm is False
        steps = [c.theta_max / (widths[i] if by_fan_in and i else 1) for i in range(c.memory_depth)]
        theta = gate_by_hand(x, k, self.layer.theta_proj, c, steps)
        eta = gate_by_hand(x, k, self.layer.eta_proj, c, [c.eta_max] * c.memory_depth)
        alpha = gate_by_hand(x, k, self.layer.alpha_proj, c, [c.alpha_max] * c.memory_depth)
        if c.decay_first:
            o, state = gated_delta_rule(q[0], k[0], v[0], theta[0], eta[0], alpha[0], self.start())
            return self.finish(o, x), state
        extra = self.extra(x, k)
        q, k = (self.powers(y) for y in (q, k))
        initial = self.layer.initial_weights if c.forget_to == "init" else None
        norm = self.layer.norm_weight, self.layer.norm_bias
        network = MemoryNetwork(c.memory_activation, c.use_residual, *norm, c.memory_objective, c.forget_to, initial)
        o, state = neural_memory(
            q, k, v, theta, eta, alpha, self.start(), network=network, chunk_size=c.chunk_size,
            backend="reference", extra=extra,
        )  # fmt: skip
        return self.finish(o[0], x), state

    def powers(self, y: Tensor) -> Tensor:
        """Every product of up to p channels, in the order of the channels, weighed by hand."""
        p, D = self.config.key_degree, self.config.head_dim
        if p == 1:
            return y
        a = self.layer.key_map.log_shares.exp()
        a = a / a.sum(-1, keepdim=True)
        found = []
        for i in range(p + 1):
            for one in itertools.combinations_with_replacement(range(D), i):
                times = math.factorial(i) / math.prod(math.factorial(one.count(d)) for d in set(one))
                product = (a[:, i] * times).sqrt().expand(y.shape[:-1])
                for d in one:
                    product = product * y[..., d]
                found.append(product)
        return torch.stack(found, dim=-1)

    def extra(self, x: Tensor, k: Tensor) -> PerToken:
        """Thresholds, 2 √D σ(x W + b) by norm and 4 σ(x W + b) by channel, or the shares of a window."""
        c = self.config
        if c.omega_window > 1:
            proj = self.layer.window_proj.proj
            shares = (x @ proj.weight.T + proj.bias).view(1, len(x), c.num_attention_heads, c.omega_window).exp()
            return PerToken(None, shares / shares.sum(-1, keepdim=True))
        if c.memory_objective not in ("huber", "huber_coordinate"):
            return PLAIN
        most = 2 * math.sqrt(c.head_dim) if c.memory_objective == "huber" else 4.0
        one = dataclasses.replace(c, gates="head", memory_depth=1)
        return PerToken(gate_by_hand(x, k, self.layer.threshold_proj, one, [most]).squeeze(-1))

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        share = torch.sigmoid(x @ self.layer.gate_proj.weight.T)
        return (rms(o, self.layer.o_norm).flatten(1) * share) @ self.layer.o_proj.weight.T

    def recall(self, x: Tensor, M: tuple[Tensor, ...]) -> Tensor:
        """Only read, every token from the same weights (1, H, D_in, D_out); tokens (T, E) from the document's start."""
        q, m, c = self.powers(self.stream(0, x))[0], self.layer, self.config
        phi = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}[c.memory_activation]
        z = torch.einsum("thd,hde->the", q, M[0][0])
        for W in M[1:]:
            z = torch.einsum("thd,hde->the", phi(z), W[0])
        if m.norm_weight is not None:
            z = F.layer_norm(z, z.shape[-1:]) * m.norm_weight + m.norm_bias
        return self.finish(q + z if c.use_residual else z, x)


def capture(module: nn.Module, into: list) -> None:
    """Append the arguments and the result of every call of a module to a list."""
    module.register_forward_hook(lambda _, arguments, result: into.append((arguments, result)))
