"""titans read: a memory file from files, whatever happens meanwhile; and text that goes on from it."""

import json
import os
import random
import signal
import threading
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forks import start_titans
from streaming.stream_cases import assert_same_memory, reading_model, text
from titans_lm.cli import main
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.generate import generate_text
from titans_lm.streaming import Reader, load_memory
from titans_lm.streaming.read import StoppedReading, read_files
from titans_lm.train.run import load_model

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of mac, with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    model = reading_model("mac").float()
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0  # greedy text has no end and no mark in it
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def books(tmp_path: Path) -> list[Path]:
    for number in range(3):
        (tmp_path / f"book_{number}").write_bytes(text(40 + number, number))
    return [tmp_path / f"book_{number}" for number in range(3)]


def beside(folder: Path) -> Path:
    """Where the streams of commands go whose folder is looked at."""
    return folder.with_name(f"{folder.name}-streams")


def titans(folder: Path, *arguments: object) -> None:
    """Run a command to its end in a process of its own."""
    command = start_titans(beside(folder), *arguments)
    assert command.ended() == 0, command.log.read_text()


def read_all(model: torch.nn.Module, books: list[Path], **settings: int) -> Reader:
    reader = Reader(model, TOKENIZER, **settings)
    for book in books:
        reader.read(book)
    return reader


def test_files_become_one_memory(folder: Path, books: list[Path], tmp_path: Path) -> None:
    model = load_model(folder, "cpu").double()
    result = read_files(model, TOKENIZER, books, tmp_path / "out.memory", piece_len=10, quiet=True)
    memory = load_memory(tmp_path / "out.memory", model)
    assert_same_memory(memory, read_all(model, books).memory)
    assert result["tokens"] == 40 + 41 + 42 + 3 + 2
    assert [source.name for source in memory.sources[0]] == [str(book) for book in books]
    assert all(source.complete for source in memory.sources[0])


def test_more_is_read_onto_a_memory(folder: Path, books: list[Path], tmp_path: Path) -> None:
    model = load_model(folder, "cpu").double()
    read_files(model, TOKENIZER, books[:1], tmp_path / "one.memory", quiet=True)
    before = (tmp_path / "one.memory").read_bytes()
    read_files(model, TOKENIZER, books[1:], tmp_path / "all.memory", onto=tmp_path / "one.memory", quiet=True)
    assert_same_memory(load_memory(tmp_path / "all.memory", model), read_all(model, books).memory)
    assert (tmp_path / "one.memory").read_bytes() == before
    read_files(model, TOKENIZER, books[:1], tmp_path / "other.memory", quiet=True)
    read_files(model, TOKENIZER, books[1:2], tmp_path / "two.memory", quiet=True)
    with pytest.raises(ValueError, match=r"other.memory', which does not go on from .*two.memory'"):
        read_files(
            model,
            TOKENIZER,
            books[:1],
            tmp_path / "other.memory",
            onto=tmp_path / "two.memory",
            resume=True,
            quiet=True,
        )


def test_what_rounding_cost_is_still_known_where_nothing_is_left_to_read(
    folder: Path, books: list[Path], tmp_path: Path
) -> None:
    model, out = load_model(folder, "cpu"), tmp_path / "half.memory"
    given = {"resume": True, "precision": "bfloat16", "quiet": True}
    first = read_files(model, TOKENIZER, books, out, **given)
    before = out.read_bytes()
    again = read_files(model, TOKENIZER, books, out, **given)
    assert first["rounding"] == again["rounding"] > 0.0
    assert out.read_bytes() == before


@pytest.mark.parametrize("after", [1, 3, 5, 9, 12])
def test_stopped_and_resumed(after: int, folder: Path, books: list[Path], tmp_path: Path) -> None:
    model, out = load_model(folder, "cpu").double(), tmp_path / "out.memory"
    whole = tmp_path / "whole.memory"
    read_files(model, TOKENIZER, books, whole, piece_len=10, quiet=True)

    pieces = 0

    def count(*_: object) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == after:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titans_lm.train.progress.CountReport.update", count)
        with pytest.raises(StoppedReading, match="--resume goes on"):
            read_files(model, TOKENIZER, books, out, piece_len=10, quiet=True)
    stopped = load_memory(out, model)
    assert 0 < stopped.tokens[0] < 128
    read_files(model, TOKENIZER, books, out, piece_len=10, resume=True, quiet=True)
    finished, expected = load_memory(out, model), load_memory(whole, model)
    assert finished.sources == expected.sources
    assert_same_memory(finished, expected)
    again = read_files(model, TOKENIZER, books, out, piece_len=10, resume=True, quiet=True)
    assert again["tokens_read_now"] == 0


