"""Text comes back from its tokens, byte for byte, whatever it came from and however it was cut into shards."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from prepare.prepare_cases import prepared, settings, text, write_rows, write_texts
from titans_lm.data.prepared import INDEX, TokenFolder, is_token_folder, tokenizer_fingerprint
from titans_lm.data.text import STARTED, Document, chance, split_documents
from titans_lm.data.tokenizer import BOS, EOS, byte_tokenizer, count_ids, decode_bytes, encode_document
from titans_lm.prepare import tokenise
from titans_lm.prepare.run import prepare
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.prepare.tokenise import ANYWHERE, WORDS, Encoder, load_tokenizer, pieces, safe_cut, train_bpe


def texts_of(folder: TokenFolder) -> list[list[bytes]]:
    """The texts of both splits, read back from their tokens; each must begin and end as a document does."""
    tokenizer, found = folder.tokenizer(), []
    for split in (folder.train, folder.valid):
        found.append([])
        for document in split:
            assert (document[0], document[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
            found[-1].append(tokenizer.decode(document[1:-1].tolist()).encode())
    return found


def all_texts_of(folder: TokenFolder) -> list[bytes]:
    return [text for part in texts_of(folder) for text in part]


def split_by_name(texts: dict[str, bytes], share: float) -> list[list[bytes]]:
    held = [data for name, data in texts.items() if chance(name) < share]
    return [[data for data in texts.values() if data not in held], held]


@pytest.mark.parametrize("tokenizer", [{}, {"train_bpe": 300}])
@pytest.mark.parametrize("shard_tokens", [2**26, 500, 1])
def test_text_comes_back(tmp_path: Path, tokenizer: dict, shard_tokens: int) -> None:
    texts = write_texts(tmp_path / "texts")
    folder = prepared(tmp_path / "texts", tmp_path / "out", shard_tokens=shard_tokens, **tokenizer)
    expected = split_by_name(texts, 0.3)
    assert all(expected), "both splits hold something"
    assert texts_of(folder) == expected
    for split, wanted in zip((folder.train, folder.valid), expected, strict=True):
        assert split.bytes == sum(map(len, wanted))
        assert [split.bytes_of(i) for i in range(len(split))] == list(map(len, wanted))
    shards = len(folder.train.shards)
    assert shards == 1 if shard_tokens > 10_000 else shards > 3
    assert all(shard.documents for shard in folder.train.shards)


def test_bytes_are_kept_that_are_no_text(tmp_path: Path) -> None:
    for name, data in (("a/x", b"caf\xe9 \xff\xfe"), ("a/y", b"more"), ("b/z", b"other")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    folder = prepared(tmp_path / "a", tmp_path / "out", held_out=0.0, valid=str(tmp_path / "b"))
    assert [decode_bytes(document) for document in folder.train] == [b"caf\xe9 \xff\xfe", b"more"]
    assert folder.train[0].dtype == np.uint16


def test_a_tokenizer_of_text_is_given_text(tmp_path: Path) -> None:
    """What is not UTF-8 would become U+FFFD, other bytes than those that bits are counted by."""
    write_texts(tmp_path / "a")
    (tmp_path / "a" / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    asked = settings(tmp_path / "a", tmp_path / "out", train_bpe=260)
    assert prepare(asked)["skipped"] == 1
    told = json.loads((tmp_path / "out" / INDEX).read_text())
    assert told["skipped"] == ["latin.txt: not UTF-8 at byte 3"]
    alone = settings(tmp_path / "a" / "latin.txt", tmp_path / "other", train_bpe=260)
    with pytest.raises(
        ValueError, match=r"latin\.txt, not UTF-8 at byte 3; expected text in UTF-8, or --tokenizer bytes"
    ):
        prepare(alone)
    assert not (tmp_path / "other").exists()


def test_what_is_tested_on_is_not_trained_on(tmp_path: Path) -> None:
    write_texts(tmp_path / "a")
    for valid in (tmp_path / "a", tmp_path / "a" / "003.txt", tmp_path):
        with pytest.raises(ValueError, match="one in the other; expected a text that is not trained on, or none"):
            prepare(settings(tmp_path / "a", tmp_path / "out", valid=str(valid)))
    assert not (tmp_path / "out").exists()


def test_rows_are_documents(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    write_texts(tmp_path / "rows" / "z", 3)
    folder = prepared(tmp_path / "rows", tmp_path / "out")
    expected = [line.encode() for lines in rows.values() for line in lines]
    expected += [text(number).encode() for number in range(3)]
    assert sorted(all_texts_of(folder)) == sorted(expected)


def test_a_saved_data_set_and_one_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [text(number) for number in range(20)]
    saved = datasets.DatasetDict({"here": datasets.Dataset.from_dict({"story": rows})})
    saved.save_to_disk(tmp_path / "saved")
    asked = []

    def load(name, subset, *, split, streaming):
        asked.append((name, subset, split, streaming))
        return datasets.Dataset.from_dict({"story": rows}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = []
    for source, more in ((tmp_path / "saved", {}), ("hf:some/set", {"subset": "small"})):
        folder = prepared(source, tmp_path / f"out{len(found)}", column="story", split="here", **more)
        found.append(sorted(all_texts_of(folder)))
    assert found[0] == found[1] == sorted(row.encode() for row in rows)
    assert set(asked) == {("some/set", "small", "here", True)}


def test_a_data_set_that_breaks_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows():
        yield from ({"text": text(number)} for number in range(20))
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(ValueError, match=r"'some/set' cannot be read: the line is dead; the same command goes on"):
        prepared("hf:some/set", tmp_path / "out")


def test_one_document_is_cut_near_its_end(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"a line\n" * 100)
    folder = prepared(tmp_path / "one.txt", tmp_path / "out", held_out=0.2)
    (train,), (held,) = texts_of(folder)
    assert train + held == b"a line\n" * 100
    assert len(held) == 133, "at a line's end"


@pytest.mark.parametrize(("count", "share"), [(2, 1e-6), (3, 0.05), (3, 0.999999)])
def test_few_documents_give_each_split_one(tmp_path: Path, count: int, share: float) -> None:
    texts = write_texts(tmp_path / "texts", count)
    folder = prepared(tmp_path / "texts", tmp_path / "out", held_out=share, train_bpe=260)
    train, held, _ = split_documents([Document(*item) for item in texts.items()], share)
    assert texts_of(folder) == [
        [data for data in texts.values() if data in {document.data for document in part}] for part in (train, held)
    ]


def test_a_limit_and_other_text_to_test_on(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 8)
    write_texts(tmp_path / "other", 2)
    folder = prepared(tmp_path / "texts", tmp_path / "out", max_documents=3, valid=str(tmp_path / "other"))
    assert texts_of(folder) == [list(texts.values())[:3], list(texts.values())[:2]]


def test_what_could_not_be_read_is_counted(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "texts" / "picture").write_bytes(b"\0\1\2")
    (tmp_path / "texts" / "rows.jsonl").write_text('{"text": ""}\n{"text": 7}\n\n{"text": "fine"}\n')
    result = prepare(settings(tmp_path / "texts", tmp_path / "out"))
    assert result["skipped"] == 3
    folder = TokenFolder(tmp_path / "out")
    assert len(folder.index["skipped"]) == 3
    assert result["train_documents"] + result["held_out_documents"] == 41
    assert result["megabytes_per_second"] > 0
    assert result["peak_resident_bytes"] > 1e6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """A folder of several shards."""
    path = tmp_path_factory.mktemp("folder")
    write_texts(path / "texts")
    return prepared(path / "texts", path / "out", shard_tokens=1000)


def test_a_split_is_a_sequence_and_a_stretch(folder: TokenFolder) -> None:
    split = folder.train
    whole = np.concatenate(list(split))
    assert len(split.shards) > 2
    assert len(whole) == split.tokens == split.lengths.sum()
    assert [len(document) for document in split] == split.lengths.tolist()
    rng = np.random.default_rng(0)
    for start, stop in [(0, 0), (0, len(whole)), (5, 6), *np.sort(rng.integers(0, len(whole), (50, 2))).tolist()]:
        assert np.array_equal(split.take(start, stop), whole[start:stop])
    assert np.array_equal(split[-1], split[len(split) - 1])
    assert [len(document) for document in split[2:5]] == split.lengths[2:5].tolist()
    for index in (len(split), -len(split) - 1):
        with pytest.raises(IndexError, match="of"):
            split[index]
    with pytest.raises(IndexError, match="got tokens"):
        split.take(0, len(whole) + 1)
    again = pickle.loads(pickle.dumps(split))
    assert np.array_equal(again.take(0, again.tokens), whole)


def test_a_tokenizer_is_known_by_what_it_does(folder: TokenFolder, tmp_path: Path) -> None:
    assert folder.tokenizer_fingerprint == tokenizer_fingerprint(byte_tokenizer())
    assert is_token_folder(folder.path)
    assert not (folder.path / STARTED).exists()
    assert not is_token_folder(tmp_path)
    write_texts(tmp_path / "texts")
    bpe = prepared(tmp_path / "texts", tmp_path / "out", train_bpe=270)
    assert bpe.tokenizer_fingerprint != folder.tokenizer_fingerprint
    assert bpe.vocab_size == len(bpe.tokenizer()) == 270
    other = bpe.tokenizer()
    other.eos_token = other.bos_token
    assert tokenizer_fingerprint(other) != bpe.tokenizer_fingerprint, "documents end otherwise"
    from_folder = prepared(tmp_path / "texts", tmp_path / "again", tokenizer=str(tmp_path / "out" / "tokenizer"))
    assert from_folder.tokenizer_fingerprint == bpe.tokenizer_fingerprint
    assert [shard.sum for shard in from_folder.train.shards] == [shard.sum for shard in bpe.train.shards]


def test_documents_are_encoded_alike_alone_and_together(tmp_path: Path) -> None:
    from titans_lm.data.text import Document

    documents = [Document(str(number), text(number).encode()) for number in range(5)]
    write_texts(tmp_path / "texts")
    prepared(tmp_path / "texts", tmp_path / "out", train_bpe=300)
    encode = Encoder(load_tokenizer(str(tmp_path / "out" / "tokenizer")))
    together, alone = encode(documents), [encode([document])[0] for document in documents]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    assert max(map(len, together)) < max(len(document.data) for document in documents), "it has learned something"
    ids = Encoder(byte_tokenizer())(documents[:1])[0]
    assert np.array_equal(ids, encode_document(documents[0].data))
    assert (ids[0], ids[-1]) == (BOS, EOS)


@pytest.mark.parametrize("parts", [(50, 5000), (50, 0, 5000)])
def test_a_bpe_is_trained_on_the_first_bytes_of_the_text(parts: tuple[int, ...]) -> None:
    """Of a document that is longer its start counts, and none after it."""
    data = [b"ab " * parts[0] + b"xy " * parts[1], *(b"xy " * count for count in parts[2:])]
    texts = [Document(str(number), text) for number, text in enumerate(data)]
    learned = train_bpe(texts, PrepareSettings(train_bpe=260, bpe_bytes=150)).get_vocab()
    assert "ab" in learned
    assert "xy" not in learned


def test_ids_beyond_sixteen_bits_are_kept_whole() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    for numbers in (range(2**16), range(2**16 + 1), (0, 7, 70_000)):
        size = numbers[-1] + 1
        backend = Tokenizer(models.WordLevel({str(number): number for number in numbers}, "0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=str(size - 1))
        encode = Encoder(tokenizer)
        assert count_ids(tokenizer) == size
        assert encode([Document("x", f"7 {size - 1}".encode())])[0].tolist() == [7, size - 1, size - 1]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """A folder of a BPE's tokens."""
    path = tmp_path_factory.mktemp("words")
    write_texts(path / "texts")
    return prepared(path / "texts", path / "out", train_bpe=300)


