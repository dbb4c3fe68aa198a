"""The layer in somebody's own model: settings, masks, what is refused, and states that are kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_cases import assert_close, assert_same_state, named_tensors, small_config, wake
from titans_lm.config import MemoryConfig
from titans_lm.layers import Diagnostics
from titans_lm.memory import LayerState, NeuralMemory
from titans_lm.ops.state import take_rows

T = 11


def make(**settings: Any) -> NeuralMemory:
    torch.manual_seed(0)
    layer = NeuralMemory(small_config("lmm", **settings)).double()
    wake(layer)
    return layer


def tokens(rows: int = 2) -> Tensor:
    return torch.randn(rows, T, 8, dtype=torch.float64)


def test_settings_make_a_layer_as_a_config_does() -> None:
    layer = NeuralMemory(hidden_size=8, num_attention_heads=2, memory_depth=1)
    assert layer.config == MemoryConfig(hidden_size=8, num_attention_heads=2, memory_depth=1)


@pytest.mark.parametrize("seed", range(3))
def test_padding_may_stand_anywhere_in_a_row(seed: int) -> None:
    layer, x = make(), tokens(3)
    valid = torch.rand(3, T, generator=torch.Generator().manual_seed(seed)) < 0.6
    told = Diagnostics(surprise=True)
    x = x.masked_fill(~valid[..., None], torch.nan)
    y, state = layer(x, valid=valid, diagnostics=told)
    assert not y[~valid].any()
    for row in range(3):
        alone_told = Diagnostics(surprise=True)
        alone, after = layer(x[row, valid[row]][None], diagnostics=alone_told)
        assert_close(y[row, valid[row]], alone[0])
        assert_close(told.surprise_norms[0][row, valid[row]], alone_told.surprise_norms[0][0])
        assert_same_state(take_rows(state, torch.tensor([row])), after)


def test_a_state_is_detached_moved_saved_and_loaded(tmp_path: Path) -> None:
    layer, x = make(), tokens()
    _, state = layer(x)
    assert state.memory.M[0].requires_grad
    assert not any(tensor.requires_grad for _, tensor in named_tensors(state.detach()))
    assert {tensor.dtype for _, tensor in named_tensors(state.to(torch.float32))} == {torch.float32, torch.int64}
    with pytest.raises(ValueError, match=r"got torch\.bfloat16 for a state; expected torch\.float32"):
        state.to(torch.bfloat16)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=f"got {dtype} for a state; expected torch.float32"):
            state.to(dtype)
    assert not state.memory.detach().to("cpu").M[0].requires_grad
    state.save(tmp_path / "state.pt")
    again = LayerState.load(tmp_path / "state.pt")
    assert_same_state(again, state, 0.0)
    assert torch.equal(layer(x, again)[0], layer(x, state.detach())[0])
    torch.save({"other": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt with a dict; expected a file that LayerState.save wrote"):
        LayerState.load(tmp_path / "other.pt")
    for noise in (b"noise", b"hello world", b"", b"PK"):
        (tmp_path / "noise.pt").write_bytes(noise)
        with pytest.raises(ValueError, match=r"noise.pt, which holds no state"):
            LayerState.load(tmp_path / "noise.pt")


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, path = make(), tmp_path / "state.pt"
    _, state = layer(tokens())
    state.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]

    def full(_: object, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("titans_lm.memory.torch.save", full)
    with pytest.raises(OSError, match="no space left"):
        state.save(path)
    assert_same_state(LayerState.load(path), state, 0.0)
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]
    with pytest.raises(ValueError, match="got device='nowhere'; expected one that this machine has"):
        LayerState.load(path, device="nowhere")


def test_hooks_of_a_layer_are_called_once_with_padding_too() -> None:
    layer, calls = make(), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    layer(tokens(), valid=torch.ones(2, 11, dtype=torch.bool))
    assert calls == [1]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (
            r"got x torch.float64 \(2, 11, 7\); expected floating point \(B, T, E\) with E = 8",
            {"x": torch.ones(2, 11, 7).double()},
        ),
        (r"got x torch.float64 \(11, 8\); expected", {"x": torch.ones(11, 8).double()}),
        (r"got x torch.int64", {"x": torch.ones(2, 11, 8).long()}),
        (r"got x torch.float16 for weights torch.float64; expected one type", {"x": torch.ones(2, 11, 8).half()}),
        (r"got x of type LayerState; expected a tensor, and a state after it", {"x": make().init_state(2)}),
        (r"got a state of type Tensor; expected LayerState", {"state": torch.zeros(2)}),
        (
            r"got a state with tails of shapes \[\(3, 3, 8\).*; expected \[\(2, 3, 8\).*, as this layer and x have",
            {"state": make().init_state(3)},
        ),
        (
            r"got a state with tails of shapes \[\(2, 1, 8\).*; expected \[\(2, 3, 8\).*one conv_size",
            {"state": make(conv_size=2).init_state(2)},
        ),
        (r"got valid int64 \(2, 11\); expected bool", {"valid": torch.ones(2, 11).long()}),
        (r"got valid of type list; expected bool", {"valid": [[True] * 11] * 2}),
        (r"got lengths of type list; expected integers \(B,\)", {"lengths": [11, 3]}),
        (r"got lengths \[12, 3\]; expected 0 to T = 11", {"lengths": torch.tensor([12, 3])}),
        (r"got lengths int64 \(1,\); expected integers \(B,\) = \(2,\)", {"lengths": torch.tensor([3])}),
    ],
)
def test_what_a_layer_cannot_read_is_refused(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        make()(**({"x": tokens()} | arguments))


@pytest.mark.parametrize(
    "own", [{}, {"gates": "channel", "gate_rank": 3}, {"memory_depth": 1, "omega_window": 3}], ids=str
)
def test_a_frozen_layer_answers_from_the_memory_of_its_state_and_leaves_it(own: dict[str, Any]) -> None:
    layer, x = make(conv_size=1, **own), tokens()
    _, state = layer(x)
    assert any(bool(S.any()) for S in state.memory.S), "there is past surprise that could be written"
    twice, after = layer(torch.cat([x[:, :1], x[:, :1]], dim=1), state, frozen=True)
    for one, other in (("M", after.memory.M), ("S", after.memory.S), ("tail", after.memory.tail)):
        assert_same_state(getattr(state.memory, one), other)
    assert_close(twice[:, 0], twice[:, 1])
    q, gate, _ = layer.project_query(x[:, :1], ())
    assert_close(twice[:, :1], layer.retrieve(state.memory.M, q, gate))


def test_under_autocast_a_layer_reads_what_it_is_given() -> None:
    layer, x = make().float(), tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(layer(x.bfloat16())[0], layer(x.bfloat16().float())[0], rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("unchecked")
def test_autocast_converts_no_float64() -> None:
    for layer, x in ((make().float(), tokens()), (make(), tokens().float())):
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="expected one type"):
            layer(x)


@pytest.mark.parametrize("objective", ["l2", "huber", "huber_coordinate"])
def test_a_token_that_is_no_number_leaves_the_other_rows_as_they_are(objective: str) -> None:
    layer, x = make(memory_objective=objective), tokens()
    expected = layer(x)[0]
    y, _ = layer(x.index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(torch.nan, dtype=x.dtype)))
    assert_close(y[1], expected[1])
    assert y[0, 3:].isnan().all()


def test_another_default_device_changes_nothing() -> None:
    """The roots of how often each product of two channels comes are kept for all layers of 11 channels a head."""
    layer = NeuralMemory(hidden_size=22, num_attention_heads=2, memory_depth=1, key_degree=2)
    x = torch.randn(1, 3, 22)
    with torch.device("meta"):
        found = layer(x)[0]
    assert torch.equal(found, layer(x)[0])


@pytest.mark.usefixtures("unchecked")
def test_settings_that_make_no_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown setting 'hidden_sizes' for MemoryConfig; did you mean 'hidden_size'"):
        NeuralMemory(hidden_sizes=8)
    with pytest.raises(ValueError, match="got a config and memory_depth; expected a config or settings, not both"):
        NeuralMemory(MemoryConfig(), memory_depth=1)
    with pytest.raises(ValueError, match="got config=64; expected a MemoryConfig"):
        NeuralMemory(64)
