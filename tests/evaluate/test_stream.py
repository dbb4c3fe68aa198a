"""Rows that are read in pieces give what one pass gives, for everything that transformers calls a language model."""

from functools import partial

import pytest
import torch

from model_cases import small_config
from titans_lm.data.batches import IGNORED
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.evaluate.accuracy import bytes_of_state, task_score
from titans_lm.evaluate.stream import CacheReader, StatefulReader, WindowReader, evaluating, logits_at, reader_for
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.fresh import language_model

OURS = ("lmm", "mac", "mag", "mal", "attention", "sliding", "segment")
OTHERS = ("llama", "mistral", "mamba2", "qwen3-next")


def made(name: str):
    torch.manual_seed(0)
    if name in OURS:
        return language_model(small_config(name, hidden_size=16), 40).double().eval()
    config = small_config("lmm", hidden_size=32, num_attention_heads=2, window=8)
    return make_baseline(fit_baseline(name, config, 40, 60_000)).double().eval()


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_pieces_are_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(name), torch.randint(0, 40, (2, 50), generator=torch.Generator().manual_seed(1))
    if name in ("qwen3-next", "mamba2"):  # their recurrences are float32 whatever the model is: here in its own dtype
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        monkeypatch.setattr(torch, "float32", torch.float64)
    with torch.no_grad():
        every = model(input_ids=ids, use_cache=False).logits
    for columns in ([0], [49], [0, 6, 7, 8, 30, 49]):
        for piece_len in (7, 16, 64):
            found = logits_at(model, ids, torch.tensor(columns), piece_len=piece_len)
            torch.testing.assert_close(found, every[:, columns], rtol=1e-8, atol=1e-9)
    assert not isinstance(reader_for(model, piece_len=7), WindowReader)


@pytest.mark.parametrize("name", ["mac", "sliding", "llama", "mistral"])
def test_a_cache_is_filled_in_pieces(name: str) -> None:
    """What is carried after all pieces predicts what one pass does, and so does what is read after it."""
    model, ids = made(name), torch.randint(0, 40, (1, 55), generator=torch.Generator().manual_seed(1))
    reader, state = reader_for(model, piece_len=9), None
    assert isinstance(reader, StatefulReader if name in OURS else CacheReader)
    with evaluating(model):
        every = model(input_ids=ids, use_cache=False).logits
        for piece in ids[:, :50].split(reader.piece(0), dim=1):
            logits, state = reader.step(piece, state, keep=1)
        torch.testing.assert_close(logits[:, -1], every[:, 49], rtol=1e-9, atol=1e-9)
        more, _ = reader.step(ids[:, 50:], reader.fork(state))
        again, _ = reader.step(ids[:, 50:], state)
    torch.testing.assert_close(more, every[:, 50:], rtol=1e-9, atol=1e-9)
    assert torch.equal(again, more), "a fork leaves what it was made from as it is"


def test_every_piece_is_told_and_then_what_nobody_reads() -> None:
    model, ids = made("sliding"), torch.zeros(2, 50, dtype=torch.int64)
    for columns, pieces in (([49], [32, 32, 32, 4]), ([0, 17], [32, 32, 36]), ([15], [32, 68])):
        told: list[int] = []
        logits_at(model, ids, torch.tensor(columns), piece_len=16, on_piece=told.append)
        assert told == pieces
    logits_at(model, ids, torch.tensor([49]), piece_len=100, on_piece=(whole := []).append)
    assert whole == [100]


def test_a_window_keeps_no_more_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans_lm.evaluate.accuracy.PIECE", 64)
    model = made("sliding")
    assert bytes_of_state(model, 150) == bytes_of_state(model, 90)
    assert bytes_of_state(made("attention"), 150).total > bytes_of_state(made("attention"), 90).total


def test_a_constant_state_is_not_measured_by_reading_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that grows is read to the end."""
    monkeypatch.setattr("titans_lm.evaluate.accuracy.SETTLED", 40)
    constant, growing = made("lmm"), made("llama")
    read = counted(constant)
    assert bytes_of_state(constant, 1_000_000) == bytes_of_state(constant, 60)
    assert read == [80, 40, 60]
    assert bytes_of_state(growing, 200).total == 200 * bytes_of_state(growing, 1).total


def counted(model) -> list[int]:
    """Keep the lengths of what a model is given."""
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True)
    return read


def test_scores_do_not_depend_on_where_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = NeedleSettings(length=600, tokenizer="bytes", keys=2, queries=2)
    model = language_model(small_config("mac", hidden_size=16), task.vocab_size)
    whole = task_score(model, task, examples=8, batch_size=4)
    monkeypatch.setattr("titans_lm.evaluate.accuracy.logits_at", partial(logits_at, piece_len=64))
    assert task_score(model, task, examples=8, batch_size=4) == whole
    assert whole.answers == 16
    assert whole.asked == 9 * 16
    batches, hits = TaskBatches(task, batch_size=4, seed=1), 0
    with evaluating(model):
        for batch in map(batches, range(2)):
            found, targets = model(batch["input_ids"]).logits.argmax(-1), batch["targets"]
            hits += int((found == targets)[targets != IGNORED].sum())
    assert 0 < whole.hits == hits < whole.asked


def test_no_tokens_at_once_are_refused() -> None:
    model = language_model(small_config("lmm", hidden_size=16), RecallSettings().vocab_size)
    with pytest.raises(ValueError, match="piece_len=0"):
        logits_at(model, torch.zeros(1, 4, dtype=torch.int64), torch.tensor([3]), piece_len=0)


def test_a_cache_that_does_not_go_on_is_found_out() -> None:
    """RecurrentGemma keeps its state to itself: it takes the name of a cache and gives none."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, lru_width=32, attention_window_size=16,
    )  # fmt: skip
    model = RecurrentGemmaForCausalLM(config).double().eval()
    ids = torch.randint(0, 40, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, [20, 59]]
    assert isinstance(reader_for(model), WindowReader)
    torch.testing.assert_close(logits_at(model, ids, torch.tensor([20, 59]), piece_len=16), whole)
