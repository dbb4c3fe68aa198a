"""Train a language model: text or prepared tokens in, a run folder out. What `titans train` runs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titans_lm.data.batches import Batch, DocumentLanes, DocumentRows, PackedRows, RandomCrops, RereadRows, fingerprint
from titans_lm.data.prepared import TokenFolder, check_split, is_token_folder, tokenizer_fingerprint
from titans_lm.data.text import load_corpus, looks_binary
from titans_lm.data.tokenizer import VOCAB_SIZE, byte_tokenizer, encode_document
from titans_lm.evaluate.bits_per_byte import HeldOut
from titans_lm.evaluate.documents import held_out_bytes, held_out_tokens
from titans_lm.evaluate.stream import check_positions
from titans_lm.train.device import environment
from titans_lm.train.diagnostics import memory_numbers
from titans_lm.train.fresh import special_ids
from titans_lm.train.loop import fit
from titans_lm.train.losses import CarriedLoss, next_token_loss
from titans_lm.train.options import plain_settings
from titans_lm.train.parallel import joined_distributed
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import MODEL, RunFolder, resolve_model, tokenizer_beside
from titans_lm.train.settings import LanguageSettings
from titans_lm.train.sized import Sized, model_from, sized_model
from titans_lm.train.writer import sink_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LanguageData:
    """Batches by step, the evaluation on text held out, the tokenizer of both, and how to speak of them."""

    batches: Callable[[int], Batch]
    held_out: HeldOut
    tokenizer: "PreTrainedTokenizerBase"
    counts: dict[str, Any]
    split: str
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token to train on stands for on average, the marks of documents counted; of text, 1."""
        return self.counts["train_bytes"] / max(1, self.counts.get("train_tokens", self.counts["train_bytes"]))

    def lines(self) -> list[str]:
        """Say how much there is, and what was left out."""
        more = [f"{len(self.skipped) - 3} more files"] if len(self.skipped) > 3 else []
        return [
            f"{self.counts['train_bytes']:,} bytes in {self.counts['train_documents']:,} documents to train on, "
            f"{self.counts['held_out_bytes']:,} held out ({self.split})",
            *self.notes,
            *(f"skipped {name}" for name in [*self.skipped[:3], *more]),
        ]


def language_data(settings: LanguageSettings) -> LanguageData:
    """Open the data that the settings name; ValueError for what cannot be trained on."""
    if settings.data is None:
        raise ValueError("got no data; expected a file, a folder of text, a folder of titans prepare, or stdlib")
    return _prepared(settings) if is_token_folder(settings.data) else _text(settings)


def _text(settings: LanguageSettings) -> LanguageData:
    """Text as bytes, in memory: random crops, or lanes that carry a state."""
    if settings.boundaries != "carry":
        raise ValueError(
            f"got boundaries={settings.boundaries!r} for text; expected a folder made by titans prepare, or "
            "--stateful, which reads documents from start to end"
        )
    check_vocabulary(settings, VOCAB_SIZE)
    corpus = load_corpus(settings.data or "", held_out=settings.held_out, valid=settings.valid)
    documents = [encode_document(document.data) for document in corpus.train]
    if settings.stateful:
        batches: Callable[[int], Batch] = DocumentLanes(documents, **_rows(settings))
    else:
        crops = RandomCrops(documents, **_rows(settings))
        batches = _with_rereading(crops, crops.take, len(crops.tokens), settings)
    held_out = _held_out(settings, *held_out_bytes(corpus.held_out, settings.eval_bytes))
    notes = tuple(
        f"note: {document.name} holds zero bytes, so it may be no text; it is read byte by byte, as it was named"
        for document in corpus.train
        if looks_binary(document.data)
    )
    return LanguageData(batches, held_out, byte_tokenizer(), corpus.describe(), corpus.split, corpus.skipped, notes)


def _prepared(settings: LanguageSettings) -> LanguageData:
    """A token folder, read as it is needed; its split was decided when it was made."""
    folder = TokenFolder(settings.data or "", verify=settings.verify_data)
    check_split(folder, settings.valid, settings.held_out)
    check_vocabulary(settings, folder.vocab_size)
    tokenizer = folder.tokenizer()
    if settings.stateful:
        batches: Callable[[int], Batch] = DocumentLanes(folder.train, **_rows(settings), pad=0)
    else:
        kind = DocumentRows if settings.boundaries == "reset" else PackedRows
        batches = _with_rereading(
            kind(folder.train, **_rows(settings)), folder.train.take, folder.train.tokens, settings
        )
    held_out = _held_out(settings, *held_out_tokens(folder.valid, tokenizer, settings.eval_bytes))
    return LanguageData(batches, held_out, tokenizer, folder.describe(), f"as prepared in {folder.path}")


def _rows(settings: LanguageSettings) -> dict[str, int]:
    return {"seq_len": settings.seq_len, "batch_size": settings.batch_size, "seed": settings.seed}


