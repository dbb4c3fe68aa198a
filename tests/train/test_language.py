import dataclasses
import json
import shutil
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from titans_lm.config import BackboneConfig
from titans_lm.data.text import load_corpus
from titans_lm.data.tokenizer import byte_tokenizer, encode_document
from titans_lm.evaluate.bits_per_byte import token_bits
from titans_lm.hf import TitansConfig, TitansForCausalLM
from titans_lm.prepare.run import prepare
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.train.language import train_language_model
from titans_lm.train.options import merge_settings, read_settings_file
from titans_lm.train.parallel import Distributed
from titans_lm.train.settings import LanguageSettings

PLACE = "PLACE"
SMALL = BackboneConfig(
    architecture="mac",
    hidden_size=16,
    num_attention_heads=2,
    num_hidden_layers=1,
    memory_expansion=1,
    intermediate_size=32,
    segment_len=16,
    window=16,
    num_persistent=2,
)


@pytest.fixture
def settings(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(6):
        (texts / f"{index}.txt").write_bytes(b"%d: all work and no play makes jack a dull boy.\n" % index * (index + 3))
    return LanguageSettings(
        data=str(texts),
        out=tmp_path / "run",
        steps=6,
        warmup_steps=1,
        seq_len=32,
        batch_size=2,
        eval_every=3,
        save_every=3,
        eval_bytes=300,
        held_out=0.2,
        model=SMALL,
    )


@pytest.mark.parametrize("stateful", [False, True])
def test_it_leaves_a_run_folder_that_says_everything(settings, stateful):
    settings = dataclasses.replace(settings, stateful=stateful)
    result = train_language_model(settings)
    run = settings.out
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "environment.json",
        "metrics.jsonl",
        "model",
        "settings.json",
    ]
    assert merge_settings(LanguageSettings(), read_settings_file(run / "settings.json")) == settings
    assert result["steps"] == 6
    assert result["parameters"] > 1000
    assert json.loads(json.dumps(result)) == result
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (256, 257, 258)
    assert AutoTokenizer.from_pretrained(run / "model")("a").input_ids == [97]

    held = [encode_document(d.data, eos=False) for d in load_corpus(settings.data, held_out=0.2).held_out]
    assert sum(len(document) - 1 for document in held) <= 300
    bits = np.concatenate(token_bits(model, held, piece_len=32, reset_every=None if stateful else 32))
    assert result["held_out_bits_per_byte"] == pytest.approx(float(bits.mean()), rel=1e-4)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in logged if "held_out_bits_per_byte" in r] == [3, 6]
    assert [r["step"] for r in logged if "loss" in r] == [1, 2, 3, 4, 5, 6]


def test_the_seed_decides_everything(settings, tmp_path):
    first = train_language_model(settings)
    again = train_language_model(dataclasses.replace(settings, out=tmp_path / "again"))
    other = train_language_model(dataclasses.replace(settings, out=tmp_path / "other", seed=1))
    assert first["loss"] == again["loss"] != other["loss"]


def test_a_longer_run_goes_on_from_a_shorter_one(settings):
    train_language_model(settings)
    longer = train_language_model(dataclasses.replace(settings, steps=9), resume=True)
    assert longer["steps"] == 9
    wider = dataclasses.replace(settings, steps=12, model=dataclasses.replace(settings.model, hidden_size=32))
    with pytest.raises(ValueError, match="do not fit this TitansForCausalLM: it has hidden_size=16, not 32"):
        train_language_model(wider, resume=True)


def test_a_sink_that_is_missing_leaves_no_run(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ValueError, match="got no trackio, which the sink 'trackio' needs"):
        train_language_model(dataclasses.replace(settings, sinks=("trackio",)))
    assert not settings.out.exists()


def test_another_model_is_trained_the_same_way(settings, llama):
    result = train_language_model(settings, model=llama())
    assert AutoModelForCausalLM.from_pretrained(result["model"]).config.model_type == "llama"


def test_bytes_that_are_no_text_are_trained_on_too(settings, tmp_path):
    data = tmp_path / "noise.bin"
    data.write_bytes(bytes(range(256)) * 8)
    result = train_language_model(dataclasses.replace(settings, data=str(data), steps=2))
    assert result["data"]["split"].startswith("one document: bytes 0 to")
    assert result["held_out_bits_per_byte"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "got no data; expected a file, a folder of text, a folder of titans prepare, or stdlib"),
        ({"data": "/nowhere"}, "does not exist"),
        ({"seq_len": 100_000}, "give more text or a smaller seq_len"),
        ({"device": "tpu9"}, "got device='tpu9'"),
        ({"valid": f"{PLACE}/texts/1.txt"}, "one in the other; expected a text that is not trained on, or none"),
        ({"held_out": 2.0}, "expected a share of the text"),
        ({"vocab_size": 300}, "got vocab_size=300 and data of 259 token ids, those of bytes; expected the same number"),
    ],
)
def test_what_will_not_do_is_an_error_before_anything_is_written(settings, change, message):
    if "valid" in change:
        change = {"valid": change["valid"].replace(PLACE, str(settings.out.parent))}
    with pytest.raises(ValueError, match=message):
        train_language_model(dataclasses.replace(settings, **change))
    assert not settings.out.exists()


