"""What an adapter is, and how one is trained: plain dataclasses that know nothing of torch."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from titans_lm.config import MemoryConfig, Start, check_at_least, check_between, check_choice, check_known
from titans_lm.train.settings import FitSettings

Rotary = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class AdapterMemory:
    """Settings of the memories of an adapter; `MemoryConfig` says more of them."""

    memory_depth: int = 1
    """Layers of the memory network, 1 to 4; 1 is the linear memory M(x) = x W."""
    memory_expansion: int = 4
    """Hidden width of the memory network in multiples of the head dimension (depth 2 and more)."""
    chunk_size: int = 1
    """Tokens whose gradients are taken at the same memory; 1 is exact, and slow for depth 2 and more."""
    momentum: bool = False
    """Whether past surprise is carried (η)."""
    theta_init: Start = 0.5
    """Share of its bound at which θ starts, for every token."""
    alpha_init: Start = (0.0001, 0.03)
    """Share of the memory that a token forgets before training, log-spaced over the heads."""

    def of_layer(self, heads: int, head_dim: int) -> MemoryConfig:
        """The settings of the memory beside an attention layer of these sizes, checked."""
        return MemoryConfig(
            hidden_size=heads * head_dim, num_attention_heads=heads, gates="head", **dataclasses.asdict(self)
        )


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What an adapter is besides its weights."""

    window: int = 256
    """Tokens that attention sees, the one that reads among them."""
    sinks: int = 4
    """First tokens that attention always sees; without them a windowed model falls apart."""
    layers: str | tuple[int, ...] = "all"
    """Layers with a memory: all, every:N, or their numbers; all layers have the window."""
    rotary: Rotary = "before"
    """Whether the memory sees queries and keys before rotary, when they say what and not where, or after it."""
    lora_rank: int = 0
    """Rank of a LoRA of the four projections, trained with the memory; it needs peft."""
    memory: AdapterMemory = field(default_factory=AdapterMemory)
    """The memories."""

    def __post_init__(self) -> None:
        check_at_least("window", self.window, 1)
        check_at_least("sinks", self.sinks, 0)
        check_at_least("lora_rank", self.lora_rank, 0)
        check_choice("rotary", self.rotary, get_args(Rotary))
        if isinstance(self.memory, dict):  # as JSON has it
            check_known(AdapterMemory, self.memory)
            object.__setattr__(self, "memory", AdapterMemory(**self.memory))
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings(FitSettings):
    """Settings of training an adapter."""

    model: str | None = None
    """Folder or hub name of the base."""
    data: str | None = None
    """A file, a folder of text, or a folder of titans prepare with the base's tokenizer."""
    out: Path | None = None
    """Folder of the run; its adapter.safetensors is the adapter."""
    steps: int = 300
    """Steps of the optimiser."""
    lr: float = 2e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises to its peak."""
    weight_decay: float = 0.0
    """Weight decay of the weight matrices; nothing else decays."""
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    """The adapter."""
    seq_len: int = 2048
    """Tokens of a row."""
    batch_size: int = 1
    """Rows of a batch."""
    distill: float = 1.0
    """Weight of the loss KL(full attention ‖ ours), beyond the window."""
    text_loss: float = 0.0
    """Weight of the loss of the text itself, beyond the window."""
    windows: tuple[int, ...] = ()
    """Windows that one is drawn of for every batch; by default the adapter's alone."""
    sink_counts: tuple[int, ...] = ()
    """Counts of sinks that one is drawn of for every batch; by default the adapter's alone."""
    returning: float = 0.5
    """Share of the rows in which passages return that have left the window."""
    passages: tuple[int, int] = (32, 256)
    """Shortest and longest passage of these rows, in tokens."""
    grow_steps: int = 100
    """Steps over which the distance of a return grows, from twice the window to the row."""
    held_out: float = 0.05
    """Share of the documents to test on, never trained on; of a single file, its end."""
    valid: str | None = None
    """A file or folder to test on instead."""
    eval_rows: int = 4
    """Rows of plain text, and as many with returns, that an evaluation reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seq_len", "batch_size", "eval_rows"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("grow_steps", self.grow_steps, 0)
        check_between("returning", self.returning, 0.0, 1.0)
        for name in ("distill", "text_loss"):
            check_between(name, getattr(self, name), 0.0, float("inf"))
        if not self.distill and not self.text_loss:
            raise ValueError("got distill=0 and text_loss=0; expected a loss: a weight above 0 for one of them")
        shortest, longest = self.passages
        check_at_least("passages", shortest, 2)
        if longest < shortest:
            raise ValueError(f"got passages={self.passages}; expected the shortest, then the longest")
        widest = max(self.adapter.window, *self.windows, 0)
        least = widest + 1 + (longest if self.returning else 0)
        if self.seq_len < least:
            raise ValueError(
                f"got seq_len={self.seq_len} with windows of {widest} tokens; expected rows of at least {least}: what "
                "is inside the window teaches nothing"
            )
        for window in self.windows:
            check_at_least("windows", window, 1)
        for count in self.sink_counts:
            check_at_least("sink_counts", count, 0)
