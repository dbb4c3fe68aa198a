"""Settings of the memory and of the stack around it: frozen dataclasses, and every check of a setting.

Configurations speak words (`memory_depth`), the ops speak letters (`L`); `memory.py` is where one becomes the other.
One flat set of names serves the library, the Hugging Face config and the command line, so a `BackboneConfig` is a
`MemoryConfig` with a stack around it.
"""

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

BlockName = Literal["lmm", "mac", "mag", "mal", "attention", "sliding", "segment"]
Architecture = Literal[BlockName, "hybrid"]
Activation = Literal["gelu", "silu", "relu"]
Gates = Literal["head", "layer", "channel"]
Objective = Literal["l2", "dot"]
ForgetTo = Literal["zero", "init"]
Gating = Literal["mutual", "memory", "mix", "sum"]
Backend = Literal["auto", "reference", "chunked", "triton"]
SurpriseSizes = bool | Literal["parts"]
TimeScales = Literal["shared", "shifted"]
Caching = Literal["residual", "grm", "ssc"]
CachingStart = Literal["checkpoint", "independent"]
CachingLengths = Literal["equal", "fenwick"]
Start = float | tuple[float, float]
"""Where a gate starts: one value for all heads, or (from, to), log-spaced over the heads."""

MEMORY_BLOCKS = ("lmm", "mac", "mag", "mal")
MEMORY_ARCHITECTURES = (*MEMORY_BLOCKS, "hybrid")
HYBRID: tuple[BlockName, ...] = ("sliding", "lmm", "sliding")
"""The blocks of architecture="hybrid", repeated over the depth: one memory between windows (D38)."""
SHARING_BLOCKS = ("mac", "mag")
"""Blocks whose attention and memory can have one q, k, v (D41)."""
CACHING_BLOCKS = ("lmm", "mag", "mal")
"""Blocks whose memory is asked once a token, and so can answer from earlier segments too (D55)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Phrase the nearest known name as a hint, or list what is known."""
    known = sorted(known)
    match = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {match[0]!r}?" if match else f"expected one of {', '.join(known)}"


def check_choice(what: str, got: Any, known: Iterable[str]) -> None:
    known = tuple(known)
    if got not in known:
        hint, listed = nearest(str(got), known), f"one of {', '.join(known)}"
        raise ValueError(f"got {what}={got!r}; " + (f"{hint} ({listed})" if "?" in hint else f"expected {listed}"))


def check_at_least(what: str, got: Any, least: int) -> None:
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ValueError(f"got {what}={got!r}; expected an integer of at least {least}")


def check_between(what: str, got: Any, low: float, high: float) -> None:
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not low <= got <= high:
        raise ValueError(f"got {what}={got!r}; expected a number from {low} to {high}")


def check_positive(what: str, got: Any) -> None:
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not 0.0 < got < math.inf:
        raise ValueError(f"got {what}={got!r}; expected a finite number above 0")


def check_start(what: str, got: Any, most: float, said: str = "") -> None:
    """Check one value above 0 and below `most`, which is called what is `said`, or an ascending pair of them."""
    pair = isinstance(got, tuple)
    for value in got if pair else (got,):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < most:
            below = said or format(most, "g")
            raise ValueError(f"got {what}={got!r}; expected a number above 0 and below {below}, or a pair of them")
    if pair and (len(got) != 2 or not got[0] < got[1]):
        raise ValueError(f"got {what}={got!r}; expected one number, or two that ascend: (from, to) over the heads")


def log_spaced(start: Start, count: int, place: int = 0, of: int = 1) -> list[float]:
    """Spread a start over the heads of a memory: from · (to / from)^(j / (N − 1)), N = count · of.

    j = head · of + place for the `place`-th of `of` memories that share the spread. One value alone stands at the
    geometric mean.
    """
    if not isinstance(start, tuple):
        return [start] * count
    low, high = start
    last = count * of - 1
    return [low * (high / low) ** ((head * of + place) / last if last else 0.5) for head in range(count)]


def check_switch(what: str, got: Any) -> None:
    if not isinstance(got, bool):
        raise ValueError(f"got {what}={got!r}; expected True or False")


