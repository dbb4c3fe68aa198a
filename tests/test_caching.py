"""Memory caching against a loop over tokens, values and gradients, and what it is made of taken away."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from model_cases import assert_close, assert_same_state, named_tensors, small_backbone, small_config, wake
from titans_lm.config import BackboneConfig, MemoryConfig
from titans_lm.memory import LayerState, NeuralMemory
from titans_lm.ops import MemoryState, neural_memory, read
from titans_lm.ops.state import state_bytes

SEGMENT, T = 3, 25
CASES: dict[str, dict[str, Any]] = {
    "residual": {"memory_caching": "residual"},
    "residual, independent": {"memory_caching": "residual", "caching_start": "independent"},
    "grm": {"memory_caching": "grm"},
    "grm, independent": {"memory_caching": "grm", "caching_start": "independent"},
    "grm, few slots": {"memory_caching": "grm", "caching_slots": 3},
    "grm, fenwick": {"memory_caching": "grm", "caching_lengths": "fenwick", "caching_slots": 4},
    "grm, fenwick, few slots": {"memory_caching": "grm", "caching_lengths": "fenwick", "caching_slots": 2},
    "ssc": {"memory_caching": "ssc", "caching_top": 2},
    "ssc, fenwick": {"memory_caching": "ssc", "caching_top": 1, "caching_lengths": "fenwick"},
}
LINEAR = {"memory_depth": 1, "chunk_size": 1}


def layer(**settings: Any) -> NeuralMemory:
    torch.manual_seed(0)
    made = NeuralMemory(small_config("lmm", caching_segment=SEGMENT, **{**LINEAR, **settings})).double()
    wake(made)
    return made


def cached_segments(done: int, config: MemoryConfig) -> list[tuple[int, int]]:
    """(first, last) segment of what is cached after so many segments, written as the definition has it."""
    N = config.caching_slots
    if config.caching_lengths == "equal":
        return [(i, i) for i in range(max(0, done - N), done)]
    found, end = [], done
    while end:
        begin = 0 if end % 2 ** (N - 1) == 0 else end & (end - 1)  # the largest grows for good
        found.append((begin, end - 1))
        end = begin
    return found


def by_tokens(memory: NeuralMemory, x: Tensor, prefer: float = 0.0) -> Tensor:
    """The layer's output token by token: one call of the op for each, all snapshots kept, sums written out.

    Of segments with equal scores it takes the last for `prefer` above 0 and the first below.
    """
    c = memory.config
    state = memory.init_state(x.shape[0])
    q, k, v = (memory.normed(i, y) for i, y in enumerate(memory.streams(x, state.conv, None)[:3]))
    gates = [
        torch.zeros_like(q[..., 0]) if gate is None else gate(x, k)
        for gate in (memory.theta_proj, memory.eta_proj, memory.alpha_proj)
    ]
    u = q if memory.recall_proj is None else memory.recall_proj(x).view_as(q)
    M, snapshots, outputs = state.memory, [], []
    for t in range(x.shape[1]):
        step = slice(t, t + 1)
        given = [y[:, step] for y in (q, k, v, *gates)]
        o, M = neural_memory(*given, M, network=memory.network, chunk_size=c.chunk_size)
        found = cached_segments(t // SEGMENT, c)
        answers = [read(snapshots[last], q[:, step], memory.reader) for _, last in found]
        if c.memory_caching == "residual":
            outputs.append(o + sum(answers))
        else:
            spans = [(t // SEGMENT * SEGMENT, t + 1)]
            spans += [(first * SEGMENT, (last + 1) * SEGMENT) for first, last in found]
            scores = torch.stack([(u[:, t] * k[:, a:b].mean(1)).sum(-1) for a, b in spans])  # (n, B, H)
            scores[0] = scores[0] + memory.open_logit
            if c.memory_caching == "ssc":
                for row, head in itertools.product(range(x.shape[0]), range(scores.shape[2])):
                    ranked = scores[1:, row, head] + prefer * torch.tensor([last for _, last in found])
                    scores[ranked.argsort(descending=True)[c.caching_top :] + 1, row, head] = -torch.inf
            gamma = scores.softmax(0)[..., None]
            outputs.append(sum(g[:, None] * a for g, a in zip(gamma, [o, *answers], strict=True)))
        if (t + 1) % SEGMENT == 0:
            snapshots.append(M.M)
            if c.caching_start == "independent":
                M = MemoryState.initial(memory.initial_weights, x.shape[0])
    return memory.project_output(torch.cat(outputs, 1), memory.gate_proj(x))


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_it_is_a_loop_over_tokens_in_values_and_gradients(settings: dict[str, Any]) -> None:
    memory, found = layer(**settings), []
    x = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    for y in (memory(x)[0], by_tokens(memory, x)):
        memory.zero_grad()
        x.grad = None
        y.square().sum().backward()
        found.append((y, x.grad, [p.grad for p in memory.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk_size", [1, 3, 16])
@pytest.mark.parametrize("settings", [{"memory_caching": "grm"}, CASES["ssc, fenwick"]], ids=["grm", "ssc"])
def test_chunks_and_depths_go_on_over_the_end_of_a_segment(settings: dict[str, Any], chunk_size: int) -> None:
    memory = layer(**settings, memory_depth=2, memory_expansion=2) if chunk_size == 3 else layer(**settings)
    memory.config = type(memory.config)(**{**memory.config.__dict__, "chunk_size": chunk_size})
    x = torch.randn(2, T, 8, dtype=torch.float64)
    assert_close(memory(x)[0], by_tokens(memory, x), 1e-10)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_text_may_be_cut_anywhere(settings: dict[str, Any]) -> None:
    memory = layer(**settings)
    x = torch.randn(2, T, 8, dtype=torch.float64)
    expected, after = memory(x)
    for cuts in ([4, 1, 5, 11, 4], [3, 6, 16], [1] * T):
        state, outputs = None, []
        for part in x.split(cuts, 1):
            y, state = memory(part, state)
            outputs.append(y)
        assert_close(torch.cat(outputs, 1), expected, 1e-10)
        assert_same_state(state, after, 1e-10)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_rows_of_other_lengths_and_places_are_rows_alone(settings: dict[str, Any]) -> None:
    memory = layer(**settings)
    x = torch.randn(3, T, 8, dtype=torch.float64)
    lengths = torch.tensor([T - 9, 3, 11])
    _, state = memory(x, lengths=lengths)
    more = torch.randn(3, 12, 8, dtype=torch.float64)
    mask = torch.rand(3, 12) < 0.6
    got, after = memory(more, state, valid=mask)
    for row, length in enumerate(lengths.tolist()):
        _, own = memory(x[row : row + 1, :length])
        expected, own = memory(more[row, mask[row]][None], own)
        assert_close(got[row, mask[row]][None], expected, 1e-10)
        assert_same_state([t[row : row + 1] for _, t in named_tensors(after)], own, 1e-10)


def test_what_is_read_frozen_is_in_no_segment() -> None:
    memory = layer(memory_caching="grm")
    x = torch.randn(2, T, 8, dtype=torch.float64)
    _, state = memory(x[:, :7])
    _, after = memory(x[:, 7:], state, frozen=True)
    assert_same_state(after.cached, state.cached, 1e-10)


@pytest.mark.parametrize("start", ["checkpoint", "independent"])
def test_segments_begin_with_the_document(start: str) -> None:
    """Persistent tokens have been written then, also more than a segment has, and are no part of the first."""
    settings = {**LINEAR, "num_persistent": SEGMENT + 1}
    caching = {"memory_caching": "grm", "caching_segment": SEGMENT, "caching_start": start}
    backbone, plain = small_backbone("lmm", **settings, **caching), small_backbone("lmm", **settings)
    plain.load_state_dict(backbone.state_dict(), strict=False)
    starts = zip(backbone.layers, backbone.init_state(2).layers, plain.init_state(2).layers, strict=True)
    for block, found, expected in starts:
        assert not torch.equal(found.memory.M[0], block.memory.init_state(2).memory.M[0])
        assert_same_state(found.memory, expected.memory, 1e-10)
        assert_same_state(found.cached, block.memory.init_state(2).cached, 1e-10)


@pytest.mark.parametrize("lengths", ["equal", "fenwick"])
def test_of_equal_segments_the_last_are_read_wherever_a_text_is_cut(lengths: str) -> None:
    """A text that repeats itself has segments of keys that are equal but for rounding, and other memories."""
    memory = layer(memory_caching="ssc", caching_top=1, num_attention_heads=1, conv_size=1, caching_lengths=lengths)
    x = torch.randn(1, SEGMENT, 8, dtype=torch.float64).repeat(1, 5, 1)
    last, first = (by_tokens(memory, x, prefer) for prefer in (1e-6, -1e-6))
    assert (last - first).abs().max() > 1e-6
    for cuts in ([5 * SEGMENT], [1] * 5 * SEGMENT, [4, 1, 5, 3, 2]):
        state, outputs = None, []
        for part in x.split(cuts, 1):
            y, state = memory(part, state)
            outputs.append(y)
        assert_close(torch.cat(outputs, 1), last, 1e-10)


def test_padding_alone_or_no_token_at_all_changes_nothing() -> None:
    memory = layer(memory_caching="grm")
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    _, state = memory(x)
    for y, after in (memory(x, state, lengths=torch.zeros(2, dtype=torch.long)), memory(x[:, :0], state)):
        assert bool(y.isfinite().all())
        assert_same_state(after, state, 1e-10)


def same_weights(memory: NeuralMemory, **settings: Any) -> NeuralMemory:
    other = layer(**settings)
    other.load_state_dict(
        {name: p for name, p in memory.state_dict().items() if name in dict(other.named_parameters())}
    )
    return other


def test_a_text_of_one_segment_is_the_plain_memory() -> None:
    memory = layer(memory_caching="grm")
    x = torch.randn(2, SEGMENT, 8, dtype=torch.float64)
    assert_close(memory(x)[0], same_weights(memory)(x)[0], 1e-12)


def test_an_open_segment_with_all_the_weight_is_the_plain_memory() -> None:
    memory = layer(memory_caching="grm")
    assert torch.equal(NeuralMemory(memory.config).open_logit, torch.full((2,), 4.0)), "where training starts"
    torch.nn.init.constant_(memory.open_logit, 50.0)
    x = torch.randn(2, T, 8, dtype=torch.float64)
    assert_close(memory(x)[0], same_weights(memory)(x)[0], 1e-12)


def test_sparse_selection_of_all_is_gated() -> None:
    memory = layer(memory_caching="grm")
    x = torch.randn(2, T, 8, dtype=torch.float64)
    selecting = same_weights(memory, memory_caching="ssc", caching_top=16)
    assert_close(selecting(x)[0], memory(x)[0], 1e-12)


def test_a_sum_of_independent_memories_is_one_where_nothing_is_forgotten_or_corrected() -> None:
    settings = {"memory_objective": "dot", "momentum": False, "decay": False}
    memory = layer(memory_caching="residual", caching_start="independent", **settings)
    torch.nn.init.zeros_(memory.initial[0])  # which each of them has
    x = torch.randn(2, T, 8, dtype=torch.float64)
    assert_close(memory(x)[0], same_weights(memory, **settings)(x)[0], 1e-10)


@pytest.mark.parametrize("architecture", ["lmm", "mag", "mal", "sliding+lmm+sliding"])
def test_a_stack_carries_it(architecture: str) -> None:
    settings = {"memory_caching": "grm", "caching_segment": SEGMENT, "caching_slots": 4}
    backbone = small_backbone(architecture, **LINEAR, **settings)
    x = torch.randn(2, 24, 8, dtype=torch.float64)
    expected, after = backbone(x)
    y, state = backbone(x[:, :13])
    size = state_bytes(state)
    z, state = backbone(x[:, 13:], state)
    assert_close(torch.cat([y, z], 1), expected, 1e-9)
    assert state_bytes(state) == size == state_bytes(after)


def test_a_state_is_saved_and_loaded(tmp_path: Any) -> None:
    memory = layer(memory_caching="grm")
    x = torch.randn(1, T, 8, dtype=torch.float64)
    _, state = memory(x)
    state.save(tmp_path / "state")
    y, _ = memory(x, LayerState.load(tmp_path / "state"))
    assert_close(y, memory(x, state)[0], 1e-12)


def test_a_hundred_thousand_equal_keys_leave_it_finite() -> None:
    memory = NeuralMemory(small_config("lmm", **LINEAR, memory_caching="grm", caching_segment=4096)).float()
    with torch.no_grad():
        x, state = torch.ones(1, 10_000, 8), None
        for _ in range(10):
            y, state = memory(x, state)
    assert bool(y.isfinite().all())
    assert all(bool(t.isfinite().all()) for _, t in named_tensors(state))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"memory_caching": "gmr"}, "did you mean 'grm'"),
        ({"memory_caching": "soup", "memory_depth": 1}, "which is grm for a linear memory"),
        ({"memory_caching": "grm", "caching_segment": 0}, "got caching_segment=0; expected an integer of at least 1"),
        ({"memory_caching": "grm", "caching_slots": 0}, "got caching_slots=0"),
        ({"memory_caching": "ssc", "caching_top": 0}, "got caching_top=0"),
        (
            {"memory_caching": "grm", "caching_open": float("nan")},
            "got caching_open=nan; expected a number from -100.0 to",
        ),
        ({"memory_caching": "grm", "caching_lengths": "fenwik"}, "did you mean 'fenwick'"),
        ({"memory_caching": "grm", "caching_lengths": "fenwick", "caching_slots": 64}, "expected 63 at most"),
        (
            {"memory_caching": "grm", "caching_lengths": "fenwick", "caching_start": "independent"},
            "whose segments are joined",
        ),
        ({"memory_caching": "grm", "architecture": "attention"}, "expected lmm, mag, mal"),
        ({"memory_caching": "grm", "architecture": "mac"}, "expected lmm, mag, mal"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BackboneConfig(**{"architecture": "lmm", **settings})
