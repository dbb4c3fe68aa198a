"""Settings of experiments: plain dataclasses that know nothing of torch, as a command line lists them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from titans_lm.checks import KnownSettings
from titans_lm.config import BackboneConfig, check_at_least, check_not_negative, check_positive, check_seed
from titans_lm.data.tasks import TASKS
from titans_lm.experiments.models import trained_model
from titans_lm.train.settings import LanguageSettings, ModelSettings, tiny_model

Hidden = tyro.conf.Suppress
"""A setting that no command line has: every run of an experiment has its own, or the experiment has it."""


def inside(kind: type | None = None) -> Any:
    """Mark settings inside others whose options have no prefix, those of another kind if one is given."""
    return tyro.conf.arg(name="", constructor=kind)


def check_once(settings: Any, *names: str, empty: tuple[str, ...] = ()) -> None:
    """Check settings of several values: one or more, or none of those in `empty`, each once."""
    for name in (*names, *empty):
        values = getattr(settings, name)
        if (not values and name in names) or len(set(values)) != len(values):
            raise ValueError(f"got {name}={values!r}; expected one or more, each once")


def check_least(settings: Any, **least: int) -> None:
    """Check settings, of several values each of them, by the least that there may be."""
    for name, smallest in least.items():
        values = getattr(settings, name)
        for value in values if isinstance(values, tuple | list) else (values,):
            check_at_least(name, value, smallest)


TRIAL_SEED = 1_000
"""Seed of the trials: none of those that count."""


def check_runs(settings: Any, *names: str, empty: tuple[str, ...] = ()) -> None:
    """Check what runs are made of: settings of several values, seeds and learning rates among them."""
    check_once(settings, *names, empty=empty)
    for seed in settings.seeds:
        check_seed("seeds", seed)
        if seed == TRIAL_SEED:
            raise ValueError(f"got seeds={settings.seeds!r}; expected others than {TRIAL_SEED}, that of trials")
    for rate in settings.rates:
        check_positive("rates", rate)


def check_shared(train: Any, **options: str) -> None:
    """Refuse settings of training that every run has of its own, by the options that say them."""
    usual = type(train)()
    for name, option in options.items():
        value = getattr(train, name)
        if value != getattr(usual, name):
            raise ValueError(f"got {name}={value!r}, which every run has its own of; expected {option} {value}")


@dataclass(frozen=True, kw_only=True)
class Experiment(KnownSettings):
    """What all experiments have that train models of equal size: who takes part, from which seeds, at which rates."""

    models: tuple[str, ...] = ("lmm", "mac", "mag", "mal", "attention", "sliding")
    """Architectures of ours, baselines as titans train --baseline takes them, trained models; the first sets the size.

    One of ours may be varied, as in lmm:memory_depth=2,chunk_size=8. NAME=PATH is a trained model, a run folder or a
    saved model, ours or any causal LM of Hugging Face: it keeps its size, and is trained further from its weights."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs that count."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates tried for each model first, with a seed of their own."""
    tune_steps: int = 1000
    """Steps of each trial."""
    jobs: int = 1
    """Runs at once, each in a process with its share of the cores."""
    out: Path = Path("runs/experiment")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""
    train: Annotated[ModelSettings, inside()] = field(default_factory=ModelSettings)
    """What all share: sizes of the model, steps, batches."""

    def __post_init__(self) -> None:
        check_least(self, tune_steps=1, jobs=1)
        check_runs(self, "models", "seeds", "rates")
        check_shared(self.train, lr="--rates", seed="--seeds", baseline="--models")


@dataclass(frozen=True, kw_only=True)
class SharedTraining(LanguageSettings):
    """Settings of training a language model, as a command line lists those that several runs share."""

    data: Hidden[str | None] = None
    out: Hidden[Path | None] = None
    lr: Hidden[float] = 3e-3
    seed: Hidden[int] = 0
    baseline: Hidden[str | None] = None
    init: Hidden[Path | None] = None


def small_training() -> LanguageSettings:
    """Settings that all language models share unless told otherwise: some minutes each on a CPU core."""
    model = BackboneConfig(
        hidden_size=128, num_attention_heads=4, num_hidden_layers=3, memory_expansion=2, segment_len=128, window=128,
        num_persistent=4,
    )  # fmt: skip
    return SharedTraining(
        model=model, steps=600, warmup_steps=60, seq_len=512, batch_size=4, eval_every=120, save_every=200,
        log_every=10, verify_data=False, keep=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Experiment):
    """Settings of `titans compare`."""

    data: str | None = None
    """What to train on, as titans train takes it; learning rates are chosen by its held-out part."""
    test: Path | None = None
    """Text that decides: a file or a folder that nobody was trained or tuned on."""
    out: Path = Path("runs/compare")
    """Folder of the runs and of compare.json; the same command goes on where it was stopped."""
    models: tuple[str, ...] = ("lmm", "mac", "mag", "mal", "attention", "sliding", "llama", "mistral", "mamba2")
    """Architectures of ours, and baselines as titans train --baseline takes them; the first sets the size.

    One of ours, delta-net or gated-delta-net may be varied, as in mac:forget_to=zero,chunk_size=64 or
    hybrid:layer_types=[lmm,sliding]: any setting of the model but its width and that of its MLP, stateful,
    weight_decay."""
    rates: tuple[float, ...] = (1e-3, 3e-3)
    tune_steps: int = 200
    positions: int = 16_384
    """Tokens of a stretch of the test text; everybody starts each stretch anew."""
    test_bytes: int = 2**20
    """Bytes of the test text that are read."""
    train: Annotated[LanguageSettings, inside(SharedTraining)] = field(default_factory=small_training)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, positions=1, test_bytes=1)
        check_shared(self.train, data="DATA:", out="--out")
        if self.train.init is not None:
            raise ValueError(
                f"got init={str(self.train.init)!r}, but models that are compared begin anew; expected none: titans "
                "evaluate perplexity compares trained ones"
            )


@dataclass(frozen=True, kw_only=True)
class TaskFit(ModelSettings):
    """Settings of training one model on a task."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*ModelSettings.may_be_zero, "steps", "batch_tokens")
    lr: Hidden[float] = 3e-3
    seed: Hidden[int] = 0
    baseline: Hidden[str | None] = None
    steps: int = 1000
    """Steps of the optimizer; 0 tests trained models as they are."""
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
    lm_loss_weight: float = 0.0
    """Weight of the loss of all tokens of a row beside that of the answers: for rows that are text."""
    gate_l1: float = 0.0
    """Price of writing and forgetting: this times the mean θ and α of all tokens is added to the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lm_loss_weight", "gate_l1"):
            check_not_negative(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class TaskExperiment(Experiment):
    """Settings of an experiment on a synthetic task; the task's own file says what is drawn (`data/tasks/`)."""

    train: Annotated[TaskFit, inside()] = field(default_factory=TaskFit)
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [one.name for one in map(trained_model, self.models) if one is not None]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"got several trained models called {name!r}; expected a name for each: NAME=PATH")
        fresh = [name for name in self.models if trained_model(name) is None]
        if not self.train.steps and fresh:
            raise ValueError(
                f"got steps=0 with {', '.join(fresh)}, which would be tested with fresh weights; expected "
                "trained models, written as NAME=PATH, or steps to train for"
            )
        if self.train.parameters is not None and not fresh:
            raise ValueError(
                f"got parameters={self.train.parameters} with trained models alone, which keep their sizes; "
                "expected none"
            )


def task_experiment(name: str) -> type[Any]:
    """Make the settings of `titans evaluate NAME`: those of the task, and those of an experiment on it."""
    plan = TASKS[name]

    def check(self: Any) -> None:
        TaskExperiment.__post_init__(self)
        plan.__post_init__(self)

    space = {
        "__doc__": plan.__doc__,
        "__annotations__": {"out": Path},
        "__module__": __name__,
        "__post_init__": check,
        "out": Path("runs") / name,
    }
    kind = type(plan.__name__.replace("Task", "Experiment"), (TaskExperiment, plan), space)
    return dataclass(frozen=True, kw_only=True)(kind)


TASK_EXPERIMENTS = {name: task_experiment(name) for name in TASKS}
"""Settings of every task by its word behind `titans evaluate`."""