@pytest.mark.parametrize("named", [False, True])
def test_a_quiet_pipe_is_stopped_and_what_was_read_is_saved(folder: Path, tmp_path: Path, named: bool) -> None:
    """The first signal ends waiting for text that does not come."""
    model, out = load_model(folder, "cpu").double(), tmp_path / "out.memory"
    if named:
        os.mkfifo(tmp_path / "pipe")
        reading, writing = (os.open(tmp_path / "pipe", os.O_RDWR) for _ in range(2))
    else:
        reading, writing = os.pipe()
    name, data = str(tmp_path / "pipe") if named else "stdin", text(45)
    os.write(writing, data)
    with os.fdopen(reading, "rb") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", SimpleNamespace(buffer=pipe))
        stop = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
        stop.start()
        with pytest.raises(StoppedReading, match="stopped after 41 tokens, which are saved"):
            read_files(model, TOKENIZER, [name if named else "-"], out, piece_len=10, quiet=True)
        stop.join()
    os.close(writing)
    stopped = load_memory(out, model)
    [source] = stopped.sources[0]
    assert (source.name, source.tokens, source.complete) == (name, 40, False)
    reader = Reader(model, TOKENIZER, piece_len=10)
    reader.read(data, name=name, max_tokens=40)
    assert_same_memory(stopped, reader.memory)


def test_a_pipe_that_nobody_writes_to_is_stopped(folder: Path, books: list[Path], tmp_path: Path) -> None:
    model, pipe, out = load_model(folder, "cpu"), tmp_path / "pipe", tmp_path / "out.memory"
    os.mkfifo(pipe)
    stop = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    with pytest.raises(StoppedReading, match="which are saved"):
        read_files(model, TOKENIZER, [books[0], pipe], out, quiet=True)
    stop.join()
    assert load_memory(out, model).sources[0][0].name == str(books[0])


def test_nothing_on_standard_input_leaves_no_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = load_model(folder, "cpu"), tmp_path / "out.memory"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO()))
    with pytest.raises(ValueError, match="got nothing on standard input; expected some text"):
        read_files(model, TOKENIZER, ["-"], out, quiet=True)
    assert not out.exists()
    some, empty = tmp_path / "some.txt", tmp_path / "empty.txt"
    some.write_text("some text")
    empty.touch()
    for more in (empty, "-"):  # after another file it is nothing more, in one go and taken up again
        whole, cut = (tmp_path / f"{name}-{Path(more).name}" for name in ("whole", "cut"))
        read_files(model, TOKENIZER, [some, more], whole, quiet=True)
        read_files(model, TOKENIZER, [some], cut, quiet=True)
        done = read_files(model, TOKENIZER, [some, more], cut, resume=True, quiet=True)
        assert done["tokens"] == load_memory(whole, model).tokens[0]


def test_a_named_pipe_is_read_as_its_text(folder: Path, books: list[Path], tmp_path: Path) -> None:
    """The shell's <(…) is one. It is read once: resuming skips it if it was read to its end."""
    model, pipe, out = load_model(folder, "cpu").double(), tmp_path / "pipe", tmp_path / "out.memory"
    os.mkfifo(pipe)

    def fed(data: bytes) -> threading.Thread:
        feeding = threading.Thread(target=pipe.write_bytes, args=(data,))
        feeding.start()
        return feeding

    feeding = fed(text(45))
    done = read_files(model, TOKENIZER, [pipe, books[0]], out, piece_len=10, quiet=True)
    feeding.join()
    reader = Reader(model, TOKENIZER, piece_len=10)
    reader.read(text(45), name=str(pipe))
    reader.read(books[0])
    assert_same_memory(load_memory(out, model), reader.memory)
    assert done["sources"] == [str(pipe), str(books[0])]
    again = read_files(model, TOKENIZER, [pipe, *books[:2]], out, piece_len=10, resume=True, quiet=True)
    reader.read(books[1])
    assert_same_memory(load_memory(out, model), reader.memory)
    assert again["tokens"] == reader.tokens
    feeding = fed(b"")
    with pytest.raises(ValueError, match=f"got nothing on {pipe}; expected some text"):
        read_files(model, TOKENIZER, [pipe], tmp_path / "none.memory", quiet=True)
    feeding.join()


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_read_or_resumed_is_named(folder: Path, books: list[Path], tmp_path: Path) -> None:
    model, out = load_model(folder, "cpu"), tmp_path / "out.memory"
    read_files(model, TOKENIZER, books[:2], out, quiet=True)
    before, empty = out.read_bytes(), tmp_path / "empty.txt"
    empty.touch()
    cases = (
        ({"files": books, "resume": False}, "which exists; resume"),
        ({"files": books[1:], "resume": True}, "same files in the same order"),
        ({"files": [tmp_path / "none"], "resume": True}, "which is not there"),
        ({"files": [tmp_path], "resume": True}, "which is a folder; expected a file to read"),
        ({"files": [], "resume": True}, "got no files"),
        ({"files": [empty], "resume": True}, "empty.txt', in which there is nothing; expected text"),
        ({"files": books, "resume": True, "save_every": 0}, "save_every=0"),
        ({"files": books, "resume": True, "precision": "int8"}, "int8"),
        ({"files": books, "resume": True, "onto": out}, "to read onto and to write to; expected two names"),
    )
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            read_files(model, TOKENIZER, out=out, quiet=True, **settings)
    books[0].write_bytes(b"changed" + books[0].read_bytes())
    with pytest.raises(ValueError, match="has changed since"):
        read_files(model, TOKENIZER, books, out, resume=True, quiet=True)
    assert out.read_bytes() == before


