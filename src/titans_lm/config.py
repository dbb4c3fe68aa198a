"""Settings of the memory and of the stack around it: frozen dataclasses, and what of them fits together.

Configurations speak words (`memory_depth`), the ops speak letters (`L`); `memory.py` is where one becomes the other.
One flat set of names serves the library, the Hugging Face config and the command line, so a `BackboneConfig` is a
`MemoryConfig` with a stack around it.
"""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from titans_lm.beyond_config import CachingConfig, TNTConfig
from titans_lm.checks import (
    Start,
    check_between,
    check_choice,
    check_fields,
    check_positive,
    check_start,
    pairs_of_json,
)
from titans_lm.checks import check_at_least as check_at_least
from titans_lm.checks import check_known as check_known
from titans_lm.checks import check_not_negative as check_not_negative
from titans_lm.checks import check_seed as check_seed
from titans_lm.checks import check_switch as check_switch
from titans_lm.checks import log_spaced as log_spaced
from titans_lm.checks import nearest as nearest

BlockName = Literal["lmm", "mac", "mag", "mal", "tnt", "attention", "sliding", "segment"]
Architecture = Literal[BlockName, "hybrid"]
Activation = Literal["gelu", "silu", "relu"]
Gates = Literal["head", "layer", "channel"]
Objective = Literal["l2", "dot", "huber", "huber_coordinate", "lp"]
ForgetTo = Literal["zero", "init"]
Gating = Literal["mutual", "memory"]
Backend = Literal["auto", "reference", "chunked", "triton"]
SurpriseSizes = bool | Literal["parts"]
TimeScales = Literal["shared", "shifted"]

THRESHOLDS: tuple[Objective, ...] = ("huber", "huber_coordinate")
"""Objectives with a threshold for every token."""
MEMORY_BLOCKS = ("lmm", "mac", "mag", "mal", "tnt")
MEMORY_ALONE = ("lmm", "tnt")
"""Blocks in which nothing but memories mixes tokens."""
HYBRID: tuple[BlockName, ...] = ("sliding", "lmm", "sliding")
"""The blocks of architecture="hybrid", repeated over the depth: one memory between windows (D38)."""
SHARING_BLOCKS = ("mac", "mag")
"""Blocks whose attention and memory can have one q, k, v (D41)."""
CACHING_BLOCKS = ("lmm", "mag", "mal")
"""Blocks whose memory is asked once a token, and so can answer from earlier segments too (D52)."""