def _with_rereading(
    batches: Callable[[int], Batch], take: Callable[[int, int], np.ndarray], tokens: int, settings: LanguageSettings
) -> Callable[[int], Batch]:
    """Let passages return as the settings say; without any, the batches as they are."""
    reread = settings.reread
    if not reread.is_on:
        return batches
    if reread.has_second and isinstance(batches, DocumentRows):
        passage, longest = reread.passages[0], int(batches.split.lengths.max())
        if longest < 2 * passage:
            raise ValueError(
                f"got reread.passages of {passage} tokens or more and boundaries='reset', where the longest document "
                f"has {longest}; expected a document that holds a passage twice, or boundaries='carry'"
            )
    return RereadRows(
        batches, take, tokens, reread, steps=settings.steps, **_rows(settings), accumulate=settings.accumulate
    )


def check_vocabulary(settings: LanguageSettings, ids: int) -> None:
    """Refuse data whose tokenizer has another number of ids than the model that the settings ask for.

    A model that training begins from has its own number, to which `_first_model` holds the data.
    """
    if settings.init is None and settings.vocab_size not in (None, ids):
        raise ValueError(
            f"got vocab_size={settings.vocab_size} and data of {ids} token ids"
            f"{', those of bytes' if ids == VOCAB_SIZE else ''}; expected the same number: "
            f"prepare the data with the tokenizer that the model is meant for, or give --vocab-size {ids}"
        )


def _held_out(settings: LanguageSettings, documents: list[np.ndarray], text_bytes: int) -> HeldOut:
    return HeldOut(
        documents, text_bytes, seq_len=settings.seq_len, batch_size=settings.batch_size, carry=settings.stateful
    )


def train_language_model(
    settings: LanguageSettings,
    *,
    resume: bool = False,
    model: "PreTrainedModel | None" = None,
    progress: ProgressReport | None = None,
) -> dict[str, Any]:
    """Train a language model and report how it went; the run folder then holds the model and all that led to it.

    `resume` goes on with the run in `settings.out`. Another Hugging Face causal language model can be trained instead
    of the one that `settings.model` describes; its vocabulary needs the ids of the data, 259 for text (data/tokenizer).

    Raises ValueError for data, settings or a run folder that will not do, and what `fit` raises.
    """
    with joined_distributed(settings.device) as world:
        data = language_data(settings)
        data.held_out.batch_size = world.share(settings.batch_size)  # refused before a run folder is made
        torch.manual_seed(settings.seed)
        sized = Sized(model) if model is not None else _first_model(settings, data, resume)
        check_positions(sized.model, settings.seq_len, "--seq-len {} or fewer")
        for sink in settings.sinks:
            sink_library(sink)
        path, plain = world.first(lambda: _run_folder(settings, resume)), plain_settings(settings)
        run = RunFolder.open(path, data.tokenizer, plain)
        shown = progress if progress is not None and world.main else ProgressReport(quiet=True)
        shown.bytes_per_token = data.bytes_per_token
        for line in (*data.lines(), f"{sized.describe()}; run folder {path}"):
            shown.say(line)
        loss = CarriedLoss() if settings.stateful else next_token_loss
        evaluation = Evaluation(data.held_out)
        result = fit(sized.model, data.batches, loss, settings, eval_fn=evaluation, run=run, progress=shown)
    return {
        "run": str(path),
        "model": str(path / MODEL),
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
        "settings": plain,
        "environment": environment(),
    }


def _first_model(settings: LanguageSettings, data: LanguageData, resume: bool) -> Sized:
    """The model that a run begins with; a run that goes on has weights of its own."""
    if settings.init is None or resume:
        return sized_model(settings, data.tokenizer)
    model = model_from(settings.init, settings.model)
    if model.config.vocab_size != len(data.tokenizer):
        raise ValueError(
            f"got init={str(settings.init)!r}, a model over {model.config.vocab_size} ids, and data of "
            f"{len(data.tokenizer)}; expected data that was prepared with its tokenizer"
        )
    own = tokenizer_beside(settings.init)
    if own is not None and tokenizer_fingerprint(own) != tokenizer_fingerprint(data.tokenizer):
        raise ValueError(
            f"got init={str(settings.init)!r} and data in another tokenizer's ids; expected data that was prepared "
            f"with its own: titans prepare TEXT --out FOLDER --tokenizer {resolve_model(settings.init)}"
        )
    for name, token in special_ids(data.tokenizer).items():  # as the model has them that the run goes on with
        setattr(model.config, name, token)
        setattr(model.generation_config, name, token)
    return Sized(model)


class Evaluation:
    """Bits per byte of the held-out text, and what the memories do on the start of its first document."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out, self.fingerprint = held_out, fingerprint(held_out.documents)

    def __call__(self, model: Any) -> dict[str, Any]:
        start = torch.from_numpy(self.held_out.documents[0][: self.held_out.seq_len].astype(np.int64))
        numbers = memory_numbers(model, start[None].to(next(model.parameters()).device))
        return {**self.held_out(model), **numbers}


def _run_folder(settings: LanguageSettings, resume: bool) -> Path:
    """Begin a run, by default named by its architecture, or that of a baseline, and the time; or open one."""
    path = settings.out
    if resume and path is None:
        raise ValueError("got no run folder to resume; expected the folder of a run")
    if path is None:
        name = settings.model.architecture if settings.baseline is None else Path(settings.baseline).stem
        path = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return (RunFolder.open(path) if resume else RunFolder.create(path, plain_settings(settings))).path
