"""Training on a token folder: what it predicts, what it measures, and when it refuses to go on."""

import dataclasses
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from prepare.prepare_cases import prepared, write_texts
from titans_lm.config import BackboneConfig
from titans_lm.data.batches import DocumentLanes
from titans_lm.data.prepared import TokenFolder
from titans_lm.data.text import text_below
from titans_lm.evaluate.documents import held_out_tokens
from titans_lm.train.language import train_language_model
from titans_lm.train.loop import Interrupted
from titans_lm.train.progress import ProgressReport
from titans_lm.train.settings import LanguageSettings

SMALL = BackboneConfig(
    architecture="lmm", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, memory_expansion=1,
    intermediate_size=32,
)  # fmt: skip


@pytest.fixture(params=["bytes", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> TokenFolder:
    write_texts(tmp_path / "texts")
    return prepared(tmp_path / "texts", tmp_path / "out", train_bpe=300 if request.param == "bpe" else 0)


def settings(folder: TokenFolder, **more: object) -> LanguageSettings:
    base = LanguageSettings(
        data=str(folder.path), out=folder.path.parent / "run", steps=4, warmup_steps=1, seq_len=24, batch_size=2,
        eval_bytes=500, save_every=2, model=SMALL,
    )  # fmt: skip
    return dataclasses.replace(base, **more)


@pytest.mark.parametrize("more", [{}, {"boundaries": "reset"}, {"stateful": True}], ids=["packed", "reset", "stateful"])
def test_a_model_comes_out_that_reads_its_own_ids(folder: TokenFolder, more: dict) -> None:
    result = train_language_model(settings(folder, **more))
    assert result["steps"] == 4
    assert 0 < result["held_out_bits_per_byte"] < 12
    assert result["data"]["tokenizer_fingerprint"] == folder.tokenizer_fingerprint
    model = AutoModelForCausalLM.from_pretrained(result["model"])
    tokenizer = AutoTokenizer.from_pretrained(result["model"])
    assert model.config.vocab_size == len(tokenizer) == folder.vocab_size
    text = "the memory learns é 🙂 <eos>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.config.bos_token_id == tokenizer.bos_token_id


class Stopping(ProgressReport):
    """Asks a run to stop after its second step."""

    def update(self, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_taken_up_again_it_is_the_run_that_was_never_stopped(folder: TokenFolder) -> None:
    whole = settings(folder, out=folder.path.parent / "whole")
    train_language_model(whole)
    part = settings(folder)
    with pytest.raises(Interrupted, match="stopped after step 2"):
        train_language_model(part, progress=Stopping(quiet=True))
    train_language_model(part, resume=True)
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if "loss" in line]
        for run in (whole.out, part.out)
    ]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


def test_a_run_does_not_go_on_with_other_tokens(folder: TokenFolder, tmp_path: Path) -> None:
    train_language_model(settings(folder, steps=2))
    write_texts(tmp_path / "others", 50)
    other = prepared(tmp_path / "others", tmp_path / "other", tokenizer=str(folder.path / "tokenizer"))
    with pytest.raises(ValueError, match="was trained on other data"):
        train_language_model(settings(folder, data=str(other.path)), resume=True)


def test_a_model_begins_on_tokens_of_its_own_tokenizer(tmp_path: Path) -> None:
    """As many ids are not enough."""
    folders = []
    for name in ("first", "second"):
        write_texts(tmp_path / name)
        (tmp_path / name / "more.txt").write_text(f"{name} of all the {name} words " * 50)
        folders.append(prepared(tmp_path / name, tmp_path / f"{name}-out", train_bpe=300))
    train_language_model(settings(folders[0], out=tmp_path / "run"))
    other = settings(folders[1], out=tmp_path / "more", init=tmp_path / "run")
    with pytest.raises(ValueError, match="and data in another tokenizer's ids"):
        train_language_model(other)
    assert not (tmp_path / "more").exists()
    with pytest.raises(ValueError, match="a run or a folder of tokens that titans made; expected text"):
        text_below(folders[0].path)


def test_a_model_to_begin_with_has_other_ids_than_the_data(folder: TokenFolder, tmp_path: Path) -> None:
    """Nobody gave a vocab_size, which is that of the model."""
    more = prepared(tmp_path / "texts", tmp_path / "other", train_bpe=320)
    train_language_model(settings(more, out=tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"a model over 320 ids, and data of \d+; expected data that was prepared with its"
    ):
        train_language_model(settings(folder, out=tmp_path / "more", init=tmp_path / "run", vocab_size=320))


def test_bits_are_per_byte_of_text(folder: TokenFolder) -> None:
    """What is held out stands for exactly so many bytes, and no character is torn."""
    tokenizer = folder.tokenizer()
    for most in (1, 50, 151, 700, 10**9):
        documents, size = held_out_tokens(folder.valid, tokenizer, most)
        text = "".join(tokenizer.decode(document[1:].tolist()) for document in documents)
        if tokenizer.vocab_size > 259:
            assert len(text.encode()) == size
        assert size == folder.valid.bytes if most > 10**6 else 0 < size < most + 12
        whole = [len(folder.valid[i]) - 1 for i in range(len(documents))]
        assert [len(document) for document in documents[:-1]] == whole[:-1], "the last alone is cut"
        assert all(document[0] == tokenizer.bos_token_id for document in documents)
        assert tokenizer.eos_token_id not in np.concatenate(documents)
    (first,), size = held_out_tokens(folder.valid, tokenizer, folder.valid.bytes_of(0))
    assert (len(first), size) == (whole[0], folder.valid.bytes_of(0)), "one that fits is whole, and the next not begun"


class OneDocument:
    """A prepared document of words that are apart by more spaces than their tokenizer gives back."""

    text = " Some   words   are   far   apart." * 50

    def __init__(self) -> None:
        parts = dict.fromkeys(self.text.lower().split())
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(["<s>", "</s>", *parts])}, "<s>")
        made = tokenizers.Tokenizer(model)
        made.normalizer = tokenizers.normalizers.Lowercase()
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
        self.ids = np.array([0, *self.tokenizer(self.text).input_ids, 1])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> np.ndarray:
        return self.ids

    def bytes_of(self, _: int) -> int:
        return len(self.text)


