"""The ordinary parts: RMSNorm, SwiGLU, rotary embedding, short convolution, and what a call tells every layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.elementwise import (
    Gating,
    causal_taps,
    followed,
    gated_linear,
    mixed_linear,
    mutually_gated_linear,
    normed_gated_linear,
    rms_norm,
    swiglu,
)
from titans_lm.ops.products import linear
from titans_lm.ops.state import state_dtype


class Rope(NamedTuple):
    """Cosines and sines of the rotary embedding for the tokens of a call."""

    cos: Float[Tensor, "_ T R"]
    sin: Float[Tensor, "_ T R"]


class Streams(NamedTuple):
    """q, k and v of tokens through the short convolution, neither normalised nor rotated, and the tails after them."""

    q: Float[Tensor, "B T E"]
    k: Float[Tensor, "B T E"]
    v: Float[Tensor, "B T E"]
    tails: tuple[Float[Tensor, "B K1 E"], ...]


class Call(NamedTuple):
    """What every layer needs to know about one call besides its input and state.

    `position` counts the tokens of each row before the call. `lengths` are the real tokens of each row, padding to the
    right; None when all are real. `fresh` says that every row starts a document, so nothing is cached yet. A list in
    `surprise` collects the memory layers' ‖∇ℓ‖ (B, T, H, L) in the order of the blocks, with `parts` all three sizes
    (B, T, H, L, 3). `known` are the places at which rows stand, each once, as numbers of the host; None where nobody
    has looked, since looking makes a GPU wait.
    """

    position: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"] | None
    rope: Rope
    fresh: bool
    surprise: list[Tensor] | None = None
    known: tuple[int, ...] | None = None
    parts: bool = False

    def piece(self, start: int, stop: int) -> "Call":
        """The same call as seen by tokens start … stop of it."""
        if start == 0 and stop == self.rope.cos.shape[1]:
            return self
        lengths = None if self.lengths is None else (self.lengths - start).clamp(0, stop - start)
        rope = Rope(self.rope.cos[:, start:stop], self.rope.sin[:, start:stop])
        taken = start if self.lengths is None else self.lengths.clamp(max=start)
        return self._replace(
            position=self.position + taken, lengths=lengths, rope=rope, fresh=self.fresh and start == 0, known=None
        )


def valid_tokens(lengths: Int[Tensor, " B"] | None, length: int) -> Bool[Tensor, "B T"] | None:
    """Turn lengths of right-padded rows into a mask."""
    if lengths is None:
        return None
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def last_rows(x: Tensor, keep: int, lengths: Int[Tensor, " B"] | None) -> Tensor:
    """The last `keep` rows that count: x is (B, keep + T, …), of which the first keep + lengths are real."""
    if lengths is None:  # a copy: a view would keep all of x alive in the state
        return x[:, x.shape[1] - keep :].clone(memory_format=torch.contiguous_format)
    index = lengths[:, None] + torch.arange(keep, device=x.device)
    tail = [1] * (x.dim() - 2)
    return x.gather(1, index.view(*index.shape, *tail).expand(-1, -1, *x.shape[2:]))


def start_linear(module: nn.Linear) -> None:
    """Draw a linear map: N(0, 1 / fan-in) and no bias, unless its owner has set `start_std` or `start_bias` on it.

    One that `start_alike` has marked gets the weights of another, which its owner has before it and so draws before it.
    """
    if module.weight.is_meta:  # nothing to draw, and in torch that takes longer than all else of such a model
        return
    like = getattr(module, "start_like", None)
    if like is None:
        nn.init.normal_(module.weight, std=getattr(module, "start_std", module.in_features**-0.5))
    else:
        start_as(module.weight, like[0].weight)
    if module.bias is not None:
        start_as(module.bias, torch.tensor(getattr(module, "start_bias", 0.0), dtype=module.bias.dtype))


def start_as(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter its first value, unless transformers has just read it from a file, which its mark says.

    The functions of nn.init look at the mark themselves while transformers loads a model.
    """
    if not getattr(parameter, "_is_hf_initialized", False):
        with torch.no_grad():
            parameter.copy_(value)


