"""What the demo trains and measures. Plain dataclasses that know nothing of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_lm.checks import KnownSettings
from titans_lm.config import BackboneConfig, check_at_least, check_seed
from titans_lm.train.settings import FitSettings


@dataclass(frozen=True, kw_only=True)
class DemoSettings(KnownSettings):
    """Settings of the demo."""

    out: Path = Path("runs/demo")
    """Folder of the report, the pictures, the numbers, the text and its memory files."""
    text: Path | None = None
    """A text of your own to hide facts in, read whole; by default prose of this machine's Python library."""
    facts: Path | None = None
    """Facts of your own, a sentence a line: Mary went to the garden. The secret number of brave otter is 4821937."""
    seed: int | None = None
    """What is hidden, and where; by default today's date."""
    tokens: int | None = None
    """Tokens to read of the library; by default 220,000."""
    quick: bool = False
    """Run everything in seconds, with a short text and models too small to learn anything: a test of the machinery."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_seed("seed", self.seed)
        if self.tokens is not None:
            check_at_least("tokens", self.tokens, 1000)


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Facts and numbers hidden in a long text."""

    tokens: int = 220_000
    parts: int = 5
    """Parts of the text; after each it is asked where people are by then."""
    moves: int = 3
    """How often somebody goes somewhere in each part but the first."""
    numbers: int = 12
    window: int = 2048
    """Tokens that the reader knows who sees the end of the text alone."""
    piece_len: int = 2048


@dataclass(frozen=True, kw_only=True)
class BooksPlan:
    """The start of the text, read by a language model of books."""

    characters: int = 24_000
    reset_every: int = 1024
    """Tokens after which the state is thrown away where it is reset: those of a row in training."""
    new_tokens: int = 80
    piece_len: int = 512


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
class DemoPlan:
    """Everything that the demo runs."""

    search: SearchPlan
    recall: RecallPlan
    books: BooksPlan = BooksPlan()


def stacks(span: int, **sizes: int) -> dict[str, BackboneConfig]:
    """A stack of linear memories with chunks of `span` tokens, and the same with windows of as many."""
    shared: dict[str, Any] = {"num_attention_heads": 1, "attention_conv_size": 4, **sizes}
    return {
        "memory": BackboneConfig(architecture="lmm", memory_depth=1, chunk_size=span, **shared),
        "window": BackboneConfig(architecture="sliding", window=span, **shared),
    }


def full_plan(seed: int) -> DemoPlan:
    """What is shown: minutes on two cores."""
    fit = FitSettings(steps=100, lr=3e-3, warmup_steps=20, eval_every=10, seed=seed)
    models = stacks(16, num_hidden_layers=2, num_persistent=4, hidden_size=64)
    return DemoPlan(search=SearchPlan(), recall=RecallPlan(**models, fit=fit))


def quick_plan(seed: int) -> DemoPlan:
    """The same in seconds."""
    fit = FitSettings(steps=6, warmup_steps=2, eval_every=2, seed=seed)
    models = stacks(4, num_hidden_layers=1, num_persistent=2, hidden_size=16)
    return DemoPlan(
        search=SearchPlan(tokens=4000, parts=2, moves=2, numbers=4, window=256, piece_len=512),
        recall=RecallPlan(
            **models, fit=fit, pairs=2, symbols=16, gap=12, gaps=(0, 12), alone=2, batch_size=4, examples=16,
            check_examples=8,
        ),
        books=BooksPlan(characters=600, reset_every=64, new_tokens=6, piece_len=64),
    )  # fmt: skip
