"""Sums of what is read: the same for the same bytes, another for any other."""

import json
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import pytest

from titans_lm.data.contents import check_contents, contents_of, files_sum, text_sum
from titans_lm.data.prepared import tokenizer_fingerprint
from titans_lm.data.tasks.haystack import BYTES, WORDS
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tokenizer import byte_tokenizer, read_tokenizer


def by_hand(*named: tuple[str, bytes]) -> str:
    return blake2b(b"".join(b"%s\0%d\0%s" % (n.encode(), len(d), d) for n, d in named), digest_size=8).hexdigest()


def test_a_text_is_its_documents(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b" / "c.txt").write_bytes(b"two")
    (tmp_path / "picture").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_bytes(b"no")
    assert text_sum(tmp_path) == by_hand(("a.txt", b"one"), ("b/c.txt", b"two"))
    assert text_sum(tmp_path / "a.txt") == files_sum(tmp_path / "a.txt") == by_hand(("a.txt", b"one"))
    assert files_sum(tmp_path) == by_hand(("a.txt", b"one"), ("b/c.txt", b"two"), ("picture", b"\0\1"))
    before = text_sum(tmp_path)
    (tmp_path / "b" / "c.txt").write_bytes(b"twp")
    assert text_sum(tmp_path) != before, "as long, and another letter"
    (tmp_path / "b" / "c.txt").write_bytes(b"two")
    (tmp_path / "b" / "c.txt").rename(tmp_path / "b" / "d.txt")
    assert text_sum(tmp_path) != before, "another name"


def test_long_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans_lm.data.text.BLOCK", 3)
    (tmp_path / "a").write_bytes(b"seven!!")
    assert files_sum(tmp_path / "a") == by_hand(("a", b"seven!!"))


def test_of_prepared_tokens_the_index_counts(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps({"splits": {"train": [{"sum": "a"}]}}))
    (tmp_path / "train-00000.bin").write_bytes(b"\0\0")
    before = text_sum(tmp_path)
    (tmp_path / "train-00000.bin").write_bytes(b"\0\1")
    assert text_sum(tmp_path) == before
    (tmp_path / "tokens.json").write_text(json.dumps({"splits": {"train": [{"sum": "b"}]}}))
    assert text_sum(tmp_path) != before


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere', which does not exist; expected a file or a folder"):
        files_sum(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="which does not exist"):
        text_sum(tmp_path / "nowhere")


def test_tasks_name_texts_questions_and_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A book.")
    (tmp_path / "questions").write_text("1 A fact.")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = str(tmp_path / "tokenizer")
    tasks = [
        NeedleSettings(books=tmp_path / "book.txt", tokenizer=WORDS),
        NeedleSettings(tokenizer=BYTES),
        SimpleNamespace(source=tmp_path / "questions", tokenizer=folder),
    ]
    found = contents_of(tasks)
    assert found == {
        str(tmp_path / "book.txt"): by_hand(("book.txt", b"A book.")),
        str(tmp_path / "questions"): by_hand(("questions", b"1 A fact.")),
        folder: tokenizer_fingerprint(read_tokenizer(folder)),
    }
    tokenizer.add_tokens(["memory"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert contents_of(tasks) != found
    assert contents_of([NeedleSettings()]) == {}


def test_what_was_noted_is_compared(tmp_path: Path) -> None:
    check_contents(tmp_path, "a run", None, {"a": "1"})
    check_contents(tmp_path, "a run", {"a": "1", "b": "2"}, {"a": "1", "c": "3"})
    said = r"holds a run that was begun when a, b held something else; give another --out, or bring back what it was"
    with pytest.raises(ValueError, match=said):
        check_contents(tmp_path, "a run", {"a": "1", "b": "2", "c": "3"}, {"a": "2", "b": "3", "c": "3"})
