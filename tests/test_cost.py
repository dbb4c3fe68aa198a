"""What a call costs, in tensors made and not in seconds: nothing grows with T², and a token copies what it must."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_cases import ARCHITECTURES, small_backbone

HIDDEN = 8
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


class Made(TorchDispatchMode):
    """Counts the operators of torch that run inside, and keeps the size of the largest tensor that one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


def made(run: Callable[[], Any]) -> Made:
    with Made() as counts:
        run()
    return counts


def tokens(length: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, length, HIDDEN)


@every_architecture
@pytest.mark.parametrize("before", [0, 40])
def test_no_tensor_grows_with_the_square_of_the_text(architecture: str, before: int) -> None:
    """Not even in full attention: what is quadratic there is time."""
    stack = small_backbone(architecture, torch.float32, num_hidden_layers=1, segment_len=32, window=24, chunk_size=16)
    with torch.no_grad():
        state = stack(tokens(before))[1] if before else None
        short, long = (made(lambda n=n: stack(tokens(n), state)).largest for n in (512, 1024))
    assert long <= 2.1 * short, "twice the text, at most twice the memory"


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "attention"])
def test_a_token_costs_the_same_however_long_the_text_is(architecture: str) -> None:
    stack = small_backbone(architecture, torch.float32)
    with torch.no_grad():
        early, late = (stack(tokens(n))[1] for n in (9, 9 + 8 * 40))  # both one token into a segment
        x = tokens(1)
        stack(x, early)  # the first look at a state notes how one is laid out
        costs = [made(lambda state=state: stack(x, state)) for state in (early, late)]
    assert costs[0].calls == costs[1].calls
    assert costs[0].largest == costs[1].largest


@pytest.mark.parametrize("architecture", ["mac", "segment", "sliding", "attention"])
def test_rows_that_stand_together_need_no_mask(architecture: str) -> None:
    """A token that all rows read at one place makes no boolean tensor and scatters nothing into place."""
    stack = small_backbone(architecture, torch.float32, memory_backend="auto")
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        _, state = stack(tokens(5, rows=2))
        attention = stack.layers[0].attention
        attention.register_forward_pre_hook(lambda *_: names.clear())
        kept: list[str] = []
        attention.register_forward_hook(lambda *_: kept.extend(names))
        with Names():
            stack(tokens(1, rows=2), state)
    assert any("scaled_dot_product" in name for name in kept)
    assert not [name for name in kept if "scatter" in name or "aten.le" in name or "aten.ge" in name]


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_mac_copies_no_memory_inside_a_segment(apart: bool) -> None:
    """What recall reads is the same tensor from token to token, and the memory itself where all rows end a segment."""
    stack = small_backbone("mac", torch.float32)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 3:] = not apart
    with torch.no_grad():
        _, state = stack(tokens(5, rows=2), None, valid)
        begun = state.layers[0].at_segment_start
        _, state = stack(tokens(1, rows=2), state)
        assert all(a is b for a, b in zip(state.layers[0].at_segment_start, begun, strict=True))
        _, state = stack(tokens(1, rows=2), state)
        _, state = stack(tokens(1, rows=2), state)  # the eighth token of a row that read them all
        ended = state.layers[0].at_segment_start
        own = state.layers[0].memory.memory.M
        assert all(a is b for a, b in zip(ended, own, strict=True)) == (not apart)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(ended, own, strict=True))
        assert not apart or all(torch.equal(a[1], b[1]) for a, b in zip(ended, begun, strict=True))


def test_what_full_attention_keeps_is_no_view_of_more() -> None:
    stack = small_backbone("attention", torch.float32)
    _, state = stack(tokens(30))
    for layer in state.layers:
        for x in (layer.k, layer.v):
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_a_long_call_is_attended_in_blocks_with_the_same_result() -> None:
    stack = small_backbone("attention")
    x = torch.randn(3, 41, HIDDEN, dtype=torch.float64)
    valid = torch.ones(3, 11, dtype=torch.bool)
    valid[1, 6:] = False
    _, state = stack(x[:, :11], None, valid)
    whole, _ = stack(x[:, 11:], state)
    for block in stack.layers:
        block.attention.rows = 7
    blocks, _ = stack(x[:, 11:], state)
    torch.testing.assert_close(blocks, whole, rtol=0.0, atol=1e-12)
