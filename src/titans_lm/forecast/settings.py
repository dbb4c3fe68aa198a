"""Settings of forecasting: the table, the model, its training. Plain dataclasses that know nothing of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.config import BackboneConfig, check_at_least, check_between, check_positive, check_seed
from titans_lm.experiments.settings import check_runs, check_shared, inside
from titans_lm.train.settings import FitSettings, Precision

Split = Literal["auto", "etth", "ettm", "shares"]
Missing = Literal["error", "fill"]
Sentinel = Literal["error", "keep", "fill"]
Normalisation = Literal["mean", "last", "none"]
Shortcut = Literal["none", "linear", "ridge"]
Loss = Literal["mse", "mae"]
Memory = Literal["fresh", "carried", "still"]
Data = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]


@dataclass(frozen=True, kw_only=True)
class TableSettings(KnownSettings):
    """How a table is read and divided."""

    separator: str = ","
    """What stands between two cells; a tab may be written as backslash and t."""
    decimal: str = "."
    """What stands before the fraction of a number; a comma in tables whose cells are parted by something else."""
    date: str | None = None
    """Column of dates; by default the first one, where it holds no numbers."""
    channels: tuple[str, ...] = ()
    """Columns to forecast; by default all but the dates."""
    missing: Missing = "error"
    """Empty and infinite cells: refuse them, or fill each with the last value before it (at the start, the first)."""
    sentinels: tuple[float, ...] = (-9999.0,)
    """Numbers that mean that nothing was measured."""
    sentinel: Sentinel = "error"
    """Such numbers: refuse them, keep them as if measured (as published results on Weather do), or fill as above."""
    split: Split = "auto"
    """Where training, validation and test part: 12, 4 and 4 months of 30 days of hours (etth) or quarters (ettm), or
    shares of the rows; auto goes by the name of the file."""
    train_share: float = 0.7
    """Share of the rows to train on."""
    test_share: float = 0.2
    """Share of the rows to test on, the last ones; validation has the rows between."""
    period: int | None = None
    """Rows of a season, for seasonal naive forecasts; by default a day of hours or minutes, a week of days, a year of
    weeks, months or quarters, by the dates."""

    def __post_init__(self) -> None:
        if self.separator == "\\t":  # as a shell passes it on
            object.__setattr__(self, "separator", "\t")
        if len(self.separator) != 1:
            raise ValueError(f"got separator={self.separator!r}; expected one character")
        if self.decimal not in (".", ",") or self.decimal == self.separator:
            raise ValueError(
                f"got decimal={self.decimal!r} with separator={self.separator!r}; expected . or , and not the separator"
            )
        check_fields(self)
        check_between("train_share", self.train_share, 0.0, 1.0)
        check_between("test_share", self.test_share, 0.0, 1.0)
        if self.train_share + self.test_share >= 1.0:
            raise ValueError(
                f"got train_share={self.train_share} and test_share={self.test_share}; "
                "expected a sum below 1, so that rows are left for validation"
            )


@dataclass(frozen=True, kw_only=True)
class TableChanges(KnownSettings):
    """How a table is read where that is not as the one that a model was fitted to."""

    separator: str | None = None
    """What stands between two cells."""
    decimal: str | None = None
    """What stands before the fraction of a number."""
    date: str | None = None
    """Column of dates."""
    channels: tuple[str, ...] | None = None
    """Columns to read, those of the model among them."""
    missing: Missing | None = None
    """Empty and infinite cells: refuse them (error), or fill each with the last value before it."""
    sentinels: tuple[float, ...] | None = None
    """Numbers that mean that nothing was measured."""
    sentinel: Sentinel | None = None
    """Such numbers: refuse them (error), keep them as if measured, or fill them."""

    def __post_init__(self) -> None:
        if self.decimal not in (None, ".", ","):
            raise ValueError(f"got decimal={self.decimal!r}; expected . or ,")


def small_stack() -> BackboneConfig:
    """One block of width 32: some CPU minutes on ETTh1."""
    return BackboneConfig(
        architecture="lmm", hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64,
        memory_expansion=2, chunk_size=2, segment_len=4, window=64, num_persistent=4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NetSettings(KnownSettings):
    """Settings of a forecaster on a stack of blocks."""

    instance_norm: Normalisation = "mean"
    """What a window is normalised by, and its forecast brought back with: its own mean and standard deviation, its
    last value, or nothing."""
    patch_len: int = 16
    """Steps of a patch; every patch of every channel is a token, and channels share the weights."""
    stride: int = 16
    """Steps from one patch to the next; the last patch ends where the window ends."""
    dropout: float = 0.1
    """Dropout of tokens and of what the head reads."""
    shortcut: Shortcut = "ridge"
    """A linear map of the window beside the stack: none, trained from zero, or trained from its closed form."""
    backbone: Annotated[BackboneConfig, tyro.conf.arg(name="model")] = field(default_factory=small_stack)
    """The stack of blocks; its architecture is that of the model's name."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_between("dropout", self.dropout, 0.0, 0.99)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(KnownSettings):
    """Settings of training a forecaster; models without gradients take their ridge alone."""

    epochs: int = 10
    """Most times that every window is read."""
    patience: int = 3
    """Evaluations on validation without a better one after which training ends."""
    evaluations: int = 1
    """Evaluations on validation per epoch, evenly."""
    batch_size: int = 32
    """Windows of a batch."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup_share: float = 0.05
    """Share of the steps over which the learning rate rises."""
    lr_floor: float = 0.1
    """Share of the peak that the cosine ends at."""
    weight_decay: float = 0.1
    """Weight decay of the weight matrices."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    loss: Loss = "mse"
    """What is minimised, on scaled values: the mean squared or the mean absolute error."""
    windows: int = 1
    """Windows one after another that a row of a batch reads with one memory, each with a forecast: above 1 the model
    is taught to go on with the memory of the window before, and validation is read so too."""
    ridge: tuple[float, ...] = (1e-6, 1e-4, 1e-2)
    """Penalties that the closed form of a linear map is tried with, in shares of the mean variance of its inputs; the
    best on validation is taken."""
    precision: Precision = "auto"
    """Precision of matrix products; auto is bfloat16 on a GPU that has it and float32 elsewhere."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_between("warmup_share", self.warmup_share, 0.0, 1.0)
        if not self.ridge:
            raise ValueError("got ridge=(); expected one penalty or more")
        for penalty in self.ridge:
            check_positive("ridge", penalty)
        self.loop(steps=1, seed=0)

    def loop(self, *, steps: int, seed: int, every: int = 0) -> FitSettings:
        """Give the settings of the training loop for so many steps."""
        return FitSettings(
            steps=steps, lr=self.lr, warmup_steps=int(self.warmup_share * steps), lr_floor=self.lr_floor,
            weight_decay=self.weight_decay, clip=self.clip, precision=self.precision, device=self.device, seed=seed,
            log_every=max(1, steps // 1000), eval_every=every, save_every=every, keep=1,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ForecastSettings(KnownSettings):
    """What all forecasters share."""

    lookback: int = 96
    """Rows L that a forecast is made from."""
    table: TableSettings = field(default_factory=TableSettings)
    """How the table is read and divided."""
    net: Annotated[NetSettings, inside()] = field(default_factory=NetSettings)
    """The model, where it is a stack of blocks (or PatchTST, as far as it has such settings)."""
    train: Annotated[TrainSettings, inside()] = field(default_factory=TrainSettings)
    """How it is trained."""
    json: Path | None = None
    """Write the numbers to this file too."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        check_fields(self, zero=["seed"])


