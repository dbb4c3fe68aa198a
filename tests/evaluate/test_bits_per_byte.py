"""Bits per byte against closed forms, whatever the pieces, and what a reset means."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from model_cases import small_config, wake
from titans_lm.data.tokenizer import VOCAB_SIZE, encode_document
from titans_lm.evaluate.bits_per_byte import buckets, token_bits
from titans_lm.experiments.text import read_texts
from titans_lm.train.fresh import byte_model

DATA = b"def f(x):\n    return x  # \xff\xc3\xa9\n"
DOCUMENTS = [(DATA * 3)[: 11 + 17 * i] for i in range(5)]
DOCUMENT_IDS = [encode_document(document, eos=False) for document in DOCUMENTS]


class Bigrams(nn.Module):
    """Predicts from the last token by a table, and has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB_SIZE, VOCAB_SIZE))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


class Counter(nn.Module):
    """Gives every byte the same chance but one, whose logit is the number of tokens read: its state."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def init_state(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size)

    def forward(
        self, input_ids: Tensor, use_cache: bool, state: Tensor | None = None, return_state: bool = False
    ) -> Any:
        state = torch.zeros(len(input_ids)) if state is None else state
        read = state[:, None] + torch.arange(1, input_ids.shape[1] + 1)
        logits = torch.zeros(*input_ids.shape, VOCAB_SIZE)
        logits[..., ord("a")] = read / 8
        return SimpleNamespace(logits=logits, state=read[:, -1])


def counted(read: int) -> float:
    """Bits that `Counter` needs for an "a" after so many tokens."""
    return -math.log2(math.exp(read / 8) / (math.exp(read / 8) + VOCAB_SIZE - 1))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    model = byte_model(small_config("mac"))
    wake(model)
    return model.double().eval()  # what is told apart here is not rounding


def test_bigrams_by_hand() -> None:
    model = Bigrams()
    log_p = torch.log_softmax(model.table.detach().double(), -1) / math.log(2)
    expected = [-float(sum(log_p[a, b] for a, b in pairwise(t))) for t in DOCUMENT_IDS]
    found = token_bits(model, DOCUMENT_IDS, reset_every=7)
    assert [bits.sum() for bits in found] == pytest.approx(expected, rel=1e-6)
    assert [len(bits) for bits in found] == [len(document) for document in DOCUMENTS]


@pytest.mark.parametrize("piece_len", [1, 3, 64])
def test_a_state_by_hand_carried_and_reset(piece_len: int) -> None:
    documents = [encode_document(b"a" * 10, eos=False), encode_document(b"a" * 4, eos=False)]
    on = token_bits(Counter(), documents, piece_len=piece_len)
    assert on[0].sum() == pytest.approx(sum(counted(i) for i in range(1, 11)))
    early, late = buckets(on, [0, 4, 10])
    assert [(b["start"], b["stop"], b["tokens"]) for b in (early, late)] == [(0, 4, 8), (4, 10, 6)]
    assert early["bits_per_token"] == pytest.approx(sum(counted(i) for i in range(1, 5)) / 4)
    assert late["bits_per_token"] == pytest.approx(sum(counted(i) for i in range(5, 11)) / 6)
    reset = token_bits(Counter(), documents, reset_every=4, piece_len=piece_len)
    three = 2 * sum(counted(i) for i in range(1, 5)) + counted(1) + counted(2)
    assert reset[0].sum() == pytest.approx(three)
    assert reset[1].sum() == pytest.approx(on[1].sum())


def test_pieces_and_batches_change_nothing(model: Any) -> None:
    for every in (None, 12):
        whole = token_bits(model, DOCUMENT_IDS, piece_len=1000, batch_size=1, reset_every=every)
        cut = token_bits(model, DOCUMENT_IDS, piece_len=5, batch_size=3, reset_every=every)
        for a, b in zip(whole, cut, strict=True):
            np.testing.assert_allclose(a, b, rtol=0.0, atol=1e-9)


def test_a_reset_is_a_new_document(model: Any) -> None:
    """One that begins with the last token before the reset."""
    found = token_bits(model, DOCUMENT_IDS, reset_every=12)
    for ids, bits in zip(DOCUMENT_IDS, found, strict=True):
        parts = [alone(model, ids[start : start + 13]) for start in range(0, len(ids) - 1, 12)]
        np.testing.assert_allclose(bits, np.concatenate(parts), atol=2e-5)
    carried = token_bits(model, DOCUMENT_IDS)
    assert not np.allclose(found[-1], carried[-1], atol=1e-3)


@torch.no_grad()
def alone(model: Any, ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(ids.astype(np.int64))
    log_p = torch.log_softmax(model(tokens[None, :-1]).logits[0].double(), -1)
    return -log_p.gather(-1, tokens[1:, None])[:, 0].numpy() / math.log(2)


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_every_word_of_a_text_is_predicted(tmp_path: Path, bos: str | None) -> None:
    """From <bos>, or from <eos> where there is none: all bytes count."""
    words = Tokenizer(WordLevel({"</s>": 0, "to": 1, "<s>": 2}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", bos_token=bos)
    (tmp_path / "a.txt").write_text("to")
    [ids], count = read_texts(tmp_path / "a.txt", tokenizer, 100)
    assert (ids.tolist(), count) == ([2 if bos else 0, 1], 2)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a\.txt, which is not UTF-8 at byte 0"):
        read_texts(tmp_path / "a.txt", tokenizer, 100)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"got 'a\.txt', of which the tokenizer keeps nothing"):
        read_texts(tmp_path / "a.txt", tokenizer, 100)


def test_wrong_questions_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="got a Bigrams, which has no state, and no reset_every"):
        token_bits(Bigrams(), DOCUMENT_IDS)
    with pytest.raises(ValueError, match="got reset_every=0"):
        token_bits(model, DOCUMENT_IDS, reset_every=0)
    with pytest.raises(ValueError, match="edges"):
        buckets(token_bits(model, DOCUMENT_IDS), [4, 2])
