"""How much is run at each scale: sizes of models and of tasks, steps, seeds."""

from dataclasses import dataclass, replace

from titans_lm.bench.settings import Precision
from titans_lm.compare.settings import small_contender
from titans_lm.compare.task_settings import TaskFit
from titans_lm.config import BackboneConfig
from titans_lm.data.tasks.needle import Kind
from titans_lm.forecast.settings import NetSettings, TrainSettings, small_stack
from titans_lm.genomics.settings import GenomicsFit
from titans_lm.genomics.settings import small_model as small_classifier
from titans_lm.repro.steps import from_recipe
from titans_lm.train.settings import LanguageSettings


@dataclass(frozen=True, kw_only=True)
class Needles:
    """What is hidden, and in rows of how many tokens."""

    values: dict[str, Kind]
    """Of each column of the paper (PK, N, W) that is run, what is hidden."""
    taught: tuple[str, ...]
    tested: tuple[str, str, str]
    """Once, twice and four times the length that is taught, as the paper's 4K, 8K and 16K are."""
    steps: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Rows of how many tokens of books facts are in."""

    taught: tuple[str, ...]
    tested: tuple[str, ...]
    steps: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is timed."""

    lengths: tuple[int, ...]
    depths: tuple[int, ...] = (1, 2, 3, 4)
    width: int = 256
    layers: int = 4
    prefill: int = 8192
    repeats: int = 2
    dtype: Precision = "float32"
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Forecasts:
    """Tables that are forecast, and by what."""

    models: tuple[str, ...]
    epochs: dict[str, int]
    """Most epochs on each table that is run, by the paper's name of it."""
    seeds: dict[str, tuple[int, ...]]
    net: NetSettings
    train: TrainSettings
    """What all share, without epochs."""
    rates: tuple[float, ...] = ()
    """Learning rates to choose from, if there are several."""
    lookback: int = 96
    horizons: tuple[int, ...] = (96, 192, 336, 720)


