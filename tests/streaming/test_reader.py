"""Reading in pieces is one long forward pass, from any kind of source, stopped and taken up anywhere."""

import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf.hf_cases import words
from model_cases import one_block, small_config
from streaming.stream_cases import (
    CONSTANT,
    assert_same_memory,
    assert_same_state,
    document,
    ids_of,
    one_forward,
    reading_model,
    text,
)
from titans_lm.data.tokenizer import BOS, EOS, byte_tokenizer
from titans_lm.streaming import Reader, TokenStream
from titans_lm.train.fresh import model_for
from titans_lm.train.run import pretrained


@pytest.mark.parametrize("piece_len", [1, 5])
@pytest.mark.parametrize("architecture", CONSTANT)
def test_reading_is_one_forward_pass(architecture: str, piece_len: int) -> None:
    model, data = reading_model(architecture, **one_block(architecture)), text(45)
    logits, state = one_forward(model, document(data))
    reader = Reader(model, piece_len=piece_len)
    assert reader.read(data) == 45
    assert_same_state(reader.memory.state, state)
    torch.testing.assert_close(reader.next_logits(), logits[:, -1], rtol=0.0, atol=1e-9)
    assert_same_state(reader.memory.state, state)
    assert reader.memory.tokens == (46,)


@pytest.mark.parametrize("keep", [0, 2])
def test_a_source_that_cannot_be_read_leaves_the_memory_as_it_was(keep: int) -> None:
    """Not even the marks at its beginning are written."""
    tokenizer = pretrained("needles")[1]
    model = model_for(small_config("lmm"), tokenizer).double().eval()
    reader = Reader(model, tokenizer, keep=keep)
    reader.read("the cat")
    before = reader.memory
    with pytest.raises(ValueError, match="not UTF-8"):
        reader.read(b"\xff\xfe")
    assert_same_memory(reader.memory, before, 0.0)
    assert (reader.tokens, reader.memory.open, reader.memory.sources) == (before.tokens[0], before.open, before.sources)
    reader.read("the dog")
    untried = Reader(model, tokenizer, memory=before, keep=keep)
    untried.read("the dog")
    assert_same_memory(reader.memory, untried.memory, 0.0)


def test_logits_are_those_of_the_whole() -> None:
    model, ids = reading_model("mac"), ids_of(BOS, text(60))
    logits, _ = one_forward(model, ids)
    reader = Reader(model, piece_len=7)
    parts = [reader.feed(ids[:, start:stop], logits=True) for start, stop in ((0, 1), (1, 2), (2, 30), (30, 61))]
    assert [part.shape[1] for part in parts] == [0, 1, 28, 31]
    assert all(part.dtype == logits.dtype for part in parts)
    found = torch.cat([*parts, reader.next_logits()[:, None]], dim=1)
    torch.testing.assert_close(found, logits, rtol=0.0, atol=1e-9)


def test_every_kind_of_source_gives_the_same_memory(tmp_path: Path) -> None:
    model, data = reading_model("lmm"), "Was man schwarz auf weiß besitzt\n".encode() * 3
    (tmp_path / "text").write_bytes(data)
    whole = Reader(model, piece_len=16)
    whole.read(data)
    buffers = bytearray(data), memoryview(data)
    for source in (data.decode(), tmp_path / "text", io.BytesIO(data), (tmp_path / "text").open("rb"), *buffers):
        reader = Reader(model, piece_len=16)
        assert reader.read(source) == len(data)
        assert_same_memory(reader.memory, whole.memory, 0.0)
        record, expected = reader.memory.sources[0][0], whole.memory.sources[0][0]
        assert (record.tokens_sha256, record.sha256, record.bytes) == (
            expected.tokens_sha256, expected.sha256, len(data),
        )  # fmt: skip
        assert record.complete
        if isinstance(source, io.IOBase):
            source.close()
    ids = [BOS, *data]
    for tokens in (ids, np.array(ids), torch.tensor(ids), iter(ids)):
        reader = Reader(model, piece_len=16)
        assert reader.read(tokens) == len(ids)
        assert_same_state(reader.memory.state, whole.memory.state)  # with <bos>, its pieces end elsewhere
        assert reader.memory.open == (False,), "token ids have no marks but their own"


