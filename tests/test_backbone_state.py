"""What a stack carries, what it refuses, and what it tells besides its output."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from model_cases import (
    BOUNDED,
    EVERY_KIND,
    MEMORIES,
    REMEMBERING,
    SHARED,
    STACKS,
    assert_close,
    close,
    named_tensors,
    small_backbone,
    wake,
)
from titans_lm.backbone import Backbone, frozen_memory
from titans_lm.config import MemoryConfig
from titans_lm.layers import Diagnostics, ShortConvolution
from titans_lm.ops.state import map_state, select_rows, state_bytes, take_rows

LONG = 2_000
# A block of every kind, beside others and alone: what is asked here of a block, it answers alike in any stack.
every_architecture = pytest.mark.parametrize("architecture", [*EVERY_KIND, "tnt", *SHARED])


def tokens(rows: int = 2, length: int = 21, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, length, 8, dtype=dtype)


def floats(state: Any) -> set[torch.dtype]:
    return {x.dtype for _, x in named_tensors(state) if x.is_floating_point()}


def held_bytes(state: Any) -> int:
    """What a state keeps alive: whole storages, each once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for _, x in named_tensors(state)}.values())


@pytest.mark.parametrize("architecture", BOUNDED)
def test_a_state_is_as_large_after_ten_tokens_as_after_two_thousand(architecture: str) -> None:
    blocks = len(architecture.split("+"))
    sizes = {"num_hidden_layers": blocks, "chunk_size": 16, "segment_len": 32, "window": 50}
    stack = small_backbone(architecture, torch.float32, **sizes)
    with torch.no_grad():
        start = stack.init_state(1)
        x = tokens(1, LONG, torch.float32)
        _, early = stack(x[:, :10])
        _, late = stack(x)
    sizes = [[(name, x.shape, x.dtype) for name, x in named_tensors(s)] for s in (start, early, late)]
    assert sizes[0] == sizes[1] == sizes[2]
    assert state_bytes(start) == state_bytes(early) == state_bytes(late)
    assert late.position.item() == LONG
    assert held_bytes(late) <= 1.1 * state_bytes(late), "no view of a longer tensor"


def test_only_full_attention_grows() -> None:
    stack = small_backbone("attention", torch.float32)
    sizes = [state_bytes(stack(tokens(1, n, torch.float32))[1]) for n in (10, 20, 40)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]) > 0


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_state_is_at_least_float32(architecture: str, dtype: torch.dtype) -> None:
    stack = small_backbone(architecture, dtype, attention_conv_size=2)
    y, state = stack(tokens(dtype=dtype))
    assert y.dtype == dtype
    y, state = stack(tokens(length=1, dtype=dtype), state)
    assert y.dtype == dtype
    assert floats(state) == {torch.promote_types(dtype, torch.float32)}


@every_architecture
def test_a_state_is_float32_under_autocast(architecture: str) -> None:
    # Heads of 16 channels: at 4, single tokens come so near to a norm of zero that bfloat16 turns them around. Weights
    # not far from their start: with the usual noise, 1.7 in norm at this width, a rounding grows tenfold in two blocks.
    stack = small_backbone(architecture, torch.float32, awake=False, attention_conv_size=2, hidden_size=32)
    wake(stack, 0.1)
    x = torch.randn(2, 29, 32)
    exact, _ = stack(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = stack(x[:, :13])
        z, state = stack(x[:, 13:], state)
    assert floats(state) == {torch.float32}
    assert close(torch.cat([y, z], dim=1).float(), exact, 0.1)
    assert not close(torch.cat([y, z], dim=1).float(), exact, 1e-5), "bfloat16 was used"


@every_architecture
def test_gradients_may_be_asked_for_inside_autocast(architecture: str) -> None:
    stack, x = small_backbone(architecture, torch.float32, attention_conv_size=2), tokens(dtype=torch.float32)
    found = []
    for inside in (True, False):
        stack.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = stack(x)[0].square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([p.grad.clone() for p in stack.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-6 * max(1.0, b.abs().max().item()))


@every_architecture
def test_a_bfloat16_model_may_be_cut_anywhere_too(architecture: str) -> None:
    """What is cached is what one pass would have used, so only the order of sums may differ."""
    stack, x = small_backbone(architecture, torch.bfloat16), tokens(dtype=torch.bfloat16)
    whole, _ = stack(x)
    first, state = stack(x[:, :13])
    second, _ = stack(x[:, 13:], state.to("cpu"))
    assert_close(torch.cat([first, second], dim=1), whole, 0.1)


@every_architecture
def test_a_state_can_be_taken_apart_and_joined(architecture: str) -> None:
    stack, x = small_backbone(architecture), tokens(3, 13)
    after = tokens(3, 5)
    _, state = stack(x)
    whole, _ = stack(after, state)
    order = torch.tensor([2, 0, 0])
    picked, _ = stack(after[order], take_rows(state, order))
    assert_close(picked, whole[order])


@every_architecture
@pytest.mark.parametrize("length", [0, 1])
def test_no_token_and_one_token_are_texts(architecture: str, length: int) -> None:
    stack, x = small_backbone(architecture), tokens(length=9)
    told, several = Diagnostics("parts"), Diagnostics("parts")
    y, state = stack(x[:, :length], diagnostics=told)
    stack(x, diagnostics=several)
    assert y.shape == (2, length, 8)
    assert [s.shape for s in told.surprise_norms] == [s[:, :length].shape for s in several.surprise_norms]
    assert [h.shape for h in told.hidden_states] == [y.shape] * len(stack.layers)
    rest, _ = stack(x[:, length:], state)
    whole, _ = stack(x)
    assert_close(torch.cat([y, rest], dim=1), whole)
    _, same = stack(x[:, :0], state, torch.zeros(2, 0, dtype=torch.bool))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named_tensors(state), named_tensors(same), strict=True))


