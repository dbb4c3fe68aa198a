"""Stopped anywhere, preparing goes on; what has changed, is damaged or does not belong is refused, and said."""

import dataclasses
import gzip
import json
import os
import random
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cli_cases import titans
from forks import start_titans
from prepare.prepare_cases import contents, prepared, settings, write_rows, write_texts
from titans_lm.data.prepared import FORMAT, INDEX, STARTED, TokenFolder
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.prepare import run as running
from titans_lm.prepare.run import prepare
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.prepare.tokenise import Encoder
from titans_lm.train.language import language_data
from titans_lm.train.settings import LanguageSettings

SMALL_SHARDS = {"shard_tokens": 600}


@pytest.mark.parametrize(("stop_after", "tokenizer"), [(0, {}), (1, {}), (12, {}), (5, {"train_bpe": 280})])
def test_stopped_and_called_again_it_gives_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int, tokenizer: dict
) -> None:
    write_texts(tmp_path / "texts", 60)
    more = {**SMALL_SHARDS, **tokenizer}
    prepared(tmp_path / "texts", tmp_path / "whole", **more)
    monkeypatch.setattr(running, "MOST_AT_ONCE", 4)
    calls, encode = [], Encoder.__call__

    def counted(self, documents):
        calls.append(len(documents))
        if len(calls) == stop_after + 1:
            raise KeyboardInterrupt
        return encode(self, documents)

    monkeypatch.setattr(Encoder, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings(tmp_path / "texts", tmp_path / "out", **more))
    assert not list((tmp_path / "out").glob(".unfinished*")), "nothing half-written stays"
    calls = [0] * 100
    prepare(settings(tmp_path / "texts", tmp_path / "out", **more))
    whole, again = contents(tmp_path / "whole"), contents(tmp_path / "out")
    assert whole == again
    encoded = sum(calls[100:])
    assert encoded == 60 if stop_after == 0 else encoded <= 60
    if stop_after == 12:
        assert encoded < 40, "what was finished is not done again"


@pytest.mark.slow
def test_killed_at_random_it_comes_to_the_same_end(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 3000, 60)
    more = {"shard_tokens": 20_000}
    prepared(tmp_path / "texts", tmp_path / "whole", **more)
    command = ["prepare", str(tmp_path / "texts"), "--out", str(tmp_path / "out")]
    command += ["--held-out", "0.3", "--shard-tokens", "20000", "--quiet"]
    rng, kills = random.Random(0), 0
    for _ in range(20):
        preparing = start_titans(tmp_path / "streams", *command)
        began = time.monotonic()
        while preparing.process.is_alive() and not (tmp_path / "out" / running.STARTED).exists():
            assert time.monotonic() - began < 120
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.15))
        if preparing.process.is_alive():
            preparing.process.kill()
            kills += 1
        if preparing.ended() == 0 and kills >= 4:
            break
    assert start_titans(tmp_path / "streams", *command).ended() == 0
    assert kills
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk_costs_nothing_that_was_finished(tmp_path: Path) -> None:
    """The size of a file is limited here, which a write notices as it does a full disk."""
    write_texts(tmp_path / "texts", 60)
    prepared(tmp_path / "texts", tmp_path / "whole", **SMALL_SHARDS)
    shutil.copytree(tmp_path / "texts", tmp_path / "more")
    (tmp_path / "more" / "030-long.txt").write_bytes(b"long " * 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, hard))
    try:
        with pytest.raises(OSError, match="finished shards are kept: free space, and run the same command") as caught:
            prepare(settings(tmp_path / "more", tmp_path / "out", **SMALL_SHARDS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ".bin" in str(caught.value.filename)
    assert not list((tmp_path / "out").glob(".unfinished*"))
    kept = sorted((tmp_path / "out").glob("*.bin"))
    assert kept
    prepare(settings(tmp_path / "more", tmp_path / "out", **SMALL_SHARDS))
    prepared(tmp_path / "more", tmp_path / "once", **SMALL_SHARDS)
    assert contents(tmp_path / "out") == contents(tmp_path / "once")


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    prepared(tmp_path / "texts", tmp_path / "out")
    before = contents(tmp_path / "out")
    assert prepare(settings(tmp_path / "texts", tmp_path / "out"))["was_there"]
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("finished", [True, False])
def test_nothing_is_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    write_texts(texts)
    if finished:
        prepare(settings(texts, out))
    else:
        monkeypatch.setattr(running._Folder, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(texts, out, shard_tokens=2**26))
        monkeypatch.undo()
        with pytest.raises(ValueError, match="which titans prepare has not finished; give that command again"):
            language_data(LanguageSettings(data=str(out)))
    before = contents(out)
    for more, told in (
        ({"train_bpe": 270}, "tokens of two tokenizers do not mix"),
        ({"tokenizer": "gpt2"}, "tokens of two tokenizers do not mix"),
        ({"held_out": 0.2}, "was begun with held_out=0.3"),
        ({"shard_tokens": 99}, "was begun with shard_tokens"),
    ):
        with pytest.raises(ValueError, match=told):
            prepare(settings(texts, out, **more))
    (texts / "000.txt").write_text("another text")
    with pytest.raises(ValueError, match=r"the text of .* has changed since it was begun"):
        prepare(settings(texts, out))
    assert contents(out) == before


def test_a_tokenizer_that_was_swapped_is_noticed(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    prepared(tmp_path / "texts", tmp_path / "other", train_bpe=270)
    folder = prepared(tmp_path / "texts", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "tokenizer")
    for gone in (folder.tokenizer, lambda: prepared(tmp_path / "texts", tmp_path / "out")):
        with pytest.raises(ValueError, match="tokenizer is missing; prepare the folder anew"):
            gone()
    shutil.copytree(tmp_path / "other" / "tokenizer", tmp_path / "out" / "tokenizer")
    with pytest.raises(ValueError, match="holds another tokeniser"):
        folder.tokenizer()
    config = tmp_path / "out" / "tokenizer" / "tokenizer_config.json"
    before = config.read_bytes()
    for other in ("null", "[]"):
        config.write_text(other)
        with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded"):
            folder.tokenizer()
    config.write_bytes(before)
    (tmp_path / "out" / INDEX).rename(tmp_path / "out" / STARTED)  # as if it were not finished
    with pytest.raises(ValueError, match="holds another tokeniser"):
        prepared(tmp_path / "texts", tmp_path / "out")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda out: flip(out / "train-00001.bin"), "train-00001.bin was changed or damaged"),
        (lambda out: flip(out / "train-00000.npy"), "train-00000.npy was changed or damaged"),
        (lambda out: (out / "valid-00000.bin").unlink(), "valid-00000.bin is missing"),
        (lambda out: (out / "train-00000.npy").unlink(), "train-00000.npy is missing"),
        (lambda out: os.truncate(out / "train-00000.bin", 10), "train-00000.bin has 10 bytes; expected"),
        (lambda out: (out / "tokens.json").write_text("{"), "tokens.json cannot be read"),
        (lambda out: (out / "tokens.json").write_text('{"format": "other"}'), "tokens.json is of another kind"),
        (lambda out: (out / "tokens.json").write_text(f'{{"format": "{FORMAT}"}}'), "tokens.json is of another kind"),
    ],
)
def test_a_damaged_folder_names_the_file(tmp_path: Path, harm, told: str) -> None:
    write_texts(tmp_path / "texts")
    prepared(tmp_path / "texts", tmp_path / "out", **SMALL_SHARDS)
    harm(tmp_path / "out")
    with pytest.raises(ValueError, match=told):
        TokenFolder(tmp_path / "out")