def test_a_pipe_is_read_as_it_comes() -> None:
    model, data = reading_model("lmm"), text(150)
    source, sink = os.pipe()

    def write() -> None:
        with os.fdopen(sink, "wb", buffering=0) as file:
            for start in range(0, len(data), 37):
                file.write(data[start : start + 37])

    writer = threading.Thread(target=write)
    writer.start()
    reader, whole = Reader(model, piece_len=64), Reader(model, piece_len=64)
    with os.fdopen(source, "rb") as file:
        reader.read(file)
    writer.join()
    whole.read(data)
    assert_same_memory(reader.memory, whole.memory)


def test_ids_of_a_generator_are_drawn_as_they_are_read() -> None:
    drawn: list[int] = []
    source = (drawn.append(i) or i for i in range(40))
    reader = Reader(reading_model("lmm"), piece_len=4)
    assert reader.read(source, max_tokens=5) == 5
    assert drawn == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("architecture", ["mac", "mal"])
def test_rows_of_different_length_are_as_if_alone(architecture: str) -> None:
    model = reading_model(architecture)
    documents = [text(50, 1), text(3, 2), b"", text(23, 3)]
    together = Reader(model, batch_size=4, piece_len=10)
    together.read(documents)
    for row, data in enumerate(documents):
        alone = Reader(model, piece_len=64)
        alone.read(data)
        assert_same_memory(together.memory.row(row), alone.memory)
    assert [len(sources) for sources in together.memory.sources] == [1, 1, 1, 1]


def test_stopped_at_any_token_and_taken_up_again() -> None:
    model, data = reading_model("mac"), text(61)
    whole = Reader(model)
    whole.read(data)
    for cut in (1, 8, 30, 60):
        reader = Reader(model, piece_len=9)
        stream = reader.stream(data)
        assert reader.read(stream, max_tokens=cut) == cut
        assert not reader.memory.sources[0][-1].complete
        other = Reader(model, memory=reader.memory)
        assert other.read(other.resume(data)) == 61 - cut
        reader.read(stream)
        for finished in (reader, other):
            assert_same_memory(finished.memory, whole.memory)
            assert [s.tokens for s in finished.memory.sources[0]] == [61]
            assert finished.memory.sources == whole.memory.sources


def test_a_stream_that_was_broken_off_is_not_gone_on_with() -> None:
    """What was taken from it and not read would be missing, and nobody would know."""
    model, data = reading_model("lmm"), text(40)
    for rows in (1, 2):
        reader = Reader(model, batch_size=rows, piece_len=8)
        streams = [reader.stream(data) for _ in range(rows)]
        run, calls = reader._run, []

        def breaks(*args: object, run: Any = run, calls: list[int] = calls) -> object:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return run(*args)

        reader._run = breaks  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            reader.read(streams)
        with pytest.raises(ValueError, match="that was broken off inside a piece, at token 2"):
            reader.read(streams)
        if rows == 1:
            reader.read(reader.resume(data))
            whole = Reader(model)
            whole.read(data)
            assert_same_memory(reader.memory, whole.memory)


def test_an_empty_source_is_marked_once_however_the_others_are_divided() -> None:
    model, texts = reading_model("lmm"), [text(40), b""]
    whole, divided = (Reader(model, byte_tokenizer(), batch_size=2) for _ in range(2))
    whole.read(texts)
    streams = [divided.stream(one) for one in texts]
    while not all(stream.exhausted for stream in streams):
        divided.read(streams, max_tokens=7)
    assert_same_memory(whole.memory, divided.memory)
    assert [len(row) for row in divided.memory.sources] == [1, 1]


def test_streams_may_take_turns() -> None:
    reader = Reader(reading_model("lmm"))
    a, b = reader.stream(b"first", "a"), reader.stream(b"second", "b")
    for stream, count in ((a, 3), (b, 2), (a, 2), (a, 1)):
        reader.read(stream, max_tokens=count, new_document=False)
    assert [(source.name, source.tokens) for source in reader.memory.sources[0]] == [("a", 3), ("b", 2), ("a", 5)]


