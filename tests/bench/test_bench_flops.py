import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.bench_cases import OP
from titans_lm.bench.flops import memory_flops, memory_widths
from titans_lm.bench.subjects_op import make_call
from titans_lm.ops import MemoryState


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
def test_it_is_what_the_op_does(change):
    """Within 15 % of the products that the op asks for.

    The formula counts equations. A program may do with less where the state is known (the first chunk has S = 0) or
    where two products are one, and has a few more for the C × C matrices of the gates.
    """
    case = {**OP, "tokens": 64, "width": 16, **change}
    call = make_call(case, torch.float32, torch.device("cpu"))
    with torch.no_grad(), Products() as counter:
        call(MemoryState.initial(call.weights, case["rows"]), case["chunk"])
    per_token = memory_flops(
        memory_widths(16, case["depth"], case["expansion"]), case["chunk"], forget_to_init=case["forget_to"] == "init"
    )
    assert counter.flops == pytest.approx(case["rows"] * 64 * case["heads"] * per_token, rel=0.15)
