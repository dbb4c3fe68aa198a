"""The state as a value: walking over it, picking rows, counting bytes, and where it starts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory
from titans_lm.ops.state import (
    detach_state,
    map_state,
    repeat_rows,
    select_rows,
    state_bytes,
    state_dtype,
    state_tensors,
    take_rows,
)

B = 3


class Nested(NamedTuple):
    """A state as blocks have it: states within states, tensors, and things that are not there."""

    memory: MemoryState
    tails: tuple[Tensor, ...]
    window: Tensor | None


def nested() -> Nested:
    weights = (torch.randn(2, 4, 6), torch.randn(2, 6, 4))
    memory = MemoryState.initial(weights, B)
    memory = memory._replace(S=tuple(map(torch.randn_like, memory.S)), offset=torch.arange(B))
    return Nested(memory, (torch.randn(B, 3), torch.randn(B, 5)), None)


def assert_rows(state: Nested, source: Nested, rows: list[int]) -> None:
    """Row i of `state` is row rows[i] of `source`, in every tensor."""
    for x, y in zip(state_tensors(state), state_tensors(source), strict=True):
        assert torch.equal(x, torch.stack([y[i] for i in rows]))


def test_initial_starts_every_row_from_the_weights_without_surprise() -> None:
    weights = (torch.randn(2, 4, 6), torch.randn(2, 6, 4))
    state = MemoryState.initial(weights, B)
    for M, S, anchor, weight in zip(state.M, state.S, state.anchor, weights, strict=True):
        assert M.shape == (B, *weight.shape)
        assert all(torch.equal(row, weight) for row in M)
        assert torch.equal(anchor, M)
        assert S.shape == M.shape
        assert not S.any()
    assert torch.equal(state.offset, torch.zeros(B, dtype=torch.int64))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_initial_is_at_least_float32(dtype: torch.dtype, kept: torch.dtype) -> None:
    assert state_dtype(dtype) == kept
    state = MemoryState.initial((torch.ones(1, 2, 2, dtype=dtype),), B)
    assert {x.dtype for x in (*state.M, *state.S, *state.anchor)} == {kept}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_every_row_reach_the_initial_weights(dtype: torch.dtype) -> None:
    weight = torch.randn(2, 4, 4, dtype=dtype, requires_grad=True)
    state = MemoryState.initial((weight,), B)
    scale = torch.tensor([1.0, 2.0, 4.0])[:, None, None, None]
    (found,) = torch.autograd.grad((scale * state.M[0]).sum(), weight, retain_graph=True)
    assert torch.equal(found, torch.full_like(weight, 7.0))
    (found,) = torch.autograd.grad(state.anchor[0].sum(), weight)
    assert torch.equal(found, torch.full_like(weight, 3.0))
    assert not state.S[0].requires_grad


def test_initial_does_not_share_memory_with_the_weights_or_between_rows() -> None:
    weight = torch.zeros(1, 2, 2)
    state = MemoryState.initial((weight,), B)
    state.M[0][0] += 1.0
    assert not weight.any()
    assert not state.M[0][1:].any()


def test_map_state_keeps_the_structure() -> None:
    state = nested()
    doubled = map_state(lambda x: 2 * x, state)
    assert type(doubled) is Nested
    assert type(doubled.memory) is MemoryState
    assert type(doubled.memory.M) is tuple
    assert doubled.window is None
    for x, y in zip(state_tensors(doubled), state_tensors(state), strict=True):
        assert torch.equal(x, 2 * y)
    assert map_state(torch.neg, None) is None


def test_map_state_walks_several_states_together() -> None:
    a, b = nested(), nested()
    total = map_state(lambda x, y: x + y, a, b)
    for x, y, z in zip(*map(state_tensors, (total, a, b)), strict=True):
        assert torch.equal(x, y + z)


def test_map_state_refuses_states_that_do_not_match() -> None:
    state = nested()
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        map_state(torch.add, state, state._replace(tails=state.tails[:1]))


@pytest.mark.usefixtures("unchecked")
def test_map_state_refuses_what_is_no_state() -> None:
    with pytest.raises(TypeError, match="got dict inside a state; expected tensors, tuples and None"):
        map_state(torch.neg, (torch.zeros(1), {"M": torch.zeros(1)}))


def test_state_tensors_finds_every_tensor() -> None:
    assert len(list(state_tensors(nested()))) == 2 + 2 + 2 + 1 + 2
    assert list(state_tensors(None)) == []


def test_detach_state_cuts_the_graph_and_keeps_the_values() -> None:
    weight = torch.randn(1, 2, 2, requires_grad=True)
    state = MemoryState.initial((weight,), B)
    detached = detach_state(state)
    assert state.M[0].requires_grad
    assert not detached.M[0].requires_grad
    assert torch.equal(state.M[0], detached.M[0])


@pytest.mark.parametrize("rows", [[2, 0, 0, 1], [1], [0, 1, 2], []])
def test_take_rows(rows: list[int]) -> None:
    state = nested()
    taken = take_rows(state, torch.tensor(rows, dtype=torch.int64))
    if rows:
        assert_rows(taken, state, rows)
    assert {len(x) for x in state_tensors(taken)} == {len(rows)}


def test_taken_rows_are_copies() -> None:
    state = nested()
    taken = take_rows(state, torch.arange(B))
    before = state.tails[0].clone()
    taken.tails[0].zero_()
    assert torch.equal(state.tails[0], before)


def test_repeat_rows_repeats_each_next_to_itself() -> None:
    state = nested()
    assert_rows(repeat_rows(state, 2), state, [0, 0, 1, 1, 2, 2])


def test_select_rows_takes_each_row_from_one_of_two() -> None:
    a, b = nested(), nested()
    chosen = select_rows(torch.tensor([True, False, True]), a, b)
    for x, y, z in zip(*map(state_tensors, (chosen, a, b)), strict=True):
        assert torch.equal(x, torch.stack([y[0], z[1], y[2]]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda s: take_rows(s, torch.tensor([0, B])), r"got rows \[0, 3\] of a state; expected numbers from 0 to 2"),
        (lambda s: take_rows(s, torch.tensor([-1])), r"got rows \[-1\] of a state; expected numbers from 0 to 2"),
        (lambda s: take_rows(s, [0]), r"got rows \[0\]; expected a tensor of integers \(N,\)"),
        (lambda s: take_rows(s, torch.tensor([True, False, True])), r"got rows tensor\(.*; expected a tensor of integ"),
        (lambda s: repeat_rows(s, 0), "got times=0; expected an integer of at least 1"),
        (lambda s: repeat_rows(s, 1.5), "got times=1.5; expected an integer of at least 1"),
        (lambda s: select_rows(torch.ones(B) > 0, s, s._replace(tails=s.tails[:1])), "expected bool .* of one model"),
        (lambda s: select_rows(torch.ones(B) > 0, s, repeat_rows(s, 2)), "got a mask torch.bool .3,. and states whose"),
        (lambda s: select_rows(torch.ones(B) > 0, s, None), "got a mask torch.bool .3,. and states whose"),
        (lambda s: select_rows(torch.ones(2) > 0, s, s), "got a mask torch.bool .2,. and states whose"),
        (lambda s: select_rows(torch.ones(B), s, s), "got a mask torch.float32 .3,. and states whose"),
    ],
)
def test_rows_that_there_are_not_are_refused(pick: Callable[[Nested], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pick(nested())


def test_select_rows_keeps_gradients_apart() -> None:
    """A NaN in the row that was not taken reaches neither value nor gradient."""
    a = torch.tensor([[1.0], [float("nan")]], requires_grad=True)
    b = torch.tensor([[float("nan")], [2.0]], requires_grad=True)
    chosen = select_rows(torch.tensor([True, False]), a, b)
    assert chosen.tolist() == [[1.0], [2.0]]
    found = torch.autograd.grad(chosen.sum(), (a, b))
    assert [g.flatten().tolist() for g in found] == [[1.0, 0.0], [0.0, 1.0]]


def test_state_bytes_counts_every_tensor_in_full() -> None:
    """Neither sharing (M and anchor at a chunk's border) nor slices of one tensor change the count."""
    state = nested()
    per_row = 3 * (2 * 4 * 6 + 2 * 6 * 4) * 4 + 8 + (3 + 5) * 4
    assert state.memory.anchor is state.memory.M
    assert state_bytes(state) == B * per_row
    apart = state._replace(memory=map_state(torch.clone, state.memory))
    assert state_bytes(apart) == B * per_row
    assert state_bytes(tuple(torch.zeros(2, 5, dtype=torch.float64))) == 2 * 5 * 8
    assert state_bytes(None) == 0


def test_a_state_in_another_order_is_written_like_any_other() -> None:
    """A state of permuted tensors, read a token at a time: the write goes into the state and into no copy of it."""
    generator = torch.Generator().manual_seed(0)
    B, H, D = 2, 3, 4
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    q, k, v, gate = draw(B, 1, H, D), draw(B, 1, H, D), draw(B, 1, H, D), torch.full((B, 1, H), 0.1).double()
    M, S = draw(B, H, D, D), draw(H, B, D, D).transpose(0, 1)
    found = []
    for surprise in (S, S.contiguous()):
        state = MemoryState((M,), (surprise,), (M,), torch.zeros(B, dtype=torch.int64))
        network = MemoryNetwork(residual=False)
        found.append(neural_memory(q, k, v, gate, gate, gate, state, network=network, chunk_size=4))
    (o, after), (expected, expected_after) = found
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    for x, y in zip((*after.M, *after.S), (*expected_after.M, *expected_after.S), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
