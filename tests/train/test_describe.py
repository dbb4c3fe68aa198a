import pytest

from model_cases import STACKS, small_config
from titans_lm.ops.state import state_bytes
from titans_lm.train.fresh import byte_model, describe_model, part_name


@pytest.mark.parametrize("architecture", STACKS)
def test_the_parts_add_up(titans, architecture):
    model = titans(architecture, num_hidden_layers=3)
    found = describe_model(model)
    mixed = "+" in architecture
    assert found["architecture"] == ("hybrid" if mixed else architecture)
    assert found["layer_types"] == (architecture.split("+") if mixed else None)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["parameters"] == sum(found["parameters_by_part"].values())
    assert found["parameters_by_part"]["embed_tokens"] == 259 * 16
    assert ("layers.*.memory" in found["parameters_by_part"]) == model.config.backbone_config().has_memory
    assert found["state_bytes_by_layer"] == [state_bytes(layer) for layer in model.init_state(1).layers]
    assert len(found["state_bytes_by_layer"]) == 3
    assert sum(found["state_bytes_by_layer"]) <= found["state_bytes"]


def test_a_model_without_memory_has_no_state(llama):
    found = describe_model(llama())
    assert (found["model"], found["architecture"]) == ("LlamaForCausalLM", None)
    assert found["state_bytes"] is found["state_bytes_by_layer"] is None
    assert found["parameters_by_part"].keys() >= {"embed_tokens", "layers.*.self_attn", "layers.*.mlp", "norm"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.backbone.layers.3.memory.q_proj.weight", "layers.*.memory"),
        ("model.layers.0.persistent", "layers.*.persistent"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("0.weight", "0.*.weight"),
        ("scale", "scale"),
    ],
)
def test_parts_are_modules_by_name(name, part):
    assert part_name(name) == part


def test_what_caching_costs_is_said() -> None:
    settings = {"memory_depth": 1, "memory_caching": "grm", "caching_slots": 3}
    found = describe_model(byte_model(small_config("lmm", **settings)))
    plain = describe_model(byte_model(small_config("lmm", memory_depth=1)))
    assert found["cached_memories_bytes"] == found["state_bytes"] - plain["state_bytes"] > 0
