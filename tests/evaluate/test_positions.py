"""Books by position: every mode against a direct computation, exact bytes, and rows that come and go."""

import math
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

from model_cases import small_config, wake
from titans_lm.backbone import frozen_memory
from titans_lm.data.tokenizer import BOS, byte_vocabulary
from titans_lm.evaluate.documents import Book, Encoder, TokenSource, books, spans
from titans_lm.evaluate.positions import EDGES, SpanScore, by_position, overall, score_spans
from titans_lm.evaluate.stream import CacheReader, StatefulReader, WindowReader, reader_for
from titans_lm.train.fresh import byte_model

TEXT = "Zoë walked, and “walked”, till the night fell.\n".encode()
LENGTHS = (150, 333, 70)
KINDS = ("mac", "tnt", "sliding+lmm+sliding", "mag+segment+mal")
"""Every block whose state has a constant size; nothing here asks what a stack is made of."""
PIECES = {"window": 32, "window_step": 8}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> list[Book]:
    folder = tmp_path_factory.mktemp("books")
    for index, length in enumerate(LENGTHS):
        (folder / f"{index}.txt").write_bytes((TEXT[index:] + TEXT * 9)[:length])
    return books([folder])


def titans_model(architecture: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = byte_model(small_config(architecture, **settings))
    wake(model)
    return model.double().eval()  # what is told apart here is not rounding


def tokens_of(book: Book) -> list[int]:
    return [BOS, *book.path.read_bytes()]


@torch.no_grad()
def alone(model: Any, ids: list[int]) -> np.ndarray:
    """Bits of every token after the first, in one pass."""
    tokens = torch.tensor(ids)
    log_p = torch.log_softmax(model(input_ids=tokens[None, :-1], use_cache=False).logits[0].double(), -1)
    return -log_p.gather(-1, tokens[1:, None])[:, 0].numpy() / math.log(2)


def sums(bits: np.ndarray) -> list[float]:
    """The same by position."""
    return [float(bits[a:b].sum()) for a, b in pairwise(EDGES) if a < len(bits)]


def read(model: Any, shelf: list[Book], *, piece_len: int = 16, batch_size: int = 2, **how: Any) -> list[SpanScore]:
    cut = {name: how.pop(name) for name in ("length", "max_tokens", "skip_tokens") if name in how}
    found = spans(shelf, Encoder(None), **cut)
    reading = reader_for(model, piece_len=piece_len, **PIECES)
    return score_spans(model, found, reading, batch_size=batch_size, **how)


@pytest.mark.parametrize("architecture", KINDS)
def test_on_is_one_pass_over_the_whole_document(architecture: str, shelf: list[Book]) -> None:
    model = titans_model(architecture)
    for book, score in zip(shelf, read(model, shelf), strict=True):
        np.testing.assert_allclose(score.bits, sums(alone(model, tokens_of(book))), atol=1e-8)
        assert score.document == book.name
        assert sum(score.bytes) == sum(score.tokens) == book.path.stat().st_size


def test_reset_is_pieces_from_nothing(shelf: list[Book]) -> None:
    model = titans_model("mac")
    for book, score in zip(shelf, read(model, shelf, reset_every=40, piece_len=16), strict=True):
        ids = tokens_of(book)
        parts = [alone(model, ids[start : start + 41]) for start in range(0, len(ids) - 1, 40)]
        np.testing.assert_allclose(score.bits, sums(np.concatenate(parts)), atol=1e-8)
    assert read(model, shelf)[1].bits[0] == pytest.approx(read(model, shelf, reset_every=64)[1].bits[0], abs=1e-9)


@pytest.mark.parametrize("architecture", KINDS)
def test_off_is_a_model_whose_theta_is_0(architecture: str, shelf: list[Book]) -> None:
    model, still = titans_model(architecture), titans_model(architecture, theta_bound=0.0)
    still.load_state_dict(model.state_dict())
    with frozen_memory(model):
        off = read(model, shelf)
    for book, score in zip(shelf, off, strict=True):
        np.testing.assert_allclose(score.bits, sums(alone(still, tokens_of(book))), atol=1e-8)
    on = read(model, shelf)
    assert abs(overall(on).bits - overall(off).bits) > 0.1, "and learning makes a difference"
    np.testing.assert_allclose(on[0].bits, sums(alone(model, tokens_of(shelf[0]))), atol=1e-8)


def test_a_memory_that_is_held_still_does_not_forget_either() -> None:
    """Where forgetting leads to zero, θ = 0 alone would let M shrink."""
    model = titans_model("lmm", forget_to="zero")
    ids = torch.arange(60)[None]
    start = model.init_state(1)
    with torch.no_grad(), frozen_memory(model):
        begun = model.init_state(1)
        state = model(input_ids=ids, state=begun, return_state=True, use_cache=False).state
    moved = model(input_ids=ids, state=start, return_state=True, use_cache=False).state
    memories = list(zip(weights(begun), weights(state), strict=True))
    assert memories
    assert all(torch.equal(a, b) for a, b in memories)
    assert not any(torch.equal(a, b) for a, b in zip(weights(start), weights(moved), strict=True))


def weights(state: Any) -> list[torch.Tensor]:
    from titans_lm.ops import MemoryState

    if isinstance(state, MemoryState):
        return list(state.M)
    return [x for part in state for x in weights(part)] if isinstance(state, tuple) else []


def test_what_is_held_still_learns_again_after_an_error() -> None:
    model = titans_model("mag")
    before = model(input_ids=torch.arange(40)[None]).logits
    with pytest.raises(RuntimeError, match="stop"), frozen_memory(model):
        raise RuntimeError("stop")
    assert torch.equal(model(input_ids=torch.arange(40)[None]).logits, before)
    with frozen_memory(titans_model("mag")):  # of another model
        assert torch.equal(model(input_ids=torch.arange(40)[None]).logits, before)


SIZES = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "tie_word_embeddings": True}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24}


