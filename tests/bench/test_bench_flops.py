from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.bench_cases import OP
from model_cases import SHARED, STACKS, small_config
from titans_lm.bench.flops import memory_flops, memory_widths, model_flops, visible_keys
from titans_lm.bench.subjects_op import make_call
from titans_lm.ops import MemoryState
from titans_lm.train.fresh import byte_model


def test_by_hand():
    """Widths 3 → 5 → 3 and chunks of 2: n = 15 and 15, so Σ n = 30, and C Σ (D_{l−1} + D_l) = 2 (8 + 8) = 32."""
    errors, read, attention, write = 30 + 15, 2 * 30, 32, 2 * 30
    assert memory_flops((3, 5, 3), 2) == 2 * (errors + read + attention + write)
    assert memory_flops((3, 5, 3), 2, forget_to_init=True) == memory_flops((3, 5, 3), 2) + 2 * 30


def test_a_linear_memory_has_one_layer_and_no_way_back():
    assert memory_widths(7, 1, 4) == (7, 7)
    assert memory_widths(7, 3, 4) == (7, 28, 28, 7)
    assert memory_flops((7, 7), 1) == 2 * (49 + 2 * 49 + 14 + 2 * 49)


class Products(TorchDispatchMode):
    """Count the operations of matrix products; torch's FlopCounterMode leaves out those in place and with out=."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = args[1:3] if name.startswith(("addmm", "baddbmm")) else args[:2]
            self.flops += 2 * a.numel() * b.shape[-1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", [{}, {"depth": 1}, {"depth": 3, "chunk": 4}, {"forget_to": "init"}], ids=str)
def test_it_is_what_the_op_does(change, monkeypatch):
    """Within 15 % of the products that the op asks for.

    The formula counts equations. A program may do with less where the state is known (the first chunk has S = 0) or
    where two products are one, and has a few more for the C × C matrices of the gates. Tiles of small chunks,
    which do more to be faster (D37), are left out.
    """
    monkeypatch.setattr(
        import_module("titans_lm.ops.chunkwise"), "tile_size", lambda _, __, ___, chunk_size, length: chunk_size
    )
    case = {**OP, "tokens": 64, "width": 16, **change}
    call = make_call(case, torch.float32, torch.device("cpu"))
    with torch.no_grad(), Products() as counter:
        call(MemoryState.initial(call.weights, case["rows"]), case["chunk"])
    per_token = memory_flops(
        memory_widths(16, case["depth"], case["expansion"]), case["chunk"], forget_to_init=case["forget_to"] == "init"
    )
    assert counter.flops == pytest.approx(case["rows"] * 64 * case["heads"] * per_token, rel=0.15)


def test_a_model_by_hand():
    """Two blocks of E = 8 with H = 2 heads, F = 12, memories of 2 layers and chunks of 4; a vocabulary of 10."""
    memory = memory_flops((4, 8, 4), 4, forget_to_init=True)
    gates = 3 * 8 * 2 * 2
    parts = model_flops(small_config("lmm"), 10, 16)
    assert parts == {
        "projections": 2 * 2 * (5 * 64 + gates),
        "memory": 2 * 2 * memory,
        "attention": 0,
        "mlp": 2 * 6 * 8 * 12,
        "head": 2 * 8 * 10,
    }
    mac = model_flops(small_config("mac"), 10, 16)
    assert mac["projections"] == 2 * 2 * (15 * 64 + gates)
    assert model_flops(small_config("mac", shared_qkv=True), 10, 16)["projections"] == 2 * 2 * (14 * 64 + gates)
    mag = model_flops(small_config("mag", shared_qkv=True), 10, 16)
    assert mag["projections"] == 2 * 2 * (7 * 64 + gates)
    assert mac["memory"] == 2 * 2 * (memory + 2 * (4 * 8 + 8 * 4))
    assert mac["attention"] == 2 * 4 * 8 * visible_keys(small_config("mac"), 16)
    huber = model_flops(small_config("lmm", memory_objective="huber"), 10, 16)
    assert huber["projections"] == 2 * 2 * (5 * 64 + gates + 8 * 2)
    window = model_flops(small_config("lmm", omega_window=4, memory_depth=1), 10, 16)
    assert window["projections"] == 2 * 2 * (5 * 64 + 3 * 8 * 2 + 8 * 2 * 4)
    assert model_flops(small_config("sliding"), 10, 16)["memory"] == 0
    per_head = model_flops(small_config("lmm", gates="head", momentum=False), 10, 16)
    assert per_head["projections"] == 2 * 2 * (5 * 64 + 2 * 8 * 2)
    per_channel = model_flops(small_config("lmm", gates="channel", gate_rank=3), 10, 16)
    assert per_channel["projections"] == 2 * 2 * (5 * 64 + 3 * (8 * 3 + 3 * 2 * (4 + 8)))


def test_keys_that_a_token_sees():
    """Rows of 6 tokens, segments and windows of 4, 3 persistent rows: counted token by token."""
    sizes = {"segment_len": 4, "window": 4, "num_persistent": 3, "chunk_size": 4}
    seen = {
        "mac": [2, 4, 6, 8, 2, 4],
        "segment": [1, 2, 3, 4, 1, 2],
        "mag": [1, 2, 3, 4, 4, 4],
        "mal": [1, 2, 3, 4, 4, 4],
        "sliding": [1, 2, 3, 4, 4, 4],
        "attention": [1, 2, 3, 4, 5, 6],
    }
    assert visible_keys(small_config("lmm", **sizes), 6) == 0
    for architecture, own in seen.items():
        assert visible_keys(small_config(architecture, **sizes), 6) == pytest.approx(3 + sum(own) / 6)


@pytest.mark.parametrize("architecture", [*STACKS, *SHARED])
def test_it_is_what_a_model_does(architecture):
    """Within 15 % of the products that a forward pass asks for, attention's own, which one operator makes, left out.

    Few tokens, so that all of them are torch's own (D28) and are seen.
    """
    config = small_config(
        architecture, hidden_size=64, intermediate_size=64, segment_len=32, window=32, chunk_size=16, num_persistent=0
    )
    model = byte_model(config).eval()
    with torch.no_grad(), Products() as counter:
        model(torch.randint(0, 256, (1, 48)))
    parts = model_flops(config, 259, 48)
    assert counter.flops == pytest.approx(48 * (sum(parts.values()) - parts["attention"]), rel=0.15)
