"""A tiny text, small data sets, and an amount of work that takes seconds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titans_lm.forecast.settings import TrainSettings
from titans_lm.genomics.settings import GenomicsFit
from titans_lm.repro import run
from titans_lm.repro.plans import merged, read_toml

SERIES, DNA = (read_toml(table)["sets"] for table in ("table3", "table4"))

WORDS = ("the", "memory", "learns", "while", "it", "reads", "and", "forgets", "what", "does", "not", "come", "again")


def quiet(_: str) -> None:
    pass


def stop_at(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come when the step of this name begins."""
    do = run._do

    def stopped(step: Any, *rest: Any) -> None:
        if step.name == name:
            raise KeyboardInterrupt
        do(step, *rest)

    patch.setattr(run, "_do", stopped)


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
                (place / one["file"] / part).mkdir(parents=True)
        else:
            (place / (one["file"] if table == "table3" else f"{one['file']}.tsv")).touch()
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


def micro() -> dict[str, Any]:
    """The amounts of work of the scale tiny with sizes that take seconds."""
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "memory_expansion": 1,
             "segment_len": 16, "window": 16, "num_persistent": 2}  # fmt: skip
    stack = {**small, "architecture": "lmm", "intermediate_size": 8, "memory_depth": 1, "chunk_size": 2}
    text = {"model": small, "seq_len": 32, "batch_size": 2, "eval_bytes": 200, "save_every": 1, "steps": 2,
            "warmup_steps": 1}  # fmt: skip
    genomics = {"models": ["lmm", "kmer-nb"]}
    more = {
        "compare": {"rates": [3e-3], "tune_steps": 1, "seeds": [0, 1], "positions": 64, "test_bytes": 200, "jobs": 1,
                    "train": text},
        "questions": {"limit": 2, "device": "cpu"},
        "task": {"seeds": [0, 1], "rates": [3e-3], "jobs": 1,
                 "train": {"model": small, "batch_size": 64, "warmup_steps": 0}},
        "mqar": {"sizes": ["32:2"], "test_sizes": ["32:2"], "train": {"steps": 1}},
        "needle": {"sizes": ["128"], "test_sizes": ["128", "160", "192"], "examples": 2, "train": {"steps": 1}},
        "babilong": {"sizes": ["0", "128"], "test_sizes": ["0", "256"], "seeds": [0], "examples": 2,
                     "train": {"steps": 2}},
        "forecast": {"models": ["lmm", "nlinear", "repeat"], "seeds": [0], "lookback": 12, "horizons": [4, 8],
                     "jobs": 1, "net": {"patch_len": 4, "stride": 4, "backbone": stack},
                     "train": {"batch_size": 32, "lr": TrainSettings().lr}},
        "genomics": {"folds": 2, "seeds": [0, 1], "rates": [1e-2], "jobs": 1, "train": {
            "model": stack, "steps": 2, "warmup_steps": 1, "eval_every": 1, "batch_size": 8, "device": "cpu",
            "max_length": GenomicsFit().max_length, "word_size": GenomicsFit().word_size}},
        "bench": {"repeats": 1, "quick": True, "device": "cpu"},
        "table1": {"text": {"rates": [3e-3], "train": {"steps": 2}}},
        "table2": {"omit": ["needle-N", "needle-W"]},
        "table3": {"omit": [], "Weather": {"seeds": [0, 1]}},
        "table4": {"non-tata": genomics, "human-ocr": genomics},
        "table5": {"text": {"train": {"steps": 2}}},
        "figure7": {"text": {"train": {"steps": 2}}, "words": {"spans": [[0, 64]]}},
        "figure8": {"op-24": {"depths": [2]}, "words": {"lengths": [24]}},
        "figure9": {"words": {"lengths": [32, 64]}},
    }  # fmt: skip
    return merged(read_toml("tiny"), more)
