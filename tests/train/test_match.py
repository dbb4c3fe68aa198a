"""Parameters of a baseline, matched by the width of its MLP."""

import pytest

from model_cases import STACKS, small_config
from titans_lm.train.fresh import byte_model
from titans_lm.train.match import count_parameters, match_parameters


@pytest.mark.parametrize("architecture", STACKS)
def test_counted_without_making_them(architecture: str) -> None:
    config = small_config(architecture)
    assert count_parameters(config, 259) == sum(p.numel() for p in byte_model(config).parameters())


def test_a_match_is_as_near_as_a_channel() -> None:
    target = count_parameters(small_config("mac", hidden_size=16), 259)
    matched = match_parameters(small_config("segment", hidden_size=16), 259, target)
    assert abs(count_parameters(matched, 259) - target) <= 3 * 16 * 2 // 2
    assert matched.architecture == "segment"
    assert match_parameters(matched, 259, count_parameters(matched, 259)) == matched


def test_an_mlp_cannot_be_less_than_nothing() -> None:
    with pytest.raises(ValueError, match="larger target"):
        match_parameters(small_config("mac"), 259, 100)
