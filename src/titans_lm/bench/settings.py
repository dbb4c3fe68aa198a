"""What `titans bench` measures: plain dataclasses that know nothing of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.config import MEMORY_BLOCKS, Architecture, check_choice, check_positive
from titans_lm.experiments.settings import check_least, check_once

Precision = Literal["float32", "bf16"]
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "tuned": {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_TOP_PAD_": "268435456",
    },
}
"""Environments of a worker. Tuned tells glibc to keep what is freed, instead of giving it back to the kernel and
asking for it, zeroed and page by page, in the next step."""
PAPER: dict[str, Any] = {"heads": 6, "width": 64, "depth": 2, "expansion": 4, "chunk": 16, "forget_to": "zero"}
"""The paper's form, which one size after the other is varied of."""
ONE_HEAD: dict[str, Any] = {"heads": 1, "width": 384, "depth": 2, "expansion": 4, "chunk": 64, "forget_to": "zero"}
"""One head over the whole width, as titans-pytorch has it by default."""
QUICK = {"heads": 2, "width": 8}
MODES = ("forward", "forward+backward", "decode")
MODELS = (*get_args(Architecture), "llama", "mamba2")
LINEAR = "lmm:memory_depth=1,chunk_size=16"
METHODS = (
    LINEAR,
    *(
        f"{LINEAR},{own}"
        for own in (
            "omega_window=4",
            "key_degree=2",
            "memory_objective=huber",
            "memory_objective=lp",
            "memory_caching=grm,caching_segment=128",
            "memory_caching=ssc,caching_segment=128",
            "lookahead_values=true",
        )
    ),
    "tnt:memory_depth=1,tnt_local_chunks=[16],tnt_global_chunk=256,tnt_shard=256",
)
"""A linear memory, and what later papers change in it (docs/guides/beyond.md)."""
PEER_CASES = ("layer", "paper", "exact", "mac", "generation")
PEER = "titans-pytorch==0.5.5"
PEERS_ENV = Path("~/.cache/titans-lm/peers")


@dataclass(frozen=True, kw_only=True)
class BenchSettings(KnownSettings):
    """What every measurement is told."""

    out: Path = Path("runs/bench")
    """Folder of the numbers, one JSON file for each kind of measurement."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    dtype: Precision = "float32"
    """Precision of the op's inputs, of the matrix product beside it, and of autocast around models."""
    threads: int | None = None
    """Threads of a worker; by default OMP_NUM_THREADS, or as many as there are cores."""
    repeats: int = 5
    """Times a case is run after its warm-up, in each of its workers."""
    rounds: int = 3
    """Times the sides of a comparison take turns."""
    timeout: float = 600.0
    """Seconds that a worker may take."""
    memory_limit: float | None = None
    """Gigabytes that a worker on the CPU may ask for; by default 85 % of the machine's."""
    quick: bool = False
    """Tiny sizes, to see that everything runs; what comes out says nothing about speed."""
    json: Path | None = None
    """Write what came out to this file too."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_fields(self, zero=["stream_tokens"])
        check_positive("timeout", self.timeout)
        if self.memory_limit is not None:
            check_positive("memory_limit", self.memory_limit)


def check_counts(settings: Any, *names: str, least: int = 1) -> None:
    """Check settings of several numbers: one or more, each once, none below `least`."""
    check_once(settings, *names)
    check_least(settings, **dict.fromkeys(names, least))


def check_names(what: str, got: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not got:
        raise ValueError(f"got no {what}; expected some of {', '.join(known)}")
    for name in got:
        check_choice(what, name, known)


@dataclass(frozen=True, kw_only=True)
class OpsSettings(BenchSettings):
    """The op alone. Around one base case, each list varies one size and leaves the others as they are."""

    tokens: int = 2048
    """Tokens of a row of the base case."""
    rows: int = 2
    """Rows of a batch."""
    lengths: tuple[int, ...] = (512, 2048, 8192)
    """Tokens T of a row."""
    chunks: tuple[int, ...] = (1, 4, 16, 64, 256)
    """Chunk sizes C; with chunk 1, 2 and 4 an eighth of the tokens is run."""
    widths: tuple[int, ...] = (32, 64, 128)
    """Channels D of a head; the number of heads keeps D × H at 384."""
    heads: tuple[int, ...] = (1, 6, 12)
    """Heads H of 64 channels."""
    depths: tuple[int, ...] = (1, 2, 3)
    """Layers L of the memory network."""
    modes: tuple[str, ...] = MODES
    """What is run: forward, forward+backward, decode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "lengths", "chunks", "widths", "heads", "depths")
        check_names("modes", self.modes, MODES)


