"""A tiny text, small data sets, and an amount of work that takes seconds."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from titans_lm.config import BackboneConfig
from titans_lm.forecast.settings import NetSettings, TrainSettings
from titans_lm.genomics.settings import GenomicsFit
from titans_lm.repro.effort import Dna, Effort, Facts, Forecasts, Needles, Speed, tiny
from titans_lm.repro.sets import DNA, SERIES

WORDS = ("the", "memory", "learns", "while", "it", "reads", "and", "forgets", "what", "does", "not", "come", "again")


def text(words: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i * i) % len(WORDS)] for i in range(words))


def texts(folder: Path) -> tuple[str, Path]:
    """Write a text to train on and one to test on."""
    (folder / "train.txt").write_text(text(900))
    (folder / "test.txt").write_text(text(60, 3))
    return str(folder / "train.txt"), folder / "test.txt"


def named_sets(folder: Path, table: str, *, whole: bool = False) -> str | None:
    """Make files with the names of a table's data sets and nothing in them, which is enough for a plan.

    `whole` has those of table 4 as folders with the official split.
    """
    if table not in ("table3", "table4"):
        return None
    place = folder / f"sets-{table}"
    place.mkdir()
    for one in SERIES if table == "table3" else DNA:
        if whole and table == "table4":
            for part in ("train", "test"):
                (place / one.file / part).mkdir(parents=True)
        else:
            (place / (one.file if table == "table3" else f"{one.file}.tsv")).touch()
    return str(place)


def series(path: Path, channels: int, *, rows: int = 200, sentinel: bool = False) -> None:
    """Write a table without dates: waves, and a value that was not measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(channels).normal(0.0, 0.2, (rows, channels))
    values = np.sin(np.arange(rows)[:, None] / 3 + np.arange(channels)) + noise
    if sentinel:
        values[20, 0] = -9999
    lines = [",".join(f"{value:.3f}" for value in row) for row in values]
    path.write_text("\n".join(lines) + "\n")


def dna(path: Path, sequences: int = 24) -> None:
    """Write sequences of two classes, one of which has a box in it."""
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [("".join(rng.choice(list("ACGT"), 20)), number % 2) for number in range(sequences)]
    lines = [f"{letters[:7] + 'GGGGGG' + letters[13:] if label else letters}\t{label}" for letters, label in rows]
    path.write_text("\n".join(["seq\tlabel", *lines]) + "\n")


def micro() -> Effort:
    """The work of the scale tiny with sizes that take seconds."""
    e = tiny()
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "memory_expansion": 1,
             "segment_len": 16, "window": 16, "num_persistent": 2}  # fmt: skip
    stack = BackboneConfig(architecture="lmm", intermediate_size=8, memory_depth=1, chunk_size=2, **small)
    fit = GenomicsFit(model=stack, steps=2, warmup_steps=1, eval_every=1, batch_size=8, device="cpu")
    return replace(
        e,
        forecasts=Forecasts(
            models=("lmm", "nlinear", "repeat"), epochs={"ECL": 1, "Weather": 1},
            seeds={"ECL": (0,), "Weather": (0, 1)}, lookback=12, horizons=(4, 8),
            net=NetSettings(patch_len=4, stride=4, backbone=stack), train=TrainSettings(batch_size=32, device="cpu"),
        ),
        dna=Dna(models=("lmm", "kmer-nb"), train=fit, folds=2, seeds=(0, 1), rates=(1e-2,)),
        text=replace(
            e.text, model=replace(e.text.model, **small), seq_len=32, batch_size=2, eval_bytes=200, save_every=1
        ),
        text_steps=dict.fromkeys(e.text_steps, 2), rates=(3e-3,), task_rate=3e-3, tune_steps=1, seeds=(0, 1),
        positions=64, test_bytes=200, limit=2, fit=replace(e.fit, model=replace(e.fit.model, **small), batch_size=64),
        recall_steps=1, recall=("32:2",), recall_tested=("32:2",),
        needles=Needles(values={"PK": "words"}, taught=("128",), tested=("128", "160", "192"), steps=1, examples=2),
        facts=Facts(taught=("0", "128"), tested=("0", "256"), steps=2, examples=2), facts_seeds=(0,),
        speed=Speed(lengths=(24,), depths=(2,), repeats=1, quick=True), jobs=1, device="cpu",
    )  # fmt: skip
