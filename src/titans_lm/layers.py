"""The ordinary parts: RMSNorm, SwiGLU, rotary embedding, short convolution, and what a call tells every layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.config import SurpriseSizes
from titans_lm.ops.fused import causal_taps, is_plain, joined_weight, rms_norm, swiglu
from titans_lm.ops.matmul import linear
from titans_lm.ops.state import state_dtype, take_places


class Rope(NamedTuple):
    """Cosines and sines of the rotary embedding for the tokens of a call."""

    cos: Float[Tensor, "_ T 1 R"]
    sin: Float[Tensor, "_ T 1 R"]


class Streams(NamedTuple):
    """q, k and v of tokens through the short convolution, neither normalised nor rotated, and the tails after them.

    `together` is what the three are parts of, where they were made as one.
    """

    q: Float[Tensor, "B T E"]
    k: Float[Tensor, "B T E"]
    v: Float[Tensor, "B T E"]
    tails: tuple[Float[Tensor, "B K1 E"], ...]
    together: Float[Tensor, "B T E3"] | None = None


@dataclass
class Diagnostics:
    """What a call is asked to tell besides its output, and what it told.

    With `surprise` True every memory layer in turn adds ‖∇ℓ‖ (B, T, H, L) to `surprise_norms`, with "parts" the norms
    of momentary and past surprise and of what was forgotten (B, T, H, L, 3). `hidden_states` receives what each block
    gives to the next, and last the normalised output.
    """

    surprise: SurpriseSizes = False
    surprise_norms: list[Tensor] = field(default_factory=list)
    hidden_states: list[Tensor] = field(default_factory=list)

    def join(self, calls: int, whole: Callable[[list[Tensor]], Tensor]) -> None:
        """Make what so many calls told one after another what one call would have told, `whole` of their parts."""
        for told in (self.surprise_norms, self.hidden_states):
            layers = len(told) // calls
            told[:] = [whole(told[layer::layers]) for layer in range(layers)]


class ForwardContext(NamedTuple):
    """What every layer needs to know about one call besides its input and state.

    `position` counts the tokens of each row before the call. `lengths` are the real tokens of each row, padding to the
    right; None when all are real. `is_start` says that every row starts a document, so nothing is cached yet.
    `host_positions` are the places at which rows stand, each once, as numbers of the host; None where nobody has
    looked, since looking makes a GPU wait. With `frozen` memories are read and never written: θ = η = α = 0 (D31).
    `embeddings` (B, T, E) are the tokens as they entered the stack; None where no block reads them (D56).
    """

    position: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"] | None
    rope: Rope
    is_start: bool
    host_positions: tuple[int, ...] | None = None
    diagnostics: Diagnostics | None = None
    frozen: bool = False
    embeddings: Float[Tensor, "B T E"] | None = None

    def slice(self, start: int, stop: int) -> "ForwardContext":
        """The same call as seen by tokens start … stop of it."""
        if start == 0 and stop == self.rope.cos.shape[1]:
            return self
        lengths = None if self.lengths is None else (self.lengths - start).clamp(0, stop - start)
        taken = start if self.lengths is None else self.lengths.clamp(max=start)
        rope = Rope(self.rope.cos[:, start:stop], self.rope.sin[:, start:stop])
        embeddings = None if self.embeddings is None else self.embeddings[:, start:stop]
        return self._replace(
            position=self.position if start == 0 else self.position + taken,
            lengths=lengths,
            rope=rope,
            is_start=self.is_start and start == 0,
            host_positions=None,
            embeddings=embeddings,
        )


class Packing(NamedTuple):
    """Rows with padding anywhere, moved to the left and back."""

    lengths: Int[Tensor, " B"]
    source: Int[Tensor, "B T"]
    target: Int[Tensor, "B T"]

    @classmethod
    def of(cls, valid: Bool[Tensor, "B T"]) -> "Packing":
        order = torch.argsort(~valid, dim=1, stable=True)
        return cls(valid.sum(1), order, (valid.cumsum(1) - 1).clamp(min=0))

    def pack(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return take_places(x, self.source)

    def unpack(self, x: Tensor, valid: Bool[Tensor, "B T"]) -> Tensor:
        return take_places(x, self.target) * valid.view(*valid.shape, *[1] * (x.dim() - 2))


def length_mask(lengths: Int[Tensor, " B"] | None, length: int) -> Bool[Tensor, "B T"] | None:
    """Turn lengths of right-padded rows into a mask."""
    if lengths is None:
        return None
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def last_valid(x: Tensor, keep: int, lengths: Int[Tensor, " B"] | None) -> Tensor:
    """The last `keep` rows that count: x is (B, keep + T, …), of which the first keep + lengths are real."""
    if lengths is None:  # a copy: a view would keep all of x alive in the state
        return x[:, x.shape[1] - keep :].clone(memory_format=torch.contiguous_format)
    return take_places(x, lengths[:, None] + torch.arange(keep, device=x.device))


def check_precision(x: Tensor, weights: torch.dtype) -> None:
    """Refuse tokens in another precision than the maps that they meet, which autocast alone converts; float64 never."""
    compares = weights.is_floating_point and weights.itemsize > 1  # quantised ones take what comes
    converts = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weights)
    if x.dtype != weights and compares and not converts:
        raise ValueError(
            f"got x {x.dtype} for weights {weights}; expected one type: convert x, or the layer, with .to(), or "
            "read under torch.autocast"
        )


def device_of(module: Any) -> torch.device:
    """Where a module with a weight computes: accelerate may keep the weight elsewhere until the module is called."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None) if module.weight.is_meta else None
    return module.weight.device if device is None else torch.device(device)


