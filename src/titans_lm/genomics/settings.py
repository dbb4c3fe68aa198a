"""Settings of `titans genomics`: how sequences are read, what classifies them, how it learns, how it is compared."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from titans_lm.checks import KnownSettings, check_fields, load_library
from titans_lm.config import BackboneConfig, check_at_least, check_between
from titans_lm.experiments.settings import Hidden, check_runs, check_shared, inside
from titans_lm.train.settings import FitSettings

Unknown = Literal["iupac", "error", "n"]
Crop = Literal["center", "start", "end"]
Pooling = Literal["mean", "last"]
Baseline = Literal["cnn", "words", "kmer-nb", "kmer-lr", "length"]
COUNTED = ("kmer-nb", "kmer-lr", "length")
"""Baselines that are no networks."""


@dataclass(frozen=True, kw_only=True)
class ReadSettings(KnownSettings):
    """How files of sequences are read."""

    sequence_column: str | None = None
    """Column of a table that holds the sequence; by default seq or sequence."""
    label_column: str | None = None
    """Column of a table that holds the class; by default label or class, where there is one."""
    unknown: Unknown = "iupac"
    """What is no A C G T N: iupac reads the codes RYSWKMBDHV as N and refuses the rest, error refuses both, n reads
    everything as N."""
    reference: Path | None = None
    """FASTA of the genome that intervals are cut out of (GenomicBenchmarks' csv.gz)."""

    def __post_init__(self) -> None:
        check_fields(self)


def small_model() -> BackboneConfig:
    """Two blocks of width 64: minutes on a CPU core for some thousand sequences."""
    return BackboneConfig(
        architecture="lmm", hidden_size=64, num_attention_heads=2, num_hidden_layers=2, memory_depth=1,
        intermediate_size=128, segment_len=64, window=64, num_persistent=4, chunk_size=16,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SequenceFit(FitSettings):
    """Settings of training on sequences, with classes or without."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*FitSettings.may_be_zero, "max_length")
    steps: int = 1000
    """Steps of the optimiser."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    keep: int = 1
    """Checkpoints kept, the newest ones."""
    model: BackboneConfig = field(default_factory=small_model)
    """The backbone."""
    batch_size: int = 32
    """Sequences of a batch."""
    max_length: int = 1024
    """Nucleotides of a sequence that are read; 0 reads all of them."""
    held_out: float = 0.1
    """Share of the sequences that is not trained on."""
    word_size: int = 1
    """Nucleotides of the longest words that have an embedding of their own, beside all shorter ones; 1 is none."""
    embed_dropout: float = 0.0
    """Share of the embedding's channels that is dropped while training."""
    reverse_complement: bool = False
    """Whether every second sequence, drawn anew each time, is read from the other strand while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("held_out", self.held_out, 0.001, 0.5)
        check_between("embed_dropout", self.embed_dropout, 0.0, 0.9)
        _check_words("word_size", self.word_size)
        if self.parallel == "fsdp":
            raise ValueError("got parallel='fsdp' for a model of sequences, which one process trains; expected auto")


@dataclass(frozen=True, kw_only=True)
class GenomicsFit(SequenceFit):
    """Settings of one classifier and its training."""

    may_be_zero: ClassVar[tuple[str, ...]] = (*SequenceFit.may_be_zero, "pretrain_steps", "overlap", "patience")
    eval_every: int = 100
    """Steps between two evaluations on the validation part; the best of them is kept."""
    baseline: Baseline | None = None
    """Another classifier instead: cnn (convolutions), words (the mean of embedded words), kmer-nb (naive Bayes of
    words, counted), kmer-lr (logistic regression of words), length (that of the number of nucleotides)."""
    parameters: int | None = None
    """Parameters that the backbone's language model would have, within 1 %, by its width (D43)."""
    pretrained: Path | None = None
    """Run of titans genomics pretrain to start from; the model's settings are then its own."""
    pretrain_steps: int = 0
    """Steps of predicting the next nucleotide of the training part, before classes are learned."""
    crop: Crop = "center"
    """Which nucleotides are read, where a sequence has more than max_length."""
    held_out: float = 0.1
    """Share of each class that is not trained on, and that the best step is chosen by."""
    overlap: int = 0
    """Sequences that share a stretch of so many nucleotides, on either strand, stay on one side of every split; 0 keeps
    equal ones together only."""
    patience: int = 0
    """Evaluations without a new best after which training ends; 0 takes all steps."""
    pooling: Pooling = "mean"
    """What the classifier reads: the mean over the nucleotides of a sequence, or the last of them."""
    embed_dropout: float = 0.1
    """Share of the embedding's channels that is dropped while training, and of what is pooled."""
    see_length: bool = False
    """Whether the length of a sequence is an input of its own: in some sets it says most of the class."""
    both_strands: bool = False
    """Whether predictions are the mean of those for both strands."""
    cnn_channels: int = 64
    """Channels of the CNN."""
    cnn_layers: int = 3
    """Convolutions of the CNN; each but the last is followed by a pooling of four places into one."""
    cnn_kernel: int = 9
    """Taps of each of the CNN's convolutions; an odd number."""
    k: int = 5
    """Nucleotides of the words that kmer-nb and kmer-lr count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_words("k", self.k)
        if self.overlap:
            check_at_least("overlap", self.overlap, 8)
        if not self.cnn_kernel % 2:
            raise ValueError(f"got cnn_kernel={self.cnn_kernel}; expected an odd number: as many taps on either side")
        self._check_together()

    def _check_together(self) -> None:
        if self.baseline == "words" and self.word_size < 2:
            raise ValueError(f"got baseline='words' with word_size={self.word_size}; expected 2 to 8 nucleotides")
        if self.patience and not self.eval_every:
            raise ValueError(f"got patience={self.patience} with eval_every=0; expected evaluations to be patient for")
        if self.pretrained is not None and (self.pretrain_steps or self.baseline is not None):
            raise ValueError("got pretrained with pretrain_steps or a baseline; expected it alone")
        if self.pretrain_steps and self.baseline is not None:
            raise ValueError(f"got pretrain_steps with baseline={self.baseline!r}; expected a backbone to pre-train")


@dataclass(frozen=True, kw_only=True)
class SharedFit(GenomicsFit):
    """Settings of a classifier, as a command line lists those that several runs share."""

    seed: Hidden[int] = 0
    baseline: Hidden[Baseline | None] = None


Data = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]


@dataclass(frozen=True, kw_only=True)
class Source(KnownSettings):
    """What all commands have that read sequences."""

    read: ReadSettings = field(default_factory=ReadSettings)
    """How the file is read."""
    json: Path | None = None
    """Write what came out to this file too."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(Source):
    """What both commands have that train one model."""

    data: Data = None
    """FASTA, a table, or a folder with a folder for each class."""
    out: Path | None = None
    """Folder of the run, and of the model that comes of it."""
    resume: bool = False
    """Go on with --out where it was stopped, by the same settings."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(GenomicsFit, RunSettings):
    """Train a classifier on sequences with classes: titans genomics train DATA --out runs/dna."""


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(SequenceFit, RunSettings):
    """Learn to predict the next nucleotide; titans genomics train DATA --pretrained RUN starts from it."""

    max_length: int = 1024
    """Nucleotides of a sequence; longer ones are cut into several."""
    held_out: float = 0.1
    """Share of the pieces that bits per nucleotide are measured on, and not trained on; at most 1,024 of them."""
    reverse_complement: bool = True
    """Whether every second sequence, drawn anew each time, is read from the other strand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("max_length", self.max_length, 2)


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(Source):
    """Compare classifiers on a file by cross-validation, with paired tests; stopped, the same command goes on."""

    data: Data = None
    """FASTA, a table, or a folder with a folder for each class."""
    out: Path = Path("runs/genomics")
    """Folder of the runs and of the results; the same command goes on where it was stopped."""
    models: tuple[str, ...] = ("lmm", "attention", "cnn", "kmer-nb", "kmer-lr")
    """Architectures of ours, and the baselines cnn, words, kmer-nb, kmer-lr, length; the first is compared with others.

    Each may be varied, as in lmm:memory_depth=2,pooling=last or kmer-nb:k=6."""
    folds: int = 5
    """Parts of the file, each of which is tested on by models that were trained on the others."""
    fold_seed: int = 0
    """Seed of the parts, which are the same for all models and seeds."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the weights, the order of the data and the validation part."""
    rates: tuple[float, ...] = ()
    """Learning rates in place of --lr, but for variants that name their own; with several each network is tried
    with all of them, fold by fold, on the fold's training part."""
    tune_steps: int = 300
    """Steps of each trial; there is one for each network, fold and learning rate."""
    jobs: int = 1
    """Runs at once, each in a process with its share of the cores."""
    train: Annotated[GenomicsFit, inside(SharedFit)] = field(default_factory=SharedFit)
    """What all share: sizes of the model, steps, batches."""

    def __post_init__(self) -> None:
        check_at_least("folds", self.folds, 2)
        check_fields(self, zero=["fold_seed"])
        check_runs(self, "models", "seeds", empty=("rates",))
        own = {"lr": "--rates"} if self.rates else {}
        check_shared(self.train, seed="--seeds", baseline="--models", **own)


@dataclass(frozen=True, kw_only=True)
class PredictSettings(Source):
    """Write classes and probabilities: titans genomics predict RUN DATA."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Run folder, or the folder of a saved classifier."""
    data: Data = None
    """FASTA, a table, or a folder with a folder for each class."""
    out: Path = Path("runs/classes.tsv")
    """Table to write: a line for each sequence with its class and the probability of every class; one that is there is
    replaced."""
    plot: Path | None = None
    """Picture to write where the file has classes: how often each is taken for each."""
    both_strands: bool | None = None
    """Whether probabilities are the mean of those for both strands; by default as the classifier was trained."""
    batch_size: int = 64
    """Sequences that are read at once."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.plot is not None and self.plot.resolve() == self.out.resolve():
            raise ValueError(f"got {str(self.out)!r} for out and plot; expected two files")


def _check_words(name: str, size: int) -> None:
    if size > 8:
        raise ValueError(f"got {name}={size}; expected 1 to 8: there are 4^{size} words")


def extra(module: str) -> Any:
    """Import a module of the extra `genomics` (scikit-learn, scipy); ValueError, saying how to install it."""
    return load_library(module, "splits, scores and counted words need", "pip install 'titans-lm[genomics]'")
