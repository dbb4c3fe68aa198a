"""Classifiers: padding moves nothing, pooling is what it says, and the encoder looks back only."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from genomics.genomics_cases import letters, sequences, tiny_fit, tiny_model
from model_cases import ARCHITECTURES, wake
from titans_lm.genomics.batches import padded, with_targets
from titans_lm.genomics.model import (
    Encoder,
    NucleotideModel,
    class_loss,
    length_features,
    make_network,
    nucleotide_loss,
    pooled,
)
from titans_lm.genomics.records import PAD

ROWS = [row for row in sequences(letters(5, shortest=7, longest=31)).tokens]
CASES = {
    **{name: {"model": tiny_model(architecture=name)} for name in ARCHITECTURES},
    "hybrid": {"model": tiny_model(architecture="hybrid", num_hidden_layers=2)},
    "last": {"pooling": "last"},
    "words": {"word_size": 3},
    "length": {"see_length": True},
    "cnn": {"baseline": "cnn", "cnn_layers": 3},
    "bag": {"baseline": "words", "word_size": 3},
}


def network(case: str) -> nn.Module:
    made = make_network(tiny_fit(embed_dropout=0.0, **CASES[case]), 2).double()
    wake(made)
    return made


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_what_its_sequences_are_alone(case: str) -> None:
    """Logits and gradients: neither depends on who else is in the batch, and on how much is padded."""
    model, labels = network(case), torch.tensor([0, 1, 0, 1, 1])
    batch = {**padded(ROWS), "labels": labels}
    class_loss(model, batch)[0].backward()
    together, logits = gradients(model), model(batch["tokens"], batch["valid"])
    model.zero_grad()
    for row, label, told in zip(ROWS, labels, logits, strict=True):
        alone = {**padded([row]), "labels": label[None]}
        torch.testing.assert_close(model(alone["tokens"], alone["valid"])[0], told, rtol=1e-9, atol=1e-9)
        (class_loss(model, alone)[0] / len(ROWS)).backward()
    for alone, all_at_once in zip(gradients(model), together, strict=True):
        torch.testing.assert_close(alone, all_at_once, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["lmm", "words", "length", "cnn", "bag"])
def test_what_stands_on_padding_is_not_looked_at(case: str) -> None:
    model, batch = network(case), padded(ROWS)
    other = batch["tokens"].masked_fill(~batch["valid"], 2)
    assert (other != batch["tokens"]).any()
    torch.testing.assert_close(model(other, batch["valid"]), model(batch["tokens"], batch["valid"]))


def test_pooling_by_hand() -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    valid = torch.tensor([[True, True, False], [True, True, True]])
    assert pooled(x, valid, "mean").tolist() == [[1.0, 2.0], [8.0, 9.0]]
    assert pooled(x, valid, "last").tolist() == [[2.0, 3.0], [10.0, 11.0]]


@pytest.mark.parametrize("words", [1, 4])
def test_the_encoder_looks_back_only(words: int) -> None:
    """Else the next nucleotide could be read and not predicted."""
    encoder = Encoder(tiny_model(), words).double()
    wake(encoder)
    batch = padded(ROWS[:1])
    changed = batch["tokens"].clone()
    changed[0, 5] = (changed[0, 5] + 1) % 4
    before, after = (encoder(tokens, batch["valid"])[0] for tokens in (batch["tokens"], changed))
    assert torch.equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any(1).all()


def entering(encoder: Encoder, tokens: torch.Tensor) -> torch.Tensor:
    """What an encoder gives its backbone."""
    encoder.backbone = nn.Identity()
    encoder.backbone.forward = lambda x, valid: (x, None)  # type: ignore[method-assign]
    return encoder.eval()(tokens, tokens < PAD)


def test_words_have_embeddings_of_their_own() -> None:
    """x_t = e_t + Σ_k E_k[the word of k that ends at t]: every word has a row that no other has, and none with an N."""
    encoder = Encoder(tiny_model(), 3)
    table = encoder.words.table.weight
    assert table.shape == (1 + 4**2 + 4**3, 16)
    assert not table.any(), "a network starts as it would without them"
    nn.init.normal_(table)
    tokens = torch.tensor([[0, 1, 2, 3, 2, 1, 2, 4, 2, 1, 2, PAD]])
    x = entering(encoder, tokens)[0]
    words = x - encoder.embedding(tokens)[0]
    torch.testing.assert_close(words[0], torch.zeros(16))  # A: nothing before it
    torch.testing.assert_close(words[6] - words[10], torch.zeros(16))  # GCG both times
    torch.testing.assert_close(words[9], table[1 + 4 * 2 + 1])  # GC after an N: the word of two alone
    torch.testing.assert_close(words[10], table[1 + 4 * 1 + 2] + table[17 + 16 * 2 + 4 * 1 + 2])  # CG and GCG
    assert not words[[7, 8, 11]].any(), "N, what follows it, and padding"
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(4))
    numbers = encoder.words.numbers(pairs)
    assert len({tuple(row) for row in numbers[:, 2].tolist()}) == 64
    assert numbers[:, 2, 0].unique().tolist() == list(range(1, 17))
    assert numbers[:, 2, 1].unique().tolist() == list(range(17, 81))


@pytest.mark.parametrize(("baseline", "alike"), [("words", True), (None, False)])
def test_a_bag_of_words_has_no_order(baseline: str | None, alike: bool) -> None:
    """ACAGA and AGACA are of the same words of two, and of other words of three."""
    rows = torch.tensor([[0, 1, 0, 2, 0], [0, 2, 0, 1, 0]])
    model = make_network(tiny_fit(baseline=baseline, word_size=2, embed_dropout=0.0), 2).double().eval()
    wake(model)
    one, other = model(rows, rows < PAD)
    assert torch.allclose(one, other, atol=1e-9) is alike
    longer = make_network(tiny_fit(baseline="words", word_size=3, embed_dropout=0.0), 2).double().eval()
    wake(longer)
    one, other = longer(rows, rows < PAD)
    assert not torch.allclose(one, other, atol=1e-6)


def test_the_length_is_seen_by_its_waves() -> None:
    """Logits + U f(T), U zero at the start; it is the number of nucleotides and not of places."""
    model = make_network(tiny_fit(see_length=True, embed_dropout=0.0), 2).eval()
    batch = padded(ROWS)
    before = model(batch["tokens"], batch["valid"])
    torch.testing.assert_close(before, model.head(pooled(model.encoder(*batch.values()), batch["valid"], "mean")))
    nn.init.normal_(model.length.weight)
    waves = torch.from_numpy(length_features(np.array([len(row) for row in ROWS]))).float()
    after = model(batch["tokens"], batch["valid"])
    torch.testing.assert_close(after - before, waves @ model.length.weight.T)


def test_waves_by_hand() -> None:
    """sin and cos of 2πT / λ, λ from 4 to 2,000 nucleotides."""
    found = length_features(np.array([3, 500]))
    assert found.shape == (2, 64)
    np.testing.assert_allclose(found[0, [0, 32]], [-1.0, 0.0], atol=1e-12)  # three quarters of the shortest
    np.testing.assert_allclose(found[1, [31, 63]], [1.0, 0.0], atol=1e-12)  # a quarter of the longest


def test_the_cnn_by_hand() -> None:
    """One layer of one channel: the largest of ReLU(norm(w ∗ x)), where an N is a column of zeros."""
    model = make_network(tiny_fit(baseline="cnn", cnn_layers=1, cnn_channels=1, cnn_kernel=3, embed_dropout=0.0), 2)
    with torch.no_grad():
        model.convolutions[0].weight.zero_()[0, 2, 0] = 1.0  # a G one place before
        model.convolutions[0].bias.fill_(-0.5)
    row = torch.tensor([[2, 4, 4]])  # G N N: −½, ½, −½, and the norm of one channel leaves its sign
    [logits] = model(row, row < PAD)
    torch.testing.assert_close(logits, model.head.weight[:, 0] + model.head.bias)
    nothing = torch.tensor([[4, 4, 4]])
    torch.testing.assert_close(model(nothing, nothing < PAD)[0], model.head.bias)


def test_losses_by_hand() -> None:
    class Fixed(nn.Module):
        def __init__(self, logits: torch.Tensor) -> None:
            super().__init__()
            self.logits = logits

        def forward(self, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
            return self.logits

    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    batch = {**padded(ROWS[:2]), "labels": torch.tensor([1, 0])}
    loss, told = class_loss(Fixed(logits), batch)
    expected = 0.5 * (torch.log(torch.tensor(2.0)) + torch.log1p(torch.exp(torch.tensor(-2.0))))
    torch.testing.assert_close(loss, expected)
    assert float(told["accuracy"]) == 0.5, "of equal logits the first class is taken"
    rows = with_targets(ROWS[:2])
    uniform = Fixed(torch.zeros(*rows["tokens"].shape, 4))
    assert float(nucleotide_loss(uniform, rows)[1]["bits_per_token"]) == pytest.approx(2.0)


def test_a_classifier_starts_from_a_model_of_nucleotides() -> None:
    fit = tiny_fit(word_size=3)
    model = NucleotideModel(fit.model, 3)
    made = make_network(fit, 2)
    made.encoder.load_state_dict(model.encoder.state_dict())
    batch = padded(ROWS)
    torch.testing.assert_close(
        made.eval().encoder(batch["tokens"], batch["valid"]), model.eval().encoder(batch["tokens"], batch["valid"])
    )


def test_dropout_is_for_training_alone() -> None:
    made = make_network(dataclasses.replace(tiny_fit(), embed_dropout=0.5), 2)
    batch = padded(ROWS)
    first, second = (made(batch["tokens"], batch["valid"]) for _ in range(2))
    assert not torch.equal(first, second)
    made.eval()
    assert torch.equal(made(batch["tokens"], batch["valid"]), made(batch["tokens"], batch["valid"]))