def test_a_run_to_resume_must_be_there(settings):
    with pytest.raises(ValueError, match=r"holds no settings\.json"):
        train_language_model(settings, resume=True)
    with pytest.raises(ValueError, match="got no run folder to resume"):
        train_language_model(dataclasses.replace(settings, out=None), resume=True)


def test_a_run_names_itself_by_its_architecture_and_the_time(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train_language_model(dataclasses.replace(settings, out=None, steps=1))
    assert result["run"].startswith("runs/mac-2")
    assert (tmp_path / result["model"] / "config.json").is_file()


def test_a_finished_run_without_checkpoints_is_not_begun_again(settings):
    train_language_model(settings)
    weights = (settings.out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(settings.out / "checkpoints")
    with pytest.raises(ValueError, match=r"is finished and whose checkpoints are gone; expected .* --init"):
        train_language_model(settings, resume=True)
    assert (settings.out / "model" / "model.safetensors").read_bytes() == weights
    assert len((settings.out / "metrics.jsonl").read_text().splitlines()) > 1


def test_settings_that_a_run_goes_on_with_are_written_down(settings):
    train_language_model(settings)
    longer = dataclasses.replace(settings, steps=7)
    train_language_model(longer, resume=True)
    assert merge_settings(LanguageSettings(), read_settings_file(settings.out / "settings.json")) == longer
    with pytest.raises(ValueError, match="other data"):
        train_language_model(dataclasses.replace(settings, seq_len=16), resume=True)
    assert merge_settings(LanguageSettings(), read_settings_file(settings.out / "settings.json")) == longer


def test_a_model_without_the_marks_of_the_data_is_given_them_and_goes_on(settings, tmp_path):
    plain = TitansConfig(vocab_size=259, **dataclasses.asdict(SMALL))
    TitansForCausalLM(plain).save_pretrained(tmp_path / "plain")
    settings = dataclasses.replace(settings, init=tmp_path / "plain")
    train_language_model(settings)
    train_language_model(dataclasses.replace(settings, steps=7), resume=True)
    saved = TitansForCausalLM.from_pretrained(settings.out / "model")
    tokenizer = byte_tokenizer()
    for config in (saved.config, saved.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_another_held_out_text_than_the_runs_is_an_error(settings, tmp_path):
    valid = tmp_path / "valid.txt"
    valid.write_text("what it is measured on. " * 30)
    settings = dataclasses.replace(settings, valid=str(valid))
    train_language_model(settings)
    valid.write_text("q" * 400)
    with pytest.raises(
        ValueError, match="was evaluated on another held-out text than is there now; bring that one back"
    ):
        train_language_model(dataclasses.replace(settings, steps=7), resume=True)


def test_a_split_that_was_prepared_is_not_asked_for_otherwise(settings, tmp_path):
    prepare(PrepareSettings(source=settings.data, out=tmp_path / "tokens", held_out=0.3))
    settings = dataclasses.replace(settings, data=str(tmp_path / "tokens"), steps=1)
    with pytest.raises(ValueError, match=r"got held_out=0\.2 with a prepared folder, .* give it to titans prepare"):
        train_language_model(settings)
    assert not settings.out.exists()
    train_language_model(dataclasses.replace(settings, held_out=0.3))


def test_rows_longer_than_learned_positions_are_an_error_before_anything_is_written(settings, tmp_path):
    GPT2Config(vocab_size=259, n_positions=24, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(
        ValueError, match=r"learned 24 positions, and rows of 32 tokens; expected --seq-len 24 or fewer"
    ):
        train_language_model(dataclasses.replace(settings, baseline=str(tmp_path / "gpt2")))
    assert not settings.out.exists()


def test_a_run_beside_its_text_is_no_text(settings, tmp_path):
    settings = dataclasses.replace(settings, out=tmp_path / "texts" / "runs" / "first")
    train_language_model(settings)
    result = train_language_model(dataclasses.replace(settings, steps=7), resume=True)
    assert (result["steps"], result["data"]["train_documents"] + result["data"]["held_out_documents"]) == (7, 6)


def test_processes_share_the_rows_of_an_evaluation(settings, monkeypatch):
    """`batch_size` is that of all of them: each has a part of it, in training as in an evaluation."""

    class Four(Distributed):
        def share(self, rows):
            return rows // 4

    def fit(*_, eval_fn, **__):
        raise StopIteration(eval_fn.held_out.batch_size)

    monkeypatch.setattr("titans_lm.train.language.fit", fit)
    monkeypatch.setattr(
        "titans_lm.train.language.joined_distributed", lambda _: nullcontext(Four(0, 1, torch.device("cpu")))
    )
    with pytest.raises(StopIteration, match=r"^2$"):
        train_language_model(dataclasses.replace(settings, batch_size=8))