@contextmanager
def weights_at_hand(module: nn.Module) -> Iterator[None]:
    """Let a module's own parameters be read without calling it, where accelerate fetches them for calls alone."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def init_linear(module: nn.Linear) -> None:
    """Draw a linear map: N(0, 1 / fan-in) and no bias, unless its owner has set `init_std` or `init_bias` on it.

    One that `tie_init` has marked gets the weights of another, which its owner has before it and so draws before it.
    """
    if module.weight.is_meta:  # nothing to draw, and in torch that takes longer than all else of such a model
        return
    like = getattr(module, "init_like", None)
    if like is None:
        nn.init.normal_(module.weight, std=getattr(module, "init_std", module.in_features**-0.5))
    else:
        init_from(module.weight, like[0].weight)
    if module.bias is not None:
        init_from(module.bias, torch.tensor(getattr(module, "init_bias", 0.0), dtype=module.bias.dtype))


def init_from(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter its first value, unless transformers has just read it from a file, which its mark says.

    The functions of nn.init look at the mark themselves while transformers loads a model.
    """
    if not getattr(parameter, "_is_hf_initialized", False):
        with torch.no_grad():
            parameter.copy_(value)


def tie_init(module: nn.Linear, like: nn.Linear) -> None:
    """Let a linear map start with the weights of another, whenever it is drawn (D32).

    The mark is on the map itself: transformers passes over a module that has no parameters of its own.
    """
    module.init_like = (like,)  # in a tuple, as a module would become a part of it
    init_linear(module)


def make_short_convs(
    q_proj: nn.Linear, k_proj: nn.Linear, kernel: int, induction: bool, lookahead: bool = False
) -> nn.ModuleList:
    """The convolutions of q, k and v, none for a kernel of 1.

    With `induction` k starts as q: one token behind where there are convolutions (D32), else that of its own token, so
    that attention starts with every token looking at itself (D34). With `lookahead` k never sees its own token (D53).
    """
    if induction:
        tie_init(k_proj, q_proj)
    if kernel == 1:
        return nn.ModuleList()
    back = (0, 1, 0) if induction else (None, None, None)
    first = (0, int(lookahead), 0)
    return nn.ModuleList(
        ShortConvolution(q_proj.out_features, kernel, i, since) for i, since in zip(back, first, strict=True)
    )


