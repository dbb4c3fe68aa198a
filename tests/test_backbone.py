"""What must hold for every stack: cut anywhere, pad anywhere, no look ahead, no row sees another, all of it trains."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from by_hand import rms
from model_cases import (
    MEMORIES,
    MEMORY_ONLY,
    MIXED,
    PLAIN,
    REMEMBERING,
    SHARED,
    SHARED_VARIANTS,
    STACKS,
    VARIANTS,
    VARIED,
    assert_close,
    assert_same_state,
    close,
    named_tensors,
    read_in_pieces,
    small_backbone,
)
from titans_lm.backbone import Backbone, BackboneState, reads_embeddings
from titans_lm.memory_rule import MemoryRule
from titans_lm.ops.state import take_rows

LENGTH = {"reference": 13}  # beyond a segment and two windows; the reference is slow
COMPUTED = [
    (a, backend) for a in MEMORIES for backend in ("chunked", "reference") if (a, backend) != ("tnt", "reference")
]
COMPUTED += [(a, "auto") for a in (*PLAIN, *SHARED, *MIXED)]  # a stack of several blocks knows no backend
every_stack = pytest.mark.parametrize(("architecture", "backend"), COMPUTED, ids=["-".join(s) for s in COMPUTED])
KINDS = ("left", "right", "middle", "scattered")
PADDED = [
    (a, b, kind)
    for a, b in COMPUTED
    for kind in KINDS
    if (b != "reference" and a not in MIXED) or kind == "scattered"  # rows are packed before any block sees them
]
TRAINED = [(architecture, name) for architecture, name in VARIED if architecture in MEMORIES or name in MEMORY_ONLY]
TRAINED += [(architecture, name) for architecture in ("mac", "mag") for name in SHARED_VARIANTS]
TRAINED += [(architecture, "default") for architecture in MIXED]
BLOCK_REACH = {"sliding": lambda i: max(0, i - (6 - 1)), "segment": lambda i: i - i % 8}
"""The first token that token i sees through one block."""


def tokens(rows: int = 2, length: int = 29) -> Tensor:
    return torch.randn(rows, length, 8, dtype=torch.float64)


def tokens_for(backend: str, rows: int = 2) -> Tensor:
    return tokens(rows, LENGTH.get(backend, 29))


@every_stack
def test_any_cut_into_calls_gives_one_pass(architecture: str, backend: str) -> None:
    stack, x = small_backbone(architecture, memory_backend=backend), tokens_for(backend)
    whole, end = stack(x)
    draw = random.Random(1)
    cuts = [sorted(draw.sample(range(1, x.shape[1]), count)) for count in (1, 4, 8)]
    for places in [[8], [x.shape[1] - 1], *cuts]:
        pieces, state = read_in_pieces(stack, x, places)
        assert_close(pieces, whole)
        assert_same_state(state, end)


@every_stack
@pytest.mark.parametrize("prefill", [1, 8])
def test_prefill_and_single_steps_give_one_pass(architecture: str, backend: str, prefill: int) -> None:
    stack, x = small_backbone(architecture, memory_backend=backend, attention_conv_size=3), tokens_for(backend)
    whole, _ = stack(x)
    steps, _ = read_in_pieces(stack, x, list(range(prefill, x.shape[1])))
    assert_close(steps, whole)


@every_stack
def test_a_state_passed_in_at_the_start_is_a_fresh_start(architecture: str, backend: str) -> None:
    stack, x = small_backbone(architecture, memory_backend=backend), tokens_for(backend)
    whole, end = stack(x)
    same, state = stack(x, stack.init_state(2))
    assert_close(same, whole)
    if "attention" not in architecture:
        assert_same_state(state, end)


def padded(kind: str, length: int) -> Tensor:
    """Masks of four rows whose numbers of tokens differ, the last of them without any."""
    place, counts = torch.arange(length), torch.tensor([length, length // 2, 3, 0])[:, None]
    if kind == "left":
        return place >= length - counts
    if kind == "right":
        return place < counts
    if kind == "middle":
        return (place < counts // 2) | (place >= length - (counts + 1) // 2)
    generator = torch.Generator().manual_seed(3)
    return torch.rand(4, length, generator=generator).argsort(1) < counts


@pytest.mark.parametrize(("architecture", "backend", "kind"), PADDED, ids=["-".join(s) for s in PADDED])
def test_a_padded_row_is_that_row_alone(architecture: str, backend: str, kind: str) -> None:
    """In one call, in two, and for the tokens that follow; what stands in the padding does not matter."""
    stack = small_backbone(architecture, memory_backend=backend, attention_conv_size=2)
    x, after = tokens_for(backend, rows=4), tokens(rows=4, length=5)
    valid = padded(kind, x.shape[1])
    alone = [stack(torch.cat([x[row, valid[row]], after[row]])[None]) for row in range(4)]
    x = x.masked_fill(~valid[..., None], torch.nan)
    for cut in (x.shape[1], 11):
        first, state = stack(x[:, :cut], None, valid[:, :cut])
        second, state = stack(x[:, cut:], state, valid[:, cut:])
        following = [stack(after[:, :3], state)]
        for t in (3, 4):
            following.append(stack(after[:, t : t + 1], following[-1][1]))
        y = torch.cat([first, second, *(o for o, _ in following)], dim=1)
        for row in range(4):
            expected, end = alone[row]
            real = torch.cat([valid[row], torch.ones(5, dtype=torch.bool)])
            assert_close(y[row, real], expected[0])
            assert not y[row, ~real].any(), "the output of padding is zero"
            if "attention" not in architecture:  # whose keys have as many slots as the longest row
                assert_same_state(take_rows(following[-1][1], torch.tensor([row])), end)


@every_stack
def test_no_token_sees_a_later_one_or_another_row(architecture: str, backend: str) -> None:
    """The Jacobian: exactly zero before a token and across rows, not zero at it and wherever it is in reach.

    Row i is asked about its token i, all rows at once: what another row knew of it would stand behind that token, and
    what the first one knows of others is asked about all of its tokens.
    """
    length = LENGTH.get(backend, 29)
    stack, x = small_backbone(architecture, memory_backend=backend), tokens(length, length).requires_grad_()
    y, _ = stack(x)
    directed = y * torch.randn_like(y)
    [influence] = torch.autograd.grad(directed[0].sum(), x, retain_graph=True)
    assert not influence[1:].any(), "rows of a batch never meet"
    [influence] = torch.autograd.grad(directed.diagonal().sum(), x)
    for i, row in enumerate(influence.abs().amax(-1)):
        assert not row[i + 1 :].any(), f"token {i} knows the future"
        reach = first_seen(stack, i)
        assert bool((row[reach : i + 1] > 0).all()), f"token {i} does not see all it should"
        assert not row[:reach].any(), f"token {i} sees beyond its range"


def first_seen(stack: Backbone, i: int) -> int:
    """The first token that token i sees through all blocks."""
    for name in reversed(stack.config.blocks):
        i = BLOCK_REACH.get(name, lambda _: 0)(i)
    return i


@pytest.mark.parametrize(("architecture", "name"), TRAINED)
def test_every_parameter_gets_a_gradient(architecture: str, name: str) -> None:
    stack = small_backbone(architecture, **(VARIANTS | SHARED_VARIANTS)[name], awake=False)
    assert_all_trained(stack)


def assert_all_trained(stack: Backbone) -> None:
    y, _ = stack(tokens(length=21))
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert not parameter.numel() or bool(parameter.grad.any()), name


@pytest.mark.parametrize("architecture", STACKS)
def test_later_tokens_train_what_earlier_ones_wrote(architecture: str) -> None:
    """The state carries the graph: a loss in the second call reaches the input of the first."""
    stack, x = small_backbone(architecture), tokens().requires_grad_()
    _, state = stack(x[:, :13])
    y, _ = stack(x[:, 13:], state)
    y[:, 0].sum().backward()
    assert x.grad is not None
    assert bool(x.grad[:, 12].any())


@every_stack
@pytest.mark.parametrize("pad", [False, True])
def test_inputs_and_states_are_left_as_they_were(architecture: str, backend: str, pad: bool) -> None:
    stack = small_backbone(architecture, memory_backend=backend, attention_conv_size=2)
    x = tokens_for(backend)
    valid = torch.rand(x.shape[:2]) < 0.7 if pad else None
    with torch.no_grad():
        _, state = stack(tokens(length=11))
        kept = [(name, t, t.clone()) for name, t in [("x", x), *named_tensors(state), *stack.named_parameters()]]
        for length in (x.shape[1], 1):
            stack(x[:, :length], state, None if valid is None else valid[:, :length])
    for name, t, before in kept:
        assert torch.equal(t, before), name


@every_stack
def test_one_state_continues_in_two_ways(architecture: str, backend: str) -> None:
    stack = small_backbone(architecture, memory_backend=backend)
    x, y = tokens_for(backend), tokens_for(backend)
    _, state = stack(x[:, :7])
    first, _ = stack(x[:, 7:], state)
    stack(y, state)
    again, _ = stack(x[:, 7:], state)
    assert torch.equal(first, again)


@pytest.mark.parametrize("architecture", REMEMBERING)
def test_both_backends_give_one_model(architecture: str) -> None:
    x = tokens(length=21)
    found = []
    for backend in ("chunked", "reference"):
        stack = small_backbone(architecture, memory_backend=backend)
        y, state = stack(x)
        y.square().sum().backward()
        found.append((y, state, [p.grad for p in stack.parameters()]))
    (y, state, gradients), (other, other_state, others) = found
    assert_close(y, other)
    assert isinstance(state, BackboneState)
    assert_same_state(state, other_state)
    for a, b in zip(gradients, others, strict=True):
        assert b is not None
        assert not b.numel() or bool(b.any()), "all of it trains"
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("architecture", "setting"), [("sliding", "window"), ("segment", "segment_len")])
def test_a_range_as_long_as_the_text_is_full_attention(architecture: str, setting: str) -> None:
    full, x = small_backbone("attention"), tokens()
    whole, _ = full(x)
    for range_, equal in ((40, True), (29, True), (28, False)):
        stack = small_backbone(architecture, **{setting: range_})
        stack.load_state_dict(full.state_dict())
        y, _ = stack(x)
        assert_close(y[:, :28], whole[:, :28])
        assert close(y[:, 28], whole[:, 28]) == equal


@pytest.mark.parametrize("architecture", MEMORIES)
@pytest.mark.parametrize(("switch", "gate"), [("momentum", "eta_proj"), ("decay", "alpha_proj")])
def test_a_gate_that_is_switched_off_is_a_gate_at_zero(architecture: str, switch: str, gate: str) -> None:
    # The step's bound depends on the largest η: without momentum it is that of η_max = 0.
    on = small_backbone(architecture, **({"eta_max": 0.0} if switch == "momentum" else {}))
    for rule in (module for module in on.modules() if isinstance(module, MemoryRule)):
        torch.nn.init.constant_(getattr(rule, gate).proj.bias, -1e9)
    off = small_backbone(architecture, **{switch: False})
    weights = {name: w for name, w in on.state_dict().items() if f".{gate}." not in name}
    off.load_state_dict(weights)
    x = tokens()
    assert_close(off(x)[0], on(x)[0])


@pytest.mark.parametrize("architecture", STACKS)
def test_parameters_are_those_of_the_blocks_and_a_norm(architecture: str) -> None:
    stack = small_backbone(architecture, num_hidden_layers=3)
    alone = [small_backbone(name, num_hidden_layers=1).layers[0] for name in stack.config.blocks]
    for place, block in enumerate(alone):
        if reads_embeddings(stack.config, place):
            block.read_embeddings()
    per_block = [sum(p.numel() for p in block.parameters()) for block in alone]  # test_blocks.py has the formula
    assert [sum(p.numel() for p in block.parameters()) for block in stack.layers] == per_block
    assert sum(p.numel() for p in stack.parameters()) == sum(per_block) + 8
    assert not list(stack.buffers())


@pytest.mark.parametrize("architecture", MIXED)
@pytest.mark.parametrize("cuts", [[], [5, 16, 17]])
def test_a_stack_of_several_blocks_is_stacks_of_one_after_another(architecture: str, cuts: list[int]) -> None:
    """Each with the positions that it counts: in a segment, or from the start of the text."""
    stack, x = small_backbone(architecture, memory_reads_embeddings=False), tokens()
    y, _ = read_in_pieces(stack, x, cuts)
    for name, block in zip(stack.config.blocks, stack.layers, strict=True):
        alone = small_backbone(name, num_hidden_layers=1)
        alone.layers[0].load_state_dict(block.state_dict())
        alone.norm.forward = lambda z: z
        x, _ = read_in_pieces(alone, x, cuts)
    assert_close(y, stack.norm(x))


@pytest.mark.parametrize("reads", [True, False])
def test_a_memory_behind_another_block_reads_the_embeddings(reads: bool) -> None:
    """With a = 0 the block before it makes no difference to what it writes; x₀ is what enters the stack."""
    stack, x = small_backbone("sliding+lmm+sliding", memory_reads_embeddings=reads), tokens()
    assert [block.embedding_norm is not None for block in stack.layers] == [False, reads, False]
    if reads:
        nn.init.zeros_(stack.layers[1].mixer_norm.weight)
    written = []
    for _ in range(2):
        written.append(stack(x)[1].layers[1].memory.M)
        nn.init.normal_(stack.layers[0].mlp.down_proj.weight)
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True)) is reads
    if reads:
        alone = stack.layers[1].memory
        start = stack.layers[1].init_state(2)
        _, state = alone(rms(x, stack.layers[1].embedding_norm), start)
        for got, expected in zip(written[0], state.memory.M, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize(
    ("architecture", "settings", "reading"),
    [
        ("mac", {}, [False, True]),
        ("mag", {}, [False, True]),
        ("mac", {"shared_qkv": True}, [False, False]),  # one q, k, v of the same tokens
        ("mag+mal", {"shared_qkv": True}, [False, True]),
        ("mal", {"memory_reads_embeddings": False}, [False, False]),
        ("attention+lmm", {}, [False, True]),
        ("lmm+segment", {}, [False, False]),
    ],
)
def test_which_blocks_read_embeddings(architecture: str, settings: dict[str, Any], reading: list[bool]) -> None:
    stack = small_backbone(architecture, num_hidden_layers=2, **settings)
    assert [block.embedding_norm is not None for block in stack.layers] == reading


def test_a_list_of_one_block_is_that_architecture() -> None:
    stack, listed = small_backbone("lmm"), small_backbone("lmm", layer_types=["lmm", "lmm"])
    assert listed.config == stack.config
    for a, b in zip(stack.parameters(), listed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("architecture", STACKS)
def test_tokens_of_another_precision_are_refused_in_a_line(architecture: str) -> None:
    stack = small_backbone(architecture)
    x = torch.randn(2, 5, stack.config.hidden_size, dtype=stack.norm.weight.dtype)
    stack(x)
    for other in (x.bfloat16(), x.float()):
        with pytest.raises(ValueError, match="expected one type: convert x, or the layer, with"):
            stack(other)
