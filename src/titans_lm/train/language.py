"""Train a language model: text or prepared tokens in, a run folder out. What `titans train` runs."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titans_lm.evaluate.bits_per_byte import HeldOut
from titans_lm.train.corpus import LanguageData, language_data
from titans_lm.train.device import environment
from titans_lm.train.insight import memory_numbers
from titans_lm.train.log import ProgressReport
from titans_lm.train.loop import fit
from titans_lm.train.losses import CarriedLoss, next_token_loss
from titans_lm.train.parallel import World, joined_world
from titans_lm.train.run import MODEL, RunFolder
from titans_lm.train.settings import LanguageSettings, plain_settings
from titans_lm.train.sized import Sized, sized_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def train_language_model(
    settings: LanguageSettings,
    *,
    resume: bool = False,
    model: "PreTrainedModel | None" = None,
    progress: ProgressReport | None = None,
) -> dict[str, Any]:
    """Train a language model and report how it went; the run folder then holds the model and all that led to it.

    `resume` goes on with the run in `settings.run`. Another Hugging Face causal language model can be trained instead
    of the one that `settings.model` describes; its vocabulary needs the ids of the data, 259 for text (data/tokenizer).

    Raises ValueError for data, settings or a run folder that will not do, and what `fit` raises.
    """
    with joined_world(settings.device) as world:
        shown = progress if progress is not None and world.main else ProgressReport(quiet=True)
        return _train(settings, resume, model, shown, world)


def _train(
    settings: LanguageSettings, resume: bool, model: "PreTrainedModel | None", progress: ProgressReport, world: World
) -> dict[str, Any]:
    data = language_data(settings)
    world.share(settings.batch_size)  # before a run folder is made
    torch.manual_seed(settings.seed)
    sized = Sized.given(model) if model is not None else sized_model(settings, data.tokenizer)
    model = sized.model
    path = world.first(lambda: _run_folder(settings, data.tokenizer, resume=resume).path)
    run = RunFolder.open(path, data.tokenizer)
    _announce(progress, data, sized, run)
    result = fit(
        model,
        data.batches,
        CarriedLoss() if settings.stateful else next_token_loss,
        settings,
        eval_fn=lambda model: {**data.held_out(model), **_insight(model, data.held_out)},
        run=run,
        progress=progress,
    )
    return {
        "run": str(run.path),
        "model": str(run.path / MODEL),
        "parameters": sized.parameters,
        "parameters_asked_for": sized.asked,
        "shape": asdict(sized.shape),
        "steps": result.step,
        "tokens": result.tokens,
        "processes": world.size,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else 0.0,
        "skipped_steps": result.skipped,
        "loss": result.last.get("loss"),
        **result.evaluation,
        "data": data.counts,
        "settings": plain_settings(settings),
        "environment": environment(),
    }


def _insight(model: Any, held_out: HeldOut) -> dict[str, Any]:
    """What the memories do on the start of the first held-out text."""
    device = next(model.parameters()).device
    start = held_out.documents[0][: held_out.seq_len]
    return memory_numbers(model, torch.from_numpy(np.asarray(start, np.int64))[None].to(device))


def default_run(settings: LanguageSettings) -> Path:
    """Name a new run by its architecture, or that of a baseline, and the time."""
    name = settings.model.architecture if settings.baseline is None else Path(settings.baseline).stem
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _run_folder(settings: LanguageSettings, tokenizer: "PreTrainedTokenizerBase", *, resume: bool) -> RunFolder:
    if not resume:
        return RunFolder.create(settings.run or default_run(settings), plain_settings(settings), tokenizer)
    if settings.run is None:
        raise ValueError("got no run folder to resume; expected the folder of a run")
    return RunFolder.open(settings.run, tokenizer)


def _announce(progress: ProgressReport, data: LanguageData, sized: Sized, run: RunFolder) -> None:
    progress.say(
        f"{data.counts['train_bytes']:,} bytes in {data.counts['train_documents']:,} documents to train on, "
        f"{data.counts['held_out_bytes']:,} held out ({data.split})"
    )
    for line in data.skipped[:3]:
        progress.say(f"skipped {line}")
    if len(data.skipped) > 3:
        progress.say(f"skipped {len(data.skipped) - 3} more files")
    progress.say(f"{sized.describe()}; run folder {run.path}")
