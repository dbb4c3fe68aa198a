"""What is counted as right, and how many bytes a model carries."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from model_cases import small_config
from titans_lm.data.batches import IGNORED, Batch
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tasks.tracking import TrackingSettings
from titans_lm.evaluate.accuracy import StateBytes, TaskScore, bytes_of_state, score_batch, task_score
from titans_lm.report.section import state_bytes
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.fresh import count_parameters, language_model


def said(batch: Batch, vocab_size: int, rng: np.random.Generator, right: float) -> torch.Tensor:
    """Logits of somebody who is right now and then."""
    targets = batch["targets"].clamp(min=0)
    guesses = torch.from_numpy(rng.integers(0, vocab_size, targets.shape))
    knows = torch.from_numpy(rng.random(targets.shape) < right)
    return torch.nn.functional.one_hot(torch.where(knows, targets, guesses), vocab_size).float()


@pytest.mark.parametrize("task", [NeedleSettings(length=0, keys=3, queries=3), RecallSettings(), TrackingSettings()])
@pytest.mark.parametrize("right", [0.0, 0.9, 1.0])
def test_an_answer_is_right_where_all_of_it_is(task, right: float) -> None:
    rng, total = np.random.default_rng(3), TaskScore(0, 0, 0, 0)
    hits = asked = whole = answers = 0
    for step in range(3):
        batch = TaskBatches(task, batch_size=5)(step)
        logits = said(batch, task.vocab_size, rng, right)
        total += score_batch(logits, batch)
        for row, targets in enumerate(batch["targets"].tolist()):
            found: dict[int, list[bool]] = {}
            for place, target in enumerate(targets):
                if target != IGNORED:
                    number = int(batch["answers"][row, place]) if "answers" in batch else place
                    found.setdefault(number, []).append(int(logits[row, place].argmax()) == target)
            hits += sum(map(sum, found.values()))
            asked += sum(map(len, found.values()))
            whole += sum(map(all, found.values()))
            answers += len(found)
    assert total == TaskScore(hits, asked, whole, answers)
    assert (total.accuracy, total.exact) == (hits / asked, whole / answers)
    assert right < 1.0 or total.exact == 1.0
    assert 0.0 < right < 1.0 or "answers" not in batch or total.exact == right


def test_a_model_is_asked_for_rows_that_it_has_not_seen() -> None:
    """The rows are those of the seed, whole batches of them, and the mode of the model is put back."""
    torch.manual_seed(0)
    task = RecallSettings(pairs=2, symbols=8, length=16)
    model = language_model(small_config("lmm", hidden_size=16), task.vocab_size).train()
    score = task_score(model, task, examples=9, batch_size=4, seed=5)
    assert score.asked == 12 * 2
    assert model.training
    expected = TaskScore(0, 0, 0, 0)
    for step in range(3):
        batch = TaskBatches(task, batch_size=4, seed=5)(step)
        expected += score_batch(model(input_ids=batch["input_ids"]).logits, batch)
    assert score == expected


@pytest.mark.parametrize("architecture", ["lmm", "mac", "mag", "mal", "sliding"])
def test_the_state_of_ours_keeps_its_size(architecture: str) -> None:
    model = language_model(small_config(architecture, hidden_size=16), 9)
    short, long = bytes_of_state(model, 40), bytes_of_state(model, 90)
    assert short.total > 0
    assert abs(short.total - long.total) <= 0.2 * short.total, "what is carried of a segment comes and goes"
    if architecture == "sliding":
        assert short.memory is None
        return
    state = model.init_state(1)
    counted = sum(x.numel() * 4 for layer in state.layers for x in _memories(layer))
    assert short.memory == long.memory == counted


def _memories(layer) -> list[torch.Tensor]:
    """The weights M of a layer's memory, found by the name that every state has for it."""
    if hasattr(layer, "M"):
        return list(layer.M)
    return _memories(layer.memory)


def test_the_state_of_full_attention_grows_and_that_of_a_window_does_not() -> None:
    like = dataclasses.replace(small_config("sliding", hidden_size=16), window=8)
    size = count_parameters(like, 9)
    made = {name: make_baseline(fit_baseline(name, like, 9, size)) for name in ("llama", "mistral")}
    for name, model in made.items():
        short, long = bytes_of_state(model, 20).total, bytes_of_state(model, 40).total
        assert (long == 2 * short) == (name == "llama"), (name, short, long)
    per_token = {name: like.num_hidden_layers * 2 * model.config.hidden_size * 4 for name, model in made.items()}
    assert bytes_of_state(made["llama"], 20).total == 20 * per_token["llama"]
    assert bytes_of_state(made["mistral"], 40).total <= 8 * per_token["mistral"]


def test_mamba2_carries_as_much_at_any_length() -> None:
    like = dataclasses.replace(small_config("sliding", hidden_size=32))
    model = make_baseline(fit_baseline("mamba2", like, 9, count_parameters(like, 9)))
    assert bytes_of_state(model, 20).total == bytes_of_state(model, 40).total > 0


SIZES = [
    (RecallSettings(), "96:3", {"length": 96, "pairs": 3}),
    (TrackingSettings(), "77", {"length": 77}),
    (NeedleSettings(), "64K", {"length": 65536}),
    (NeedleSettings(), "2Kx3", {"length": 2048, "keys": 3, "queries": 3}),
    (NeedleSettings(), "300@0.25", {"length": 300, "depth": 0.25}),
    (BabiLongSettings(), "1M", {"length": 1048576}),
    (BabiLongSettings(), "0", {"length": 0}),
]


@pytest.mark.parametrize(("task", "size", "expected"), SIZES)
def test_sizes_are_read(task, size: str, expected: dict) -> None:
    found = task.resized(size)
    assert {name: getattr(found, name) for name in expected} == expected
    assert dataclasses.replace(found, **{name: getattr(task, name) for name in expected}) == task


@pytest.mark.parametrize(
    ("task", "size"),
    [(RecallSettings(), "64"), (TrackingSettings(), "1:2"), (NeedleSettings(), "1@2")],
)
def test_sizes_of_another_form_are_told(task, size: str) -> None:
    with pytest.raises(ValueError, match=f"got the size '{size}'; expected"):
        task.resized(size)


def test_a_model_without_a_cache_carries_nothing() -> None:
    config = OpenAIGPTConfig(vocab_size=9, n_positions=64, n_embd=8, n_layer=1, n_head=2)
    assert bytes_of_state(OpenAIGPTLMHeadModel(config).eval(), 40) == StateBytes(None, None)
    assert state_bytes({"state_bytes": {"total": None, "memory": None}}) == "–"
