"""Small sequences with classes that can be told apart, and settings that take seconds."""

from pathlib import Path

import numpy as np

from titans_lm.config import BackboneConfig
from titans_lm.genomics.records import Sequences
from titans_lm.genomics.settings import GenomicsFit

MOTIF = "GGGCGG"


def letters(count: int = 40, seed: int = 0, shortest: int = 18, longest: int = 30) -> list[tuple[str, str]]:
    """Random sequences of A, C and T, every second with a motif of G and C in it: (letters, class)."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        text = "".join(rng.choice(list("ACT"), rng.integers(shortest, longest + 1)))
        if number % 2:
            place = int(rng.integers(0, len(text) - len(MOTIF)))
            text = text[:place] + MOTIF + text[place + len(MOTIF) :]
        rows.append((text, ("plain", "box")[number % 2]))
    return rows


def write_table(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("seq\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return path


def words_of(row: np.ndarray, k: int) -> list[int]:
    """The numbers of the words of k nucleotides, none of them N: AA…A is 0, TT…T is 4^k − 1."""
    return [int("".join(map(str, row[start : start + k])), 4) for start in range(len(row) - k + 1)]


def sequences(rows: list[tuple[str, str]]) -> Sequences:
    """The same without a file, by hand: A 0, C 1, G 2, T 3."""
    classes = tuple(sorted({label for _, label in rows}))
    tokens = tuple(np.array(["ACGTN".index(letter) for letter in text], np.uint8) for text, _ in rows)
    labels = np.array([classes.index(label) for _, label in rows], np.int64)
    return Sequences(tuple(str(number) for number in range(len(rows))), tokens, labels, classes)


def tiny_model(**changes: object) -> BackboneConfig:
    sizes = {
        "architecture": "lmm", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "memory_depth": 1,
        "intermediate_size": 16, "segment_len": 8, "window": 8, "num_persistent": 1, "chunk_size": 8,
    }  # fmt: skip
    return BackboneConfig(**{**sizes, **changes})


def tiny_fit(**changes: object) -> GenomicsFit:
    usual = {
        "model": tiny_model(), "steps": 4, "warmup_steps": 1, "eval_every": 2, "save_every": 2, "batch_size": 8,
        "lr": 1e-2, "held_out": 0.25, "cnn_channels": 8, "cnn_layers": 2, "cnn_kernel": 5, "k": 2, "device": "cpu",
    }  # fmt: skip
    return GenomicsFit(**{**usual, **changes})
