"""What the demo trains and measures. Plain dataclasses that know nothing of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_lm.config import BackboneConfig, check_at_least, check_between
from titans_lm.train.settings import FitSettings


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of the demo."""

    out: Path = Path("runs/demo")
    """Folder of the report, the plots, the numbers and the trained byte model."""
    data: str = "stdlib"
    """Text to train the byte models on: a file, a folder, or the word stdlib, the Python library's own source."""
    quick: bool = False
    """Run everything in seconds with models too small to learn anything: a test of the machinery."""
    minutes: float = 5.5
    """Minutes that the demo may take: on a slow machine the byte models get fewer steps."""
    seed: int = 0
    """Seed of weights, batches and sampling."""

    def __post_init__(self) -> None:
        check_between("minutes", self.minutes, 0.1, 1e6)
        check_at_least("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class RecallPlan:
    """Associative recall: pairs, a gap of one filler token that is longer than a window can bridge, then the keys."""

    memory: BackboneConfig
    window: BackboneConfig
    """The same stack with sliding windows, as wide as it takes to have as many parameters."""
    fit: FitSettings
    pairs: int = 8
    symbols: int = 128
    gap: int = 40
    """Tokens of filler between the last pair and the first question."""
    gaps: tuple[int, ...] = (0, 10, 20, 40)
    """Gaps that are trained on: both models see the same ones, and both are tested on the longest."""
    alone: int = 80
    """Steps with the shortest gap alone, before all take turns."""
    batch_size: int = 64
    examples: int = 2048
    """Fresh examples to test on."""
    check_examples: int = 64
    """Examples over the whole gap that are asked every `fit.eval_every` steps, for the curve."""

    @property
    def length(self) -> int:
        return 2 * self.pairs + self.gap + 2 * self.pairs


@dataclass(frozen=True, kw_only=True)
class LanguagePlan:
    """A byte model with a memory, and the same stack without one."""

    memory: BackboneConfig
    no_memory: BackboneConfig
    """The same stack with segments alone, as wide as it takes to have as many parameters."""
    fit: FitSettings
    seq_len: int = 256
    batch_size: int = 8
    least_steps: int = 40
    """Steps that are trained however slow the machine is."""
    documents: int = 32
    """Held-out documents to test on."""
    document_bytes: int = 4096
    """Bytes that are read of each."""
    edges: tuple[int, ...] = (0, 64, 128, 256, 512, 1024, 2048, 4096)
    """Borders of the positions that are told apart."""


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """One held-out document: read, coloured by surprise, and continued."""

    document_bytes: int = 6144
    shown_bytes: int = 2400
    """Bytes whose surprise is shown, from the start."""
    new_bytes: int = 320
    prompt_bytes_shown: int = 480
    temperature: float = 0.7


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """Everything that the demo runs."""

    recall: RecallPlan
    language: LanguagePlan
    reading: ReadingPlan = field(default_factory=ReadingPlan)


def full_plan(seed: int) -> DemoPlan:
    """What is shown: minutes on two cores."""
    size: dict[str, Any] = {"num_hidden_layers": 2, "num_persistent": 4, "attention_conv_size": 4}
    small = {**size, "hidden_size": 64, "num_attention_heads": 1}
    bytes_ = {**size, "hidden_size": 96, "num_attention_heads": 2, "segment_len": 64}
    return DemoPlan(
        recall=RecallPlan(
            memory=BackboneConfig(architecture="lmm", memory_depth=1, chunk_size=16, **small),
            window=BackboneConfig(architecture="sliding", window=16, **small),
            fit=FitSettings(steps=280, lr=3e-3, warmup_steps=20, eval_every=20, seed=seed),
        ),
        language=LanguagePlan(
            memory=BackboneConfig(architecture="mac", memory_depth=1, **bytes_),
            no_memory=BackboneConfig(architecture="segment", **bytes_),
            fit=FitSettings(steps=400, lr=6e-3, warmup_steps=20, seed=seed),
        ),
    )


def quick_plan(seed: int) -> DemoPlan:
    """The same in seconds."""
    tiny: dict[str, Any] = {
        "hidden_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1, "num_persistent": 2,
        "attention_conv_size": 4,
    }  # fmt: skip
    return DemoPlan(
        recall=RecallPlan(
            memory=BackboneConfig(architecture="lmm", memory_depth=1, chunk_size=4, **tiny),
            window=BackboneConfig(architecture="sliding", window=4, **tiny),
            fit=FitSettings(steps=6, warmup_steps=2, eval_every=2, seed=seed),
            pairs=2, symbols=16, gap=12, gaps=(0, 12), alone=2, batch_size=4, examples=16, check_examples=8,
        ),
        language=LanguagePlan(
            memory=BackboneConfig(architecture="mac", memory_depth=1, chunk_size=8, segment_len=16, **tiny),
            no_memory=BackboneConfig(architecture="segment", segment_len=16, **tiny),
            fit=FitSettings(steps=6, warmup_steps=2, seed=seed),
            seq_len=64, batch_size=2, least_steps=2, documents=4, document_bytes=256, edges=(0, 16, 64, 256),
        ),
        reading=ReadingPlan(document_bytes=400, shown_bytes=300, new_bytes=12, prompt_bytes_shown=80),
    )  # fmt: skip
