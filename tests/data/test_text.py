import os
import sysconfig
from pathlib import Path

import pytest

from titans_lm.data.text import Document, chance, check_apart, load_corpus, read_documents, split_documents


@pytest.fixture
def folder(tmp_path):
    """A folder with texts, something binary, something empty, something hidden, and links that lead around."""
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_bytes(b"second")
    (root / "a.md").write_bytes(b"first")
    (root / "deep" / "er" / "c").write_bytes(b"\xff\xfe is no UTF-8")
    (root / "image.png").write_bytes(b"\x89PNG\x00\x00")
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden").write_bytes(b"hidden")
    (root / ".git" / "config").write_bytes(b"hidden")
    (root / "deep" / "around").symlink_to(root, target_is_directory=True)
    (root / "latest").symlink_to(root / "b.txt")
    return root


def test_a_folder_is_read_in_order_and_says_what_it_skipped(folder):
    documents, skipped = read_documents(folder)
    assert [(d.name, d.data) for d in documents] == [
        ("a.md", b"first"),
        ("b.txt", b"second"),
        ("deep/er/c", b"\xff\xfe is no UTF-8"),
    ]
    assert skipped == ["empty.txt: empty", "image.png: not text (it holds a zero byte)"]


def test_a_file_that_is_named_is_read_whatever_it_holds(folder):
    documents, skipped = read_documents(folder / "image.png")
    assert [d.data for d in documents] == [b"\x89PNG\x00\x00"]
    assert skipped == []


@pytest.mark.parametrize("make", ["file", "folder"])
def test_text_that_is_empty_is_an_error(tmp_path, make):
    empty = tmp_path / "empty"
    empty.write_bytes(b"") if make == "file" else empty.mkdir()
    with pytest.raises(ValueError, match=r"got no text in .*empty"):
        read_documents(empty)


def test_a_source_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist; expected a file, a folder or the word stdlib"):
        read_documents(tmp_path / "nothing")


def test_nothing_but_unreadable_files_is_an_error_that_names_one(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"1 files skipped, the first: x\.bin: not text"):
        read_documents(tmp_path)


def test_the_standard_library_is_real_text_everywhere():
    documents, _ = read_documents("stdlib")
    names = [d.name for d in documents]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert sum(len(d.data) for d in documents) > 3_000_000
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"site-packages", "test", "tests", "__pycache__"}
    source = Path(sysconfig.get_paths()["stdlib"], "os.py").read_bytes()
    assert next(d.data for d in documents if d.name == "os.py") == source


def documents_named(names):
    return [Document(name, name.encode()) for name in names]


def test_whole_documents_are_held_out_by_their_names():
    names = [f"{i}.txt" for i in range(400)]
    train, held, split = split_documents(documents_named(names), 0.1)
    assert 20 <= len(held) <= 60
    assert held == sorted(held, key=lambda document: chance(document.name)), "its first few are a fair sample"
    assert {d.name for d in held} == {name for name in names if chance(name) < 0.1}
    assert sorted(d.name for d in train + held) == sorted(names)
    assert split == f"{len(held)} of 400 documents held out, by a hash of their names"
    again, held_again, _ = split_documents(documents_named(reversed(names)), 0.1)
    assert held_again == held
    assert set(again) == set(train)


def test_a_new_document_moves_no_other():
    names = [f"{i}.txt" for i in range(200)]
    _, held, _ = split_documents(documents_named(names), 0.2)
    _, more, _ = split_documents(documents_named([*names, "new.txt"]), 0.2)
    assert {d.name for d in more} - {"new.txt"} == {d.name for d in held}


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_each_part_gets_a_document_at_least(held_out):
    train, held, _ = split_documents(documents_named(["a", "b", "c"]), held_out)
    assert len(train) >= 1
    assert len(held) >= 1
    assert len(train) + len(held) == 3


def test_one_document_is_cut_near_its_end_after_a_line(tmp_path):
    data = b"".join(b"line %d\n" % i for i in range(1000))
    path = tmp_path / "book.txt"
    path.write_bytes(data)
    corpus = load_corpus(path, held_out=0.05)
    (train,), (held,) = corpus.train, corpus.held_out
    assert train.data + held.data == data
    assert train.data.endswith(b"\n")
    assert 0.04 < len(held.data) / len(data) <= 0.05
    assert corpus.split == f"one document: bytes 0 to {len(train.data)} to train on, the rest held out"