def start_alike(module: nn.Linear, like: nn.Linear) -> None:
    """Let a linear map start with the weights of another, whenever it is drawn (D32).

    The mark is on the map itself: transformers passes over a module that has no parameters of its own.
    """
    module.start_like = (like,)  # in a tuple, as a module would become a part of it
    start_linear(module)


def streams_of(q_proj: nn.Linear, k_proj: nn.Linear, kernel: int, induction: bool) -> nn.ModuleList:
    """The convolutions of q, k and v, none for a kernel of 1.

    With `induction` k starts as q: one token behind where there are convolutions (D32), else that of its own token, so
    that attention starts with every token looking at itself (D34).
    """
    if induction:
        start_alike(k_proj, q_proj)
    if kernel == 1:
        return nn.ModuleList()
    back = (0, 1, 0) if induction else (None, None, None)
    return nn.ModuleList(ShortConvolution(q_proj.out_features, kernel, i) for i in back)


class Linear(nn.Linear):
    """x Wᵀ + b, which for a single row on a CPU is as fast as its weights can be read.

    A matrix times one vector is all reading, and the library that torch gives it to on a CPU reads neither ahead nor
    with more than one thread: Σ_e W_oe x_e as an ordinary reduction took a half to a third of the time. It holds W ∘ x
    for a moment, so large matrices stay where they were.
    """

    most = 2**19

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        alone = input.numel() == self.in_features and weight.numel() <= self.most
        if not alone or not input.is_cpu or input.dtype != weight.dtype or weight.dtype.itemsize < 4:
            return linear(input, weight, self.bias)
        if torch.is_autocast_enabled("cpu"):
            return linear(input, weight, self.bias)
        y = torch.linalg.vecdot(weight, input.reshape(-1))
        y = y if self.bias is None else y + self.bias
        return y.view(*input.shape[:-1], -1)


def plain(*projs: nn.Module, bias: bool = False) -> bool:
    """Whether these are linear maps and nothing else: PEFT wraps them, users put hooks on them."""
    return all(
        type(p) is Linear and (p.bias is None or bias) and not (p._forward_hooks or p._forward_pre_hooks) for p in projs
    )


def side_by_side(x: Float[Tensor, "B T E"], *projs: nn.Module) -> Float[Tensor, "B T _"]:
    """Several linear maps of one input, one beside the other: a single product, which is faster than three."""
    if not plain(*projs):
        return torch.cat([proj(x) for proj in projs], dim=-1)
    weights: list[Any] = [proj.weight for proj in projs]
    return linear(x, torch.cat(weights))


def joint(x: Float[Tensor, "B T E"], *projs: nn.Module) -> tuple[Tensor, ...]:
    """Several linear maps of one input, of several tokens in one product."""
    if x.shape[1] == 1 or not plain(*projs):
        return tuple(proj(x) for proj in projs)
    widths: list[Any] = [proj.out_features for proj in projs]
    return side_by_side(x, *projs).split(widths, dim=-1)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, computed in at least float32; the weight is `start` at first."""

    def __init__(self, width: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.eps, self.start = eps, start
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x: Float[Tensor, "*s E"]) -> Float[Tensor, "*s E"]:
        precise = state_dtype(x.dtype)
        if precise == x.dtype == self.weight.dtype:
            return rms_norm(x, self.weight, self.eps)
        return (F.rms_norm(x.to(precise), x.shape[-1:], eps=self.eps) * self.weight.to(precise)).to(x.dtype)


class Affine(nn.Module):
    """a ∘ x + b by channel, which starts as x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*s E"]) -> Float[Tensor, "*s E"]:
        return (x * self.weight + self.bias).to(x.dtype)