@dataclass(frozen=True, kw_only=True)
class KernelsSettings(BenchSettings):
    """The experimental kernels and the chunked backend in turn, over a grid of shapes, on a GPU."""

    widths: tuple[int, ...] = (64, 128)
    """Channels D of a head."""
    expansions: tuple[int, ...] = (0, 1, 2, 4)
    """Hidden channels of the memory by D; 0 is a linear memory."""
    chunks: tuple[int, ...] = (16, 32, 64)
    """Chunk sizes C."""
    memories: tuple[int, ...] = (8, 64, 512)
    """Rows times heads."""
    tokens: int = 4096
    """Tokens of a row."""
    modes: tuple[str, ...] = MODES[:2]
    """What is run: forward, forward+backward."""
    rounds: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "widths", "chunks", "memories")
        check_counts(self, "expansions", least=0)
        check_names("modes", self.modes, MODES[:2])


@dataclass(frozen=True, kw_only=True)
class ModelSettings(BenchSettings):
    """Language models of every architecture, and baselines of the same width, depth and vocabulary."""

    models: tuple[str, ...] = MODELS
    """Architectures of ours, and llama and mamba2 of transformers."""
    width: int = 256
    """Width of every model."""
    layers: int = 4
    """Blocks of every model."""
    contexts: tuple[int, ...] = (100, 100_000)
    """Tokens that were read before the tokens whose decoding is timed."""
    prefill: int = 8192
    """Tokens of the prompt that is read in one call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("models", self.models, MODELS)
        check_once(self, "models")
        check_counts(self, "contexts")


@dataclass(frozen=True, kw_only=True)
class PeersSettings(BenchSettings):
    """Ours and theirs in turn: titans-pytorch from the registry, and blocks of transformers."""

    peers_env: Path = PEERS_ENV
    """Environment of titans-pytorch; made where it is missing."""
    cases: tuple[str, ...] = PEER_CASES
    """layer, paper, exact, mac, generation."""
    allocators: tuple[str, ...] = ("default", "tuned")
    """Settings of the allocator, the same on both sides: layer, exact and mac run with all, the rest with the last."""
    repeats: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("cases", self.cases, PEER_CASES)
        check_names("allocators", self.allocators, tuple(ALLOCATORS))


@dataclass(frozen=True, kw_only=True)
class ScalingSettings(BenchSettings):
    """The op over long texts, and models that read on and on."""

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
    """Tokens of one row, forward and backward; the first that does not fit ends the list."""
    stream_tokens: int = 1_000_000
    """Tokens that each model reads; 0 leaves streaming out."""
    stream_models: tuple[str, ...] = ("lmm", "mac")
    """Architectures that stream."""
    repeats: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "lengths")
        check_names("stream_models", self.stream_models, MEMORY_BLOCKS)


@dataclass(frozen=True, kw_only=True)
class TNTSettings(BenchSettings):
    """A layer of TNT and plain memories in turn, forward and backward."""

    widths: tuple[int, ...] = (64, 128, 256)
    """Widths of the layers."""
    heads: int = 4
    """Heads of a layer."""
    expansion: int = 4
    """Hidden width of the memories, which have two layers, in multiples of the head dimension."""
    tokens: int = 8192
    """Tokens of a row."""
    rows: int = 1
    """Rows of a batch."""
    chunk: int = 8
    """Tokens of a chunk of the local memory, and of a plain one beside it."""
    shards: tuple[int, ...] = (512, 2048)
    """Tokens of a shard, and of a chunk of the global memory."""
    repeats: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "widths", "shards")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(BenchSettings):
    """Training steps of models of equal size in turn: memories beyond the paper beside the plain one."""

    models: tuple[str, ...] = METHODS
    """Models by the names that titans compare takes, variants such as lmm:key_degree=2 among them."""
    parameters: int = 1_240_000
    """Parameters of every model, up to 1 %."""
    vocab_size: int = 4096
    """Ids of the vocabulary."""
    tokens: int = 1024
    """Tokens of a row."""
    rows: int = 2
    """Rows of a batch."""
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_once(self, "models")


@dataclass(frozen=True, kw_only=True)
class AllSettings(BenchSettings):
    """Everything, one kind after the other, each with its own sizes and two repeats in two rounds; one to two hours on
    two cores."""

    repeats: int = 2
    rounds: int = 2
    peers_env: Path = PEERS_ENV
    """Environment of titans-pytorch; made where it is missing."""


@dataclass(frozen=True, kw_only=True)
class RenderSettings(KnownSettings):
    """Write the pages of results, and their plots, from the numbers of earlier runs."""

    results: Path = Path("docs/results/bench")
    """Folder of the JSON files; the plots go there too."""
    docs: Path = Path("docs/results.md")
    """The index; the page of each topic goes into the folder of its name."""
    json: Path | None = None
    """Write the names of the files that were written to this file."""
    quiet: bool = False
    """Show nothing."""