def test_a_line_that_ends_far_away_moves_no_cut():
    _, (held,), _ = split_documents([Document("x", b"a" * 9000 + b"\n" + b"b" * 999)], 0.5)
    assert len(held.data) == 5000


@pytest.mark.parametrize("data", [b"ab", b"\xff\xff\xff", b"\n\n"])
def test_the_shortest_documents_split_too(data):
    (train,), (held,), _ = split_documents([Document("x", data)], 0.05)
    assert train.data + held.data == data
    assert train.data
    assert held.data


@pytest.mark.parametrize("held_out", [0.05, 0.0501, 0.0502, 0.0503])
def test_one_document_is_cut_between_characters(tmp_path, held_out):
    path, text = tmp_path / "one.txt", "語é" * 4003
    path.write_text(text)
    corpus = load_corpus(path, held_out=held_out)
    assert corpus.train[0].data.decode() + corpus.held_out[0].data.decode() == text


def test_a_single_byte_cannot_be_split():
    with pytest.raises(ValueError, match="got 1 byte in 'x'"):
        split_documents([Document("x", b"a")])


@pytest.mark.parametrize("held_out", [0.0, 1.0, -1.0])
def test_a_share_outside_zero_and_one_is_an_error(held_out):
    with pytest.raises(ValueError, match="expected a share of the text between 0 and 1"):
        split_documents(documents_named("ab"), held_out)


def test_held_out_text_can_come_from_elsewhere(folder, tmp_path):
    other = tmp_path / "valid.txt"
    other.write_bytes(b"unseen")
    corpus = load_corpus(folder, valid=other)
    assert len(corpus.train) == 3
    assert [d.data for d in corpus.held_out] == [b"unseen"]
    assert corpus.describe() == {
        "train_documents": 3,
        "train_bytes": 11 + len(b"\xff\xfe is no UTF-8"),
        "held_out_documents": 1,
        "held_out_bytes": 6,
        "skipped_files": 2,
        "split": f"held out: {other}",
    }


def test_a_name_that_is_not_utf8_does_not_stop_the_walk(tmp_path):
    for name in (b"odd-\xff.txt", b"plain.txt"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(b"text")
    train, held, _ = split_documents(read_documents(tmp_path)[0], 0.5)
    assert len(train) + len(held) == 2


def test_a_large_file_that_is_text_is_read_to_its_end(tmp_path):
    data = bytes(range(1, 256)) * 200
    (tmp_path / "text").write_bytes(data)
    (tmp_path / "late zero").write_bytes(data + b"\0")
    assert {d.name: len(d.data) for d in read_documents(tmp_path)[0]} == {"text": 51_000, "late zero": 51_001}


def test_a_file_that_cannot_be_opened_is_skipped(tmp_path, monkeypatch):
    for name in ("closed.txt", "open.txt"):
        (tmp_path / name).write_bytes(b"text")
    read = Path.open

    def refuse(path, *args):
        if path.name == "closed.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args)

    monkeypatch.setattr(Path, "open", refuse)
    documents, skipped = read_documents(tmp_path)
    assert [d.name for d in documents] == ["open.txt"]
    assert skipped == ["closed.txt: Permission denied"]


def test_a_folder_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("text")
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    documents, skipped = read_documents(tmp_path)
    assert [document.name for document in documents] == ["open/x.txt"]
    assert [line.partition(":")[0] for line in skipped] == ["shut"]


def test_words_that_are_no_path_are_apart_from_all_but_themselves(tmp_path):
    others = (tmp_path / "a", tmp_path / "b"), ("stdlib", pytest.__file__)
    for one, other in (("stdlib", "."), (".", "hf:owner/name"), *others):
        check_apart(one, other)
    library = (("stdlib", "stdlib"), ("stdlib", os.__file__), (Path(os.__file__).parent, "stdlib"))
    for one, other in (*library, ("hf:owner/name", "hf:owner/name"), (tmp_path, tmp_path / "b")):
        with pytest.raises(ValueError, match="one in the other; expected a text that is not trained on"):
            check_apart(one, other)
