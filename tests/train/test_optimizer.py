from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from model_cases import STACKS
from titans_lm.train.parallel import Distributed
from titans_lm.train.settings import FitSettings
from titans_lm.train.trainer import Trainer, build_optimizer, decays, learning_rate

SPARED = ("bias", "norm", "embed", "initial", "persistent", "lm_head")


@pytest.mark.parametrize("architecture", STACKS)
def test_only_weight_matrices_decay(titans, architecture):
    model = titans(architecture)
    decay = decays(model)
    for name, parameter in model.named_parameters():
        if any(word in name for word in SPARED):
            assert not decay[name], name
        else:
            assert decay[name] == (parameter.dim() >= 2), name
    assert any("initial" in name for name in decay) == model.config.backbone_config().has_memory
    assert any(name.endswith("o_proj.weight") for name in decay if decay[name])


@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_is_in_one_group_once(tied):
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.tie_word_embeddings = tied
    model = LlamaForCausalLM(config)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = build_optimizer(model, FitSettings(weight_decay=0.3))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert (id(model.lm_head.weight) in decayed) != tied
    assert id(model.model.embed_tokens.weight) not in decayed
    assert id(model.model.norm.weight) not in decayed


def test_frozen_and_marked_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].weight._no_weight_decay = True
    assert decays(model) == {"1.weight": False, "1.bias": False, "2.weight": True, "2.bias": False}
    with pytest.raises(ValueError, match="without a parameter that requires a gradient"):
        build_optimizer(model.requires_grad_(False), FitSettings())


def test_decay_pulls_on_matrices_and_leaves_the_rest():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, FitSettings(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "0.weight" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


def test_the_learning_rate_rises_falls_and_ends_at_the_floor():
    settings = FitSettings(steps=100, lr=2.0, warmup_steps=10, lr_floor=0.1)
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    middle = learning_rate(10 + 89 // 2, settings)
    assert middle == pytest.approx(0.2 + 1.8 / 2, abs=0.05)
    assert learning_rate(500, settings) == pytest.approx(0.2)


@pytest.mark.parametrize("settings", [FitSettings(steps=1, warmup_steps=0), FitSettings(steps=3, warmup_steps=50)])
def test_runs_shorter_than_their_warm_up_have_a_learning_rate(settings):
    assert all(0 < learning_rate(step, settings) <= settings.lr for step in range(settings.steps))


@pytest.mark.parametrize("change", [("data", {}), ("", {"lr": 1.0}), ("", {"accumulate": 2})])
def test_processes_that_are_told_other_things_are_told_apart(change: tuple[str, dict[str, Any]]) -> None:
    """As torchrun has them on two machines, each with its own copy of a file and its own command."""

    class Other(Distributed):
        def all_gather(self, value: Any) -> list[Any]:
            data, told = value
            return [value, (data + change[0], told | change[1])]

    with pytest.raises(ValueError, match="got other data or other settings in process 1 than in process 0"):
        Trainer(nn.Linear(2, 2), lambda step: {}, None, FitSettings(), Other(0, 2, torch.device("cpu")))


def test_machines_may_differ_in_what_is_their_own() -> None:
    told: list[dict[str, Any]] = []

    class Other(Distributed):
        def all_gather(self, value: Any) -> list[Any]:
            told.append(value[1])
            return [value, value]

    Trainer(nn.Linear(2, 2), lambda step: {}, None, FitSettings(), Other(0, 1, torch.device("cpu")))
    assert set(vars(FitSettings())) - set(told[0]) == {"device", "workers", "sinks"}