def test_read_then_write_on_is_never_having_saved(folder: Path, books: list[Path], tmp_path: Path) -> None:
    """In a process of its own, as a user would; greedy, so that every token must be the same."""
    model, out = load_model(folder, "cpu"), tmp_path / "book.memory"
    never_saved = generate_text(
        model, TOKENIZER, "What", max_new_tokens=20, temperature=0.0, memory=read_all(model, books).memory
    )
    titans(tmp_path, "read", *books, "--model", folder, "--out", out, "--quiet")
    written = tmp_path / "written.json"
    arguments = ("--prompt", "What", "--max-new-tokens", 20, "--temperature", 0, "--json", written)
    titans(tmp_path, "generate", "--model", folder, "--memory", out, *arguments)
    found = json.loads(written.read_text())
    assert found["text"] == never_saved.text
    assert (found["tokens"], found["prompt_tokens"]) == (20, 4)


def test_an_answer_stays_in_its_memory_and_disturbs_no_other(folder: Path) -> None:
    model = load_model(folder, "cpu").double()
    reader = Reader(model, TOKENIZER)
    reader.read(b"Nothing is lost.")
    memory = reader.memory
    first = generate_text(model, TOKENIZER, "", max_new_tokens=5, temperature=0.0, memory=memory)
    assert first.prompt_tokens == 0, "it goes on where the text stops"
    again = generate_text(model, TOKENIZER, "", max_new_tokens=5, temperature=0.0, memory=memory)
    assert again.text == first.text
    longer = generate_text(model, TOKENIZER, "", max_new_tokens=9, temperature=0.0, memory=memory)
    assert first.memory is not None
    rest = generate_text(model, TOKENIZER, "", max_new_tokens=4, temperature=0.0, memory=first.memory)
    assert rest.memory is not None
    assert longer.memory is not None
    assert_same_memory(rest.memory, longer.memory, 1e-9)


@pytest.mark.slow
def test_killed_while_reading_nothing_is_corrupt_and_nothing_saved_is_lost(
    folder: Path, books: list[Path], tmp_path: Path
) -> None:
    """kill −9 at random moments until it is done; then the memory is that of an undisturbed run, bit for bit."""
    model, out = load_model(folder, "cpu"), tmp_path / "out.memory"
    for book in books:
        book.write_bytes(book.read_bytes() * 130)
    command = ["read", *books, "--model", folder, "--out", out, "--resume"]
    command += ["--save-every", 500, "--piece-len", 100, "--device", "cpu"]
    luck, saved, kills = random.Random(0), 0, 0
    for _ in range(40):
        reading = start_titans(beside(tmp_path), *command)
        process = reading.process
        deadline = time.monotonic() + (120 if kills >= 4 else luck.uniform(0.2, 1.5))
        known = out.stat().st_mtime_ns if out.exists() else 0
        while process.is_alive() and (out.stat().st_mtime_ns if out.exists() else 0) == known:
            time.sleep(0.01)  # until it has saved once more: each life is to get somewhere
        process.join(max(deadline - time.monotonic(), 0.0))
        process.kill()
        process.join()
        tokens = load_memory(out, model).tokens[0]
        assert tokens >= saved
        saved = tokens
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, reading.log.read_text()
        kills += 1
    assert kills >= 4
    whole = tmp_path / "whole.memory"
    titans(
        tmp_path, "read", *books, "--model", folder, "--out", whole, "--piece-len", 100, "--device", "cpu", "--quiet"
    )
    expected = load_memory(whole, model)
    assert load_memory(out, model).sources == expected.sources
    assert_same_memory(load_memory(out, model), expected, 0.0)
    whole.unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"out.memory", *(book.name for book in books)}


def test_memory_files_are_shown_compared_and_verified(
    folder: Path, books: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(folder, "cpu")
    for name, files in (("a", books[:1]), ("b", books[1:])):
        read_files(model, TOKENIZER, files, tmp_path / name, quiet=True)
    main(["memory", "show", str(tmp_path / "a")])
    shown = capsys.readouterr().out
    assert "tokens: 41" in shown
    assert f"\n  {books[0]}\n" in shown
    read_files(model, TOKENIZER, books[:1], tmp_path / "twice", onto=tmp_path / "a", quiet=True)
    main(["memory", "show", str(tmp_path / "twice")])
    shown = capsys.readouterr().out
    assert f"\n  {books[0]}\n" in shown
    assert f"\n  {books[0]} (2)\n" in shown
    main(["memory", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "diff.json")])
    assert json.loads((tmp_path / "diff.json").read_text())["equal"] is False
    main(["memory", "verify", str(tmp_path / "a"), "--model", str(folder)])
    assert "whole: yes" in capsys.readouterr().out
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(SystemExit) as stop:
        main(["memory", "verify", str(tmp_path / "a")])
    assert stop.value.code == 2
    assert "damaged or not whole" in capsys.readouterr().err
