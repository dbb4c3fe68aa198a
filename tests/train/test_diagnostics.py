"""What memories are said to do is what they do."""

import pytest
import torch

from model_cases import MEMORIES, REMEMBERING
from titans_lm.memory import NeuralMemory
from titans_lm.memory_rule import MemoryRule
from titans_lm.train.diagnostics import SIZES, memory_numbers

IDS = torch.arange(40)[None] % 30


@pytest.mark.parametrize(
    ("architecture", "gates"),
    [("lmm", "head"), ("lmm", "channel"), *((architecture, "layer") for architecture in REMEMBERING)],
)
def test_numbers_of_every_block_and_layer(titans, architecture: str, gates: str) -> None:
    layers = max(2, len(architecture.split("+")))
    model = titans(architecture, num_hidden_layers=layers, gates=gates, gate_rank=2).eval()
    found = memory_numbers(model, IDS)["memory"]
    assert set(found) == {"theta", "eta", "alpha", "momentary", "past", "forgotten", "M_norm", "S_norm"}
    memories, blocks = (
        sum(isinstance(module, kind) for module in model.modules()) for kind in (MemoryRule, NeuralMemory)
    )
    assert blocks == sum(block in MEMORIES for block in model.config.backbone_config().blocks)
    for name, numbers in found.items():  # sizes are those of all memories of a block together
        many = blocks if name in SIZES else memories
        assert [len(layers) for layers in numbers] == [2] * many, name
        assert all(number > 0.0 for layers in numbers for number in layers), name
    config = model.config.backbone_config()
    assert all(layers[0] <= config.theta_max for layers in found["theta"])
    assert all(number <= config.eta_max for layers in found["eta"] for number in layers)


def test_fresh_gates_are_where_they_start(titans) -> None:
    """θ and η at half of their limits, α at alpha_init; their weights are small and move them little.

    Without a stretch of α: with one some tokens would be cut off at zero, and the mean lie above alpha_init (D33).
    """
    found = memory_numbers(titans("lmm", alpha_stretch=0.0).eval(), IDS)["memory"]
    config = titans("lmm").config.backbone_config()
    assert found["theta"][0][0] == pytest.approx(config.theta_max / 2, rel=0.05)
    assert found["eta"][0] == pytest.approx([config.eta_max / 2] * 2, rel=0.05)
    assert found["alpha"][0] == pytest.approx([config.alpha_init] * 2, rel=0.1)


def test_norms_are_those_of_the_state_and_sizes_those_of_its_surprise(titans) -> None:
    model = titans("lmm").eval()
    found = memory_numbers(model, IDS)["memory"]
    with torch.no_grad():
        out = model(IDS, return_state=True, use_cache=False, output_surprise="parts")
    state = out.state.layers[0].memory
    for name, part in (("M", state.M), ("S", state.S)):
        expected = [float(weights[0].double().flatten(1).norm(dim=-1).mean()) for weights in part]
        assert found[f"{name}_norm"][0] == pytest.approx(expected, rel=1e-6), name
    for i, name in enumerate(("momentary", "past", "forgotten")):
        assert found[name][0] == pytest.approx(out.surprise[0][..., i].double().mean((0, 1, 2)).tolist()), name


def test_a_gate_that_is_switched_off_says_nothing(titans) -> None:
    found = memory_numbers(titans("lmm", momentum=False).eval(), IDS)["memory"]
    assert found["eta"] == [[]]
    assert found["past"] == [[0.0, 0.0]]


def test_nothing_stays_behind_and_others_have_nothing_to_say(titans, llama) -> None:
    model = titans("mac").eval()
    memory_numbers(model, IDS)
    assert not any(module._forward_hooks for module in model.modules())
    assert any(isinstance(module, NeuralMemory) for module in model.modules())
    assert memory_numbers(titans("sliding").eval(), IDS) == {}
    assert memory_numbers(llama().eval(), IDS) == {}


@pytest.mark.parametrize("architecture", ["lmm", "mag", "mal", "sliding+lmm+sliding"])
def test_gates_are_those_of_the_text(titans, architecture: str) -> None:
    """What the memory does with persistent tokens before the text is not counted in."""
    model = titans(architecture, num_persistent=16).eval()
    (memory,) = [module for module in model.modules() if isinstance(module, NeuralMemory)]
    with torch.no_grad():
        memory.theta_proj.proj.weight.mul_(50.0)  # so that tokens differ
    calls = []
    memory.theta_proj.register_forward_hook(lambda module, given, out: calls.append(out))
    found = memory_numbers(model, IDS)["memory"]
    assert [call.shape[1] for call in calls] == [16, 40]
    assert found["theta"][0] == pytest.approx(calls[1].double().mean((0, 1, 2)).tolist())
    assert found["theta"][0] != pytest.approx(torch.cat(calls, 1).double().mean((0, 1, 2)).tolist(), rel=1e-6)
