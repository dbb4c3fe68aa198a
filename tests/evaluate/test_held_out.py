"""Held-out text during training: carried or piece by piece, by position, and what there is to read."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model_cases import STACKS, small_config
from question_cases import small_llama
from titans_lm.data.text import Document
from titans_lm.data.tokenizer import byte_tokenizer, encode_document
from titans_lm.evaluate.bits_per_byte import HeldOut, token_bits
from titans_lm.evaluate.documents import _cut, held_out_bytes
from titans_lm.train.fresh import byte_model

TEXTS = [b"short", b"the longest of these documents by far, in many pieces", b"", b"a", b"of middling length here"]
DOCUMENTS = [encode_document(text, eos=False) for text in TEXTS]


def titans(architecture: str = "lmm") -> Any:
    torch.manual_seed(0)
    return byte_model(small_config(architecture))


def bits_of(model, ids):
    ids = torch.tensor([int(i) for i in ids])[None]
    nats = F.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
    return nats.detach() / math.log(2)


@pytest.mark.parametrize("architecture", STACKS)
def test_carried_bits_are_those_of_one_pass(architecture):
    model = titans(architecture).double()
    found = token_bits(model, DOCUMENTS, piece_len=8, batch_size=3)
    assert [len(bits) for bits in found] == [len(text) for text in TEXTS]
    for document, bits in zip(DOCUMENTS, found, strict=True):
        if len(bits):
            torch.testing.assert_close(torch.from_numpy(bits), bits_of(model, document), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["titans", "llama"])
def test_bits_without_memory_are_those_of_separate_pieces(kind):
    model = titans().double() if kind == "titans" else small_llama(259)
    found = token_bits(model, DOCUMENTS, piece_len=8, reset_every=8, batch_size=3)
    for document, bits in zip(DOCUMENTS, found, strict=True):
        pieces = [bits_of(model, document[s : s + 9]) for s in range(0, len(document) - 1, 8)]
        assert len(bits) == len(document) - 1
        if pieces:
            torch.testing.assert_close(torch.from_numpy(bits), torch.cat(pieces), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = titans().train(training)
    token_bits(model, DOCUMENTS, piece_len=4, reset_every=4)
    assert model.training == training
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_knows_nothing_needs_eight_bits():
    class Uniform(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, **_):
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 256)})

    held_out = HeldOut(*held_out_bytes([Document("x", b"abc" * 50)], 1000), seq_len=16, batch_size=2)
    found = held_out(Uniform())
    assert found["held_out_bits_per_byte"] == pytest.approx(8.0)
    assert found["held_out_by_position"] == [
        {"start": 0, "stop": 64, "tokens": 150, "bits_per_token": pytest.approx(8.0)}
    ]


def test_positions_count_what_was_read_before():
    """In the document where the state is carried, else in the piece that starts anew."""
    taken = held_out_bytes([Document("x", b"abc" * 50)], 1000)
    for carry, starts in ((True, [(0, 64), (64, 64), (128, 22)]), (False, [(0, 64 + 50), (64, 36)])):
        held_out = HeldOut(*taken, seq_len=100, batch_size=2, carry=carry)
        found = held_out(titans("lmm"))["held_out_by_position"]
        assert [(bucket["start"], bucket["tokens"]) for bucket in found] == starts
        bits = sum(bucket["tokens"] * bucket["bits_per_token"] for bucket in found) / 150
        assert bits == pytest.approx(held_out(titans("lmm"))["held_out_bits_per_byte"])


def test_bits_per_byte_is_the_mean_over_what_fits():
    model = titans("mag")
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    held_out = HeldOut(*held_out_bytes(documents, 20), seq_len=8, batch_size=2, carry=True)
    assert held_out.bytes == 20
    read = [encode_document(TEXTS[0], eos=False), encode_document(TEXTS[1][:15], eos=False)]
    wanted = torch.cat([bits_of(model, document) for document in read]).mean()
    assert held_out(model)["held_out_bits_per_byte"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_document_of_which_a_tokenizer_keeps_nothing_takes_its_room():
    tokens, size = _cut(np.array([], np.uint16), 4, 2, byte_tokenizer())
    assert (len(tokens), size) == (0, 2)


def test_nothing_to_read_is_an_error():
    with pytest.raises(ValueError, match="got no held-out text"):
        HeldOut(*held_out_bytes([Document("x", b"")], 10), seq_len=8, batch_size=1)
    with pytest.raises(ValueError, match="got no held-out text; expected at least one token to predict"):
        HeldOut([DOCUMENTS[0][:1]], 10, seq_len=8, batch_size=1)
    with pytest.raises(ValueError, match="got a LlamaForCausalLM, which has no state, and no reset_every"):
        token_bits(small_llama(259), DOCUMENTS, piece_len=8)
    with pytest.raises(ValueError, match="got piece_len=0"):
        token_bits(titans(), DOCUMENTS, piece_len=0)
