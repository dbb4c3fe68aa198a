"""Surprise along a document: the gradient of the memory's own loss, token by token, and the model's bits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model_cases import BOUNDED, MEMORIES, REMEMBERING, one_block, small_config, wake
from streaming.stream_cases import assert_same_memory
from titans_lm.streaming import Reader
from titans_lm.surprise import Surprise, measure_surprise
from titans_lm.train.fresh import byte_model

IDS = np.array([256, *b"import os\nimport sys\nprint(os.getcwd())\n"], np.uint16)


def made(architecture: str, **settings: Any) -> Any:
    model = byte_model(small_config(architecture, **one_block(architecture) | settings))
    wake(model)
    return model


@pytest.mark.parametrize("architecture", REMEMBERING)
def test_pieces_change_nothing(architecture: str) -> None:
    model = made(architecture).double()
    whole = measure_surprise(model, IDS)
    config = model.config
    assert whole.tokens.tolist() == IDS.tolist()
    memories = sum(name in MEMORIES for name in config.backbone_config().blocks)
    size = (len(IDS), config.num_attention_heads, config.memory_depth)
    assert [block.shape for block in whole.blocks] == [size] * memories
    assert [x.shape for x in whole.past + whole.forgotten] == [block.shape for block in whole.blocks] * 2
    for piece_len in (1, 7):
        behind: list[int] = []
        cut = measure_surprise(model, IDS, piece_len=piece_len, on_piece=behind.append)
        assert behind == [*range(piece_len, len(IDS), piece_len), len(IDS)]
        np.testing.assert_allclose(cut.bits, whole.bits, atol=1e-5)
        for name in ("blocks", "past", "forgotten"):
            for a, b in zip(getattr(cut, name), getattr(whole, name), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_linear_memory_is_surprised_by_its_error() -> None:
    """‖∇ℓ‖ = 2 ‖k W − v‖ where ‖k‖ = 1 and W is the memory before the token: chunks of one."""
    model = made("lmm", memory_depth=1, chunk_size=1, num_hidden_layers=1, num_persistent=0)
    memory = model.model.backbone.layers[0].memory
    seen = []

    def note(module: Any, args: tuple, kwargs: dict) -> None:
        x, state = args[0], args[1]
        k, v = (memory.normed(i, y) for i, y in enumerate(memory.streams(x, state.conv, None)[:3]) if i)
        error = torch.einsum("bthd,bhde->bthe", k, state.memory.M[0]) - v
        seen.append(2 * error.norm(dim=-1)[0])

    hook = memory.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        found = measure_surprise(model, IDS, piece_len=1)
    hook.remove()
    np.testing.assert_allclose(found.blocks[0][:, :, 0], torch.cat(seen).numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("forget_to", ["zero", "init"])
def test_past_and_forgotten_are_the_sizes_of_what_is_written(forget_to: str) -> None:
    """‖η_t S_{t−1}‖ and ‖α_t (M_{t−1} − B)‖, from the state and the gates before each token."""
    model = made("mag", num_hidden_layers=1, num_persistent=0, forget_to=forget_to)
    memory = model.model.backbone.layers[0].memory
    past, forgotten = [], []

    def note(module: Any, args: tuple) -> None:
        x, state = args[0], args[1].memory
        k = memory.normed(1, memory.streams(x, args[1].conv, None).k)
        eta, alpha = (
            gate(x, k)[0, 0].T[..., None, None] for gate in (memory.eta_proj, memory.alpha_proj)
        )  # (L, H, 1, 1)
        for found, gate, weights in ((past, eta, state.S), (forgotten, alpha, state.M)):
            base = memory.initial_weights if forget_to == "init" and found is forgotten else (0.0,) * len(weights)
            sizes = [(gate[i] * (w[0] - base[i])).flatten(1).norm(dim=1) for i, w in enumerate(weights)]
            found.append(torch.stack(sizes, dim=-1))

    hook = memory.register_forward_pre_hook(note)
    with torch.no_grad():
        alone = measure_surprise(model, IDS, piece_len=1)
    hook.remove()
    together = measure_surprise(model, IDS)
    for name, expected in (("past", past), ("forgotten", forgotten)):
        for found in (alone, together):
            np.testing.assert_allclose(getattr(found, name)[0], torch.stack(expected).numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("architecture", [name for name in REMEMBERING if name in BOUNDED])
def test_a_text_after_a_memory_is_the_rest_of_one_text(architecture: str) -> None:
    model = made(architecture).double()
    whole = measure_surprise(model, IDS)
    for cut in (1, 7, 40):
        reader = Reader(model)
        reader.feed([IDS[:cut]])
        before = reader.memory
        rest = measure_surprise(model, IDS[cut:], memory=before, piece_len=5)
        assert rest.tokens.tolist() == IDS[cut:].tolist()
        np.testing.assert_allclose(rest.bits, whole.bits[cut:], atol=1e-5, err_msg=f"cut at {cut}")
        for name in ("blocks", "past", "forgotten"):
            for a, b in zip(getattr(rest, name), getattr(whole, name), strict=True):
                np.testing.assert_allclose(a, b[cut:], rtol=1e-4, atol=1e-5, err_msg=f"{name}, cut at {cut}")
        assert_same_memory(reader.memory, before, 0.0)


def test_an_empty_memory_is_the_start_of_a_text() -> None:
    model = made("lmm")
    whole, found = measure_surprise(model, IDS), measure_surprise(model, IDS, memory=Reader(model).memory)
    np.testing.assert_array_equal(found.bits, whole.bits)
    np.testing.assert_array_equal(found.part("past"), whole.part("past"))


def test_bits_are_the_loss() -> None:
    model = made("mag").double()
    found = measure_surprise(model, IDS, piece_len=7)
    tokens = torch.from_numpy(IDS.astype(np.int64))
    with torch.no_grad():
        nats = F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")
    assert np.isnan(found.bits[0])
    np.testing.assert_allclose(found.bits[1:], nats.numpy() / np.log(2), atol=1e-6)


def test_every_memory_counts_the_same_in_the_summary() -> None:
    one, two = np.array([1.0, 2.0, 3.0]), np.array([300.0, 100.0, 200.0])
    blocks = (one.reshape(3, 1, 1), two.reshape(3, 1, 1))
    found = Surprise(np.arange(3), np.zeros(3), blocks).summary()
    assert found == pytest.approx([(0.5 + 1.5) / 2, (1.0 + 0.5) / 2, (1.5 + 1.0) / 2])
    assert Surprise(np.arange(3), np.zeros(3), (np.zeros((3, 1, 2)),)).summary().tolist() == [0.0, 0.0, 0.0]


def test_each_size_has_its_own_scale() -> None:
    sizes = np.arange(1.0, 7.0).reshape(3, 1, 2)
    found = Surprise(np.arange(3), np.zeros(3), (sizes,), (100 * sizes,), (0 * sizes,))
    assert found.part("past").shape == (3, 1, 1, 2)
    assert found.scale("past").tolist() == [[[300.0, 400.0]]]
    assert found.scale("forgotten").tolist() == [[[1.0, 1.0]]]
    assert found.summary("past") == pytest.approx(found.summary())
    assert found.summary("forgotten").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="without 'past'"):
        Surprise(np.arange(3), np.zeros(3), (sizes,)).summary("past")


def test_no_memory_no_surprise() -> None:
    with pytest.raises(ValueError, match="without memory"):
        measure_surprise(byte_model(small_config("segment")), IDS)
    with pytest.raises(ValueError, match="two tokens or more"):
        measure_surprise(made("lmm"), IDS[:1])
    with pytest.raises(ValueError, match="one document"):
        measure_surprise(made("lmm"), IDS[None])
    model = made("lmm")
    with pytest.raises(ValueError, match="two tokens or more"):
        measure_surprise(model, IDS[:0], memory=Reader(model).memory)
    with pytest.raises(ValueError, match="memory of 2 rows"):
        measure_surprise(model, IDS, memory=Reader(model, batch_size=2).memory)


@pytest.mark.usefixtures("unchecked")
def test_what_must_be_known() -> None:
    with pytest.raises(ValueError, match="did you mean 'past'"):
        measure_surprise(made("lmm"), IDS).part("pasta")
    with pytest.raises(ValueError, match="got output_surprise='some'; expected False, True"):
        made("lmm")(torch.zeros(1, 2, dtype=torch.int64), output_surprise="some")


def test_the_model_is_left_as_it_was() -> None:
    model = made("mal").train()
    measure_surprise(model, IDS)
    assert model.training