PARTS = [
    "a", "b", "Z", "é", "記", "🙂", "1", "7", "²", "'s", "'ll", "'", "’", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\x1c",
    "\x85",
    "\u00a0", "\u2028", "\u3000", "\u0301", ",", "}", "<bos>", "<|end|>", "_", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_has_the_tokens_of_the_whole(
    words: TokenFolder, monkeypatch: pytest.MonkeyPatch, special: bool
) -> None:
    """Cut every few characters, with special tokens read out of text and not."""
    tokenizer: Any = words.tokenizer()
    tokenizer.split_special_tokens = not special
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    drawn = np.random.default_rng(0)
    documents = [Document("x", "".join(drawn.choice(PARTS, 400)).encode()) for _ in range(60)]
    monkeypatch.setattr(tokenise, "PIECE", 10**9)
    whole = Encoder(tokenizer)
    assert whole.cut is (WORDS if special else ANYWHERE)
    expected = whole(documents)
    monkeypatch.setattr(tokenise, "PIECE", 3)
    monkeypatch.setattr(tokenise, "AT_ONCE", 50)
    found = Encoder(tokenizer)(documents)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(list(pieces(documents[0].data.decode(), whole.cut))) > 20


def test_a_bare_tokenizer_is_told_what_it_lacks(words: TokenFolder, tmp_path: Path) -> None:
    shutil.copy(words.path / "tokenizer" / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match=r"name its token in a tokenizer_config\.json beside its"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert load_tokenizer(str(tmp_path)).eos_token_id == words.tokenizer().eos_token_id


def test_a_tokenizer_of_another_form_is_given_whole_texts(words: TokenFolder) -> None:
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    for change in ("prefix", "pattern", "normalizer", "token"):
        backend = words.tokenizer().backend_tokenizer
        if change == "prefix":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        elif change == "pattern":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        elif change == "normalizer":
            backend.normalizer = normalizers.NFC()
        else:
            backend.add_tokens([AddedToken("two words", normalized=False)])
        assert safe_cut(backend) is None