def gated(
    proj: nn.Module,
    gate: Float[Tensor, "B T E"],
    x: Tensor,
    activation: Gating,
    x_norm: nn.Module | None = None,
    gate_norm: nn.Module | None = None,
) -> Float[Tensor, "B T O"]:
    """proj(φ([norm] gate) ∘ [norm] x), φ being SiLU or the sigmoid; x is (B, T, E), or (B, T, H, D) to be normed."""
    owner, inner, outer = cast(Any, proj), cast(Any, x_norm), cast(Any, gate_norm)
    together = x.shape[1] > 1 and plain(proj)
    if together and x_norm is None:
        return gated_linear(gate, x, owner.weight, activation)
    if together and activation == "sigmoid" and _normed_alike(gate, x, owner, inner, outer):
        gate_weight = None if outer is None else outer.weight
        return normed_gated_linear(gate, x, owner.weight, inner.weight, gate_weight, inner.eps)
    x = x if x_norm is None else x_norm(x)
    x, gate = x.flatten(2).to(gate.dtype), gate if gate_norm is None else gate_norm(gate)
    return proj((F.silu(gate) if activation == "silu" else torch.sigmoid(gate)) * x)


def mutually_gated(
    proj: nn.Module, y: Float[Tensor, "B T E"], m: Float[Tensor, "B T E"], y_norm: nn.Module, m_norm: nn.Module
) -> Float[Tensor, "B T O"]:
    """proj(ŷ ∘ σ(m̂) + m̂ ∘ σ(ŷ)), hats being norms: each lets the other through."""
    owner, inner, outer = cast(Any, proj), cast(Any, y_norm), cast(Any, m_norm)
    if y.shape[1] > 1 and plain(proj) and _normed_alike(m, y, owner, inner, outer):
        return mutually_gated_linear(y, m, owner.weight, inner.weight, outer.weight, inner.eps)
    y, m = y_norm(y), m_norm(m)
    return proj(y * torch.sigmoid(m) + m * torch.sigmoid(y))


def mixed(
    proj: nn.Module,
    gate_proj: nn.Module,
    y: Float[Tensor, "B T E"],
    m: Float[Tensor, "B T E"],
    y_norm: nn.Module,
    m_norm: nn.Module,
) -> Float[Tensor, "B T O"]:
    """proj(g ∘ ŷ + (1 − g) ∘ m̂) with g = σ(gate_proj(ŷ + m̂)), hats being norms: a convex mix by channel."""
    owner, gate, inner, outer = cast(Any, proj), cast(Any, gate_proj), cast(Any, y_norm), cast(Any, m_norm)
    together = y.shape[1] > 1 and plain(proj) and plain(gate_proj, bias=True)
    if together and _normed_alike(m, y, owner, inner, outer):
        weights = owner.weight, gate.weight, gate.bias, inner.weight, outer.weight
        return mixed_linear(y, m, *weights, inner.eps)
    y, m = y_norm(y), m_norm(m)
    return proj(torch.lerp(m, y, torch.sigmoid(gate_proj(y + m)).to(y.dtype)))


def _normed_alike(gate: Tensor, x: Tensor, proj: Any, x_norm: Any, gate_norm: Any) -> bool:
    """Whether norms, gate and product are of one precision, and gradients are asked for."""
    norms = [norm for norm in (x_norm, gate_norm) if norm is not None]
    plain_norms = all(type(norm) is RMSNorm and not norm._forward_hooks and norm.eps == x_norm.eps for norm in norms)
    tensors = gate, x, proj.weight, *(norm.weight for norm in norms)
    return (
        plain_norms
        and followed(*tensors)
        and not torch.is_autocast_enabled(x.device.type)
        and all(y.dtype == x.dtype == state_dtype(x.dtype) for y in tensors)
    )