class Linear(nn.Linear):
    """x Wᵀ + b by the faster of the ways that there are (ops/matmul.py)."""

    is_plain = True

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, computed in at least float32; the weight is `start` at first."""

    is_plain = True

    def __init__(self, width: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.eps, self.start = eps, start
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x: Float[Tensor, "*s E"]) -> Float[Tensor, "*s E"]:
        return rms_norm(x, self.weight, self.eps)


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

    def forward(self, x: Float[Tensor, "*s E"], shifted: bool = True) -> Float[Tensor, "*s E"]:
        y = x * self.weight
        return (y + self.bias if shifted else y).to(x.dtype)


class SwiGLU(nn.Module):
    """The Llama MLP: W_down(SiLU(W_gate x) ∘ W_up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden, bias=False)
        self.up_proj = Linear(width, hidden, bias=False)
        self.down_proj = Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution whose last inputs are a value, then SiLU: y_t = SiLU(Σ_{i ≥ first} w_i ∘ x_{t−i}).

    With `back` it starts as the token so many before, w_back = 1, and a fifth of the usual noise on all taps (D32).
    """

    is_plain = True

    def __init__(self, width: int, kernel: int, back: int | None = None, first: int = 0) -> None:
        super().__init__()
        self.kernel, self.back, self.first = kernel, back, first
        self.weight = nn.Parameter(torch.empty(kernel, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.kernel**-0.5
        if self.back is None:
            nn.init.uniform_(self.weight, -bound, bound)
            return
        start = torch.empty_like(self.weight).uniform_(-0.2 * bound, 0.2 * bound)
        start[self.kernel - 1 - self.back] += 1.0
        init_from(self.weight, start)

    @property
    def taps(self) -> Float[Tensor, "K E"]:
        """The weights, zero for tokens that are too near."""
        return F.pad(self.weight[: -self.first], (0, 0, 0, self.first)) if self.first else self.weight

    def init_tail(self, batch_size: int) -> Float[Tensor, "B K1 E"]:
        """Nothing but zeros before the first token."""
        width, dtype = self.weight.shape[1], state_dtype(self.weight.dtype)
        return torch.zeros(batch_size, self.kernel - 1, width, dtype=dtype, device=device_of(self))

    def fits(self, tail: Tensor, batch_size: int) -> bool:
        return tail.shape == (batch_size, self.kernel - 1, self.weight.shape[1])

    def forward(
        self, x: Float[Tensor, "B T E"], tail: Float[Tensor, "B K1 E"], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B K1 E"]]:
        T = x.shape[1]
        padded = torch.cat([tail.to(x.dtype), x], dim=1)
        weight = self.taps.to(x.dtype)
        y = F.silu((padded * weight).sum(1, keepdim=True)) if T == 1 else causal_taps(padded, weight)
        return y, last_valid(padded, self.kernel - 1, lengths).to(tail.dtype)


class JoinedMaps(NamedTuple):
    """Linear maps of one input as one matrix, and their convolutions as one, if there are any."""

    weight: Float[Tensor, "N E"]
    taps: Float[Tensor, "K N"] | None

    def __call__(
        self, x: Float[Tensor, "B T E"], tails: tuple[Tensor, ...], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T N"], tuple[Tensor, ...]]:
        """All of them side by side, and the tails after them."""
        y = linear(x, self.weight)
        if self.taps is None:
            return y, tails
        sizes, keep = [tail.shape[-1] for tail in tails], tails[0].shape[1]
        padded = torch.cat([torch.cat(tails, dim=-1).to(y.dtype), y], dim=1)
        last = padded[:, x.shape[1] :] if lengths is None else last_valid(padded, keep, lengths)
        after = []
        for part in last.to(tails[0].dtype).split(sizes, dim=-1):  # copies: a view would keep all of `padded` alive
            after.append(part.clone(memory_format=torch.contiguous_format))
        return causal_taps(padded, self.taps.to(y.dtype)), tuple(after)


def join_maps(projs: Sequence[nn.Module], convs: nn.ModuleList) -> JoinedMaps | None:
    """Linear maps and their convolutions side by side; None where each has to be called."""
    weight = joined_weight(*projs) if is_plain(*convs) else None
    if weight is None:
        return None
    return JoinedMaps(weight, torch.cat([conv.taps for conv in convs], dim=-1) if len(convs) else None)


def project_and_convolve(
    x: Float[Tensor, "B T E"],
    projs: Sequence[nn.Module],
    convs: nn.ModuleList,
    tails: tuple[Tensor, ...],
    lengths: Int[Tensor, " B"] | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Linear maps of one input, each through its own convolution if there are any, and the tails after them."""
    if not convs:
        return tuple([proj(x) for proj in projs]), tails
    found = [conv(proj(x), tail, lengths) for proj, conv, tail in zip(projs, convs, tails, strict=True)]
    ys, tails = zip(*found, strict=True)
    return ys, tails


def make_streams(
    x: Float[Tensor, "B T E"],
    projs: Sequence[nn.Module],
    convs: nn.ModuleList,
    tails: tuple[Tensor, ...],
    lengths: Int[Tensor, " B"] | None,
    maps: JoinedMaps | None = None,
) -> Streams:
    """q, k and v of tokens before norms and heads: of several tokens by one map, `maps` where the caller has it."""
    maps = join_maps(projs, convs) if maps is None and x.shape[1] > 1 else maps
    if maps is None or x.shape[1] == 1:
        (q, k, v), tails = project_and_convolve(x, projs, convs, tails, lengths)
        return Streams(q, k, v, tails)
    together, tails = maps(x, tails, lengths)
    return Streams(*together.chunk(3, dim=-1), tails, together)


def rope_angles(positions: Int[Tensor, "_ T"], channels: int, base: float, dtype: torch.dtype) -> Rope:
    """Rotary angles of integer positions, computed in float64 so that token 10⁶ turns as exactly as token 1."""
    last = (2 - channels) / max(channels, 1)
    frequencies = torch.logspace(0.0, last, channels // 2, base, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64).view(*positions.shape, 1, 1) * frequencies
    return Rope(angles.cos().to(state_dtype(dtype)), angles.sin().to(state_dtype(dtype)))


def rotate(x: Float[Tensor, "B T H D"], rope: Rope) -> Float[Tensor, "B T H D"]:
    """Turn the first 2R channels of every head by its token's angles; the others know no position (D18)."""
    half = rope.cos.shape[-1]
    a, b, rest = x.to(rope.cos.dtype).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = [torch.addcmul(a * rope.cos, b, rope.sin, value=-1), torch.addcmul(b * rope.cos, a, rope.sin)]
    return torch.cat([*turned, rest], dim=-1).to(x.dtype)