@every_architecture
def test_hidden_states_and_surprise_stand_where_their_tokens_stand(architecture: str) -> None:
    stack, x = small_backbone(architecture), tokens(2, 21)
    valid = torch.rand(2, 21) < 0.6
    told = Diagnostics(surprise=True)
    y, _ = stack(x, None, valid, told)
    hidden, surprise = told.hidden_states, told.surprise_norms
    assert len(hidden) == len(stack.layers)
    assert len(surprise) == sum(name in MEMORIES for name in stack.config.blocks)
    assert torch.equal(hidden[-1], y)
    for row in range(2):
        alone = Diagnostics(surprise=True)
        stack(x[row, valid[row]][None], diagnostics=alone)
        for got, expected in zip([*hidden, *surprise], [*alone.hidden_states, *alone.surprise_norms], strict=True):
            assert_close(got[row, valid[row]], expected[0])
            assert not got[row, ~valid[row]].any()


@pytest.mark.parametrize("architecture", REMEMBERING)
def test_all_three_sizes_stand_where_their_tokens_stand(architecture: str) -> None:
    stack, x = small_backbone(architecture), tokens(2, 21)
    valid = torch.rand(2, 21) < 0.6
    momentary, found = Diagnostics(surprise=True), Diagnostics(surprise="parts")
    stack(x, None, valid, momentary)
    stack(x, None, valid, found)
    for size, parts in zip(momentary.surprise_norms, found.surprise_norms, strict=True):
        assert parts.shape == (*size.shape, 3)
        assert torch.equal(parts[..., 0], size)
        assert not parts[~valid].any()
    for row in range(2):
        alone = Diagnostics(surprise="parts")
        stack(x[row, valid[row]][None], diagnostics=alone)
        for got, expected in zip(found.surprise_norms, alone.surprise_norms, strict=True):
            assert_close(got[row, valid[row]], expected[0])


@pytest.mark.parametrize("architecture", MEMORIES)
def test_a_frozen_memory_is_frozen_in_this_thread_alone(architecture: str) -> None:
    """θ = α = 0 from the persistent tokens on, without a change to any module."""
    stack, x = small_backbone(architecture), tokens(2, 21)
    usual, _ = stack(x)
    with frozen_memory(stack), ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: stack(x)[0]).result()
        frozen, state = stack(x)
    assert torch.equal(beside, usual)
    assert torch.equal(stack(x)[0], usual)
    assert not torch.equal(frozen, usual)
    for block, layer in zip(stack.layers, state.layers, strict=True):
        memory = layer if architecture in ("lmm", "tnt") else layer.memory
        for M, initial in zip(memory.memory.M, block.memory.initial_weights, strict=True):
            assert torch.equal(M, initial.expand_as(M))


