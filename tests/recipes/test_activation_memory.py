"""What a step holds in memory: by hand, and against what autograd keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_cases import ARCHITECTURES, small_config
from titans_lm.recipes.estimate import (
    Precision,
    Step,
    activation_bytes,
    attention_widths,
    held_bytes,
    mask_numbers,
    memory_state_bytes,
    weight_copy_bytes,
)
from titans_lm.train.fresh import byte_model
from titans_lm.train.losses import next_token_loss

TNT = {"tnt_global_chunk": 32, "tnt_local_chunks": (16,), "tnt_shard": 32}


def test_an_lmm_by_hand() -> None:
    """E = 8, H = 2, F = 12, a memory of 2 (4 · 8 + 8 · 4) = 128 numbers, 2 blocks, 5 rows of 16 tokens, in float32.

    The three persistent tokens are a call of their own, for one row. All calls are shorter than a segment of chunks.
    """
    token = 2 * (14 * 8 * 4 + 2 * 16 * 4 + 2 * 12 * 4) + 2 * 8 * 4
    states = (1 * 256 + 64) + (5 * 256 + 64) + 5 * 128
    assert held_bytes(Step(small_config("lmm"), 259, 5, 16, "float32")) == {
        "activations": 80 * token,
        "memory_states": 4 * 2 * states,
        "weight_copies": 4 * 2 * (6 * 64 + 2 * 8 * 12),
        "loss": 12 * 259 * 80,
    }


def test_a_mac_by_hand() -> None:
    """The same sizes in bfloat16, in two segments of 8 tokens behind 3 persistent rows."""
    step = Step(small_config("mac"), 259, 5, 16, "bfloat16")
    attention = 1 + 2 * (2 + 2 * 3 / 16) + 1
    token = 2 * (14 * 8 * 4 + (21 + attention) * 8 * 2 + 2 * 16 * 4 + 4 * 12 * 2) + 8 * (4 + 2)
    masks = 2 * 8 * (3 + 2 * 8)
    assert held_bytes(step) == {
        "activations": 80 * token + 2 * 2 * masks,
        "memory_states": 4 * 2 * 2 * (5 * 256 + 64),
        "weight_copies": 2 * (2 * ((2 * 5 + 3 + 2 + 5) * 64 + 3 * 8 * 12) + 259 * 8),
        "loss": 12 * 259 * 80,
    }


def test_many_chunks_keep_a_state_for_each_segment_of_them() -> None:
    """Of 100 chunks, segments have 10; long texts cost the square root."""
    config = small_config("lmm", num_persistent=0)
    step = Step(config, 259, 1, 400, "float32")
    assert memory_state_bytes(step) == 4 * 2 * (10 * 256 + 64)


def test_states_of_a_small_vocabulary_and_a_large_memory_outweigh_the_loss() -> None:
    config = small_config("lmm", num_persistent=0, hidden_size=64)
    memory = 2 * 2 * 32 * 64
    assert held_bytes(Step(config, 3, 1, 8, "float32"))["loss"] == 4 * 2 * memory * (8 + 4)


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes of all storages that the graph of a loss keeps, without the parameters'."""
    kept: list[Tensor] = []

    def pack(x: Any) -> Any:
        kept.append(x)  # held, so that no other storage takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        next_token_loss(model, {"input_ids": ids, "targets": ids})
    mine = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(size for place, size in sizes.items() if place not in mine)


@pytest.mark.parametrize(("tokens", "precision"), [(32, "float32"), (96, "float32"), (96, "bfloat16")])
@pytest.mark.parametrize("kernel", [1, 4])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "sliding+lmm+sliding"])
def test_it_is_what_autograd_keeps(architecture: str, kernel: int, tokens: int, precision: Precision) -> None:
    """Within 15 % of it, in one window and in three, before anything is led back."""
    config = small_config(
        architecture, hidden_size=64, intermediate_size=128, segment_len=32, window=32, chunk_size=16,
        num_persistent=4, attention_conv_size=kernel,
    )  # fmt: skip
    ids = torch.randint(0, 256, (4, tokens))
    model, step = byte_model(config).train(), Step(config, 259, 4, tokens, precision)
    log_probabilities = 4 * 259 * ids.numel()
    counted = activation_bytes(step) + memory_state_bytes(step) + weight_copy_bytes(step) + log_probabilities
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        assert counted == pytest.approx(saved_bytes(model, ids), rel=0.15)


@pytest.mark.parametrize(
    ("architecture", "tokens", "own"),
    [
        ("lmm", 96, {"key_degree": 2}),
        ("lmm", 32, {"key_degree": 3}),
        ("lmm", 96, {"key_degree": 2, "omega_window": 3, "num_attention_heads": 2}),
        ("tnt", 96, {"key_degree": 2, "num_attention_heads": 2, **TNT}),
    ],
)
def test_polynomial_keys_are_what_autograd_keeps(architecture: str, tokens: int, own: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "chunk_size": 16}
    config = small_config(architecture, **sizes | {"memory_depth": 1, "num_persistent": 0} | own)
    ids = torch.randint(0, 256, (4, tokens))
    model, step = byte_model(config).train(), Step(config, 259, 4, tokens, "float32")
    counted = activation_bytes(step) + memory_state_bytes(step) + weight_copy_bytes(step) + 4 * 259 * ids.numel()
    assert counted == pytest.approx(saved_bytes(model, ids), rel=0.15)


def test_attention_sees_what_its_range_holds() -> None:
    """Widths of queries, keys, values and outputs by token, and one mask for all rows and heads."""
    sizes = {"num_persistent": 2, "window": 4, "segment_len": 4, "chunk_size": 4}
    assert attention_widths(small_config("lmm", **sizes), 8) == 0
    assert attention_widths(small_config("attention", **sizes), 8) == 4 * (1 + 2 / 8)
    assert attention_widths(small_config("segment", **sizes), 8) == 1 + 2 * (1 + 2 / 4) + 1
    assert attention_widths(small_config("sliding", **sizes), 4) == 1 + 2 * (1 + 2 / 4) + 1
    keys = (2 + 4) / 8 + (2 + 8) / 8  # the first window's, and the second's with the window before it
    assert attention_widths(small_config("sliding", **sizes), 8) == 1 + 4 / 8 + 2 * keys + 8 / 8 + 1
    assert mask_numbers(small_config("attention", **sizes), 8) == 0
    assert mask_numbers(small_config("segment", **sizes), 6) == 4 * (2 + 4) + 2 * (2 + 2)
    assert mask_numbers(small_config("sliding", **sizes), 8) == 4 * (2 + 4) + 4 * (2 + 8)