@dataclass(frozen=True, kw_only=True)
class Dna:
    """How classifiers of DNA are compared."""

    models: tuple[str, ...]
    train: GenomicsFit
    folds: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    tune_steps: int = 300


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is run."""

    name: str
    text: LanguageSettings
    """What language models share, without steps."""
    text_steps: dict[str, int]
    """Steps on text, by table."""
    rates: tuple[float, ...]
    """Learning rates that each is tried with in table 1; the ablations on text take the first."""
    task_rate: float
    """Learning rate of all models on tasks."""
    tune_steps: int
    seeds: tuple[int, ...]
    """Seeds of language models and of recall."""
    positions: int
    test_bytes: int
    limit: int | None
    """Questions of each task."""
    fit: TaskFit
    """What models on tasks share, without steps."""
    recall_steps: int
    recall: tuple[str, ...]
    recall_tested: tuple[str, ...]
    needles: Needles
    needle_seeds: tuple[int, ...]
    facts: Facts
    facts_seeds: tuple[int, ...]
    speed: Speed
    forecasts: Forecasts
    dna: Dna
    jobs: int
    device: str = "auto"


CLASSIFIERS = ("lmm", "attention", "words", "cnn", "kmer-nb", "kmer-lr:k=6", "kmer-lr:k=8", "length:max_length=0")
"""Models that are compared on DNA, the first with each of the others."""


def tiny() -> Effort:
    """Two CPU cores, each table in less than an hour."""
    model = BackboneConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=2, memory_depth=2, memory_expansion=2,
        intermediate_size=128, segment_len=32, window=32, num_persistent=4,
    )  # fmt: skip
    return Effort(
        name="tiny",
        text=replace(small_contender(), warmup_steps=20, device="cpu"),
        text_steps={"table1": 200, "table5": 150, "figure7": 240},
        rates=(3e-3, 1e-2),
        task_rate=1e-2,
        tune_steps=60,
        seeds=(0, 1, 2),
        positions=16_384,
        test_bytes=2**17,
        limit=200,
        fit=TaskFit(model=model, batch_size=32, device="cpu"),
        recall_steps=200,
        recall=("64:8",),
        recall_tested=("64:8", "128:16", "256:32"),
        needles=Needles(
            values={"PK": "number", "N": "number"},
            taught=("0x8", "128", "256x4", "512"),
            tested=("512", "1K", "2K"),
            steps=500,
            examples=16,
        ),
        needle_seeds=(0,),
        facts=Facts(taught=("0", "128", "256"), tested=("0", "256", "1K", "4K", "16K"), steps=900, examples=32),
        facts_seeds=(0, 1),
        speed=Speed(lengths=(1024, 2048, 4096, 8192, 16_384)),
        forecasts=_few_forecasts(),
        dna=Dna(
            models=CLASSIFIERS,
            train=GenomicsFit(steps=360, max_length=512, word_size=8, device="cpu"),
            folds=3,
            seeds=(0,),
            rates=(3e-3,),
        ),
        jobs=2,
    )


def _few_forecasts() -> Forecasts:
    """About as many steps on each table: four epochs of hours, one of quarters; one seed where rows are many."""
    stack = replace(small_stack(), memory_depth=1, chunk_size=8)
    hours, quarters, once = ("ETTh1", "ETTh2"), ("ETTm1", "ETTm2"), ("Weather",)
    return Forecasts(
        models=("lmm", "attention", "patchtst", "dlinear", "nlinear", "repeat"),
        epochs=dict.fromkeys(hours, 4) | dict.fromkeys(quarters + once, 1),
        seeds=dict.fromkeys(hours + quarters, (0, 1, 2)) | dict.fromkeys(once, (0,)),
        net=NetSettings(backbone=stack),
        train=TrainSettings(batch_size=64, lr=1e-3, device="cpu"),
    )


def _all_forecasts() -> Forecasts:
    stack = replace(
        small_stack(), hidden_size=128, num_attention_heads=4, num_hidden_layers=2, intermediate_size=256,
        memory_depth=2, chunk_size=4,
    )  # fmt: skip
    tables = ("ETTm1", "ETTm2", "ETTh1", "ETTh2", "ECL", "Traffic", "Weather")
    return Forecasts(
        models=("lmm", "mamba", "attention", "patchtst", "dlinear", "nlinear", "repeat"),
        epochs=dict.fromkeys(tables, 10),
        seeds=dict.fromkeys(tables, (0, 1, 2)),
        net=NetSettings(stride=8, backbone=stack),
        train=TrainSettings(batch_size=32, device="cuda"),
        rates=(1e-4, 1e-3),
    )


def small() -> Effort:
    """One GPU: the sizes of the small recipes, 10M parameters."""
    recipe = from_recipe("small-lmm")
    model = BackboneConfig(
        hidden_size=128, num_attention_heads=4, num_hidden_layers=4, memory_depth=2, memory_expansion=2,
        segment_len=128, window=128, num_persistent=4,
    )  # fmt: skip
    return Effort(
        name="small",
        text=replace(
            small_contender(), model=recipe.model, seq_len=1024, batch_size=16, warmup_steps=150, save_every=500,
            device="cuda",
        ),
        text_steps={"table1": 3000, "table5": 3000, "figure7": 3000},
        rates=(1e-3, 3e-3, 1e-2),
        task_rate=1e-3,
        tune_steps=300,
        seeds=(0, 1, 2),
        positions=32_768,
        test_bytes=2**20,
        limit=None,
        fit=TaskFit(model=model, batch_size=64, warmup_steps=200, device="cuda"),
        recall_steps=4000,
        recall=("64:4", "128:8", "256:16", "512:32"),
        recall_tested=("128:8", "512:32", "1024:64", "2048:128"),
        needles=Needles(
            values={"PK": "number", "N": "number", "W": "uuid"},
            taught=("0x8", "256", "512x4", "1K"),
            tested=("1K", "2K", "4K"),
            steps=10_000,
            examples=64,
        ),
        needle_seeds=(0, 1, 2),
        facts=Facts(
            taught=("0", "256", "512", "1K", "2K"),
            tested=("2K", "4K", "8K", "16K", "32K", "64K", "128K"),
            steps=10_000,
            examples=128,
        ),
        facts_seeds=(0, 1, 2),
        speed=Speed(
            lengths=(2048, 4096, 8192, 16_384, 32_768), width=768, layers=12, prefill=32_768, repeats=5, dtype="bf16"
        ),
        forecasts=_all_forecasts(),
        dna=Dna(
            models=CLASSIFIERS,
            train=GenomicsFit(
                model=replace(small_classifier(), hidden_size=128, num_attention_heads=4, intermediate_size=512),
                steps=5000, warmup_steps=100, batch_size=64, eval_every=250, word_size=8, device="cuda",
            ),
            folds=5, seeds=(0, 1, 2), rates=(1e-3, 3e-3), tune_steps=500,
        ),
        jobs=1,
        device="cuda",
    )  # fmt: skip


EFFORTS = {"tiny": tiny, "small": small}
"""The scales that are run."""