def train_step(stack: Backbone, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    stack.zero_grad()
    y, state = stack(x[:, :13])
    z, _ = stack(x[:, 13:], state)
    loss = y.square().sum() + z.square().sum()
    loss.backward()
    return loss.detach(), [p.grad for p in stack.parameters()]


@every_architecture
def test_gradient_checkpointing_recomputes_and_changes_nothing(architecture: str) -> None:
    stack, x = small_backbone(architecture).train(), tokens()
    calls: list[int] = []
    for block in stack.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss, gradients = train_step(stack, x)
    assert len(calls) == 2 * len(stack.layers)
    stack.gradient_checkpointing = True
    again, same = train_step(stack, x)
    assert len(calls) == 3 * 2 * len(stack.layers), "every block ran a second time, in the backward pass"
    assert torch.equal(loss, again)
    for a, b in zip(gradients, same, strict=True):
        assert_close(a, b, 1e-12)
    stack.eval()
    calls.clear()
    train_step(stack, x)
    assert len(calls) == 2 * len(stack.layers)


@pytest.mark.usefixtures("unchecked")
class TestRefusals:
    """A wrong input is named, with what was expected, before anything is computed."""

    @pytest.mark.parametrize(
        "x",
        [torch.zeros(2, 5, 7), torch.zeros(2, 8), torch.zeros(2, 5, 8).long(), torch.zeros(1, 2, 5, 8), [[[0.0] * 8]]],
        ids=["width", "rank 2", "integers", "rank 4", "list"],
    )
    def test_hidden_states(self, x: Tensor) -> None:
        with pytest.raises(ValueError, match=r"got hidden states .*; expected floating point \(B, T, E\) with E = 8"):
            small_backbone("mac", torch.float32)(x)

    @pytest.mark.parametrize(
        "valid",
        [
            torch.ones(2, 4, dtype=torch.bool),
            torch.ones(5, dtype=torch.bool),
            torch.ones(2, 5),
            torch.ones(2, 5).long(),
            [[True] * 5] * 2,
        ],
        ids=["length", "rank", "float", "integers", "list"],
    )
    def test_masks(self, valid: Tensor) -> None:
        with pytest.raises(ValueError, match=r"got valid .*; expected bool \(B, T\) = \(2, 5\)"):
            small_backbone("mac", torch.float32)(torch.zeros(2, 5, 8), None, valid)

    @every_architecture
    def test_a_state_of_another_batch(self, architecture: str) -> None:
        stack = small_backbone(architecture)
        with pytest.raises(ValueError, match="got a state of 3 rows and 2 rows of input"):
            stack(tokens(2), stack.init_state(3))

    @every_architecture
    def test_a_state_of_another_model(self, architecture: str) -> None:
        """One whose tensors have other shapes: what is the same in form cannot be told apart (as mag and mal)."""
        stack = small_backbone(architecture)
        alike = [{"mag", "mal", "mag, shared"}, {"attention", "sliding", "segment"}]
        own = next((group for group in alike if architecture in group), {architecture})
        others = [small_backbone(a) for a in STACKS if a not in own]
        others += [
            small_backbone(architecture, num_hidden_layers=len(stack.layers) + 1),
            small_backbone(architecture, num_attention_heads=1),
        ]
        for other in others:
            with pytest.raises(ValueError, match="got the state of another model"):
                stack(tokens(2), other.init_state(2))

    @every_architecture
    def test_a_state_of_another_precision(self, architecture: str) -> None:
        stack, other = small_backbone(architecture), small_backbone(architecture, torch.float32)
        with pytest.raises(ValueError, match=r"got a state in torch.float32; expected torch.float64"):
            stack(tokens(2), other.init_state(2))
        with pytest.raises(ValueError, match=r"got a state in torch.float64; expected torch.float32"):
            other(tokens(2, dtype=torch.float32), stack.init_state(2))

    @pytest.mark.parametrize("state", [(), {}, torch.zeros(2)])
    def test_what_is_no_state(self, state: Any) -> None:
        with pytest.raises(ValueError, match=r"got a state of type .*; expected BackboneState"):
            small_backbone("mac")(tokens(2), state)

    @pytest.mark.parametrize("rows", [0, -1, 1.5, None])
    def test_a_batch_without_rows(self, rows: Any) -> None:
        with pytest.raises(ValueError, match=f"got batch_size={rows}; expected an integer of at least 1"):
            small_backbone("mac").init_state(rows)

    def test_settings_of_something_else(self) -> None:
        with pytest.raises(ValueError, match="got a MemoryConfig for a stack; expected a BackboneConfig"):
            Backbone(MemoryConfig())


@pytest.mark.parametrize("architecture", ["sliding", "mac"])
@torch.no_grad()
def test_a_position_may_stand_on_the_device_of_another_block(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack that is spread over two GPUs; the second is meta here, where tensors have no numbers."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know meta
    stack, x = small_backbone(architecture, torch.float32), tokens(dtype=torch.float32)
    _, state = stack(x)
    elsewhere = map_state(lambda x: x.to("meta"), state)._replace(position=state.position)
    y, after = stack.to("meta")(x[:, :1].to("meta"), elsewhere)
    assert y.is_meta
    assert after.position.is_meta
    assert select_rows(torch.tensor([True, False]), after, after).layers is not None


def test_weights_that_are_taken_away_while_a_model_is_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's ZeRO-3 does after each module's own start."""
    made = ShortConvolution.__init__

    def emptied(module: Any, *args: Any, **kwargs: Any) -> None:
        made(module, *args, **kwargs)
        module.weight.data, module.weight.ds_id = torch.empty(0), 7

    monkeypatch.setattr(ShortConvolution, "__init__", emptied)
    with pytest.raises(ValueError, match=r"made under DeepSpeed ZeRO-3, .* expected a lower stage, or FSDP"):
        small_backbone("lmm")
