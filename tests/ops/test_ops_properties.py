"""What holds for any call and both backends: cutting, padding, rows, causality, and inputs left alone."""

from itertools import combinations, pairwise, product

import pytest
import torch
from torch import Tensor

from ops.memory_cases import Call, Case, make_call, named_parts
from titans_lm.ops import MemoryState, neural_memory
from titans_lm.ops.state import map_state, take_rows

BACKENDS = ("reference", "chunked")
SETTINGS = {
    "fresh": Case(tokens=13, rows=3, forget_to="init", gates=("layer", "head", "channel")),
    "inside": Case(tokens=13, rows=3, offsets=(2,), gates=("channel", "head", "layer")),
    "rows-apart": Case(tokens=13, rows=3, offsets=(3, 0, 1), forget_to="init"),
    "padded": Case(tokens=13, rows=3, offsets=(3, 0, 1), padding="scattered"),
    "left-padded": Case(tokens=13, rows=3, padding="left", forget_to="init"),
    "empty-row": Case(tokens=13, rows=3, padding="empty row", chunk=3),
}


def part_of(call: Call, tokens: slice, rows: slice = slice(None)) -> tuple[list, dict]:
    """Arguments of a call on some of its tokens and rows, without the state."""

    def cut(x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return x[rows, tokens] if isinstance(x, Tensor) else tuple(y[rows, tokens] for y in x)

    valid = call.settings["valid"]
    valid = None if valid is None else valid[rows, tokens]
    return [cut(x) for x in call.arguments[:6]], {**call.settings, "valid": valid}


def read_in_pieces(call: Call, borders: list[int], backend: str) -> tuple[Tensor, MemoryState, Tensor]:
    state, outputs, surprise = call.arguments[6], [], []
    for start, end in pairwise(borders):
        arguments, settings = part_of(call, slice(start, end))
        o, state, s = neural_memory(*arguments, state, **settings, return_surprise=True, backend=backend)
        outputs.append(o)
        surprise.append(s)
    o, surprise = torch.cat(outputs, 1), torch.cat(surprise, 1)
    valid = call.settings["valid"]
    if valid is not None:
        o, surprise = (x.masked_fill(~valid[:, :, None, None], 0.0) for x in (o, surprise))
    return o, state, surprise


def assert_close(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def cuts(tokens: int) -> list[list[int]]:
    """Every split into two calls, single tokens, an empty call, and some splits into several."""
    several = [list(c) for c in combinations(range(1, tokens), 3)][::37]
    middle = [[i] for i in range(1, tokens)] + several + [list(range(1, tokens)), [4, 4], [0], [tokens]]
    return [[0, *m, tokens] for m in middle]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sequence_may_be_cut_anywhere(setting: str, backend: str) -> None:
    call = make_call(SETTINGS[setting])
    with torch.no_grad():
        expected = call(backend)
        for borders in cuts(SETTINGS[setting].tokens):
            assert_close(read_in_pieces(call, borders, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", ["inside", "padded"])
def test_gradients_cross_a_cut(setting: str, backend: str) -> None:
    call = make_call(SETTINGS[setting])

    def gradients(o: Tensor, state: MemoryState) -> tuple[Tensor, ...]:
        mix = sum((w * torch.linspace(-1, 1, w.numel()).view_as(w)).sum() for w in (o, *state.M, *state.S))
        return torch.autograd.grad(mix, list(call.leaves.values()))

    assert_close(gradients(*read_in_pieces(call, [0, 5, 6, 13], backend)[:2]), gradients(*call(backend)[:2]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("padding", "offsets"),
    list(product(("left", "right", "middle", "scattered", "empty row"), ((), (2, 0, 3)))),
)
def test_a_padded_batch_is_each_row_alone(padding: str, offsets: tuple[int, ...], backend: str) -> None:
    case = Case(tokens=11, rows=3, padding=padding, offsets=offsets, gates=("layer", "channel", "head"))
    call = make_call(case)
    with torch.no_grad():
        o, state, surprise = call(backend)
        for row in range(case.rows):
            real = call.settings["valid"][row]
            arguments, settings = part_of(call, real, slice(row, row + 1))
            settings["valid"] = None
            before = take_rows(call.arguments[6], torch.tensor([row]))
            alone = neural_memory(*arguments, before, **settings, return_surprise=True, backend=backend)
            assert_close((o[row : row + 1, real], surprise[row : row + 1, real]), (alone[0], alone[2]))
            assert_close(take_rows(state, torch.tensor([row])), alone[1])


def equal_bits(a: MemoryState, b: MemoryState) -> bool:
    """Equal tensor by tensor; a NaN equals nothing."""
    same = []
    map_state(lambda x, y: same.append(torch.equal(x, y)) or x, a, b)
    return all(same)


def spoil_padding(call: Call, filler: float) -> tuple[tuple, dict]:
    """Put something else into q, k, v and the gates of every padded token."""
    hidden = ~call.settings["valid"]

    def spoil(x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(x, tuple):
            return tuple(spoil(y) for y in x)
        return x.masked_fill(hidden.view(*hidden.shape, *[1] * (x.dim() - 2)), filler)

    return tuple(spoil(x) for x in call.arguments[:6]), call.settings


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e300])
def test_what_stands_in_the_padding_reaches_nothing(filler: float, chunk: int, backend: str) -> None:
    case = Case(tokens=11, rows=3, chunk=chunk, padding="scattered", offsets=(0, min(2, chunk - 1)))
    call = make_call(case)
    o, state, _ = call(backend)
    arguments, settings = spoil_padding(call, filler)
    o_spoiled, state_spoiled = neural_memory(*arguments, call.arguments[6], **settings, backend=backend)
    valid = settings["valid"]
    assert torch.equal(o_spoiled[valid], o[valid])
    assert equal_bits(state_spoiled, state)
    leaves = list(call.leaves.values())
    found = torch.autograd.grad(o_spoiled[valid].sum() + sum(w.sum() for w in state_spoiled.M), leaves)
    expected = torch.autograd.grad(o[valid].sum() + sum(w.sum() for w in state.M), leaves)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "chunk", "forget_to"), list(product((1, 2, 9), (1, 4), ("zero", "init"))))
def test_padding_alone_leaves_the_state_as_it_is(tokens: int, chunk: int, forget_to: str, backend: str) -> None:
    case = Case(tokens=tokens, rows=3, chunk=chunk, padding="all empty", offsets=(0, chunk - 1), forget_to=forget_to)
    call = make_call(case)
    arguments, settings = spoil_padding(call, float("nan"))
    _, state = neural_memory(*arguments, call.arguments[6], **settings, backend=backend)
    assert equal_bits(state, call.arguments[6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_with_real_rows_beside_it_leaves_the_empty_row_as_it_is(backend: str) -> None:
    call = make_call(Case(tokens=11, rows=3, padding="empty row", offsets=(3, 1, 2)))
    arguments, settings = spoil_padding(call, float("nan"))
    _, state = neural_memory(*arguments, call.arguments[6], **settings, backend=backend)
    empty = torch.tensor([1])
    assert equal_bits(take_rows(state, empty), take_rows(call.arguments[6], empty))
    assert not equal_bits(take_rows(state, torch.tensor([0])), take_rows(call.arguments[6], torch.tensor([0])))


def output_jacobians(call: Call, backend: str) -> dict[str, Tensor]:
    """∂o/∂x of every per-token input x, sized |o| over (row, token) by |x| over (row, token): (B, T, B, T)."""
    o = call(backend)[0]
    B, T = o.shape[:2]
    names = [n for n in call.leaves if n in "qkv" or n.startswith(("theta", "eta", "alpha"))]
    sizes = {name: torch.zeros(B, T, B, T) for name in names}
    for row, t in product(range(B), range(T)):
        for i in range(o[row, t].numel()):
            found = torch.autograd.grad(
                o[row, t].flatten()[i], [call.leaves[n] for n in names], retain_graph=True, allow_unused=True
            )
            for name, x in zip(names, found, strict=True):
                if x is not None:
                    sizes[name][row, t] += x.detach().abs().flatten(2).sum(-1)
    return sizes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", [(), (3,), (1, 3)], ids=["fresh", "inside", "rows-apart"])
def test_no_output_knows_a_later_token_or_another_row(offsets: tuple[int, ...], backend: str) -> None:
    case = Case(tokens=7, heads=1, offsets=offsets, gates=("channel", "layer", "head"), forget_to="init")
    T = case.tokens
    earlier = torch.tril(torch.ones(T, T, dtype=torch.bool))
    for name, size in output_jacobians(make_call(case), backend).items():
        for row, other in product(range(case.rows), repeat=2):
            block = size[row, :, other]
            if row != other:
                assert (block == 0).all(), f"row {row} knows {name} of row {other}"
                continue
            allowed = torch.eye(T, dtype=torch.bool) if name == "q" else earlier
            assert (block[~allowed] == 0).all(), f"o knows {name} of another or a later token"
            if name in "qkv":
                assert (block[allowed] > 0).all(), f"o should know {name}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_do_not_mix(backend: str) -> None:
    call = make_call(Case(heads=3, gates=("layer", "head", "channel"), forget_to="init"))
    o = call(backend)[0]
    leaves = {n: x for n, x in call.leaves.items() if not n.startswith(("M", "S", "anchor", "initial", "norm"))}
    found = torch.autograd.grad(o[:, :, 1].sum(), list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        assert (gradient[:, :, [0, 2]] == 0).all(), name
        assert (gradient[:, :, 1] != 0).any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_inputs_are_left_alone(setting: str, backend: str) -> None:
    call = make_call(SETTINGS[setting])
    state = call.arguments[6]
    given = {**call.leaves, **named_parts(state), "offset": state.offset}
    copies = {name: x.detach().clone() for name, x in given.items()}
    versions = {name: x._version for name, x in given.items()}
    o, after, _ = call(backend)
    (o.sum() + sum(w.sum() for w in after.M)).backward()
    for name, x in given.items():
        assert torch.equal(x, copies[name]), name
        assert x._version == versions[name], name


@pytest.mark.parametrize("setting", SETTINGS)
def test_auto_is_the_fast_backend(setting: str) -> None:
    call = make_call(SETTINGS[setting])
    for x, y in zip(call("auto")[:1], call("chunked")[:1], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_keeps_its_sizes(backend: str) -> None:
    """After one token and after many, every tensor of the state has the size and type it started with."""
    call = make_call(Case(tokens=40, chunk=16))
    before = call.arguments[6]
    for count in (1, 15, 16, 17, 40):
        arguments, settings = part_of(call, slice(0, count))
        _, after = neural_memory(*arguments, before, **settings, backend=backend)
        map_state(lambda x, y: torch.testing.assert_close(x.shape, y.shape) or x, before, after)
        assert [w.dtype for w in after.M + after.S + after.anchor] == [torch.float64] * 6
        assert after.offset.tolist() == [count % 16] * 2
        assert after.offset.dtype == before.offset.dtype


@pytest.mark.parametrize("tokens", [3, 4, 13])
def test_outputs_lie_in_the_order_of_the_text(tokens: int) -> None:
    """Of one chunk or of several, heads can be put side by side without a copy."""
    o, _, _ = make_call(Case(tokens=tokens, chunk=4))("chunked")
    assert o.view(*o.shape[:2], -1).shape == (*o.shape[:2], o.shape[2] * o.shape[3])


def test_another_default_device_changes_nothing() -> None:
    call = make_call(Case(tokens=13, chunk=4))
    expected = call("chunked")[0]
    with torch.device("meta"):
        found = neural_memory(*call.arguments, **call.settings, backend="chunked")[0]
    assert torch.equal(found, expected)
