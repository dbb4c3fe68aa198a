"""Pre-training: the next nucleotide of sequences without classes. What `titans genomics pretrain` runs."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from titans_lm.data.batches import IGNORED
from titans_lm.genomics.batches import NucleotideBatches, pieces, with_targets
from titans_lm.genomics.model import NucleotideModel, evaluating, nucleotide_loss
from titans_lm.genomics.nucleotides import Tokens
from titans_lm.genomics.records import read_sequences
from titans_lm.genomics.saved import save_nucleotides
from titans_lm.genomics.settings import PretrainSettings
from titans_lm.train.device import environment, to_device
from titans_lm.train.files import write_json
from titans_lm.train.log import ProgressReport
from titans_lm.train.loop import Interrupted, fit
from titans_lm.train.parallel import joined_world
from titans_lm.train.run import MODEL, SETTINGS, RunFolder
from titans_lm.train.settings import plain_settings

RESULT = "result.json"
MOST_HELD_OUT = 1024
"""Most pieces that are held out: of a genome a share would take longer to measure than to train on."""


def pretrain_on_file(
    settings: PretrainSettings, *, resume: bool = False, progress: ProgressReport | None = None
) -> dict[str, Any]:
    """Train a model of nucleotides on a file; the run folder then holds what classifiers can start from.

    Raises ValueError for data or settings that will not do, KeyboardInterrupt where it is stopped, and what `fit`
    raises.
    """
    if settings.data is None or settings.run is None:
        raise ValueError("got no data or no run; expected titans genomics pretrain DATA --run FOLDER")
    if not resume and settings.run.exists() and any(settings.run.iterdir()):
        raise ValueError(
            f"got the run folder {settings.run}, which is not empty; choose another folder, or resume the run"
        )
    shown = ProgressReport(quiet=True) if progress is None else progress
    data = read_sequences(settings.data, settings.read)
    try:
        told = pretrain_rows(settings, data.tokens, settings.run, shown)
    except Interrupted as stopped:
        raise KeyboardInterrupt(f"stopped after step {stopped.step}; the same command with --resume goes on") from None
    result = {
        "run": str(settings.run),
        "model": str(settings.run / MODEL),
        "sequences": len(data),
        **told,
        "settings": plain_settings(settings),
        "environment": environment(),
    }
    write_json(settings.run / RESULT, result)
    return result


def pretrain_rows(
    settings: PretrainSettings, rows: Sequence[Tokens], path: Path, progress: ProgressReport
) -> dict[str, Any]:
    """Train a model of nucleotides on sequences, in a folder of its own; one that is done is not done again.

    Sequences are cut into pieces of `max_length`, of which a share, drawn by the seed, is held out; no more than
    `MOST_HELD_OUT`, and the rest is trained on. ValueError where there are fewer than two pieces, and for a folder that
    was begun with other settings.
    """
    cut = pieces(rows, settings.max_length)
    if len(cut) < 2:
        raise ValueError(
            f"got {len(cut)} pieces of {settings.max_length} nucleotides; expected at least two: give more "
            "sequences or a smaller max_length"
        )
    order = np.random.default_rng([settings.seed, 2]).permutation(len(cut))
    many = min(max(round(len(cut) * settings.held_out), 1), len(cut) - 1, MOST_HELD_OUT)
    test, train = ([cut[place] for place in part] for part in (order[:many], order[many:]))
    with joined_world(settings.device) as world:
        world.share(settings.batch_size)
        world.first(lambda: _begin(settings, path))
        torch.manual_seed(settings.seed)
        model = NucleotideModel(settings.model, settings.stem_size, settings.word_size, settings.embed_dropout)
        size, seed, strands = settings.batch_size, settings.seed, settings.reverse_complement
        batches = NucleotideBatches(train, batch_size=size, seed=seed, strands=strands)
        progress.say(f"pre-training on {len(train):,} pieces, {len(test):,} held out; run folder {path}")
        ended = fit(
            model, batches, nucleotide_loss, settings, run=RunFolder.open(path), progress=progress,
            eval_fn=lambda model: {"held_out_bits_per_nucleotide": bits_per_nucleotide(model, test, size)},
        )  # fmt: skip
        world.first(lambda: save_nucleotides(path / MODEL, model))
    return {
        "pieces": len(train),
        "held_out_pieces": len(test),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": ended.step,
        "tokens": ended.tokens,
        "seconds": ended.seconds,
        **ended.evaluation,
    }


def bits_per_nucleotide(model: nn.Module, rows: Sequence[Tokens], batch_size: int) -> float:
    """Mean −log₂ p of every nucleotide after the first of its piece, N left out; 2 is guessing.

    The model is left in the mode that it was in.
    """
    device = next(model.parameters()).device
    total, many = 0.0, 0
    with evaluating(model):
        for start in range(0, len(rows), batch_size):
            batch = to_device(with_targets(rows[start : start + batch_size]), device)
            logits = model(batch["tokens"], batch["valid"]).float().flatten(0, 1)
            targets = batch["targets"].flatten()
            total += float(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"))
            many += int((targets != IGNORED).sum())
    return total / max(many, 1) / math.log(2)


def _begin(settings: PretrainSettings, path: Path) -> None:
    asked = {name: value for name, value in plain_settings(settings).items() if name != "run"}
    if not (path / SETTINGS).is_file():
        RunFolder.create(path, asked)
    elif json.loads((path / SETTINGS).read_bytes()) != json.loads(json.dumps(asked)):
        raise ValueError(f"got the run {path}, which was begun with other settings; expected those, or another folder")
