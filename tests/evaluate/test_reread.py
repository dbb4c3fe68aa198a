"""Rereading: gains by carried states are those of plain reading, and are zero where nothing can be known."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from model_cases import MEMORIES, small_config, wake
from titans_lm.data.tokenizer import BOS
from titans_lm.evaluate.bits_per_byte import bits_of
from titans_lm.evaluate.documents import Book, Encoder, books
from titans_lm.evaluate.reread import Drawing, Passages, draw_passages, fitting_distances, reread
from titans_lm.evaluate.stream import CacheReader, StatefulReader, WindowReader, reader_for
from titans_lm.train.fresh import byte_model

DISTANCES = [0, 5, 24]
DRAWING = Drawing(length=12, passages=8, rows=4, distance=DISTANCES[-1], context=7, skip_tokens=3)


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Book], list[Book]]:
    """Books to reread, and others; every place of them is told from all others."""
    found = []
    for name, count in (("held", 2), ("others", 3)):
        folder = tmp_path_factory.mktemp(name)
        for index in range(count):
            text = " ".join(f"{name[0]}{index}{place * place % 997}" for place in range(40))
            (folder / f"{name}{index}.txt").write_text(text)
        found.append(books([folder]))
    return found[0], found[1]


def drawn(shelves: tuple[list[Book], list[Book]], **changes: Any) -> list[Passages]:
    return list(draw_passages(*shelves, Encoder(None), Drawing(**{**vars(DRAWING), **changes})))


def titans_model(architecture: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = byte_model(small_config(architecture, **settings))
    wake(model)
    return model.double().eval()


@torch.no_grad()
def plainly(model: Any, one: Passages, distances: list[int]) -> np.ndarray:
    """The same as `reread`, by passes over whole rows: the passage before is another one, or the same."""
    found, (count, length) = [], one.ids.shape
    for first in (np.roll(one.ids, -1, axis=0), one.ids):
        for distance in distances:
            before, between = (np.tile(x, (count, 1)) for x in (one.before, one.between[:distance]))
            rows = torch.from_numpy(np.concatenate([before, first, between, one.ids], axis=1))
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, -length:]
            found.append(bits_of(logits, rows[:, -length:]).sum(1))
    return np.reshape(found, (2, len(distances), count))


def hugging_face(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, n_positions=96))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8))
    else:
        model = Mamba2ForCausalLM(
            Mamba2Config(**sizes, num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=8, expand=2)
        )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@pytest.mark.parametrize("architecture", [*MEMORIES, "sliding", "attention"])
def test_carried_states_give_what_whole_rows_give(architecture: str, shelves: tuple[list[Book], list[Book]]) -> None:
    model, one = titans_model(architecture), drawn(shelves)[1]
    reading = reader_for(model, piece_len=5, max_len=200)
    assert isinstance(reading, StatefulReader)
    assert reading.constant == (architecture != "attention")
    found = reread(model, one, DISTANCES, reading)
    np.testing.assert_allclose(found, plainly(model, one, DISTANCES), rtol=0, atol=1e-9)
    assert np.abs(found[0] - found[1])[0].min() > 1e-6, "and they do depend on what was read"


@pytest.mark.parametrize(("kind", "constant"), [("llama", False), ("gpt2", False), ("mistral", True), ("mamba2", True)])
def test_caches_of_others_are_copied_and_give_the_same(
    kind: str, constant: bool, shelves: tuple[list[Book], list[Book]]
) -> None:
    model, one = hugging_face(kind), drawn(shelves)[0]
    reading = reader_for(model, piece_len=6, max_len=96)
    assert isinstance(reading, CacheReader)
    assert reading.constant == constant
    expected = plainly(model, one, DISTANCES)
    rounding = 1e-5 if kind == "mamba2" else 1e-9  # it computes in float32 whatever it is given
    np.testing.assert_allclose(reread(model, one, DISTANCES, reading), expected, rtol=0, atol=rounding)
    if kind == "llama":
        whole = WindowReader(model, 96, 0)
        np.testing.assert_allclose(reread(model, one, DISTANCES, whole), expected, rtol=0, atol=1e-9)


def test_a_window_knows_exactly_nothing_beyond_its_reach(shelves: tuple[list[Book], list[Book]]) -> None:
    """Two blocks that see six tokens each, the token itself included, reach ten tokens back: beyond, not one bit of the
    logits differs. The farthest token that the first one of the passage is predicted from is the last one read."""
    model = titans_model("sliding").float()
    reading = reader_for(model, piece_len=8, max_len=64)
    for one in drawn(shelves, distance=30):
        unread, read = reread(model, one, [0, 4, 11, 30], reading)
        assert np.array_equal(unread[2:], read[2:])
        assert (unread[:2] != read[:2]).all()


class Copying(nn.Module):
    """Says the token that followed the last place where the two tokens before stood, nearly for certain, else all
    alike: what full attention learns to do (induction)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.config = type("Config", (), {"vocab_size": 259, "architecture": "attention"})()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        logits = torch.zeros(*input_ids.shape, 259, dtype=torch.float64)
        for row, ids in enumerate(input_ids.tolist()):
            last: dict[tuple[int, int], int] = {}
            for place in range(1, len(ids)):
                if place > 1:
                    last[ids[place - 2], ids[place - 1]] = ids[place]
                if (ids[place - 1], ids[place]) in last:
                    logits[row, place, last[ids[place - 1], ids[place]]] = 20.0
        return type("Output", (), {"logits": logits})()