def hugging_face(name: str) -> Any:
    torch.manual_seed(0)
    if name == "mamba2":
        config = Mamba2Config(**SIZES, num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=8)
        model: Any = Mamba2ForCausalLM(config)
    elif name == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=10))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    wake(model, 0.1)
    return model.double().eval()


@pytest.mark.parametrize("piece_len", [7, 32])
@pytest.mark.parametrize("name", ["mamba2", "mistral"])
def test_a_cache_of_constant_size_is_carried(name: str, piece_len: int, shelf: list[Book]) -> None:
    """Rows end at different places, and pieces are shorter and longer than the window."""
    model = hugging_face(name)
    reading = reader_for(model, piece_len=piece_len, **PIECES)
    assert isinstance(reading, CacheReader)
    assert reading.piece_len == piece_len
    for book, score in zip(shelf, read(model, shelf, piece_len=piece_len, batch_size=3), strict=True):
        np.testing.assert_allclose(score.bits, sums(alone(model, tokens_of(book))), rtol=1e-4)


class OneByOne(torch.nn.Module):
    """A model that begins anew where it is given several tokens after its first call, as some do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Any, use_cache: bool = True, cache_params: Any = None) -> Any:
        name = next(name for name in ("cache", "cache_params") if name in signature(self.model.forward).parameters)
        kept = cache_params if input_ids.shape[1] == 1 else None
        return self.model(input_ids=input_ids, use_cache=use_cache, **{name: kept})


def test_what_goes_on_token_by_token_only_is_read_so(shelf: list[Book]) -> None:
    reading = reader_for(OneByOne(hugging_face("mamba2")), piece_len=16, **PIECES)
    assert isinstance(reading, CacheReader)
    assert reading.piece_len == 1


@pytest.mark.parametrize("name", ["llama", "attention"])
def test_windows_predict_every_token_from_at_least_what_overlaps(name: str, shelf: list[Book]) -> None:
    model = hugging_face(name) if name == "llama" else titans_model("attention")
    reading = reader_for(model, piece_len=16, **PIECES)
    assert isinstance(reading, WindowReader)
    assert not reading.constant
    for book, score in zip(shelf, read(model, shelf, batch_size=3), strict=True):
        ids = tokens_of(book)
        bits = alone(model, ids[:33])
        for start in range(32, len(ids) - 1, 8):
            stop = min(start + 8, len(ids) - 1)
            # inputs start − 24 … stop − 1 make a window of 32, of which the last 8 are new
            bits = np.concatenate([bits, alone(model, ids[start - 24 : stop + 1])[24:]])
        np.testing.assert_allclose(score.bits, sums(bits), rtol=1e-6)


def test_a_window_no_longer_than_its_step_is_a_reset(shelf: list[Book]) -> None:
    model = hugging_face("llama")
    tight = reader_for(model, piece_len=16, window=20, window_step=20)
    found = score_spans(model, spans(shelf, Encoder(None)), tight, batch_size=2)
    parts = [alone(model, tokens_of(shelf[0])[i : i + 21]) for i in range(0, LENGTHS[0], 20)]
    np.testing.assert_allclose(found[0].bits, sums(np.concatenate(parts)), rtol=1e-6)
    with pytest.raises(ValueError, match="window=4 and window_step=8"):
        reader_for(model, piece_len=16, window=4, window_step=8)


def test_a_table_of_positions_is_not_left() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=8, n_layer=1, n_head=1, n_positions=32))
    assert isinstance(reader_for(model, piece_len=16, window=32, window_step=16), WindowReader)
    with pytest.raises(ValueError, match="33 tokens for a GPT2LMHeadModel, which has 32 positions"):
        reader_for(model, piece_len=16, window=33, window_step=16)


def test_stretches_begin_from_nothing(shelf: list[Book]) -> None:
    model = titans_model("lmm")
    assert isinstance(reader_for(model, piece_len=3, **PIECES), StatefulReader)
    told: list[int] = []
    found = read(model, shelf, length=100, max_tokens=240, on_piece=told.append)
    assert [(score.document, score.start, sum(score.tokens)) for score in found] == [
        ("0.txt", 0, 100), ("0.txt", 100, 50), ("1.txt", 0, 100), ("1.txt", 100, 100), ("1.txt", 200, 40),
        ("2.txt", 0, 70),
    ]  # fmt: skip
    assert sum(told) == 460
    late = read(model, shelf[:2], length=100, max_tokens=120, skip_tokens=130)
    assert [(score.start, sum(score.tokens)) for score in late] == [(130, 20), (130, 100), (230, 20)]
    np.testing.assert_allclose(late[2].bits, sums(alone(model, [BOS, *tokens_of(shelf[1])[231:251]])), atol=1e-8)
    ids = tokens_of(shelf[1])
    np.testing.assert_allclose(found[3].bits, sums(alone(model, [BOS, *ids[101:201]])), atol=1e-8)


def test_positions_are_gathered_over_stretches() -> None:
    scores = [
        SpanScore("a", 0, (64, 64, 10), (100, 120, 30), (200.0, 180.0, 30.0)),
        SpanScore("a", 138, (64, 2), (50, 0), (100.0, 4.0)),
    ]
    first, second, third = by_position(scores)
    assert (first.start, first.stop, first.tokens, first.bytes) == (0, 64, 128, 150)
    assert first.bits_per_byte == 2.0
    assert second.bits_per_byte == pytest.approx(184 / 120)
    assert (third.start, third.stop, third.bits_per_token) == (128, 256, 3.0)
    assert overall(scores).bits_per_byte == pytest.approx(514 / 300)
    torn = [SpanScore("a", 0, (64, 1), (64, 0), (128.0, 9.0))]  # a last token that begins no character
    assert [part.stop for part in by_position(torn)] == [64], "no bits per byte where there is no byte"
    every = overall(torn)
    assert (every.tokens, every.bytes, every.bits) == (65, 64, 137.0)
    assert scores[0].between(0, 128) == (380.0, 220, 128)
    with pytest.raises(ValueError, match="got positions 0 to 100"):
        scores[0].between(0, 100)
    with pytest.raises(ValueError, match="no text"):
        overall([])


def word_tokenizer(model: Any, decoder: Any, before: Any, **special: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer(model)
    rust.pre_tokenizer, rust.decoder = before, decoder
    return PreTrainedTokenizerFast(tokenizer_object=rust, **special)


def byte_level(**special: Any) -> Any:
    from tokenizers import decoders, models, pre_tokenizers

    merges = [("a", "l"), ("al", "k"), ("w", "alk"), ("e", "d"), ("Ġ", "walk"), ("â", "Ģ")]
    vocabulary = byte_vocabulary() | {a + b: 300 + i for i, (a, b) in enumerate(merges)} | {"<s>": 290, "</s>": 291}
    return word_tokenizer(
        models.BPE(vocab=vocabulary, merges=merges), decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(add_prefix_space=False), **special,
    )  # fmt: skip


def test_bytes_of_byte_level_tokens_are_exact(tmp_path: Path) -> None:
    """A character that is torn between tokens gives each of them its bytes."""
    (tmp_path / "a.txt").write_bytes(TEXT * 3)
    encoder = Encoder(byte_level(bos_token="<s>"))
    ids, sizes = TokenSource(encoder.tokens(books([tmp_path])[0])).take(10_000)
    spelled = encoder.tokenizer.convert_ids_to_tokens(ids.tolist())
    assert b"".join(bytes(byte_vocabulary()[c] for c in token) for token in spelled) == TEXT * 3
    assert sizes.tolist() == [len(token) for token in spelled]
    quote = spelled.index("âĢ")
    assert sizes[quote : quote + 2].tolist() == [2, 1], "“ is three bytes in two tokens"


def test_other_tokens_stand_for_the_text_up_to_their_end(tmp_path: Path) -> None:
    """What the tokenizer drops (spaces, line breaks) counts with the token after it, at the end with the last one."""
    from tokenizers import models, pre_tokenizers

    (tmp_path / "a.txt").write_bytes("  né à \n né \n\n".encode())
    words = {"né": 0, "à": 1, "<s>": 2, "?": 3}
    tokenizer = word_tokenizer(
        models.WordLevel(words, unk_token="?"), None, pre_tokenizers.WhitespaceSplit(), bos_token="<s>"
    )
    ids, sizes = TokenSource(Encoder(tokenizer).tokens(books([tmp_path])[0])).take(99)
    assert ids.tolist() == [0, 1, 0]
    assert sizes.tolist() == [2 + 3, 1 + 2, 3 + 3 + 3]
    assert sizes.sum() == (tmp_path / "a.txt").stat().st_size


def test_blocks_without_a_token_count_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import models, pre_tokenizers

    monkeypatch.setattr("titans_lm.evaluate.documents.LEAST", 4)
    monkeypatch.setattr("titans_lm.evaluate.documents.MOST", 8)
    (tmp_path / "a.txt").write_bytes(b"a a a a\n" + b" " * 40 + b"b\n" + b" " * 24)
    tokenizer = word_tokenizer(
        models.WordLevel({"a": 0, "b": 1}, unk_token="a"), None, pre_tokenizers.WhitespaceSplit(), eos_token="b"
    )
    ids, sizes = TokenSource(Encoder(tokenizer).tokens(books([tmp_path])[0])).take(99)
    assert ids.tolist() == [0, 0, 0, 0, 1]
    assert sizes.sum() == 8 + 42 + 24
    assert sizes[:3].tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("special", "begin", "lost"), [({"bos_token": "<s>"}, 290, 0), ({"eos_token": "</s>"}, 291, 0), ({}, ord("Z"), 1)]
)
def test_a_text_begins_after_the_mark_that_there_is(tmp_path: Path, special: Any, begin: int, lost: int) -> None:
    """<bos>, else <eos>; where there is neither, nothing predicts the first token."""
    (tmp_path / "a.txt").write_bytes(TEXT)
    for length in (None, 1000):
        [stretch] = spans(books([tmp_path]), Encoder(byte_level(**special)), length=length)
        assert stretch.begin.tolist() == [begin]
        assert stretch.source.take(1000).sizes.sum() == len(TEXT) - lost


def test_a_shelf_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        books([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "binary").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match="no text in"):
        books([tmp_path / "empty"])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("x")
    with pytest.raises(ValueError, match=r"two documents named 'x\.txt'"):
        books([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8"):
        TokenSource(Encoder(byte_level()).tokens(Book("latin.txt", tmp_path / "latin.txt"))).take(9)
    with pytest.raises(ValueError, match="length=0"):
        list(spans([], Encoder(None), length=0))


def test_memory_does_not_grow_with_the_book(tmp_path: Path) -> None:
    """Of a book only some blocks are held, and of its bits only sums."""
    import tracemalloc

    (tmp_path / "long.txt").write_bytes(b"line of a book\n" * 200_000)
    book, peaks = books([tmp_path])[0], []
    for most in (100_000, 3_000_000):
        tracemalloc.start()
        [stretch] = spans([book], Encoder(None), max_tokens=most)
        total = 0
        while len((part := stretch.source.take(512)).ids):
            total += len(part.ids)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert total == most
    assert peaks[1] < 1.1 * peaks[0] + 100_000


@pytest.mark.data
def test_held_out_books_are_not_in_the_training_set(data_dir: Path) -> None:
    """No file of the same name, and no long paragraph in common."""
    base = data_dir / "gutenberg"
    held_out, taught = books([base / part for part in ("valid", "test", "haystack")]), books([base / "train"])
    assert len(held_out) == 13
    assert not {book.name for book in held_out} & {book.name for book in taught}
    known = {paragraph for book in taught for paragraph in long_paragraphs(book)}
    assert len(known) > 10_000
    assert [book.name for book in held_out if known.intersection(long_paragraphs(book))] == []


def long_paragraphs(book: Book) -> list[str]:
    paragraphs = book.path.read_text(encoding="utf-8").replace("\r", "").split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs if len(paragraph) > 300]
