"""Shipped models by name, and titans ask: from files to an answer, from a memory to another, and one line otherwise."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import titans_lm
from cli_cases import titans
from shipped_cases import ship
from titans_lm import ask
from titans_lm.ask import answer, as_asked
from titans_lm.data.tasks.vocabulary import as_taught, word_tokenizer
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.serve.chat import render
from titans_lm.serve.schema import Message
from titans_lm.streaming import Reader, save_memory
from titans_lm.streaming.read import StoppedReading
from titans_lm.train import shipped
from titans_lm.train.run import load_model, resolve_model

QUESTION = "Where is Mary?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ship(tmp_path_factory.mktemp("weights"))


@pytest.fixture(autouse=True)
def _shipped(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", weights)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("It was late.\nMary went to the garden.\nNobody knew.\n")
    return path


def test_a_shipped_model_is_taken_wherever_a_folder_is(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = titans_lm.pretrained("facts")
    assert resolve_model("pretrained:facts") == weights / "facts" == resolve_model(Path("pretrained:facts"))
    assert not model.training
    assert tokenizer.get_vocab() == word_tokenizer().get_vocab()
    code, out, _ = titans(capsys, "info", "pretrained:needles", "--json", weights / "info.json")
    assert (code, json.loads((weights / "info.json").read_text())["architecture"]) == (0, "mac")
    code, out, _ = titans(
        capsys, "generate", "pretrained:facts", "--prompt", "Mary", "--max-new-tokens", 3, "--seed", 0
    )
    assert (code, bool(out)) == (0, True)


def test_a_file_is_read_and_asked_and_its_memory_asked_again(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = titans_lm.pretrained("facts")
    reader = Reader(model, tokenizer)
    reader.read(notes)
    expected = answer(model, tokenizer, QUESTION, reader.memory).text.strip()
    kept, told = tmp_path / "notes.memory", tmp_path / "told.json"
    code, out, _ = titans(capsys, "ask", notes, QUESTION, "--out", kept, "--json", told)
    assert (code, out.splitlines()[-1]) == (0, expected)
    assert f"memory of {kept.stat().st_size:,} bytes" in out
    assert json.loads(told.read_text())["sources"] == [str(notes)]
    assert titans(capsys, "ask", QUESTION, "--memory", kept) == (0, f"{expected}\n", "")
    short = answer(model, tokenizer, QUESTION, reader.memory, max_new_tokens=1).text.strip()
    assert titans(capsys, "ask", QUESTION, "--memory", kept, "--max-new-tokens", 1) == (0, f"{short}\n", "")
    assert short != expected
    assert titans(capsys, "ask", notes, QUESTION, "--memory", kept, "--quiet", "--json", told)[0] == 0
    assert json.loads(told.read_text())["sources"] == [str(notes), str(notes)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.memory", "notes.txt", "told.json"]


def test_an_answer_ends_where_its_model_ends_it(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = titans_lm.pretrained("facts")
    reader = Reader(model, tokenizer)
    reader.read(notes)
    free = answer(model, tokenizer, QUESTION, reader.memory, max_new_tokens=8)
    first = reader.fork()
    first.read(as_asked(tokenizer, QUESTION), new_document=False)
    monkeypatch.setattr(model.generation_config, "eos_token_id", int(first.next_logits().argmax()))
    ended = answer(model, tokenizer, QUESTION, reader.memory, max_new_tokens=8)
    assert ended.tokens == 1 < free.tokens


def test_a_question_is_written_as_the_model_was_taught() -> None:
    assert as_asked(word_tokenizer(), QUESTION) == f"\n{QUESTION} Answer:"
    assert as_asked(byte_tokenizer(), QUESTION) == QUESTION


@pytest.mark.parametrize(
    ("asked", "taught"),
    [
        ("where is mary", QUESTION),
        (" WHERE  IS MARY ? ", QUESTION),
        ("where is Zoë?", "Where is Zoë?"),
        ("what is the SECRET number of Brave OTTER", "What is the secret number of brave otter?"),
        ("Who is mary?", None),
        ("where is the garden", None),
    ],
)
def test_a_question_may_be_typed_in_haste(asked: str, taught: str | None) -> None:
    assert as_taught(asked, word_tokenizer()) == (taught or asked)
    assert as_taught(asked, byte_tokenizer()) == asked
    assert as_asked(word_tokenizer(), asked) == as_asked(word_tokenizer(), taught or asked)
    message = Message(role="user", content=asked)
    assert render(word_tokenizer(), [message], 0, False) == as_asked(word_tokenizer(), asked)


def test_a_hasty_question_is_answered_as_a_careful_one(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    careful = titans(capsys, "ask", notes, QUESTION, "--quiet")
    assert careful[0] == 0
    assert titans(capsys, "ask", notes, "where is mary", "--quiet") == careful


def test_words_that_the_model_was_not_taught_are_named(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = titans(capsys, "ask", notes, "Where is Peter?")
    assert code == 0
    assert "warning: the model was not taught the words Peter" in out


def test_a_question_goes_to_the_model_that_was_taught_such(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = notes.with_name("told.json")
    number = "What is the secret number of brave otter?"
    for question, model in ((QUESTION, "pretrained:facts"), (number, "pretrained:needles")):
        assert titans(capsys, "ask", notes, question, "--json", told)[0] == 0
        assert json.loads(told.read_text())["model"] == model
        code, out, _ = titans(capsys, "ask", notes, question, "--model", "pretrained:facts")
        warned = 'warning: pretrained:facts was taught questions such as "Where is Mary?"' in out
        assert (code, warned) == (0, question == number)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "nothing": (["ask"], "got no question"),
    "no question": (["ask", "notes.txt"], "got 'notes.txt' in the place of the question"),
    "nothing to read": (["ask", QUESTION], "nothing to read; expected files before it, or --memory"),
    "a file that is not there": (["ask", "note.txt", QUESTION], "got the file 'note.txt', which is not there"),
    "an empty file": (["ask", "empty.txt", QUESTION], "got the file 'empty.txt', which is empty"),
    "a blank file": (["ask", "blank.txt", QUESTION], "got the file 'blank.txt', which is empty or blank"),
    "a picture": (["ask", "picture.png", QUESTION], "got the file 'picture.png', which is not text"),
    "nowhere to write": (["ask", "notes.txt", QUESTION, "--json", "."], "got --json ., which cannot be written"),
    "no memory file": (["ask", QUESTION, "--memory", "notes.txt"], "'notes.txt'"),
    "a memory that is there": (["ask", "notes.txt", QUESTION, "--out", "notes.txt"], "which exists; ask it with"),
    "a memory in a file": (["ask", "notes.txt", QUESTION, "--out", "notes.txt/x"], "which cannot be written"),
    "no word to answer": (["ask", "notes.txt", QUESTION, "--out", "m", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "a memory of nothing": (["ask", QUESTION, "--memory", "x", "--out", "y"], "expected files to keep"),
    "an unknown name": (["ask", "notes.txt", QUESTION, "--model", "pretrained:fact"], "did you mean 'facts'?"),
    "a question that no model was taught": (["ask", "notes.txt", "Who is Mary?"], "which no model of this package was"),
    "another unknown name": (["generate", "pretrained:x"], "expected one of books, facts, needles"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "told"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_in_one_line(
    args: list[str], told: str, notes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(notes.parent)
    Path("empty.txt").touch()
    Path("blank.txt").write_bytes(BOM_UTF8 + b" \n" * 9000)
    Path("picture.png").write_bytes(b"PNG\0\0")
    code, _, error = titans(capsys, *args)
    assert (code, error.count("\n")) == (2, 1)
    assert told in error
    assert not Path("m").exists()


def test_a_shipped_model_is_a_new_one_every_time(weights: Path) -> None:
    assert titans_lm.pretrained("facts")[0] is not titans_lm.pretrained("facts")[0]


def test_nothing_on_standard_input_leaves_nothing(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "empty").open("wb+") as empty:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=empty))
        code, _, error = titans(capsys, "ask", "-", QUESTION, "--out", tmp_path / "kept")
        assert (code, "got nothing on standard input; expected some text" in error) == (2, True)
        assert not (tmp_path / "kept").exists()
        assert titans(capsys, "ask", notes, QUESTION, "--out", tmp_path / "notes.memory")[0] == 0
        code, _, error = titans(capsys, "ask", "-", QUESTION, "--memory", tmp_path / "notes.memory")
    assert (code, "got nothing on standard input; expected some text" in error) == (2, True), "whatever it knew before"


def test_a_memory_of_another_model_is_refused(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = notes.with_name("notes.memory")
    assert titans(capsys, "ask", notes, QUESTION, "--out", kept)[0] == 0
    code, _, error = titans(capsys, "ask", QUESTION, "--memory", kept, "--model", "pretrained:needles")
    assert (code, error.count("\n")) == (2, 1)
    assert "of another model" in error


@pytest.mark.usefixtures("unchecked")
def test_a_wheel_without_weights_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got pretrained:None, which is no model of this package"):
        titans_lm.pretrained(None)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="a titans-lm that came without weights"):
        titans_lm.pretrained("facts")


def test_transformers_loads_one_by_its_folder(weights: Path) -> None:
    """Once the package is imported: its folder needs no code beside it."""
    folder = weights / "facts"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Mary").input_ids == word_tokenizer()("Mary").input_ids
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == load_model(folder, "cpu").config.vocab_size


def test_a_question_that_is_broken_off_keeps_nothing(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise StoppedReading("stopped; the same command with --resume goes on")

    monkeypatch.setattr(ask, "read_files", stopped)
    code, _, error = titans(capsys, "ask", notes, QUESTION, "--out", tmp_path / "kept")
    assert (code, error.count("\n"), "--resume" in error, "titans read" in error) == (130, 1, False, True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_memory_of_half_a_text_is_asked_with_a_warning(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = titans_lm.pretrained("facts")
    reader = Reader(model, tokenizer)
    reader.read(notes, max_tokens=10)
    save_memory(reader.memory, tmp_path / "half", model)
    assert "notes.txt was read only in part" in titans(capsys, "ask", QUESTION, "--memory", tmp_path / "half")[1]


@pytest.mark.usefixtures("unchecked")
def test_a_question_after_a_text_keeps_the_mark_that_begins_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's <bos> begins every turn: the reader writes the first one at the start of a text alone."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.content }}{% endfor %}<bos>"
    monkeypatch.setattr(ask, "generate_text", lambda _, __, asked, **___: asked)
    for opened, first in ((False, ""), (True, "<bos>")):
        assert answer(None, tokenizer, QUESTION, SimpleNamespace(open=(opened,))) == f"{first}{QUESTION}<bos>"


def test_a_chat_template_that_refuses_is_told() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no questions, please') }}"
    with pytest.raises(ValueError, match="the model's chat template refuses these messages: no questions, please"):
        as_asked(tokenizer, QUESTION)
