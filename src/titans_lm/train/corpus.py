"""What a language model is trained and tested on: text as bytes, or a token folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.data.batches import Batch, DocumentLanes, RandomCrops
from titans_lm.data.packing import DocumentRows, PackedRows
from titans_lm.data.prepared import TokenFolder, is_token_folder
from titans_lm.data.reread import RereadRows
from titans_lm.data.text import load_corpus
from titans_lm.data.tokenizer import VOCAB_SIZE, byte_tokenizer, encode_document
from titans_lm.evaluate.bits_per_byte import HeldOut
from titans_lm.evaluate.documents import held_out_bytes, held_out_tokens
from titans_lm.train.settings import LanguageSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LanguageData:
    """Batches by step, the text held out, the tokeniser of both, and how to speak of them."""

    batches: Callable[[int], Batch]
    held_out: HeldOut
    tokenizer: "PreTrainedTokenizerBase"
    counts: dict[str, Any]
    split: str
    skipped: tuple[str, ...] = ()


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
    sizes = {"seq_len": settings.seq_len, "batch_size": settings.batch_size, "seed": settings.seed}
    if settings.stateful:
        batches: Callable[[int], Batch] = DocumentLanes(documents, **sizes)
    else:
        crops = RandomCrops(documents, **sizes)
        batches = _with_rereading(crops, partial(_cut, crops.tokens), len(crops.tokens), settings)
    held_out = _held_out(settings, *held_out_bytes(corpus.held_out, settings.eval_bytes))
    return LanguageData(batches, held_out, byte_tokenizer(), corpus.describe(), corpus.split, corpus.skipped)


def _prepared(settings: LanguageSettings) -> LanguageData:
    """A token folder, read as it is needed; its split was decided when it was made."""
    if settings.valid is not None:
        raise ValueError(
            f"got valid={settings.valid!r} with a prepared folder, which has held its part out already; "
            "give it to titans prepare"
        )
    folder = TokenFolder(settings.data or "", verify=settings.verify_data)
    check_vocabulary(settings, folder.vocab_size)
    tokenizer = folder.tokenizer()
    sizes = {"seq_len": settings.seq_len, "batch_size": settings.batch_size, "seed": settings.seed}
    if settings.stateful:
        batches: Callable[[int], Batch] = DocumentLanes(folder.train, **sizes, pad=0)
    else:
        rows = (DocumentRows if settings.boundaries == "reset" else PackedRows)(folder.train, **sizes)
        batches = _with_rereading(rows, folder.train.take, folder.train.tokens, settings)
    held_out = _held_out(settings, *held_out_tokens(folder.valid, tokenizer, settings.eval_bytes))
    return LanguageData(batches, held_out, tokenizer, folder.describe(), f"as prepared in {folder.path}")


def _with_rereading(
    batches: Callable[[int], Batch], take: Callable[[int, int], np.ndarray], tokens: int, settings: LanguageSettings
) -> Callable[[int], Batch]:
    """Let passages return as the settings say; without any, the batches as they are."""
    if not settings.reread.is_on:
        return batches
    if settings.reread.share and isinstance(batches, DocumentRows):
        _check_documents(int(batches.split.lengths.max()), settings.reread.passages[0])
    sizes = {"seq_len": settings.seq_len, "batch_size": settings.batch_size, "seed": settings.seed}
    return RereadRows(batches, take, tokens, settings.reread, **sizes, accumulate=settings.accumulate)


def _check_documents(longest: int, passage: int) -> None:
    if longest < 2 * passage:
        raise ValueError(
            f"got reread.passages of {passage} tokens or more and boundaries='reset', where the longest document has "
            f"{longest}; expected a document that holds a passage twice, or boundaries='carry'"
        )


def _cut(tokens: np.ndarray, start: int, stop: int) -> np.ndarray:
    return tokens[start:stop]


def check_vocabulary(settings: LanguageSettings, ids: int) -> None:
    """Refuse data whose tokenizer has another number of ids than the model that the settings ask for."""
    if settings.vocab_size not in (None, ids):
        raise ValueError(
            f"got vocab_size={settings.vocab_size} and data of {ids} token ids{_named(ids)}; expected the same number: "
            f"prepare the data with the tokenizer that the model is meant for, or give --vocab-size {ids}"
        )


def _named(ids: int) -> str:
    return ", those of bytes" if ids == VOCAB_SIZE else ""


def _held_out(settings: LanguageSettings, documents: list[Any], text_bytes: int) -> HeldOut:
    return HeldOut(
        documents, text_bytes, seq_len=settings.seq_len, batch_size=settings.batch_size, carry=settings.stateful
    )
