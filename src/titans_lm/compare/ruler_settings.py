"""Settings of `titans evaluate variables` and `common-words`: what RULER asks beside its needles."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from titans_lm.compare.task_settings import HiddenTask, TaskSettings
from titans_lm.data.tasks.common_words import CommonWordsSettings
from titans_lm.data.tasks.variables import VariablesSettings


@dataclass(frozen=True, kw_only=True)
class VariablesTask(HiddenTask):
    """Train and test models on variable tracking: which variables hold a number that was handed from one to the next?

    Begin with `titans evaluate variables --task.tokenizer words --task.name words --models lmm sliding`. Sizes are
    tokens of a row (1024x2: with chains of two hops; 0x2: without a haystack); --test-sizes may be of any length, as
    long rows are read in pieces. An answer counts where all variables of the chain are right.
    """

    command: ClassVar[str] = "variables"
    task: VariablesSettings = field(default_factory=VariablesSettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("0x0", "0x1", "0x2", "0x4", "1024")
    """Sizes to train on, one a batch: a number and its variable first, then longer chains, then a haystack."""
    test_sizes: tuple[str, ...] = ("1024", "4096", "16384", "65536")
    """Sizes to test on."""
    examples: int = 128
    """Rows that are tested of every size."""
    out: Path = Path("runs/variables")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""


@dataclass(frozen=True, kw_only=True)
class CommonWordsTask(TaskSettings):
    """Train and test models on common words: which words of a list come more often than the others?

    Begin with `titans evaluate common-words --models lmm sliding`. Sizes are the most tokens of a row (512x4: with four
    common words); --test-sizes may be of any length, as long rows are read in pieces. An answer counts where all of the
    common words are right.
    """

    command: ClassVar[str] = "common-words"
    task: CommonWordsSettings = field(default_factory=lambda: CommonWordsSettings(often=6, rarely=1))
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("256x2", "512x4", "1024")
    """Sizes to train on, one a batch."""
    curriculum: bool = True
    """Whether the sizes to train on join one after the other, evenly over the first half of the steps."""
    test_sizes: tuple[str, ...] = ("1024", "4096", "16384", "65536")
    """Sizes to test on."""
    examples: int = 128
    """Rows that are tested of every size."""
    out: Path = Path("runs/common-words")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""