def test_a_model_that_copies_gains_at_every_distance(shelves: tuple[list[Book], list[Book]]) -> None:
    """Of text without a token twice only passages can be copied: two tokens cost all of their bits, the others none."""
    model, ids = Copying(), np.random.default_rng(0).permutation(200)
    one = Passages("random", (0, 12, 24, 36), np.array([BOS]), ids[:48].reshape(4, 12), ids[48:72])
    unread, read = reread(model, one, DISTANCES, WindowReader(model, 200, 0))
    np.testing.assert_allclose(unread, 12 * np.log2(259), rtol=0, atol=1e-9)
    rest = 10 * (np.logaddexp.reduce([20.0, *np.zeros(258)]) - 20.0) / np.log(2)
    np.testing.assert_allclose(read, 2 * np.log2(259) + rest, rtol=0, atol=1e-6)


def test_passages_are_pieces_of_their_books_and_do_not_overlap(shelves: tuple[list[Book], list[Book]]) -> None:
    found, others = shelves
    text = {book.name: book.path.read_bytes() for book in found}
    told = drawn(shelves)
    assert [one.document for one in told] == ["held0.txt", "held1.txt"]
    for place, one in enumerate(told):
        mine, other = text[one.document], others[place].path.read_bytes()
        assert bytes(one.before[1:].tolist()) == mine[3:10]
        assert one.before[0] == BOS
        assert bytes(one.between.tolist()) == other[3:27]
        for start, ids in zip(one.starts, one.ids, strict=True):
            assert bytes(ids.tolist()) == mine[start : start + 12]
        ordered = sorted(one.starts)
        assert ordered[0] >= 10
        assert all(b - a >= 12 for a, b in pairwise(ordered))
    again, other = drawn(shelves), drawn(shelves, seed=1)
    assert [one.starts for one in again] == [one.starts for one in told] != [one.starts for one in other]


def test_other_books_are_read_on_one_after_the_other(shelves: tuple[list[Book], list[Book]]) -> None:
    text = [book.path.read_bytes()[3:] for book in shelves[1]]
    whole = b"".join([text[1], text[2], text[0]])
    assert bytes(drawn(shelves, distance=len(whole))[1].between.tolist()) == whole


def test_distances_fit_or_are_left_out(shelves: tuple[list[Book], list[Book]]) -> None:
    one = drawn(shelves)[0]  # 8 tokens before, passages of 12
    assert fitting_distances(one, DISTANCES, 37) == [0, 5]
    assert fitting_distances(one, DISTANCES, 36) == [0]
    model = titans_model("attention")
    reading = reader_for(model, piece_len=6, max_len=31)
    assert reread(model, one, fitting_distances(one, DISTANCES, 31), reading).shape == (2, 0, 4)


def test_books_that_are_too_short(shelves: tuple[list[Book], list[Book]]) -> None:
    with pytest.raises(ValueError, match=r"got 4 passages of 60 tokens from 'held0.txt', which has \d+ tokens, 10 of"):
        drawn(shelves, length=60)
    with pytest.raises(ValueError, match=r"got a distance of 9,999 tokens between two readings and other books of \d+"):
        drawn(shelves, distance=9999)
    with pytest.raises(ValueError, match="which has 96 positions; expected no more"):
        reader_for(hugging_face("gpt2"), piece_len=6, max_len=97)
