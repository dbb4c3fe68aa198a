"""Trained models on tasks, NAME=PATH: tested as they are or trained further, ours and others, and never written to."""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from cli_cases import titans
from experiments.experiment_cases import NeedleExperiment, RecallExperiment
from experiments.experiment_cases import task_finals as finals
from model_cases import small_config
from titans_lm.data.batches import IGNORED
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tasks.task import Task
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.experiments.models import folder_name, kind_of, trained_model
from titans_lm.experiments.settings import TaskFit
from titans_lm.experiments.tasks import FILE, FRESH, TrainedModel, run_task
from titans_lm.report import tasks as scored
from titans_lm.train.checkpoint import save_model
from titans_lm.train.files import JsonLines
from titans_lm.train.run import METRICS, RunFolder, load_model
from titans_lm.train.sized import sized_for


def gpt2(folder: Path, vocab: int = 259, positions: int = 400, tokenizer: Any = None) -> Path:
    torch.manual_seed(len(folder.name))
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": positions, "vocab_size": vocab}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.5, bos_token_id=None, eos_token_id=None))
    folder.mkdir(parents=True)
    save_model(folder, model, tokenizer)
    return folder


def llama(folder: Path, vocab: int = 17, tokenizer: Any = None, width: int = 16) -> Path:
    """A Llama of one block, which is told of fewer positions than are read: its angles have no end."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": width}
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=vocab, max_position_embeddings=8, initializer_range=0.5, **sizes)
    folder.mkdir(parents=True)
    save_model(folder, LlamaForCausalLM(config), tokenizer)
    return folder


def sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.md5(path.read_bytes()).hexdigest() for path in files}


def right_by_hand(model: Any, task: Task, *, examples: int, seed: int) -> tuple[int, int, int, int]:
    """Hits, targets, right answers and answers, row by row, each read at once."""
    batch = task.draw(np.random.default_rng([seed, 0]), examples)
    hits = targets = right = answers = 0
    for row in range(examples):
        with torch.no_grad():
            said = model(batch["input_ids"][row : row + 1]).logits[0].argmax(-1).tolist()
        wanted = batch["targets"][row].tolist()
        which = batch["answers"][row].tolist() if "answers" in batch else list(range(len(wanted)))
        of: dict[int, list[bool]] = {}
        for place, target in enumerate(wanted):
            if target != IGNORED:
                of.setdefault(which[place], []).append(said[place] == target)
        hits, targets = hits + sum(map(sum, of.values())), targets + sum(map(len, of.values()))
        right, answers = right + sum(map(all, of.values())), answers + len(of)
    return hits, targets, right, answers


def told(test: dict[str, Any]) -> tuple[int, int, int, int]:
    return test["hits"], test["asked"], test["right"], test["answers"]


def recall(out: Path, models: tuple[str, ...], **changes: Any) -> Any:
    train = TaskFit(
        model=small_config("lmm", hidden_size=16, num_hidden_layers=1), steps=3, warmup_steps=1, batch_size=4,
        save_every=2,
    )  # fmt: skip
    train = dataclasses.replace(
        train, **{name: changes.pop(name) for name in ("steps", "parameters") if name in changes}
    )
    settings = {
        "task": RecallSettings(symbols=16, answers=False), "sizes": ("16:2",), "test_sizes": ("16:2", "32:3"),
        "seeds": (0,), "rates": (1e-3,), "examples": 4, "train": train, "quiet": True, **changes,
    }  # fmt: skip
    return RecallExperiment(out=out, models=models, **settings)


def run(settings: Any) -> dict[str, Any]:
    return run_task(settings, f"titans evaluate {settings.name}", lambda _: None)


def test_models_of_others_are_tested_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On recall, without a step: accuracies are those of a plain loop, for every size and seed; nothing is copied."""
    first, other = gpt2(tmp_path / "gpt2", vocab=17, positions=32), llama(tmp_path / "models" / "llama")
    before = sums(tmp_path)
    code, out, err = titans(
        capsys, "evaluate", "mqar", "--models", f"g={first}", f"l={other}",
        "--steps", 0, "--task.symbols", 16, "--task.pairs", 2,
        "--sizes", "16:2", "32:3", "--examples", 8, "--batch-size", 8, "--seeds", 5, 6, "--out", tmp_path / "out",
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "out" / FILE).read_text())
    assert result["parameters_asked_for"] is None
    for one, folder, kind in zip(result["contenders"], (first, other), ("gpt2", "llama"), strict=True):
        model = load_model(folder, "cpu")
        start = one["start"]
        assert (start["path"], start["kind"], one["rate"], one["tuning"]) == (str(folder), kind, None, [])
        assert one["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        for seed, done in zip((5, 6), one["runs"], strict=True):
            assert (done["seed"], done["steps"], done["tokens"]) == (seed, 0, 0)
            for place, size in enumerate(((16, 2), (32, 3)), 1):
                task = RecallSettings(symbols=16, answers=False, length=size[0], pairs=size[1])
                wanted = right_by_hand(model, task, examples=8, seed=seed + place * FRESH)
                assert told(done["tests"][f"{size[0]}:{size[1]}"]) == wanted
    assert sum(test["hits"] for one in result["contenders"] for run in one["runs"] for test in run["tests"].values())
    assert {path: sum for path, sum in sums(tmp_path).items() if "/out/" not in path} == before
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert not (tmp_path / "out" / "trials").exists()
    assert "learning rates" not in out
    assert "trained models, each with parameters of its own, tested as they are; 2 seeds." in scored.said(result)
    assert [row[:4] for row in scored.tables(result)[0].body] == [
        [name, f"{one['parameters']:,}", f"{one['state_bytes']['total']:,}", "–"]
        for name, one in zip(("g, trained gpt2", "l, trained Transformer++ (Llama)"), result["contenders"], strict=True)
    ]
    assert [line.label for line in scored.plot(result).lines] == ["g, trained gpt2", "l, trained Transformer++ (Llama)"]
    assert "g, trained gpt2" in out


def test_needles_are_asked_in_the_tokens_of_the_model(tmp_path: Path) -> None:
    """Its own tokenizer by content, from another folder; depth by depth the accuracies of a plain loop."""
    folder = gpt2(tmp_path / "gpt2", tokenizer=byte_tokenizer())
    byte_tokenizer().save_pretrained(tmp_path / "tokens")
    settings = NeedleExperiment(
        models=(f"g={folder}",), train=TaskFit(steps=0, batch_size=4), seeds=(2,), examples=4, sizes=("400",),
        test_sizes=("300", "0x1"), depths=(0.0, 1.0), out=tmp_path / "out", quiet=True,
        task=NeedleSettings(tokenizer=str(tmp_path / "tokens")),
    )  # fmt: skip
    result, model = run(settings), load_model(folder, "cpu")
    tests = result["contenders"][0]["runs"][0]["tests"]
    assert list(tests) == ["300@0", "300@1", "0x1"]
    for place, (size, task) in enumerate(settings.eval_tasks.items(), 1):
        assert told(tests[size]) == right_by_hand(model, task, examples=4, seed=2 + place * FRESH)
    as_bytes = dataclasses.replace(settings, task=NeedleSettings(), out=tmp_path / "bytes")
    assert run(as_bytes)["contenders"][0]["runs"][0]["tests"] == tests, "byte tokens by their short name"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of a task, and what came out."""
    out = tmp_path_factory.mktemp("ours")
    return out / "runs" / "lmm-seed0", run(recall(out, ("lmm",), steps=6, rates=(1e-2,)))


def test_a_run_of_a_task_is_tested_again(ours: Any, tmp_path: Path) -> None:
    """The same rows give the scores of the first time; at a new size those of a plain loop."""
    folder, before = ours
    settings = recall(tmp_path / "out", (f"again={folder}",), steps=0, test_sizes=("16:2", "32:3", "48:4"))
    result = run(settings)
    one, first = result["contenders"][0], before["contenders"][0]
    tests = one["runs"][0]["tests"]
    assert {size: tests[size] for size in ("16:2", "32:3")} == first["runs"][0]["tests"]
    wanted = right_by_hand(load_model(folder), settings.eval_tasks["48:4"], examples=4, seed=3 * FRESH)
    assert told(tests["48:4"]) == wanted
    assert (one["parameters"], one["start"]["kind"]) == (first["parameters"], "lmm")
    assert scored.tables(result)[0].body[0][0] == "**again, trained LMM**"
    assert scored.heading(result).endswith(", again, trained LMM")
    assert run(settings)["contenders"] == result["contenders"], "nothing is done twice"


def test_training_goes_on_from_the_weights(ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has the loss of the loaded model, a run that was stopped goes on, and the source is left alone."""
    other = llama(tmp_path / "llama", tokenizer=byte_tokenizer())
    folders = {"lmm": ours[0], "l": other}
    before = {path: sums(path) for path in folders.values()}
    models = ("sliding", *(f"{name}={path}" for name, path in folders.items()))
    settings = recall(tmp_path / "out", models, rates=(1e-3, 1e-2), tune_steps=2)
    result = run(settings)
    fresh, *trained = result["contenders"]
    assert abs(result["parameters_asked_for"] / fresh["parameters"] - 1.0) < 0.02
    assert all(len(one["tuning"]) == 2 and one["rate"] in (1e-3, 1e-2) for one in result["contenders"])
    assert ("parameters each, but for trained models, which keep theirs, 3 steps of 4 sequences") in scored.said(result)
    batch = settings.train_tasks[0].draw(np.random.default_rng([0, 0]), 4)
    for one, path in zip(trained, folders.values(), strict=True):
        made = settings.out / "runs" / f"{folder_name(one['name'])}-seed0"
        with torch.no_grad():
            logits = load_model(path)(batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
        log = JsonLines(made / METRICS).read()
        assert [record["step"] for record in log if "loss" in record] == [3]
        first = JsonLines(settings.out / "trials" / f"{folder_name(one['name'])}-0.001" / METRICS).read()
        assert first[-1]["step"] == 2
        assert one["runs"][0]["steps"] == 3
        assert sums(path) == before[path]
        again = run(recall(tmp_path / "step", (one["name"],), steps=1))
        start = JsonLines(tmp_path / "step" / "runs" / f"{folder_name(one['name'])}-seed0" / METRICS).read()[0]
        assert start["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert "trained models, each with parameters of its own, 1 more steps of 4" in scored.said(again)
        assert (made / "model" / "tokenizer.json").is_file() == (path == other), "what lay beside it goes along"
    moved = load_model(settings.out / "runs" / f"{folder_name(trained[1]['name'])}-seed0").state_dict()
    assert any((moved[name] != weight).any() for name, weight in load_model(other).state_dict().items())

    import titans_lm.experiments.tasks as tasks

    fit, alone = tasks.fit, recall(tmp_path / "stopped", (trained[1]["name"],), rates=(trained[1]["rate"],))

    def stopping(*args: Any, **more: Any) -> None:
        fit(*args, **more, on_step=lambda record: record["step"] == 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(alone)
    assert RunFolder.open(alone.out / "runs" / f"{folder_name(alone.models[0])}-seed0").latest() is not None
    assert run(alone)["contenders"][0]["runs"][0]["tests"] == trained[1]["runs"][0]["tests"]


def test_the_first_sets_the_size_and_half_precision_is_trained_in_float32(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama", width=128)
    model = load_model(folder, "cpu").bfloat16()
    save_model(folder, model)
    result = run(recall(tmp_path / "out", (f"l={folder}", "lmm"), steps=1))
    size = sum(parameter.numel() for parameter in model.parameters())
    assert result["parameters_asked_for"] == result["contenders"][0]["parameters"] == size
    made = load_model(tmp_path / "out" / "runs" / f"{folder_name(f'l={folder}')}-seed0")
    assert (load_model(folder).dtype, made.dtype) == (torch.bfloat16, torch.float32)


def test_other_weights_at_the_same_path_are_not_mixed_up(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    settings = recall(tmp_path / "out", (f"l={folder}",), steps=0)
    weights = run(settings)["contenders"][0]["start"]["weights"]
    assert weights == TrainedModel.find(f"l={folder}").weights
    shutil.rmtree(folder)
    torch.manual_seed(9)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    save_model(folder, model)
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run(settings)


def test_what_is_trained_is_told_by_its_name() -> None:
    assert trained_model("a.b=runs/x") == ("a.b", Path("runs/x"))
    for other in ("lmm", "llama", "lmm:memory_depth=2", "lmm:memory_depth=2,chunk_size=8", "runs/a=b", "runs/x"):
        assert trained_model(other) is None
    assert folder_name("a b=runs/x").startswith("a-b-")
    assert folder_name("x=runs/caf\udce9").startswith("x-"), "a path whose bytes are no text"
    assert folder_name("a=runs/x") != folder_name("a=runs/y")


def test_progress_is_shown_unless_it_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps while training, tokens while testing, trials too; several jobs at once would write over each other."""
    monkeypatch.setattr("titans_lm.train.progress.QUIET_SECONDS", 0.0)
    settings = recall(
        tmp_path / "out", ("sliding",), sizes=("24:2",), test_sizes=("5000:2",), steps=2, tune_steps=1, examples=6,
        rates=(1e-3, 1e-2), quiet=False,
    )  # fmt: skip
    run(settings)
    shown = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    trial = ["{0} 1/1", "{0}, test 24:2: 72 of 144 tokens", "{0}, test 24:2: 144 of 144 tokens"]
    # Two batches of three rows in pieces of 2,048 tokens, up to the last query; then what nobody reads.
    read = [6_144, 15_000, 21_144, 30_000]
    assert shown[:6] == [line.format(f"sliding-{rate}") for rate in ("0.001", "0.01") for line in trial]
    assert shown[6:8] == ["sliding-seed0 1/2", "sliding-seed0 2/2"]
    assert shown[8:] == [f"sliding-seed0, test 5000:2: {done:,} of 30,000 tokens" for done in read]
    run(dataclasses.replace(settings, out=tmp_path / "quiet", quiet=True, rates=(1e-3,)))
    assert capsys.readouterr().err == ""
    shows = {
        jobs: finals(dataclasses.replace(settings, jobs=jobs), 9_000, {"sliding": 1e-3})[0].shown for jobs in (1, 2)
    }
    assert shows == {1: True, 2: False}


def refused(said: str, settings: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        run(settings() if callable(settings) else settings)


def test_mistakes_are_told_before_anything_is_trained(ours: Any, tmp_path: Path) -> None:
    out, folder = tmp_path / "out", ours[0]
    refused(
        "got steps=0 with lmm, mac:chunk_size=4, which would be tested with fresh weights; expected trained "
        "models, written as NAME=PATH, or steps to train for",
        lambda: recall(out, ("lmm", f"a={folder}", "mac:chunk_size=4"), steps=0),
    )
    refused(
        "got several trained models called 'a'; expected a name for each",
        lambda: recall(out, (f"a={folder}", "a=other")),
    )
    refused(
        "got parameters=9000 with trained models alone, which keep their sizes; expected none",
        lambda: recall(out, (f"a={folder}",), parameters=9000),
    )
    refused("got the model 'a='; expected PATH or NAME=PATH", lambda: recall(out, ("a=",)))
    refused("got the model 'nowhere', which does not exist", recall(out, ("a=nowhere",)))
    refused(
        f"got a={folder}, a model of 17 ids, and a task of 65; expected a model with as many, or a task with fewer",
        recall(out, (f"a={folder}",), task=RecallSettings(symbols=64, answers=False)),
    )
    short = gpt2(tmp_path / "short", vocab=17, positions=31)
    refused(
        f"got s={short}, which has learned 31 positions, and rows of 32 tokens; expected --sizes and --test-sizes of "
        "31 tokens or fewer",
        recall(out, (f"s={short}",), steps=0),
    )
    assert not (out / "runs").exists()


def test_tokens_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", "The", "secret"])}, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="?")
    words.save_pretrained(tmp_path / "words")
    of_bytes, of_words = gpt2(tmp_path / "b", tokenizer=byte_tokenizer()), gpt2(tmp_path / "wo", tokenizer=words)
    alone = gpt2(tmp_path / "alone", vocab=256)

    def needle(folder: Path, tokenizer: str) -> Any:
        return NeedleExperiment(
            models=(f"n={folder}",), train=TaskFit(steps=0), sizes=("0x1",), test_sizes=("0x1",), examples=2,
            seeds=(0,), out=tmp_path / "out", task=NeedleSettings(tokenizer=tokenizer), quiet=True,
        )  # fmt: skip

    said = "got task.tokenizer={!r} for n={}, which was trained with another one; expected its own: pass --task.{}"
    refused(said.format("words", of_bytes, "tokenizer bytes"), needle(of_bytes, "words"))
    refused(
        said.format(str(tmp_path / "words"), of_bytes, "tokenizer bytes"), needle(of_bytes, str(tmp_path / "words"))
    )
    refused(said.format("bytes", of_words, f"tokenizer {of_words}"), needle(of_words, "bytes"))
    refused(
        f"got task.tokenizer={str(tmp_path / 'words')!r} of 3 ids for n={alone}, a model of 256 without a tokenizer "
        "beside it; expected the one that it was trained with",
        needle(alone, str(tmp_path / "words")),
    )
    assert not (tmp_path / "out" / "runs").exists()
    assert run(needle(alone, "bytes"))["contenders"][0]["runs"][0]["tests"]["0x1"]["answers"] == 2
    assert run(dataclasses.replace(needle(of_words, str(of_words)), out=tmp_path / "own"))["contenders"]


@pytest.mark.parametrize("name", ["lmm", "delta-net", "gated-delta-net", "gated-delta-net:conv_size=2"])
def test_a_trained_rule_is_known_as_what_it_is(name: str, tmp_path: Path) -> None:
    """DeltaNet and Gated DeltaNet are blocks of ours with their own rule: not LMM, in a table that starts from them."""
    settings = recall(tmp_path, (name,))
    (job,) = finals(settings, None, {name: 1e-3})
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model", sized_for(job.settings, 17).model)
    assert kind_of(tmp_path / "model") == name.partition(":")[0]
    (tmp_path / "model" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json with a list; expected a model's config"):
        kind_of(tmp_path / "model")