@pytest.mark.usefixtures("unchecked")
def test_bytes_are_those_of_the_text_where_a_tokenizer_gives_back_another() -> None:
    split: Any = OneDocument()
    [whole], size = held_out_tokens(split, split.tokenizer, 10**6)
    assert size == len(split.text)
    for most in (len(split.text) - 8, 400):
        [cut], kept = held_out_tokens(split, split.tokenizer, most)
        assert kept / (len(cut) - 1) == pytest.approx(size / (len(whole) - 1), rel=0.05)
        assert kept <= most + 12


def test_settings_that_do_not_go_together(folder: TokenFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give it to titans prepare"):
        train_language_model(settings(folder, valid=str(tmp_path / "texts")))
    with pytest.raises(ValueError, match="got boundaries='reset' for text"):
        train_language_model(settings(folder, data=str(tmp_path / "texts"), boundaries="reset"))
    with pytest.raises(ValueError, match="expected one of"):
        settings(folder, boundaries="mix")
    shard = folder.path / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="was changed or damaged"):
        train_language_model(settings(folder))


def test_two_processes_do_not_prepare_one_folder(tmp_path: Path, other_owner) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "out").mkdir()
    with other_owner(tmp_path / "out" / "in-use"), pytest.raises(ValueError, match="process 7 on the moon has in use"):
        prepared(tmp_path / "texts", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["in-use"]
    folder = prepared(tmp_path / "texts", tmp_path / "out")
    assert not (folder.path / "in-use").exists()


def test_tokens_beside_their_text_are_no_text(tmp_path: Path) -> None:
    write_texts(tmp_path)
    first = prepared(tmp_path, tmp_path / "tokens", shard_tokens=1000)
    again = prepared(tmp_path, tmp_path / "tokens", shard_tokens=1000)
    assert again.describe() == first.describe()


def test_lanes_of_a_folder_leave_its_tokens_on_the_disk(tmp_path: Path) -> None:
    """Each process that makes batches gets a copy of what makes them."""
    write_texts(tmp_path / "texts", 60)
    train = prepared(tmp_path / "texts", tmp_path / "out").train
    lanes = DocumentLanes(train, seq_len=16, batch_size=3)
    assert train.tokens > 1000
    assert len(pickle.dumps(lanes)) < train.tokens
    again, listed = pickle.loads(pickle.dumps(lanes)), DocumentLanes([*train], seq_len=16, batch_size=3)
    for step in range(40):
        for name, rows in lanes(step).items():
            assert torch.equal(rows, again(step)[name])
            assert torch.equal(rows, listed(step)[name])


def test_few_files_of_a_folder_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans_lm.data.prepared.MOST_OPEN", 3)
    write_texts(tmp_path / "texts", 60)
    train = prepared(tmp_path / "texts", tmp_path / "out", shard_tokens=200).train
    assert len(train.shards) > 10
    before = len(os.listdir("/proc/self/fd"))
    assert train.lengths.sum() == len(train.take(0, train.tokens)) == train.tokens
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 3