@dataclass(frozen=True, kw_only=True)
class TrainForecaster(ForecastSettings):
    """Fit a model to a table: best on validation, tested once, saved with its scaler."""

    data: Data = None
    """Table to train on: a CSV file."""
    model: str = "lmm"
    """Model, as titans forecast evaluate takes it."""
    horizon: int = 96
    """Rows H that it forecasts."""
    seed: int = 0
    """Seed of the fresh weights and of the order of the windows."""
    out: Path = Path("runs/forecaster")
    """Folder of the run, with the fitted model in it; the same command goes on where it was stopped."""

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class EvaluateForecasters(ForecastSettings):
    """Fit and test models on tables, horizon by horizon, and show their errors side by side."""

    data: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ()
    """Tables: CSV files."""
    models: tuple[str, ...] = ("lmm", "attention", "nlinear", "repeat")
    """Models: lmm, mac, mag, mal, tnt, attention, sliding, segment, hybrid, mamba, patchtst, dlinear, nlinear,
    seasonal, repeat.

    A trained one may be varied, as in lmm:memory_depth=1,patch_len=8,lr=0.003."""
    horizons: tuple[int, ...] = (96, 192, 336, 720)
    """Rows H to forecast, each by a model of its own."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of trained models."""
    rates: tuple[float, ...] = ()
    """Learning rates that the first seed is trained with, but for models whose names say their own; the best on
    validation counts, and is that of the other seeds. Only what counts is tested. Without any, --lr is taken."""
    streaming: bool = False
    """Measure models with a memory by streaming too: the memory carried from window to window over the whole test
    part, and frozen."""
    out: Path = Path("runs/forecast")
    """Folder of the runs and of results.json; the same command goes on where it was stopped."""
    jobs: int = 1
    """Runs at once, each in a process with its share of the cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_runs(self, "models", "horizons", "seeds", empty=("rates",))
        for horizon in self.horizons:
            check_at_least("horizons", horizon, 1)
        if self.rates:
            check_shared(self.train, lr="--rates")


@dataclass(frozen=True, kw_only=True)
class PredictSettings(KnownSettings):
    """Forecast a table with a fitted model: a CSV file, and a plot of history, forecast and truth."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Run folder of titans forecast train, or the model folder in it."""
    data: Data = None
    """Table to go on from: a CSV file with the channels that the model was trained on."""
    out: Path = Path("forecast")
    """Folder for forecast.csv and forecast.png; files of these names are replaced."""
    origin: str | None = None
    """First row to forecast, as a date or as the number of a row counted from 0; by default the row after the last."""
    memory: Memory = "fresh"
    """What the memory has read: the window alone (fresh), all windows before it too (carried), or it learns nothing
    at all (still)."""
    table: TableChanges = field(default_factory=TableChanges)
    """How the table is read; by default as the one that the model was fitted to."""
    plot_channels: int = 4
    """Most channels that the plot shows, the last ones of the table."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    json: Path | None = None
    """Write what was done to this file too."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        check_fields(self)
