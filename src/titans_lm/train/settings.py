"""Settings of training: plain dataclasses that know nothing of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.config import BackboneConfig, check_between, check_choice, check_not_negative, check_seed
from titans_lm.data.curriculum import RereadCurriculum
from titans_lm.data.text import HELD_OUT

Precision = Literal["auto", "float32", "bfloat16"]
Boundaries = Literal["carry", "reset"]
Parallel = Literal["auto", "ddp", "fsdp"]
Sink = Literal["tensorboard", "wandb", "trackio"]

DELTA_RULE: dict[str, Any] = {
    "architecture": "lmm", "layer_types": None, "shared_qkv": False,
    "memory_depth": 1, "memory_residual": False, "memory_norm": False, "memory_objective": "l2",
    "chunk_size": 1, "momentum": False, "forget_to": "zero", "gates": "head", "theta_bound": 0.5,
    "theta_stretch": 0.0, "alpha_stretch": 0.0, "omega_window": 1, "key_degree": 1, "memory_caching": None,
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "delta-net": {**DELTA_RULE, "decay": False, "alpha_init": 0.002},
    "gated-delta-net": {**DELTA_RULE, "decay": True, "decay_first": True},
}
"""Settings that make the rule of another model of our op, in our block and from our start; 2 θ is its β."""


@dataclass(frozen=True, kw_only=True)
class FitSettings(KnownSettings):
    """Settings of the training loop, whatever the task."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("warmup_steps", "workers", "seed", "eval_every", "save_every")
    """Counts that need not be 1 or more."""
    steps: int = 600
    """Steps of the optimizer."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises to its peak."""
    lr_floor: float = 0.1
    """Share of the peak that the cosine ends at."""
    weight_decay: float = 0.1
    """Weight decay of the weight matrices; nothing else decays."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of their squares."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    accumulate: int = 1
    """Batches whose gradients make one step."""
    precision: Precision = "auto"
    """Precision of matrix products; auto is bfloat16 on a GPU that has it and float32 elsewhere."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    parallel: Parallel = "auto"
    """Under torchrun: ddp gives every process a copy of the model, fsdp a part of it; auto is ddp."""
    workers: int = 0
    """Processes that make batches ahead of time; they change no batch."""
    activation_checkpointing: bool = False
    """Keep what enters each block, and make the rest again for the gradients: less memory, a third more time."""
    seed: int = 0
    """Seed of the fresh weights and of the order of the data."""
    log_every: int = 1
    """Steps between two lines of metrics.jsonl."""
    eval_every: int = 200
    """Steps between two evaluations; 0 evaluates at the end only."""
    save_every: int = 200
    """Steps between two checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Checkpoints kept, the newest ones."""
    max_skipped: int = 25
    """Steps in a row that are skipped, as not finite, before training gives up."""
    compile: bool = False
    """Compile every block of a baseline (torch.compile): slow at first, then faster; on a CPU it needs a C++ compiler.
    Our own blocks have gradients by hand, which a graph would have to do without."""
    sinks: tuple[Sink, ...] = ()
    """Where numbers go beside metrics.jsonl: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)
        check_fields(self, zero=self.may_be_zero)
        for name in ("lr", "weight_decay"):
            check_not_negative(name, getattr(self, name))
        check_between("clip", self.clip, 0.0, float("inf"))
        check_between("lr_floor", self.lr_floor, 0.0, 1.0)
        for name in ("beta1", "beta2"):
            check_between(name, getattr(self, name), 0.0, 0.99999)
        for sink in self.sinks:
            check_choice("sinks", sink, get_args(Sink))


def small_model() -> BackboneConfig:
    """Size the model that `titans train` trains unless told otherwise: minutes on two CPU cores."""
    return BackboneConfig(
        architecture="mac",
        hidden_size=128,
        num_attention_heads=4,
        num_hidden_layers=3,
        memory_expansion=2,
        segment_len=128,
        window=128,
        num_persistent=4,
        attention_conv_size=4,
    )


def tiny_model() -> BackboneConfig:
    """Size the models that `titans evaluate` trains on tasks: minutes on a CPU core, and as in tables of recall."""
    return BackboneConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=2, memory_depth=1, intermediate_size=128,
        segment_len=32, window=32, num_persistent=4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelSettings(FitSettings):
    """Settings of training a model over tokens, ours or another."""

    model: BackboneConfig = field(default_factory=small_model)
    """The model."""
    baseline: str | None = None
    """Train another model instead, as large as --model says: llama, mistral (sliding window), mamba, mamba2, qwen3-next
    (Gated DeltaNet and attention), a folder with a config.json, taken as it is; or our block with the rule of another:
    delta-net, gated-delta-net."""
    parameters: int | None = None
    """Parameters that the model is to have, within 1 %, by its width and an MLP as wide beside it as --model has it."""
    batch_size: int = 4
    """Rows of a batch."""


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(ModelSettings):
    """Settings of training a language model."""

    data: str | None = None
    """A file, a folder of text, a folder of titans prepare, or the word stdlib: the Python library's own source."""
    out: Path | None = None
    """Folder of the run; by default runs/ARCHITECTURE-DATE-TIME."""
    init: Path | None = None
    """A trained model to begin with: its settings are those of --model, and what changes no shape of its weights may
    be given anew, such as --model.chunk-size."""
    vocab_size: int | None = None
    """Ids of the tokenizer that the model is made for; by default that of the data: 259 for bytes."""
    seq_len: int = 512
    """Tokens of a row that a step reads."""
    stateful: bool = False
    """Read each document from start to end and carry the memory from step to step; gradients stop at the step.

    A document longer than a row's share of all tokens is cut into such shares."""
    boundaries: Boundaries = "carry"
    """Of a prepared folder: carry fills rows with one document after another, reset gives every row one document."""
    verify_data: bool = True
    """Read a prepared folder once and compare it with its sums before training."""
    held_out: float = HELD_OUT
    """Share of the documents held out for validation, never trained on; of a single file, its end."""
    valid: str | None = None
    """A file or folder to validate on instead."""
    eval_bytes: int = 65_536
    """Bytes of held-out text that an evaluation reads."""
    reread: RereadCurriculum = field(default_factory=RereadCurriculum)
    """Rows in which passages return (D40)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is not None and (self.baseline is not None or self.parameters is not None):
            other = "baseline" if self.baseline is not None else "parameters"
            raise ValueError(f"got init and {other}; expected one of them: a trained model is as large as it is")
        if self.stateful and self.baseline is not None and self.baseline not in RULES:
            raise ValueError(
                f"got stateful=True with baseline={self.baseline!r}, which carries no state from step to step; "
                "expected no baseline, or rows that start anew"
            )
        if self.stateful and self.model.state_grows:
            raise ValueError(
                "got stateful=True with full attention in the stack, whose state grows with the text; "
                "expected blocks whose state has a fixed size, such as mac or sliding"
            )
        if self.reread.is_on:
            self.reread.check_run(self.steps, self.seq_len)
            if self.stateful:
                raise ValueError(
                    "got reread with stateful=True, whose rows go on where the step before ended; expected one of them"
                )
