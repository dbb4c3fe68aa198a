"""Surprise along a document: the gradient of the memory's own loss, token by token, and the model's bits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model_cases import MEMORIES, small_config, wake
from titans_lm.surprise import Surprise, measure_surprise
from titans_lm.train.language import byte_model

IDS = np.array([256, *b"import os\nimport sys\nprint(os.getcwd())\n"], np.uint16)


def made(architecture: str, **settings: Any) -> Any:
    model = byte_model(small_config(architecture, **settings))
    wake(model)
    return model


@pytest.mark.parametrize("architecture", MEMORIES)
def test_pieces_change_nothing(architecture: str) -> None:
    model = made(architecture).double()
    whole = measure_surprise(model, IDS)
    config = model.config
    assert whole.tokens.tolist() == IDS.tolist()
    assert [block.shape for block in whole.blocks] == [(len(IDS), config.num_attention_heads, config.memory_depth)] * 2
    for piece_len in (1, 5, 40):
        cut = measure_surprise(model, IDS, piece_len=piece_len)
        np.testing.assert_allclose(cut.bits, whole.bits, atol=1e-5)
        for a, b in zip(cut.blocks, whole.blocks, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_linear_memory_is_surprised_by_its_error() -> None:
    """‖∇ℓ‖ = 2 ‖k W − v‖ where ‖k‖ = 1 and W is the memory before the token: chunks of one."""
    model = made("lmm", memory_depth=1, chunk_size=1, num_hidden_layers=1, memory_reads_persistent=False)
    memory = model.model.backbone.layers[0].memory
    seen = []

    def note(module: Any, args: tuple, kwargs: dict) -> None:
        x, state = args[0], args[1]
        (_, k, v), _ = memory._streams(x, state.conv, None)
        error = torch.einsum("bthd,bhde->bthe", k, state.memory.M[0]) - v
        seen.append(2 * error.norm(dim=-1)[0])

    hook = memory.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        found = measure_surprise(model, IDS, piece_len=1)
    hook.remove()
    np.testing.assert_allclose(found.blocks[0][:, :, 0], torch.cat(seen).numpy(), rtol=1e-4, atol=1e-6)


def test_bits_are_the_loss() -> None:
    model = made("mag")
    found = measure_surprise(model, IDS, piece_len=7)
    tokens = torch.from_numpy(IDS.astype(np.int64))
    with torch.no_grad():
        nats = F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
    assert np.isnan(found.bits[0])
    np.testing.assert_allclose(found.bits[1:], nats.numpy() / np.log(2), atol=2e-5)


def test_every_memory_counts_the_same_in_the_summary() -> None:
    one, two = np.array([1.0, 2.0, 3.0]), np.array([300.0, 100.0, 200.0])
    blocks = (one.reshape(3, 1, 1), two.reshape(3, 1, 1))
    found = Surprise(np.arange(3), np.zeros(3), blocks).summary()
    assert found == pytest.approx([(0.5 + 1.5) / 2, (1.0 + 0.5) / 2, (1.5 + 1.0) / 2])
    assert Surprise(np.arange(3), np.zeros(3), (np.zeros((3, 1, 2)),)).summary().tolist() == [0.0, 0.0, 0.0]


def test_no_memory_no_surprise() -> None:
    with pytest.raises(ValueError, match="without memory"):
        measure_surprise(byte_model(small_config("segment")), IDS)
    with pytest.raises(ValueError, match="two tokens or more"):
        measure_surprise(made("lmm"), IDS[:1])
    with pytest.raises(ValueError, match="one document"):
        measure_surprise(made("lmm"), IDS[None])


def test_the_model_is_left_as_it_was() -> None:
    model = made("mal").train()
    measure_surprise(model, IDS)
    assert model.training
