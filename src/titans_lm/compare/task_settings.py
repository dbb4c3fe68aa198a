"""Settings of `titans evaluate mqar` and its sisters: a task, who does it, and how they learn it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from titans_lm.compare.settings import check_contest, check_trained
from titans_lm.config import BackboneConfig, check_at_least, check_positive
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.copying import CopySettings, LookupSettings, PhoneBookSettings
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tasks.sizes import AT, resized
from titans_lm.data.tasks.task import Task
from titans_lm.data.tasks.tracking import TrackingSettings
from titans_lm.data.tasks.variables import VariablesSettings
from titans_lm.train.settings import ModelSettings, tiny_model


@dataclass(frozen=True, kw_only=True)
class TaskFit(ModelSettings):
    """Settings of training one model on a task."""

    least_steps: ClassVar[int] = 0
    """Steps that there must be."""
    steps: int = 1000
    """Steps of the optimiser; 0 tests trained models as they are."""
    eval_every: int = 0
    """Steps between two tests of 128 rows of each size; 0 tests at the end only, and only the rows that count."""
    save_every: int = 500
    """Steps between two checkpoints; 0 saves at the end only."""
    log_every: int = 20
    """Steps between two lines of metrics.jsonl."""
    keep: int = 1
    """Checkpoints kept, the newest ones."""
    model: BackboneConfig = field(default_factory=tiny_model)
    """The model."""
    batch_size: int = 64
    """Rows of a batch."""
    batch_tokens: int = 0
    """Most tokens of a batch: of long rows it has fewer. 0 sets no limit."""
    text_weight: float = 0.0
    """Weight of the loss of all tokens of a row beside that of the answers: for rows that are text."""
    gate_price: float = 0.0
    """Price of writing and forgetting: this times the mean θ and α of all tokens is added to the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_size", self.batch_size, 1)
        check_at_least("batch_tokens", self.batch_tokens, 0)
        for name in ("text_weight", "gate_price"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"got {name}={getattr(self, name)}; expected a number of at least 0")


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of an evaluation by a synthetic task."""

    command: ClassVar[str]
    """Word behind `titans evaluate`."""
    task: Task = field(default_factory=RecallSettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ()
    """Sizes to train on, one a batch, all as often."""
    shares: tuple[float, ...] = ()
    """How often each size is trained on beside the others, such as 4 2 1; all as often where none are given."""
    test_sizes: tuple[str, ...] = ()
    """Sizes to test on."""
    out: Path = Path("runs/task")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""
    models: tuple[str, ...] = ("lmm", "mac", "mag", "mal", "attention", "sliding")
    """Architectures of ours, baselines as titans train --baseline takes them, trained models; the first sets the size.

    One of ours may be varied, as in lmm:memory_depth=2,chunk_size=8. NAME=PATH is a trained model, a run folder or a
    saved model, ours or any causal LM of Hugging Face: it keeps its size, and is trained further from its weights."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs that count."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates that each is tried with before, from a seed that does not count."""
    tune_steps: int = 1000
    """Steps of each trial."""
    curriculum: bool = False
    """Whether the sizes to train on join one after the other, evenly over the first half of the steps."""
    examples: int = 1024
    """Rows that are tested of every size."""
    test_tokens: int = 0
    """Most tokens that are tested of every size: of long rows fewer are. 0 sets no limit."""
    jobs: int = 1
    """Runs at once, each in a process with its share of the cores."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""
    train: TaskFit = field(default_factory=TaskFit)
    """What all share: sizes of the model, steps, batches."""

    def __post_init__(self) -> None:
        for name in ("tune_steps", "examples", "jobs"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("test_tokens", self.test_tokens, 0)
        check_contest(self.models, self.seeds, self.rates)
        check_trained(self.models, self.train.steps, self.train.parameters)
        for name in ("sizes", "test_sizes"):
            sizes = getattr(self, name)
            if len(set(sizes)) != len(sizes):
                raise ValueError(f"got {name}={sizes!r}; expected every size once")
            for size in sizes:
                resized(self.task, size)
        if self.shares and len(self.shares) != len(self.sizes):
            raise ValueError(
                f"got {len(self.shares)} shares for {len(self.sizes)} sizes; expected one for each, or none"
            )
        for share in self.shares:
            check_positive("shares", share)

    @property
    def taught(self) -> list[Task]:
        """Tasks to train on."""
        return [resized(self.task, size) for size in self.sizes] or [self.task]

    @property
    def tested(self) -> dict[str, Task]:
        """Tasks to test on, by their sizes."""
        task = self.test_task
        return {size: resized(task, size) for size in self.test_sizes or self.sizes} or {"": task}

    @property
    def test_task(self) -> Task:
        """The task as it is tested; sizes go over it."""
        return self.task

    @property
    def tried(self) -> dict[str, Task]:
        """Tasks that a learning rate is chosen by: those it is trained on, none that is to show how far it carries."""
        return {size: resized(self.task, size) for size in self.sizes} or {"": self.task}


@dataclass(frozen=True, kw_only=True)
class RecallTask(TaskSettings):
    """Train and test models on associative recall (MQAR): pairs of a key and a value, then the keys again.

    Begin with `titans evaluate mqar --models lmm attention sliding`. Sizes are LENGTH:PAIRS.
    """

    command: ClassVar[str] = "mqar"
    task: RecallSettings = field(
        default_factory=lambda: RecallSettings(symbols=256, answers=False, pairs=64, length=4096)
    )
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("64:4", "128:8")
    """Sizes to train on, one a batch, all as often."""
    out: Path = Path("runs/mqar")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""


@dataclass(frozen=True, kw_only=True)
class CopyTask(TaskSettings):
    """Train and test models on copying: a string of letters, then the string again. Sizes are letters, or 5-20.

    An answer counts where every letter of it, and its end, is right.
    """

    command: ClassVar[str] = "copy"
    task: CopySettings = field(default_factory=CopySettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("5-20",)
    """Sizes to train on, one a batch, all as often: 20 is one string a row, 5-20 as many as fit."""
    test_sizes: tuple[str, ...] = ("10", "20", "40", "80")
    """Sizes to test on."""
    out: Path = Path("runs/copy")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""


@dataclass(frozen=True, kw_only=True)
class LookupTask(TaskSettings):
    """Train and test models on looking up an n-gram: which letter follows it in a string? Sizes are letters."""

    command: ClassVar[str] = "lookup"
    task: LookupSettings = field(default_factory=LookupSettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("8", "16", "32")
    """Sizes to train on, one a batch, all as often."""
    test_sizes: tuple[str, ...] = ("16", "32", "64", "128")
    """Sizes to test on."""
    out: Path = Path("runs/lookup")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""


@dataclass(frozen=True, kw_only=True)
class PhoneBookTask(TaskSettings):
    """Train and test models on a phone book: ten digits by a name. Sizes are entries.

    An answer counts where all ten digits are right.
    """

    command: ClassVar[str] = "phonebook"
    task: PhoneBookSettings = field(default_factory=lambda: PhoneBookSettings(entries=100))
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("3", "5", "10")
    """Sizes to train on, one a batch, all as often."""
    test_sizes: tuple[str, ...] = ("5", "10", "20", "40")
    """Sizes to test on."""
    out: Path = Path("runs/phonebook")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""


@dataclass(frozen=True, kw_only=True)
class TrackingTask(TaskSettings):
    """Train and test models on state tracking: the product of a word of group elements so far. Sizes are tokens."""

    command: ClassVar[str] = "tracking"
    task: TrackingSettings = field(default_factory=TrackingSettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("8", "16", "32")
    """Sizes to train on, one a batch, all as often."""
    test_sizes: tuple[str, ...] = ("16", "32", "64", "128")
    """Sizes to test on."""
    out: Path = Path("runs/tracking")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""


@dataclass(frozen=True, kw_only=True)
class HiddenTask(TaskSettings):
    """What needles, variables and stories share: facts that are hidden in text, and another text to test in."""

    task: NeedleSettings | VariablesSettings | BabiLongSettings = field(default_factory=NeedleSettings)
    """The task; sizes go over what is set here."""
    curriculum: bool = True
    """Whether the sizes to train on join one after the other, evenly over the first half of the steps."""
    test_books: Path | None = None
    """A text or a folder of texts to test in; those of the task where none is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_books is not None and self.task.books is None:
            raise ValueError("got test_books without task.books; expected books to train in as well")

    @property
    def test_task(self) -> NeedleSettings | VariablesSettings | BabiLongSettings:
        """The task as it is tested, in a text of its own where one is given; sizes go over it."""
        return self.task if self.test_books is None else replace(self.task, books=self.test_books)


@dataclass(frozen=True, kw_only=True)
class NeedleTask(HiddenTask):
    """Train and test models on needles in a haystack, far beyond the lengths that they were trained on.

    Begin with `titans evaluate needle --task.tokenizer words --models lmm sliding`. Sizes are tokens of a row (512x4:
    with four needles, all asked for; 0x8: eight, without a haystack); --test-sizes may be of any length, as long rows
    are read in pieces. An answer counts where all of its characters are right.
    """

    command: ClassVar[str] = "needle"
    task: NeedleSettings = field(default_factory=NeedleSettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("0x8", "256", "512x4", "1024")
    """Sizes to train on, one a batch: many needles without a haystack first, as nothing is learned without."""
    test_sizes: tuple[str, ...] = ("1024", "4096", "16384", "65536")
    """Sizes to test on."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Places of the needle that every size is tested at, 0 the begin and 1 the end; of several needles, any."""
    examples: int = 64
    """Rows that are tested of every size, at every depth."""
    out: Path = Path("runs/needle")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.depths)) != len(self.depths):
            raise ValueError(f"got depths={self.depths!r}; expected every depth once")

    @property
    def tested(self) -> dict[str, Task]:
        """Tasks to test on, by their sizes and depths."""
        task = self.test_task
        sizes = self.test_sizes or self.sizes or (str(task.length),)
        found: dict[str, Task] = {}
        for size in sizes:
            one = resized(task, size)
            assert isinstance(one, NeedleSettings)
            placed = one.length and one.keys * one.values == 1 and one.depth is None
            at_depths = {f"{size}{AT}{at:g}": replace(one, depth=at) for at in self.depths if placed}
            found |= at_depths or {size: one}
        return found


@dataclass(frozen=True, kw_only=True)
class BabiLongTask(HiddenTask):
    """Train and test models on questions about facts that are scattered over books (BABILong).

    Begin with `titans evaluate babilong --task.books books/ --task.tokenizer words --models lmm sliding
    --train.model.conv-size 8`: a place is named up to five tokens behind its person. Sizes are tokens of a row, 0 the
    facts alone; --test-sizes may be of any length, as 1M, as long rows are read in pieces.
    """

    command: ClassVar[str] = "babilong"
    task: BabiLongSettings = field(default_factory=BabiLongSettings)
    """The task; sizes go over what is set here."""
    sizes: tuple[str, ...] = ("0", "512", "1K", "2K")
    """Sizes to train on, one a batch."""
    test_sizes: tuple[str, ...] = ("0", "1K", "4K", "16K", "64K")
    """Sizes to test on."""
    test_source: Path | None = None
    """A file of bAbI with the questions to test on, not those of task.source; drawn stories where none is given."""
    examples: int = 128
    """Rows that are tested of every size."""
    out: Path = Path("runs/babilong")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task.source is not None and self.test_source in (None, self.task.source):
            raise ValueError(
                f"got task.source={str(self.task.source)!r} and {'no' if self.test_source is None else 'the same'} "
                "test_source, which would test on the questions that are taught; expected test_source with another "
                "file: bAbI has one to train on and one to test on"
            )

    @property
    def test_task(self) -> BabiLongSettings:
        """The task as it is tested, in a text and by a file of questions of its own; sizes go over it."""
        return replace(self.task, source=self.test_source, books=super().test_task.books)