def test_a_choice_that_is_broken_off_leaves_the_memory_as_it_was() -> None:
    reader = Reader(reading_model("mac"))
    reader.read(text(9))
    expected = reader.next_logits()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            reader.decode(raising)
        assert torch.equal(reader.next_logits(), expected)
    assert reader.decode(lambda logits: logits.argmax(-1)) == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([-1], "got token ids from -1 to -1; expected whole numbers below 259"),
        ([259], "got token ids from 259 to 259; expected"),
        ([1, 2], "got token ids of shapes .* expected 1 rows of tokens"),
    ],
)
def test_a_choice_of_no_token_leaves_the_memory_as_it_was(chosen: list[int], message: str) -> None:
    reader = Reader(reading_model("mac"))
    reader.read(text(9))
    before = reader.memory
    with pytest.raises(ValueError, match=message):
        reader.decode(lambda _: chosen)
    assert reader.memory is before


def raising(_: torch.Tensor) -> list[int]:
    raise KeyboardInterrupt


def test_a_source_that_changed_is_not_taken_up() -> None:
    reader = Reader(reading_model("lmm"), piece_len=8)
    reader.read(reader.stream(text(40)), max_tokens=16)
    with pytest.raises(ValueError, match="first 16 tokens are not those"):
        reader.resume(b"x" + text(40)[1:])
    with pytest.raises(ValueError, match="10 tokens, of which 16 had been read"):
        reader.resume(text(40)[:10])
    with pytest.raises(ValueError, match="read nothing"):
        Reader(reading_model("lmm")).resume(b"abc")


def test_documents_begin_and_end_with_their_marks() -> None:
    model, a, b = reading_model("lmm"), text(9, 1), text(7, 2)
    reader = Reader(model)
    reader.read(a)
    reader.read(b)
    reader.read(b"more", new_document=False)
    _, state = one_forward(model, ids_of(BOS, a, EOS, BOS, b, b"more"))
    assert_same_state(reader.memory.state, state)
    reader.end_document()
    reader.end_document()
    _, state = one_forward(model, ids_of(BOS, a, EOS, BOS, b, b"more", EOS))
    assert_same_state(reader.memory.state, state)
    assert [source.tokens for source in reader.memory.sources[0]] == [9, 7, 4]


def test_a_fork_disturbs_nobody() -> None:
    model, data = reading_model("mac"), text(30)
    reader = Reader(model, piece_len=16)
    reader.read(data)
    before = reader.memory
    kept = [x.clone() for x in [before.state.position, *before.state.layers[0].memory.memory.M]]
    answers = []
    for question in (b"who", b"what"):
        fork = reader.fork()
        fork.read(question, new_document=False)
        answers.append(fork.next_logits())
        _, state = one_forward(model, ids_of(BOS, data, question))
        assert_same_state(fork.memory.state, state)
    assert not torch.equal(*answers)
    for x, y in zip(kept, [before.state.position, *before.state.layers[0].memory.memory.M], strict=True):
        assert torch.equal(x, y)
    assert_same_memory(reader.memory, before, 0.0)
    with torch.device("meta"):  # what is made on the default device
        many = reader.fork(3)
    many.read([b"a", b"bc", b"d"], new_document=False)
    one = reader.fork()
    one.read(b"bc", new_document=False)
    assert_same_memory(many.memory.row(1), one.memory)


def test_reset_forgets_everything() -> None:
    model = reading_model("mag")
    reader, fresh = Reader(model), Reader(model)
    reader.read(text(20))
    reader.reset()
    assert_same_memory(reader.memory, fresh.memory, 0.0)
    assert reader.tokens == 0
    reader.read(b"again")
    fresh.read(b"again")
    assert_same_memory(reader.memory, fresh.memory, 0.0)


def test_on_piece_sees_whole_memories() -> None:
    model, data = reading_model("lmm"), text(20)
    reader, seen = Reader(model, piece_len=6), []
    reader.read(data, on_piece=lambda r: seen.append(r.memory))
    assert [memory.tokens for memory in seen] == [(7,), (13,), (19,), (21,)]
    again = Reader(model, memory=seen[1])
    again.read(again.resume(data))
    assert_same_memory(again.memory, reader.memory)