LARGEST_POLYNOMIAL = 2**21
"""Numbers of one head's memory, at most, where keys are polynomials: 8 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(CachingConfig, TNTConfig):
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
    """Inner loss: l2 is ‖M(k) − v‖² (eq. 12), dot is −⟨M(k), v⟩ (linear attention); huber is l2 up to a threshold of
    each token, by norm or by coordinate, and linear beyond; lp has p = 3 (D48)."""
    threshold_init: Start = 0.5
    """Share of its largest value at which the threshold of huber starts (D48)."""
    key_degree: int = 1
    """Degree p of the polynomial that a linear memory is given in a key's place (ATLAS); 1 is the key itself (D50)."""
    omega_window: int = 1
    """Last tokens c whose errors a token writes, each by a share (ATLAS' Omega rule); 1 is Titans (D49)."""
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
    """Kernel of the causal depthwise convolution and SiLU on the memory's q, k, v; 1 switches both off."""
    induction_init: bool = True
    """Whether a key starts as the query of the token before it, so that a token recalls what followed it (D32)."""
    lookahead_values: bool = False
    """Whether a value is written to the key of the tokens before it alone, and so answers what comes next (D53)."""
    memory_backend: Backend = "auto"
    """What computes the memory; every backend gives the same result."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""

    def __post_init__(self) -> None:
        pairs_of_json(self, "theta_init", "theta_later_init", "eta_init", "alpha_init", "threshold_init")
        if self.memory_caching == "soup":
            raise ValueError("got memory_caching='soup', which is grm for a linear memory; expected 'grm'")
        check_fields(self, zero=["num_persistent"])
        if self.memory_depth > 4:
            raise ValueError(f"got memory_depth={self.memory_depth}; expected 1 to 4 layers")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"got hidden_size={self.hidden_size} and num_attention_heads={self.num_attention_heads}; "
                "expected a width that the heads divide"
            )
        check_positive("norm_eps", self.norm_eps)
        for name in ("theta_bound", "theta_stretch", "alpha_stretch"):
            check_between(name, getattr(self, name), 0.0, 1.0)
        for name in ("theta_init", "theta_later_init", "eta_init", "threshold_init"):
            check_start(name, getattr(self, name), 1.0)
        check_between("eta_max", self.eta_max, 0.0, 0.999)
        self._check_alpha_init()
        self._check_decay_first()
        self._check_window()
        self._check_keys()
        self.check_caching()
        self.check_tnt()

    def _check_keys(self) -> None:
        """Refuse keys that cannot look back, polynomial ones where a memory is not linear in them or too large."""
        if self.lookahead_values and self.conv_size == 1:
            raise ValueError("got lookahead_values=True with conv_size=1; expected 2 or more, to see tokens before")
        if self.key_degree == 1:
            return
        linear = self.memory_depth == 1 and not self.use_residual and self.gates != "channel"
        if not linear or self.memory_backend == "triton":
            raise ValueError(
                f"got key_degree={self.key_degree}; expected with it memory_depth=1 without residual, gates per head "
                "or layer, and no kernels"
            )
        size = self.memory_widths[0] * self.head_dim
        if size > LARGEST_POLYNOMIAL:
            raise ValueError(
                f"got key_degree={self.key_degree} with heads of {self.head_dim} channels, a memory of {size:,} "
                f"numbers a head; expected at most {LARGEST_POLYNOMIAL:,}: a lower degree, or more heads"
            )

    def _check_window(self) -> None:
        """Refuse what a window of several tokens does not go with."""
        others = {"gates": "channel", "decay_first": True, "memory_backend": "triton"}
        clash = [name for name, value in others.items() if getattr(self, name) == value]
        clash += ["memory_objective"] if self.memory_objective in THRESHOLDS else []
        if self.omega_window > 1 and clash:
            raise ValueError(
                f"got omega_window={self.omega_window} with {clash[0]}={getattr(self, clash[0])!r}; expected a window "
                "of 1, or gates per head or layer, decay_first=False, an objective without a threshold, and no kernels"
            )

    def _check_alpha_init(self) -> None:
        if self.decay:
            check_start("alpha_init", self.alpha_init, self.alpha_max)
        elif not isinstance(self.alpha_init, tuple):
            check_between("alpha_init", self.alpha_init, 0.0, 1.0)
        elif self.alpha_init != MemoryConfig.alpha_init:
            raise ValueError(
                f"got alpha_init={self.alpha_init} with decay=False, which never forgets; expected no alpha_init, or "
                "decay=True"
            )

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
        hidden, first = self.memory_expansion * self.head_dim, self.head_dim
        if self.key_degree > 1:
            first = math.comb(first + self.key_degree, self.key_degree)
        return (first, *[hidden] * (self.memory_depth - 1), self.head_dim)

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
        pull = 3.0 * self.head_dim**0.5 if self.memory_objective == "lp" else 1.0  # 3 e² to 2 e, e up to 2 √D (D48)
        of_chunk = self.theta_bound / (self.chunk_size + 2.0 * eta_max / (1.0 - eta_max))
        return (1.0 - eta_max) * min(of_chunk, 1.0 - 0.5 * alpha_max) / pull

    @property
    def threshold_max(self) -> float:
        """Largest threshold: the distance of two opposite answers of unit RMS, or four times the RMS of a channel."""
        return 2.0 * self.head_dim**0.5 if self.memory_objective == "huber" else 4.0


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(MemoryConfig):
    """Settings of a stack of blocks: hidden states in, hidden states out."""

    architecture: Architecture = "mac"
    """lmm, mac, mag, mal, tnt, or the same stack without memory: attention (full), sliding (window), segment; or
    hybrid: sliding, lmm, sliding, over and over."""
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
    """Tokens that sliding-window attention sees, the token itself included (mag, mal, sliding, hybrid)."""
    num_persistent: int = 16
    """Persistent tokens P of each block: learned, independent of the data (D11)."""
    memory_reads_residual: bool = True
    """Whether the memory reads attention's output with the token added to it, y + s, or y alone (mac; D36)."""
    memory_reads_embeddings: bool = True
    """Whether a memory behind another block reads the tokens' embeddings too (D56); not with shared_qkv."""
    gating: Gating = "mutual"
    """What ⊗ is (mac, mag; D9): mutual, attention and memory gate each other; memory, the memory gates attention."""
    shared_qkv: bool = False
    """Whether attention and memory of a block have one q, k, v projection and convolution (mac, mag; D41)."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding."""
    rotary_fraction: float = 0.5
    """Share of a head's channels that the rotary embedding turns; the rest is free of position (D18)."""
    attention_conv_size: int = 1
    """Kernel of a causal depthwise convolution and SiLU on attention's q, k, v; 1 is neither (for fair baselines, 4;
    D42). With shared_qkv it is conv_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if "tnt" in self.blocks:
            self.check_tnt_goes_with()
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
                f"{self.conv_size}; expected 1 or {self.conv_size}: the one convolution is conv_size's"
            )
        if self.lookahead_values:
            raise ValueError("got lookahead_values=True with shared_qkv=True; expected one: attention sees itself")

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
    def memories(self) -> int:
        """Memories of a head in a block of a stack of one kind: in TNT the global one and the local ones."""
        return 1 + len(self.tnt_local_chunks) if self.architecture == "tnt" else 1

    @property
    def has_segments(self) -> bool:
        """Whether a block of the stack cuts the text into segments, inside which its positions count."""
        return not {"mac", "segment"}.isdisjoint(self.blocks)

    @property
    def state_grows(self) -> bool:
        """Whether a block of the stack keeps the keys and values of the whole text."""
        return "attention" in self.blocks
