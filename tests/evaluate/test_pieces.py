"""Rows that are read in pieces give what one pass gives, for everything that transformers calls a language model."""

import pytest
import torch

from model_cases import small_config
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.evaluate.pieces import carries, logits_at, read_all
from titans_lm.evaluate.tasks import bytes_of_state, task_score
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
@pytest.mark.parametrize("columns", [[0], [49], [0, 6, 7, 8, 30, 49]])
def test_pieces_are_one_pass(name: str, columns: list[int]) -> None:
    model, ids = made(name), torch.randint(0, 40, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[:, columns]
    for piece_len in (7, 16, 64):
        found = logits_at(model, ids, torch.tensor(columns), piece_len=piece_len)
        # Qwen3-Next's recurrence is float32 whatever the model is.
        close = 1e-6 if name == "qwen3-next" else 1e-9
        torch.testing.assert_close(found, whole, rtol=10 * close, atol=close)
    assert carries(model) == (name != "mamba2")


def test_every_piece_is_told_and_then_what_nobody_reads() -> None:
    model, ids = made("sliding"), torch.zeros(2, 50, dtype=torch.int64)
    for columns, pieces in (([49], [32, 32, 32, 4]), ([0, 17], [32, 32, 36]), ([15], [32, 68])):
        told: list[int] = []
        logits_at(model, ids, torch.tensor(columns), piece_len=16, on_piece=told.append)
        assert told == pieces
    logits_at(model, ids, torch.tensor([49]), piece_len=100, on_piece=(whole := []).append)
    assert whole == [100]


@pytest.mark.parametrize("name", ["mac", "sliding", "llama", "mistral"])
def test_a_cache_is_filled_in_pieces(name: str) -> None:
    """What is carried after all pieces predicts what one pass does, and nothing more is kept than afterwards needed."""
    model, ids = made(name), torch.randint(0, 40, (1, 50), generator=torch.Generator().manual_seed(1))
    one, many = read_all(model, ids, piece_len=50), read_all(model, ids, piece_len=9)
    torch.testing.assert_close(many.logits[:, -1], one.logits[:, -1], rtol=1e-9, atol=1e-9)


def test_a_window_keeps_no_more_of_a_long_row() -> None:
    model = made("sliding")
    assert bytes_of_state(model, 5000) == bytes_of_state(model, 3000)
    assert bytes_of_state(made("attention"), 5000).total > bytes_of_state(made("attention"), 3000).total


def test_a_constant_state_is_not_measured_by_reading_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that grows is read to the end."""
    read = []
    monkeypatch.setattr("titans_lm.evaluate.tasks.SETTLED", 40)
    monkeypatch.setattr(
        "titans_lm.evaluate.tasks.read_all", lambda model, ids: read.append(ids.shape[1]) or read_all(model, ids)
    )
    constant, growing = made("lmm"), made("llama")
    assert bytes_of_state(constant, 1_000_000) == bytes_of_state(constant, 60)
    assert read == [80, 40, 60]
    whole = bytes_of_state(growing, 200)
    assert read[3:] == [80, 40, 200]
    assert whole.total == 200 * bytes_of_state(growing, 1).total


def test_scores_do_not_depend_on_where_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = NeedleSettings(length=300, tokenizer="words", keys=2, queries=2)
    model = language_model(small_config("mac", hidden_size=16), task.vocab_size)
    with torch.no_grad():  # sure of digits and marks, so that something is right
        model.lm_head.weight[256:] = 0.0
    whole = task_score(model, task, examples=8, batch_size=4)
    monkeypatch.setattr("titans_lm.evaluate.pieces.PIECE", 64)
    monkeypatch.setattr(logits_at, "__kwdefaults__", {"piece_len": 64})
    assert task_score(model, task, examples=8, batch_size=4) == whole
    assert whole.answers == 16
    assert whole.asked == 5 * 16


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
    assert not carries(model)
    torch.testing.assert_close(logits_at(model, ids, torch.tensor([20, 59]), piece_len=16), whole)
