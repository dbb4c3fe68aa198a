"""Taking back tokens: what is left is what a reader knows that has read no more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf.hf_cases import words
from model_cases import named_tensors, one_block
from streaming.stream_cases import CONSTANT, document, reading_model, text
from titans_lm.backbone import frozen_memory
from titans_lm.data.tokenizer import BOS
from titans_lm.streaming import Memory, Reader, save_memory


def assert_equal(a: Memory, b: Memory) -> None:
    """All of two memories, to the bit."""
    assert (a.tokens, a.open, a.sources, a.pending.tolist()) == (b.tokens, b.open, b.sources, b.pending.tolist())
    for (name, x), (_, y) in zip(named_tensors(a.state), named_tensors(b.state), strict=True):
        assert torch.equal(x, y), name


def greedy(logits: torch.Tensor) -> int:
    return int(logits.argmax())


@pytest.mark.parametrize("piece_len", [1, 7])
@pytest.mark.parametrize("architecture", CONSTANT)
def test_it_leaves_what_a_reader_knows_that_has_read_less(architecture: str, piece_len: int) -> None:
    model, data = reading_model(architecture, **one_block(architecture)).float(), text(40)
    reader, back = Reader(model, piece_len=piece_len, keep=32), 0
    reader.read(data)
    known: dict[int, Memory] = {}  # after every piece of one that takes nothing back
    Reader(model, piece_len=piece_len).read(data, max_tokens=39, on_piece=lambda r: known.update({r.tokens: r.memory}))
    for tokens in (1, 6, 13, 30):
        reader.undo(tokens - back)
        back = tokens
        if 41 - tokens not in known:
            shorter = Reader(model, piece_len=piece_len)
            shorter.read(data, max_tokens=40 - tokens)
            known[shorter.tokens] = shorter.memory
        assert_equal(reader.memory, known[41 - tokens])


def test_memory_files_are_equal(tmp_path: Path) -> None:
    model, data = reading_model("mac"), text(40)
    reader, shorter = Reader(model, piece_len=8, keep=20), Reader(model, piece_len=8)
    reader.read(data)
    reader.undo(11)
    shorter.read(data, max_tokens=29)
    headers = [
        replace(save_memory(one.memory, tmp_path / name, model), written="")
        for name, one in (("a", reader), ("b", shorter))
    ]
    assert headers[0] == headers[1]
    files = [load_file(tmp_path / name) for name in ("a", "b")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_what_was_written_can_be_taken_back() -> None:
    model, data = reading_model("mag"), text(20)
    reader, other = Reader(model, keep=16), Reader(model)
    for one, count in ((reader, 15), (other, 6)):
        one.read(data)
        written = list(one.write(greedy, count))
    assert len(written) == 6, "no early end"
    reader.undo(9)
    assert_equal(reader.memory, other.memory)
    again = [list(one.write(greedy, 5)) for one in (reader, other)]
    assert again[0] == again[1]


def test_documents_open_and_close_again() -> None:
    model, first, second = reading_model("lmm"), text(9), text(12, 1)
    steps: list[Any] = [
        lambda reader: reader.read(first, name="first"),
        lambda reader: reader.end_document(),
        lambda reader: reader.read(second, name="second"),
        lambda reader: reader.feed(document(b"more")),
    ]
    known, reader = {}, Reader(model, keep=50)
    for step in steps:
        step(reader)
        known[reader.tokens] = reader.memory
    assert list(known) == [10, 11, 24, 29], "with <bos> and <eos>"
    for tokens in (24, 11, 10):
        reader.undo(reader.tokens - tokens)
        assert_equal(reader.memory, known[tokens])
    reader.undo(10)
    assert_equal(reader.memory, Reader(model).memory)


@pytest.mark.parametrize("piece_len", [1, 2048])
def test_between_two_documents_none_is_open_where_one_mark_is_both(piece_len: int) -> None:
    tokenizer = words()
    tokenizer.add_special_tokens({"bos_token": "w1", "eos_token": "w1"})
    reader = Reader(reading_model("lmm"), tokenizer, keep=50, piece_len=piece_len)
    reader.read("w2 w3")
    reader.read("w4")
    assert reader.memory.open == (True,)
    reader.undo(2)
    assert reader.memory.open == (False,)


@pytest.mark.parametrize("piece_len", [1, 2048])
def test_between_two_documents_none_is_open(piece_len: int) -> None:
    reader = Reader(reading_model("lmm"), keep=50, piece_len=piece_len)
    reader.read(text(9))
    reader.read(text(12, 1))
    reader.undo(13)
    assert (reader.tokens, reader.memory.open) == (11, (False,)), "its <eos> is read, the next <bos> is not"
    reader.undo(1)
    assert reader.memory.open == (True,)


def test_rows_go_back_together() -> None:
    model, texts = reading_model("mac"), [text(30), text(22, 1)]
    reader, shorter = Reader(model, batch_size=2, piece_len=5, keep=32), Reader(model, batch_size=2, piece_len=5)
    reader.read(texts)
    reader.undo(9)
    shorter.read([texts[0][:21], texts[1][:13]])
    a, b = reader.memory, shorter.memory
    assert (a.tokens, a.open, a.pending.tolist()) == (b.tokens, b.open, b.pending.tolist())
    read = [[(source.tokens, source.tokens_sha256) for [source] in memory.sources] for memory in (a, b)]
    assert read[0] == read[1], "the last step is cut in one row and left out in the other"
    for (name, x), (_, y) in zip(named_tensors(a.state), named_tensors(b.state), strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=1e-9, msg=name)


def test_a_row_is_cut_where_it_stood_and_not_where_others_read_on() -> None:
    """A row whose text is over has no token in later calls, which say nothing of where it is cut."""
    model, texts = reading_model("lmm"), [text(10), text(40, 1)]
    reader = Reader(model, batch_size=2, piece_len=6, keep=32)
    reader.read(texts)
    reader.undo(4)
    assert reader.memory.tokens == (7, 37)
    assert [[(source.tokens, source.complete) for source in row] for row in reader.memory.sources] == [
        [(6, False)], [(36, False)],
    ]  # fmt: skip
    alone = Reader(model, memory=reader.memory.row(0))
    alone.read(alone.resume(texts[0]))
    assert alone.tokens == 11
    reader = Reader(model, batch_size=2, keep=8)
    reader.read(["", "abc"])
    reader.undo(1)
    assert (reader.memory.tokens, reader.memory.open) == ((0, 3), (False, True))


def test_a_source_without_a_token_is_not_what_is_cut() -> None:
    reader = Reader(reading_model("lmm"), keep=20)
    reader.read(text(6))
    reader.read("", new_document=False, name="nothing")
    assert [source.name for source in reader.memory.sources[0]] == ["text", "nothing"]
    for tokens in (4, 3):
        reader.undo(2 if tokens == 4 else 1)
        [source] = reader.memory.sources[0]
        assert (source.name, source.tokens, source.complete) == ("text", tokens, False)
        assert reader.resume(text(6)).tokens == tokens


def test_a_document_without_marks_closes_again() -> None:
    model, tokenizer = reading_model("lmm"), words()
    reader = Reader(model, tokenizer, keep=8)
    reader.read(b"w1 w2 w3")
    reader.undo(3)
    assert_equal(reader.memory, Reader(model, tokenizer).memory)


def test_a_source_goes_on_from_a_new_opening(tmp_path: Path) -> None:
    model, path = reading_model("mal"), tmp_path / "text"
    path.write_bytes(text(60))
    whole, reader = Reader(model, piece_len=6), Reader(model, piece_len=6, keep=20)
    whole.read(path)
    stream = reader.stream(path)
    reader.read(stream, max_tokens=30)
    reader.undo(9)
    with pytest.raises(ValueError, match="at token 30, of which 21 are read"):
        reader.read(stream)
    stream.close()
    reader.read(reader.resume(path))
    a, b = reader.memory, whole.memory
    assert (a.tokens, a.open, a.sources) == (b.tokens, b.open, b.sources)


def test_going_back_again_and_again_keeps_little() -> None:
    model = reading_model("lmm", num_hidden_layers=1)
    reader, plain = Reader(model, piece_len=1, keep=16), Reader(model, piece_len=1)
    data = text(90)
    reader.read(data)
    assert len(reader._history.calls) <= 33
    assert len(reader._history.states) <= 10
    for tokens in (3, 5, 2):
        reader.undo(tokens)
    plain.read(data, max_tokens=80)
    assert_equal(reader.memory, plain.memory)


def test_what_cannot_be_taken_back_is_refused() -> None:
    model = reading_model("lmm")
    reader = Reader(model, keep=8)
    reader.feed([[BOS, *range(20)]])
    before = reader.memory
    with pytest.raises(ValueError, match=r"got undo\(22\) of a row that has read 21 tokens; expected 21 at most"):
        reader.undo(22)
    with pytest.raises(ValueError, match=r"got undo\(9\) of a reader that can take back 8 tokens.*keep=9\) or more"):
        reader.undo(9)
    with pytest.raises(ValueError, match=r"got tokens=-1"):
        reader.undo(-1)
    with pytest.raises(ValueError, match="take back 8 tokens, of those that it has read itself"):
        reader.fork().undo(1)
    plain = Reader(model)
    plain.feed([[BOS, 1, 2]])
    with pytest.raises(ValueError, match=r"got undo\(1\) of a reader that keeps nothing earlier; expected Reader"):
        plain.undo(1)
    reader.undo(0)
    assert_equal(reader.memory, before)


def test_what_was_read_frozen_is_read_so_again() -> None:
    model, readers = reading_model("lmm"), []
    for length in (20, 12):
        readers.append(Reader(model, piece_len=20, keep=20))
        with frozen_memory(model):
            readers[-1].feed([[*range(60, 60 + length)]])
    readers[0].undo(8)
    assert_equal(readers[0].memory, readers[1].memory)