def test_words_are_cut_at_places_that_depend_on_the_text_alone() -> None:
    tokenizer = words()
    data = "".join(f"w{i % 49 + 1}" + (" " if i % 7 else "\n") for i in range(60_000)).encode()
    whole = TokenStream(data, tokenizer).take(10**9)
    assert whole.tolist() == tokenizer(data.decode(), add_special_tokens=False).input_ids

    class Drip(io.BytesIO):
        def read1(self, size: int = -1) -> bytes:
            return self.read(1 + self.tell() % 997)

    stream = TokenStream(Drip(data), tokenizer)
    parts = [stream.take(1000) for _ in range(70)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert stream.record() == record_of(data, tokenizer)


def record_of(data: bytes, tokenizer: object) -> object:
    stream = TokenStream(data, tokenizer, name="stream")
    stream.take(10**9)
    return stream.record()


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = reading_model("lmm")
    reader = Reader(model)
    for source, message in (
        (tmp_path, "which is a folder"),
        (tmp_path / "none", "which is not there"),
        (io.StringIO("text"), "binary mode"),
        ([1, -2], "whole numbers from 0"),
        ([1, 2.5], "whole numbers from 0"),
        (torch.ones(1, 3, dtype=torch.int64), "whole numbers from 0"),
        ([5, 300], "below 259"),
        (5, "got a source of type int; expected text, a Path, a file or pipe"),
        (None, "got a source of type NoneType; expected text"),
        (torch.tensor(5), "got a source of type Tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            reader.read(source)

    other = reading_model("lmm")
    other.config.vocab_size = 300
    with pytest.raises(ValueError, match="a text and no tokenizer for a model of 300 ids"):
        Reader(other).read(b"abc")
    with pytest.raises(ValueError, match="1 sources for 2 rows"):
        Reader(model, batch_size=2).read(b"abc")
    with pytest.raises(ValueError, match="read nothing"):
        Reader(model).next_logits()
    with pytest.raises(ValueError, match="grow with the text"):
        Reader(reading_model("attention"))
    with pytest.raises(ValueError, match="expected a TitansForCausalLM"):
        Reader(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="piece_len=0"):
        Reader(model, piece_len=0)
    stream = TokenStream(b"\xff\xfe", words())
    with pytest.raises(ValueError, match="not UTF-8"):
        stream.take(1)


def test_a_model_that_was_trained_without_it_answers_from_earlier_segments() -> None:
    model, data = reading_model("lmm"), text(45)
    caching = {"memory_caching": "grm", "caching_segment": 12, "caching_slots": 3}
    plain, reader = Reader(model), Reader(model, piece_len=5, caching=caching)
    for one in (plain, reader):
        one.read(data[:11])  # <bos> is a token too
    torch.testing.assert_close(reader.next_logits(), plain.next_logits())
    for one in (plain, reader):
        one.read(data[11:], new_document=False)
    whole = Reader(model, caching=caching)
    whole.read(data)
    torch.testing.assert_close(reader.next_logits(), whole.next_logits())
    assert not torch.allclose(reader.next_logits(), plain.next_logits())
    assert reader.memory.bytes > plain.memory.bytes
    assert model.config.memory_caching is None
    mixed = Reader(reading_model("mac+lmm"), caching=caching).model.model.backbone.layers
    assert [block.memory.config.memory_caching for block in mixed] == [None, "grm"], "MAC answers from no segment"
    assert reader.model.lm_head.weight is model.lm_head.weight
    model.compile_decoding(backend="eager")
    compiled = Reader(model, piece_len=5, caching=caching)
    compiled.read(data)
    torch.testing.assert_close(compiled.next_logits(), whole.next_logits())


@pytest.mark.parametrize(
    ("architecture", "caching", "said"),
    [
        ("lmm", {"caching_segments": 4}, "did you mean 'caching_segment'"),
        ("sliding", {}, "without a memory that can; expected lmm, mag, mal"),
        ("mac", {}, "expected lmm, mag, mal"),
    ],
)
def test_caching_that_cannot_be_is_refused(architecture: str, caching: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Reader(reading_model(architecture), caching=caching)
