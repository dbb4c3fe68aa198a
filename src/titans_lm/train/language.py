"""Train a language model on bytes: documents in, a run folder out. What `titans train` runs."""

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titans_lm.config import BackboneConfig
from titans_lm.data.batches import DocumentLanes, RandomCrops
from titans_lm.data.text import Corpus, load_corpus
from titans_lm.data.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, byte_tokenizer, encode_document
from titans_lm.train.device import choose_device, environment
from titans_lm.train.heldout import HeldOut
from titans_lm.train.log import ProgressReport
from titans_lm.train.loop import fit
from titans_lm.train.losses import CarriedLoss, next_token_loss
from titans_lm.train.run import MODEL, RunFolder
from titans_lm.train.settings import LanguageSettings, plain_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train_language_model(
    settings: LanguageSettings,
    *,
    resume: bool = False,
    model: "PreTrainedModel | None" = None,
    progress: ProgressReport | None = None,
) -> dict[str, Any]:
    """Train a byte model and report how it went; the run folder then holds the model and all that led to it.

    `resume` goes on with the run in `settings.run`. Another Hugging Face causal language model can be trained instead
    of the one that `settings.model` describes; its vocabulary needs 259 ids (data/tokenizer).

    Raises ValueError for data, settings or a run folder that will not do, and what `fit` raises.
    """
    progress = progress or ProgressReport(quiet=True)
    if settings.data is None:
        raise ValueError("got no data; expected a file, a folder of text, or the word stdlib")
    choose_device(settings.device)
    corpus = load_corpus(settings.data, held_out=settings.held_out, valid=settings.valid)
    batches = language_batches(corpus, settings)
    held_out = HeldOut(
        corpus.held_out,
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        max_bytes=settings.eval_bytes,
        carry=settings.stateful,
    )
    torch.manual_seed(settings.seed)
    model = model if model is not None else byte_model(settings.model)
    run = _run_folder(settings, resume=resume)
    _announce(progress, corpus, model, run)
    result = fit(
        model,
        batches,
        CarriedLoss() if settings.stateful else next_token_loss,
        settings,
        eval_fn=held_out,
        run=run,
        progress=progress,
    )
    return {
        "run": str(run.path),
        "model": str(run.path / MODEL),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": result.step,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else 0.0,
        "skipped_steps": result.skipped,
        "loss": result.last.get("loss"),
        **result.evaluation,
        "data": corpus.describe(),
        "settings": plain_settings(settings),
        "environment": environment(),
    }


def byte_model(config: BackboneConfig) -> "PreTrainedModel":
    """Build a fresh language model over bytes."""

    from titans_lm.hf import TitansConfig, TitansForCausalLM

    return TitansForCausalLM(
        TitansConfig(
            vocab_size=VOCAB_SIZE,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **dataclasses.asdict(config),
        )
    )


def language_batches(corpus: Corpus, settings: LanguageSettings) -> RandomCrops | DocumentLanes:
    """Lay out the training documents as the settings ask: random crops, or lanes that carry a state."""
    documents = [encode_document(document.data) for document in corpus.train]
    sampler = DocumentLanes if settings.stateful else RandomCrops
    return sampler(documents, seq_len=settings.seq_len, batch_size=settings.batch_size, seed=settings.seed)


def default_run(settings: LanguageSettings) -> Path:
    """Name a new run by its architecture and the time."""
    return Path("runs") / f"{settings.model.architecture}-{datetime.now():%Y%m%d-%H%M%S}"


def _run_folder(settings: LanguageSettings, *, resume: bool) -> RunFolder:
    tokenizer = byte_tokenizer()
    if not resume:
        return RunFolder.create(settings.run or default_run(settings), plain_settings(settings), tokenizer)
    if settings.run is None:
        raise ValueError("got no run folder to resume; expected the folder of a run")
    return RunFolder.open(settings.run, tokenizer)


def _announce(progress: ProgressReport, corpus: Corpus, model: "PreTrainedModel", run: RunFolder) -> None:
    counts = corpus.describe()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    progress.say(
        f"{counts['train_bytes']:,} bytes in {counts['train_documents']:,} documents to train on, "
        f"{counts['held_out_bytes']:,} held out ({counts['split']})"
    )
    for line in corpus.skipped[:3]:
        progress.say(f"skipped {line}")
    if len(corpus.skipped) > 3:
        progress.say(f"skipped {len(corpus.skipped) - 3} more files")
    progress.say(f"{parameters:,} parameters; run folder {run.path}")