def test_sums_can_be_left_unread_and_sizes_cannot(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    prepared(tmp_path / "texts", tmp_path / "out")
    flip(tmp_path / "out" / "train-00000.bin")
    TokenFolder(tmp_path / "out", verify=False)
    os.truncate(tmp_path / "out" / "train-00000.bin", 10)
    with pytest.raises(ValueError, match="has 10 bytes"):
        TokenFolder(tmp_path / "out", verify=False)


def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_texts(tmp_path / "texts", 4)
    write_rows(tmp_path / "rows", 2)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "one.jsonl").write_text('{"text": "fine"}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
    (tmp_path / "hollow.txt").write_text("")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.tex").write_text("do not touch")
    cases = [
        ([""], "got the source '', which does not exist"),
        (["nowhere"], "which does not exist; expected a file, a folder, hf:NAME"),
        ([tmp_path / "empty"], "got no files in"),
        ([tmp_path / "bad.jsonl"], "line 2 of .*bad.jsonl is not JSON"),
        ([tmp_path / "one.jsonl"], "got no document to train on; expected more documents, or --valid"),
        ([tmp_path / "hollow.txt"], "got no document to train on; .*; skipped 1, the first .*hollow.txt"),
        ([tmp_path / "deep.jsonl"], "line 1 of .*deep.jsonl is not JSON"),
        ([tmp_path / "torn.jsonl.gz"], "torn.jsonl.gz cannot be unpacked"),
        ([tmp_path / "texts", "--held-out", "1"], "got held_out=1 without valid, which leaves nothing to train on"),
        ([tmp_path / "rows", "--column", "story"], "row 1 of a.jsonl has no 'story' but"),
        ([tmp_path / "rows" / "c.parquet", "--column", "story"], "has no column 'story' but"),
        ([tmp_path / "texts", "--tokenizer", tmp_path / "texts"], "the tokenizer .* cannot be loaded"),
        ([tmp_path / "texts", "--train-bpe", "100000"], "and text that gives"),
        ([tmp_path / "texts", "--train-bpe", "100"], "expected at least 259"),
        ([tmp_path / "texts", "--train-bpe", "300", "--tokenizer", "gpt2"], "got both train_bpe=300 and tokenizer"),
        ([tmp_path / "texts", "--held-out", "0"], "got held_out=0 without valid, which leaves nothing to test on"),
    ]
    for number, (args, told) in enumerate(cases):
        code, out, err = titans(capsys, "prepare", *args, "--out", tmp_path / f"out{number}")
        assert (code, out) == (2, ""), err
        assert err.splitlines()[-1].startswith("titans: error: "), err
        assert "Traceback" not in err
        assert re.search(told, err), err
    code, _, err = titans(capsys, "prepare", tmp_path / "texts", "--out", tmp_path / "occupied")
    assert code == 2
    assert "holds 'thesis.tex' already" in err
    code, _, err = titans(capsys, "prepare", tmp_path / "texts")
    assert "got no source or no out" in err


def test_the_command_says_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_texts(tmp_path / "texts")
    args = [tmp_path / "texts", "--out", tmp_path / "out", "--train-bpe", "300", "--json", tmp_path / "told.json"]
    code, out, _ = titans(capsys, "prepare", *args)
    assert code == 0
    assert "documents to train on" in out
    assert "MB/s" in out
    assert (tmp_path / "told.json").is_file()
    code, out, _ = titans(capsys, "prepare", *args)
    assert code == 0
    assert "was there already" in out


@pytest.mark.parametrize(
    ("rows", "told", "mended"),
    [
        (['{"body": "one two"}'] * 40, "name the text with --column", {"column": "body"}),
        (['{"text": "one two three"}'] * 40 + ["{"], "JSON", None),
        (['{"text": "one two three"}'], "expected more documents, or --valid", None),
    ],
)
def test_a_source_that_will_not_do_leaves_nothing(tmp_path: Path, rows: list[str], told: str, mended: Any) -> None:
    source = tmp_path / "ROWS.JSONL"
    source.write_text("\n".join(rows))
    settings = PrepareSettings(source=str(source), out=tmp_path / "out", shard_tokens=64)
    with pytest.raises(ValueError, match=told):
        prepare(settings)
    assert not (tmp_path / "out").exists()
    if mended is None:
        source.write_text("\n".join(f'{{"text": "one two three {number}"}}' for number in range(40)))
    prepare(dataclasses.replace(settings, **(mended or {})))
    assert (tmp_path / "out" / INDEX).is_file()


def test_a_file_that_cannot_be_split_or_unpacked_leaves_nothing(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "one two"}\n' * 400)
    for name, data in (("one.txt", b"x"), ("cut.jsonl.gz", whole[:-20]), ("no.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=r"expected at least 2|cannot be"):
            prepare(PrepareSettings(source=str(tmp_path / name), out=tmp_path / "out"))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [['{"text": "one two three"}'] * 40, ['{"text": ""}'] * 40])
def test_a_tokenizer_of_somebody_else_is_left_where_it_is(tmp_path: Path, rows: list[str]) -> None:
    out = tmp_path / "out"
    byte_tokenizer().save_pretrained(out / "tokenizer")
    (out / "tokenizer" / "notes.txt").write_text("mine")
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    before = contents(out)
    settings = PrepareSettings(source=str(tmp_path / "rows.jsonl"), tokenizer=str(out / "tokenizer"), out=out)
    with pytest.raises(ValueError, match="which holds 'tokenizer' already; expected a new or empty one"):
        prepare(settings)
    assert contents(out) == before


def test_killed_before_its_tokenizer_had_its_name_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "texts", 40, 60)
    written = running.write_json

    def killed(path: Path, value: Any) -> None:
        written(path, value)
        if path.name == running.STARTED:
            raise KeyboardInterrupt

    monkeypatch.setattr(running, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "texts", tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer").exists()
    monkeypatch.undo()
    prepared(tmp_path / "texts", tmp_path / "out")
    prepared(tmp_path / "texts", tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shards_outlive_a_tokenizer_that_is_lost_and_others_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what a source holds makes its shards useless; a user's own files are nobody's."""
    rows = [f'{{"text": "one two three {number}"}}' for number in range(200)]
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    source.write_text("\n".join(rows))
    asked = PrepareSettings(source=str(source), out=out, shard_tokens=64)
    calls, encode = iter(range(10**6)), Encoder.__call__

    def stopped(self: Encoder, documents: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return encode(self, documents)

    monkeypatch.setattr(running, "AT_ONCE", 1024)
    monkeypatch.setattr(Encoder, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare(asked)
    shards = sorted(path.name for path in out.glob("train-*"))
    assert shards
    (out / "notes.txt").write_text("mine")
    (out / "tokenizer").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="tokenizer"):
        prepare(asked)
    assert sorted(path.name for path in out.glob("train-*")) == shards
    (tmp_path / "away").rename(out / "tokenizer")
    running._Folder(out, json.loads((out / STARTED).read_bytes()), 64).remove()
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