class SwiGLU(nn.Module):
    """The Llama MLP: W_down(SiLU(W_gate x) ∘ W_up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden, bias=False)
        self.up_proj = Linear(width, hidden, bias=False)
        self.down_proj = Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        projs: list[Any] = [self.gate_proj, self.up_proj, self.down_proj]
        weights = [proj.weight for proj in projs]
        together = x.shape[1] > 1 and plain(*projs) and followed(x, *weights)
        if together and all(w.dtype == x.dtype for w in weights) and not torch.is_autocast_enabled(x.device.type):
            return swiglu(x, *weights)
        return gated(self.down_proj, self.gate_proj(x), self.up_proj(x), "silu")


class ShortConvolution(nn.Module):
    """Causal depthwise convolution whose last inputs are a value, then SiLU: y_t = SiLU(Σ_i w_i ∘ x_{t−i}).

    With `back` it starts as the token so many before, w_back = 1, and a fifth of the usual noise on all taps (D32).
    """

    def __init__(self, width: int, kernel: int, back: int | None = None) -> None:
        super().__init__()
        self.kernel, self.back = kernel, back
        self.weight = nn.Parameter(torch.empty(kernel, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.kernel**-0.5
        if self.back is None:
            nn.init.uniform_(self.weight, -bound, bound)
            return
        start = torch.empty_like(self.weight).uniform_(-0.2 * bound, 0.2 * bound)
        start[self.kernel - 1 - self.back] += 1.0
        start_as(self.weight, start)

    def init_tail(self, batch_size: int) -> Float[Tensor, "B K1 E"]:
        """Nothing but zeros before the first token."""
        width, dtype = self.weight.shape[1], state_dtype(self.weight.dtype)
        return torch.zeros(batch_size, self.kernel - 1, width, dtype=dtype, device=self.weight.device)

    def forward(
        self, x: Float[Tensor, "B T E"], tail: Float[Tensor, "B K1 E"], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B K1 E"]]:
        T = x.shape[1]
        padded = torch.cat([tail.to(x.dtype), x], dim=1)
        weight = self.weight.to(x.dtype)
        y = F.silu((padded * weight).sum(1, keepdim=True)) if T == 1 else causal_taps(padded, weight)
        return y, last_rows(padded, self.kernel - 1, lengths).to(tail.dtype)


def convolved(
    x: Float[Tensor, "B T E"],
    projs: Sequence[nn.Module],
    convs: nn.ModuleList,
    tails: tuple[Tensor, ...],
    lengths: Int[Tensor, " B"] | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Linear maps of one input, each through its own convolution; of several tokens as one map and one convolution."""
    if x.shape[1] == 1 or len(projs) == 1:
        found = [conv(proj(x), tail, lengths) for proj, conv, tail in zip(projs, convs, tails, strict=True)]
        return tuple(y for y, _ in found), tuple(tail for _, tail in found)
    y = side_by_side(x, *projs)
    sizes, dtype = [tail.shape[-1] for tail in tails], y.dtype
    padded = torch.cat([torch.cat(tails, dim=-1).to(dtype), y], dim=1)
    y = causal_taps(padded, torch.cat([weight for conv in convs for weight in conv.parameters()], dim=-1).to(dtype))
    last = last_rows(padded, tails[0].shape[1], lengths).to(tails[0].dtype)
    return y.split(sizes, dim=-1), tuple(part.contiguous() for part in last.split(sizes, dim=-1))


def rope_angles(positions: Int[Tensor, "_ T"], channels: int, base: float, dtype: torch.dtype) -> Rope:
    """Rotary angles of integer positions, computed in float64 so that token 10⁶ turns as exactly as token 1."""
    half = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float64)
    angles = positions.to(torch.float64).unsqueeze(-1) * base ** (-half / max(channels, 1))
    return Rope(angles.cos().to(state_dtype(dtype)), angles.sin().to(state_dtype(dtype)))


def rotate(x: Float[Tensor, "B T H D"], rope: Rope) -> Float[Tensor, "B T H D"]:
    """Turn the first 2R channels of every head by its token's angles; the others know no position (D18)."""
    half = rope.cos.shape[-1]
    cos, sin = rope.cos.unsqueeze(2), rope.sin.unsqueeze(2)
    a, b, rest = x.to(cos.dtype).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = [torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)]
    return torch.cat([*turned, rest], dim=-1).to(x.dtype)
