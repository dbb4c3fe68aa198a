"""Recall accuracy of models that know the answer, and the reach of windows by derivatives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_cases import small_config, wake
from titans_lm.backbone import Backbone
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.evaluate.accuracy import Recall, sliding_reach, task_score

TASK = RecallSettings(pairs=4, symbols=32, gap=5, length=29, answers=False)


class Lookup(nn.Module):
    """Answers every key with what followed it in the first `pairs` pairs of the row, always right."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.wrong = wrong

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not self.training
        logits = torch.zeros(*input_ids.shape, TASK.vocab_size)
        for row, tokens in enumerate(input_ids.tolist()):
            known = dict(zip(tokens[0 : 2 * TASK.pairs : 2], tokens[1 : 2 * TASK.pairs : 2], strict=True))
            for place, token in enumerate(tokens):
                answer = known.get(token, 0)
                logits[row, place, answer if not self.wrong else (answer + 1) % TASK.vocab_size] = 1.0
        return SimpleNamespace(logits=logits)


def test_a_model_that_looks_up_is_always_right() -> None:
    model = Lookup().train()
    found = task_score(model, TASK, examples=20, batch_size=8)
    assert (found.hits, found.asked) == (24 * 4, 24 * 4)  # three whole batches
    assert found.accuracy == 1.0
    assert not Recall(found.hits, found.asked, TASK.chance).at_chance
    assert model.training, "the model is left as it was"


def test_a_model_that_is_off_by_one_is_never_right() -> None:
    assert task_score(Lookup(wrong=True), TASK, examples=8, batch_size=8).hits == 0


def test_the_seed_draws_the_examples() -> None:
    class Guess(Lookup):
        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, TASK.vocab_size)
            logits[..., 1 + TASK.symbols // 2] = 1.0  # always the first value
            return SimpleNamespace(logits=logits)

    results = [task_score(Guess(), TASK, examples=640, batch_size=64, seed=seed) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]
    assert TASK.chance == 1 / 16
    assert all(Recall(result.hits, result.asked, TASK.chance).at_chance for result in results)


def test_an_interval_by_hand() -> None:
    low, high = Recall(50, 100, 0.5).interval
    assert (low, high) == pytest.approx((0.3438, 0.6562), abs=1e-4)  # Wilson with z = 3.29
    assert Recall(0, 10, 0.5).interval[0] == 0.0
    assert Recall(10, 10, 0.5).interval[1] == pytest.approx(1.0)
    assert not Recall(90, 100, 0.5).at_chance


@pytest.mark.parametrize(("layers", "window", "kernel"), [(1, 4, 1), (2, 3, 4), (3, 4, 2)])
def test_reach_of_sliding_windows_by_jacobian(layers: int, window: int, kernel: int) -> None:
    config = small_config(
        "sliding", num_hidden_layers=layers, window=window, attention_conv_size=kernel, num_persistent=2
    )
    reach, length = sliding_reach(config), 24
    model = Backbone(config).double()
    wake(model)
    x = torch.randn(1, length, config.hidden_size, dtype=torch.float64, requires_grad=True)
    model(x)[0][0, -1].sum().backward()
    felt = x.grad[0].abs().sum(-1)
    assert felt[length - 1 - reach] > 0.0, "it reaches as far as it says"
    assert float(felt[: length - 1 - reach].max()) == 0.0, "and no farther"


def test_only_windows_have_a_reach() -> None:
    with pytest.raises(ValueError, match="sliding"):
        sliding_reach(small_config("mac"))
