"""What an adapter is besides its weights: plain dataclasses that know nothing of torch."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from titans_lm.checks import KnownSettings, check_fields, pairs_of_json
from titans_lm.config import MemoryConfig, Start

Rotary = Literal["before", "after"]
Keys = Literal["attention", "hidden"]


@dataclass(frozen=True, kw_only=True)
class AdapterMemory(KnownSettings):
    """Settings of the memories of an adapter; `MemoryConfig` says more of them."""

    memory_depth: int = 1
    """Layers of the memory network, 1 to 4; 1 is the linear memory M(x) = x W."""
    memory_expansion: int = 4
    """Hidden width of the memory network in multiples of the head dimension (depth 2 and more)."""
    chunk_size: int = 1
    """Tokens whose gradients are taken at the same memory; 1 is exact, and slow for depth 2 and more."""
    keys: Keys = "attention"
    """What a memory is written and read by: attention's own keys and queries, or a map of the hidden states, by which
    a token is found where a similar one was read and answers with the value of the token after that (D45)."""
    key_degree: int = 1
    """Degree of the polynomial of keys that a linear memory reads (D50); 2 has a state some D / 2 times as large."""
    momentum: bool = False
    """Whether past surprise is carried (η)."""
    theta_init: Start = 0.5
    """Share of its bound at which θ starts, for every token."""
    alpha_init: Start = (0.0001, 0.03)
    """Share of the memory that a token forgets before training, log-spaced over the heads."""

    def __post_init__(self) -> None:
        pairs_of_json(self, "theta_init", "alpha_init")
        check_fields(self)

    def of_layer(self, heads: int, head_dim: int) -> MemoryConfig:
        """The settings of the memory beside an attention layer of these sizes, checked."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if name != "keys"}
        return MemoryConfig(hidden_size=heads * head_dim, num_attention_heads=heads, gates="head", **own)


LAYERS = "all, every:N, best:N, or a list of their numbers"


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(KnownSettings):
    """What an adapter is besides its weights."""

    window: int = 256
    """Tokens that attention sees, the one that reads among them."""
    sinks: int = 4
    """First tokens that attention always sees; without them a windowed model falls apart."""
    layers: str | tuple[int, ...] = "all"
    """Layers with a memory: all, every:N, their numbers, or best:N, where own keys start with the largest share of what
    the window misses, which titans retrofit finds out; all layers have the window."""
    rotary: Rotary = "before"
    """Whether a memory with attention's keys sees them and queries before rotary, when they say what and not where, or
    after it."""
    lora_rank: int = 0
    """Rank of a LoRA of the four projections, trained with the memory; it needs peft."""
    memory: AdapterMemory = field(default_factory=AdapterMemory)
    """The memories."""

    def __post_init__(self) -> None:
        check_fields(self, zero=["sinks", "lora_rank"])
        if isinstance(self.memory, dict):  # as JSON has it
            object.__setattr__(self, "memory", AdapterMemory(**self.memory))
        elif not isinstance(self.memory, AdapterMemory):
            raise ValueError(f"got memory={self.memory!r}; expected settings by name, such as {{'memory_depth': 2}}")
        if isinstance(self.layers, list | tuple):
            object.__setattr__(self, "layers", tuple(self.layers))
            if len(set(self.layers)) < len(self.layers):
                raise ValueError(f"got layers={self.layers}; expected every number once")
        elif not isinstance(self.layers, str):
            raise ValueError(f"got layers={self.layers!r}; expected {LAYERS}")
        if self.best is not None and (self.best < 1 or self.memory.keys != "hidden"):
            raise ValueError(
                f"got layers={self.layers!r} with keys={self.memory.keys!r}; expected best:1 or more with "
                "keys='hidden': layers are chosen by what memories with own keys start with"
            )

    @property
    def best(self) -> int | None:
        """How many layers are chosen by what their memories start with; None where layers are named."""
        count = self.layers.removeprefix("best:") if isinstance(self.layers, str) else ""
        return int(count) if count != self.layers and count.isdecimal() else None