def check_known(cls: type, settings: Iterable[str]) -> None:
    """Fail on a setting that the config class does not have, with the nearest match."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in settings:
        if name not in names:
            raise ValueError(f"unknown setting {name!r} for {cls.__name__}; {nearest(name, names)}")


FORMER: dict[str, tuple[Any, str]] = {
    "memory_targets": ("rms", "norm 1 learned worse, and no norm no better (D15)"),
    "memory_init_scale": (1.0, "both smaller and larger starts learned worse (D14)"),
    "theta_fan_in": (None, "whether there is a LayerNorm decides it (D14)"),
    "memory_reads_persistent": (True, "it made no difference, and num_persistent=0 has none to read (D16)"),
    "alpha_max": (1.0, "nothing was ever better than to let a token forget all"),
}
"""Settings that are no more: the value that each has now, and why."""


def former_settings(decay_first: bool) -> dict[str, Any]:
    """What settings that are no more would be set to; a decay_first memory never forgot all (D44)."""
    former = {name: value for name, (value, _) in FORMER.items()}
    return former | ({"alpha_max": 0.999} if decay_first else {})


def drop_former(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a saved model without those that are no more; ValueError where one had another value."""
    former = former_settings(bool(settings.get("decay_first")))
    for name, value in former.items():
        if name in settings and settings[name] != value:
            raise ValueError(
                f"got {name}={settings[name]!r}, a setting that is no more: {FORMER[name][1]}; expected {value!r} or "
                "none, so this model needs the version that saved it"
            )
    return {name: value for name, value in settings.items() if name not in former}


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Settings of one neural long-term memory layer."""

    hidden_size: int = 256
    """Width E of the model."""
    num_attention_heads: int = 4
    """Heads H, of attention and of the memory: one memory of D = E / H channels per head (D5)."""
    memory_depth: int = 2
    """Layers L of the memory network, 1 to 4; 1 is the linear memory M(x) = x W."""
    memory_expansion: int = 4
    """Hidden width of the memory network in multiples of the head dimension (depth 2 and more)."""
    memory_activation: Activation = "gelu"
    """Non-linearity φ of the memory network."""
    memory_residual: bool | None = None
    """Whether M(x) adds x; by default for depth 2 and more."""
    memory_norm: bool | None = None
    """Whether the memory network ends in a LayerNorm; by default for depth 2 and more."""
    memory_objective: Objective = "l2"
    """Inner loss: l2 is ‖M(k) − v‖² (eq. 12), dot is −⟨M(k), v⟩ (linear attention)."""
    forget_to: ForgetTo = "init"
    """Where forgetting leads: to the learned initial memory, or to zero as in eq. 13 (D13)."""
    chunk_size: int = 16
    """Tokens C whose gradients are taken at the same memory; part of the model, not a speed knob."""
    gates: Gates = "layer"
    """Gates per head, per head and memory layer, or channel-wise on each layer's input (D3)."""
    gate_rank: int = 32
    """Rank of the projection that makes channel-wise gates (D2)."""
    gates_see_keys: bool = False
    """Whether gates are made of the key too, which knows the tokens before through the convolution (D35)."""
    momentum: bool = True
    """Whether past surprise is carried (η); off sets η = 0."""
    decay: bool = True
    """Whether the memory forgets (α); off sets α = 0."""
    decay_first: bool = False
    """Whether a token's gradient is taken at the memory that has forgotten already, as Gated DeltaNet's is (D44)."""
    theta_bound: float = 0.9
    """c in the bound on θ that keeps repeated keys stable (D10)."""
    theta_stretch: float = 0.2
    """How far θ's gate reaches beyond zero and its bound before it is cut: above 0 a token can write nothing (D33)."""
    theta_init: Start = 0.5
    """Share of its bound at which θ of the first layer of a memory starts, for every token (D2)."""
    theta_later_init: Start = 0.1
    """The same of the second and later layers of a memory, where layers have gates of their own (D14)."""
    eta_max: float = 0.6
    """Largest share of past surprise that a token may keep (D10)."""
    eta_init: Start = 0.5
    """Share of eta_max at which η starts (D2)."""
    alpha_init: Start = 0.002
    """Share of the memory that a token forgets before training; a pair (from, to) is log-spaced over the heads (D2)."""
    time_scales: TimeScales = "shared"
    """Whether every block spreads a pair over its heads alike, or all heads of the stack share one spread (D2)."""
    alpha_stretch: float = 0.003
    """How far α's gate reaches beyond zero and its bound before it is cut: above 0 a token can forget nothing (D33)."""
    conv_size: int = 4
    """Kernel of the causal depthwise convolution on the memory's q, k, v; 1 switches it off."""
    induction_init: bool = True
    """Whether a key starts as the query of the token before it, so that a token recalls what followed it (D32)."""
    memory_caching: Caching | None = None
    """How memories at the ends of earlier segments answer too (lmm, mag, mal; D55): residual, a sum; grm, weighed by
    how a segment's mean key fits the token; ssc, the best of them alone. Nothing is cached by default."""
    caching_segment: int = 256
    """Tokens of a segment, after which the memory is cached."""
    caching_slots: int = 16
    """Cached memories of a row at most; the state has room for as many from the start."""
    caching_top: int = 4
    """Cached memories that a token reads with ssc."""
    caching_start: CachingStart = "checkpoint"
    """Whether the memory goes on after a segment, or starts independently anew."""
    caching_lengths: CachingLengths = "equal"
    """Segments of one length, the last of them kept; or fenwick: joined to powers of two, so that few cover all."""
    memory_backend: Backend = "auto"
    """What computes the memory; every backend gives the same result."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""

    def __post_init__(self) -> None:
        for name in ("theta_init", "theta_later_init", "eta_init", "alpha_init"):
            if isinstance(getattr(self, name), list):  # as JSON has a pair
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("hidden_size", "num_attention_heads", "memory_expansion", "chunk_size", "gate_rank", "conv_size"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("memory_depth", self.memory_depth, 1)
        if self.memory_depth > 4:
            raise ValueError(f"got memory_depth={self.memory_depth}; expected 1 to 4 layers")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"got hidden_size={self.hidden_size} and num_attention_heads={self.num_attention_heads}; "
                "expected a width that the heads divide"
            )
        check_choice("memory_activation", self.memory_activation, get_args(Activation))
        check_choice("memory_objective", self.memory_objective, get_args(Objective))
        check_choice("forget_to", self.forget_to, get_args(ForgetTo))
        check_choice("gates", self.gates, get_args(Gates))
        check_choice("memory_backend", self.memory_backend, get_args(Backend))
        for name in ("momentum", "decay", "decay_first", "induction_init", "gates_see_keys"):
            check_switch(name, getattr(self, name))
        for name in ("memory_residual", "memory_norm"):
            if getattr(self, name) is not None:
                check_switch(name, getattr(self, name))
        check_positive("norm_eps", self.norm_eps)
        check_between("theta_bound", self.theta_bound, 0.0, 1.0)
        check_between("theta_stretch", self.theta_stretch, 0.0, 1.0)
        check_choice("time_scales", self.time_scales, get_args(TimeScales))
        for name in ("theta_init", "theta_later_init", "eta_init"):
            check_start(name, getattr(self, name), 1.0)
        check_between("alpha_stretch", self.alpha_stretch, 0.0, 1.0)
        check_between("eta_max", self.eta_max, 0.0, 0.999)
        self._check_alpha_init()
        self._check_caching()

    def _check_caching(self) -> None:
        for name, kind in (("caching_start", CachingStart), ("caching_lengths", CachingLengths)):
            check_choice(name, getattr(self, name), get_args(kind))
        for name in ("caching_segment", "caching_slots", "caching_top"):
            check_at_least(name, getattr(self, name), 1)
        if self.memory_caching is None:
            return
        if self.memory_caching == "soup" and self.memory_depth == 1 and not self.use_norm:
            raise ValueError("got memory_caching='soup', which is grm for a linear memory; expected 'grm'")
        check_choice("memory_caching", self.memory_caching, get_args(Caching))
        if self.caching_start == "independent" and self.caching_lengths == "fenwick":
            raise ValueError(
                "got caching_start='independent' with caching_lengths='fenwick', whose segments are joined; expected "
                "caching_start='checkpoint'"
            )

    def _check_alpha_init(self) -> None:
        if self.decay:
            check_start("alpha_init", self.alpha_init, 1.0)
        elif not isinstance(self.alpha_init, tuple):
            check_between("alpha_init", self.alpha_init, 0.0, 1.0)
        elif self.alpha_init != MemoryConfig.alpha_init:
            raise ValueError(
                f"got alpha_init={self.alpha_init} with decay=False, which never forgets; expected no alpha_init, or "
                "decay=True"
            )
        self._check_decay_first()

    def _check_decay_first(self) -> None:
        """Refuse what the substitution by θ and v is not exact for: all but a linear memory that forgets to zero."""
        linear = self.memory_depth == 1 and not self.use_residual and not self.use_norm
        exact = self.chunk_size == 1 and self.memory_objective == "l2" and self.forget_to == "zero"
        if self.decay_first and not (linear and exact and self.decay and self.gates != "channel"):
            raise ValueError(
                "got decay_first=True; expected with it decay, memory_depth=1 without residual and norm, chunk_size=1, "
                "memory_objective='l2', forget_to='zero', and gates per head or layer"
            )

    @property
    def head_dim(self) -> int:
        """Channels D of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def memory_widths(self) -> tuple[int, ...]:
        """Widths D_0 … D_L of the memory network."""
        hidden = self.memory_expansion * self.head_dim
        return (self.head_dim, *[hidden] * (self.memory_depth - 1), self.head_dim)

    @property
    def gates_per_head(self) -> int:
        """Numbers that θ, η or α is made of for one token and head: one, one for each layer, or one for each row."""
        return {"head": 1, "layer": self.memory_depth, "channel": sum(self.memory_widths[:-1])}[self.gates]

    @property
    def use_residual(self) -> bool:
        return self.memory_depth > 1 if self.memory_residual is None else self.memory_residual

    @property
    def use_norm(self) -> bool:
        return self.memory_depth > 1 if self.memory_norm is None else self.memory_norm

    @property
    def theta_scales(self) -> list[float]:
        """What the bound on θ is multiplied by in each layer: 1 / fan-in of later ones where no LayerNorm ends the
        memory, which else sees to it that a step cannot be too large (D14)."""
        return [1.0] + [1.0 if self.use_norm else 1.0 / width for width in self.memory_widths[1:-1]]

    @property
    def theta_starts(self) -> list[Start]:
        """Share of its bound at which θ of each layer starts (D2, D14); one gate for all layers starts as the first."""
        return [self.theta_init] + [self.theta_later_init] * (self.memory_depth - 1)

    @property
    def alpha_max(self) -> float:
        """Largest share of the memory that a token may forget; `decay_first` divides by what it keeps (D44)."""
        return 0.999 if self.decay_first else 1.0

    @property
    def alpha_start(self) -> Start:
        """Share of alpha_max at which α starts."""
        start, most = self.alpha_init, self.alpha_max
        return (start[0] / most, start[1] / most) if isinstance(start, tuple) else start / most

    @property
    def theta_max(self) -> float:
        """Largest step (1 − η_max) min(c / (C + 2 η_max / (1 − η_max)), 1 − α_max / 2), so that no text can make a
        linear memory grow (D10); the second term counts at C = 1 alone."""
        eta_max, alpha_max = self.eta_max if self.momentum else 0.0, self.alpha_max if self.decay else 0.0
        of_chunk = self.theta_bound / (self.chunk_size + 2.0 * eta_max / (1.0 - eta_max))
        return (1.0 - eta_max) * min(of_chunk, 1.0 - 0.5 * alpha_max)


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(MemoryConfig):
    """Settings of a stack of blocks: hidden states in, hidden states out."""

    architecture: Architecture = "mac"
    """lmm, mac, mag, mal, or the same stack without memory: attention (full), sliding (window), segment; or hybrid:
    sliding, lmm, sliding, over and over."""
    layer_types: tuple[BlockName, ...] | None = None
    """The block of each layer by its name, or some that are repeated over the depth; by default what architecture
    says. Where it is given it wins: architecture then is hybrid, or the name of the only block (D38)."""
    num_hidden_layers: int = 4
    """Blocks in the stack."""
    intermediate_size: int | None = None
    """Width of the SwiGLU MLP; by default 8/3 of hidden_size, rounded up to a multiple of 32."""
    segment_len: int = 512
    """Tokens of a segment (mac, segment); a multiple of chunk_size for mac."""
    window: int = 512
    """Tokens that sliding-window attention sees, the token itself included (mag, mal, sliding)."""
    num_persistent: int = 16
    """Persistent tokens P of each block: learned, independent of the data (D11)."""
    memory_reads_residual: bool = True
    """Whether the memory reads attention's output with the token added to it, y + s, or y alone (mac; D36)."""
    gating: Gating = "mutual"
    """What ⊗ is (mac, mag; D9): mutual, attention and memory gate each other; memory, the memory gates attention; mix,
    a convex mix of both by a learned gate; sum, attention plus the memory times a scale that starts at zero."""
    shared_qkv: bool = False
    """Whether attention and memory of a block have one q, k, v projection and convolution (mac, mag; D41)."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding."""
    rotary_fraction: float = 0.5
    """Share of a head's channels that the rotary embedding turns; the rest is free of position (D18)."""
    attention_conv_size: int = 1
    """Kernel of a causal depthwise convolution on attention's q, k, v; 1 is none (for fair baselines, 4; D42). With
    shared_qkv it is conv_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("architecture", self.architecture, get_args(Architecture))
        check_choice("gating", self.gating, get_args(Gating))
        for name in ("num_hidden_layers", "segment_len", "window", "attention_conv_size"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("num_persistent", self.num_persistent, 0)
        if self.intermediate_size is not None:
            check_at_least("intermediate_size", self.intermediate_size, 1)
        for name in ("memory_reads_residual", "shared_qkv"):
            check_switch(name, getattr(self, name))
        check_positive("rope_theta", self.rope_theta)
        check_between("rotary_fraction", self.rotary_fraction, 0.0, 1.0)
        if self.layer_types is not None:
            self._name_stack(self.layer_types)
        elif self.architecture == "hybrid" and not self.has_memory:
            raise ValueError(
                f"got architecture='hybrid' and num_hidden_layers={self.num_hidden_layers}; expected as many layers as "
                f"it takes to come to a memory in {', '.join(HYBRID)}"
            )
        if "mac" in self.blocks and self.segment_len % self.chunk_size:
            raise ValueError(
                f"got segment_len={self.segment_len} and chunk_size={self.chunk_size}; expected a segment_len that is "
                "a multiple of chunk_size, so that a segment ends where a chunk ends"
            )
        if self.shared_qkv:
            self._check_sharing()
        if self.memory_caching is not None and set(CACHING_BLOCKS).isdisjoint(self.blocks):
            raise ValueError(
                f"got memory_caching={self.memory_caching!r} with architecture={self.architecture!r}; expected lmm, "
                "mag, mal, or a stack with one of them, whose memory is asked once a token"
            )

    def _check_sharing(self) -> None:
        """Refuse shared_qkv where no block can share, and a convolution beside the one that is shared."""
        if not set(self.blocks) & set(SHARING_BLOCKS):
            raise ValueError(
                f"got shared_qkv=True with architecture={self.architecture!r}; expected a block of "
                f"{', '.join(SHARING_BLOCKS)}, whose attention and memory read the same tokens"
            )
        if self.attention_conv_size not in (1, self.conv_size):
            raise ValueError(
                f"got attention_conv_size={self.attention_conv_size} with shared_qkv=True and conv_size="
                f"{self.conv_size}; expected it left out, as the one convolution is conv_size's"
            )

    def _name_stack(self, given: Any) -> None:
        """Check the list of blocks, and give each stack one name: that of its only block, or hybrid."""
        if not isinstance(given, list | tuple):
            raise ValueError(f"got layer_types={given!r}; expected a list of blocks, such as sliding, lmm, sliding")
        for name in given:
            check_choice("layer_types", name, get_args(BlockName))
        if not 1 <= len(given) <= self.num_hidden_layers:
            raise ValueError(
                f"got layer_types of {len(given)} blocks and num_hidden_layers={self.num_hidden_layers}; expected "
                f"1 to {self.num_hidden_layers} blocks, of which fewer are repeated over the depth"
            )
        alone = len(set(given)) == 1
        object.__setattr__(self, "architecture", given[0] if alone else "hybrid")
        object.__setattr__(self, "layer_types", None if alone else tuple(given))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The block of every layer."""
        pattern = self.layer_types or (HYBRID if self.architecture == "hybrid" else (self.architecture,))
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_hidden_layers))

    @property
    def is_mixed(self) -> bool:
        """Whether the stack has blocks of several kinds."""
        return len(set(self.blocks)) > 1

    def by_block(self) -> "list[tuple[BackboneConfig, int]]":
        """Each block of the stack, as the settings of a stack of nothing else, and the number of its layers."""
        return [(self.with_architecture(name), count) for name, count in Counter(self.blocks).items()]

    def with_architecture(self, name: str) -> "BackboneConfig":
        """The same settings for another stack; hybrid has the blocks that layer_types says, where it does.

        A stack of a block that cannot share q, k and v does not (D41).
        """
        mixed = name == "hybrid"
        shared = self.shared_qkv and (mixed or name in SHARING_BLOCKS)
        kept = self.layer_types if mixed else None
        caching = self.memory_caching if mixed or name in CACHING_BLOCKS else None
        return dataclasses.replace(self, architecture=name, layer_types=kept, shared_qkv=shared, memory_caching=caching)

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size or -(-8 * self.hidden_size // 3 // 32) * 32

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that the rotary embedding turns: an even number."""
        return int(self.head_dim * self.rotary_fraction) // 2 * 2

    @property
    def memory_begins_persistent(self) -> bool:
        """Whether a memory of the stack reads persistent tokens before a document (D16)."""
        return self.num_persistent > 0 and not {"lmm", "mag", "mal"}.isdisjoint(self.blocks)

    @property
    def has_memory(self) -> bool:
        return not set(MEMORY_BLOCKS).isdisjoint(self.blocks)

    @property
    def has_segments(self) -> bool:
        """Whether a block of the stack cuts the text into segments, inside which its positions count."""
        return not {"mac", "segment"}.isdisjoint(self.blocks)

    @property
    def state_grows(self) -> bool:
        """Whether a block of the stack keeps the keys and values of the whole text."""
        return "attention" in self.blocks
