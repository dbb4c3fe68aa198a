"""Products by oneDNN: what torch's own give, wherever they are taken, and taken only where they may be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import Case, make_call
from ops.test_ops_precision import cast_call
from titans_lm.ops import matmul


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take oneDNN on this machine, whatever it is, also for small products; lists the first shapes it was given."""
    if not matmul._agrees():
        pytest.skip("this torch has no oneDNN")
    seen: list[tuple[int, ...]] = []
    one_dnn = matmul._one_dnn

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(x.shape))
        return one_dnn(x, weight, bias)

    monkeypatch.setattr(matmul, "has_faster_products", lambda: True)
    monkeypatch.setattr(matmul, "_one_dnn", noted)
    for name in ("LEAST", "LEAST_EACH", "MOST"):
        monkeypatch.setattr(matmul, name, 0)
    return seen


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(7,), (2, 5), (1, 1), (3, 2, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_map_and_its_gradients(taken: list, lead: tuple[int, ...], biased: bool) -> None:
    given = [drawn(*lead, 6), drawn(4, 6), *([drawn(4)] if biased else [])]
    mine, exact = ([x.to(dtype).requires_grad_() for x in given] for dtype in (torch.float32, torch.float64))
    y, expected = matmul.linear(*mine), F.linear(*exact)
    close(y, expected)
    grad = drawn(*y.shape)
    found = torch.autograd.grad(y, mine, grad), torch.autograd.grad(expected, exact, grad.double())
    for a, b in zip(*found, strict=True):
        close(a, b)
    assert len(taken) == 3, "forward, by x, by the weight"


def test_a_weight_wider_than_its_input_and_the_other_way(taken: list) -> None:
    for x, y in ((drawn(9, 3), drawn(9, 8)), (drawn(9, 8), drawn(9, 3))):
        close(matmul.outer(x, y), x.double().T @ y.double())


def laid(x: Tensor, how: str) -> Tensor:
    """The same numbers, contiguous, transposed in memory, or as a part of something larger."""
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "part":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., x.shape[-1] :] = x
        return wide[..., x.shape[-1] :]
    return x


LAYOUTS = ("contiguous", "transposed", "part")


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_batches_of_any_layout(taken: list, left: str, right: str) -> None:
    x, y = laid(drawn(3, 5, 4), left), laid(drawn(3, 4, 6), right)
    exact = x.double() @ y.double()
    close(matmul.bmm(x, y), exact)
    for place in LAYOUTS:
        total = laid(drawn(3, 5, 6), place)
        expected = total.double() - exact
        assert matmul.add_bmm_(total, x, y, alpha=-1) is total
        close(total, expected)
        close(matmul.bmm_into(x, y, total), exact)
    assert len(taken) == 3 * 7


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("place", LAYOUTS)
def test_small_batches_stay_with_torch_in_any_layout(rows: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_faster_products", lambda: pytest.fail("asked for a small product"))
    x, y, total = drawn(rows, 5, 4), drawn(rows, 4, 6), laid(drawn(rows, 5, 6), place)
    expected = total.double() - x.double() @ y.double()
    close(matmul.add_bmm_(total, x, y, alpha=-1), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: matmul.linear(drawn(3, 4).double(), drawn(5, 4).double()),
        lambda: matmul.times(drawn(3, 4).bfloat16(), drawn(4, 5).bfloat16()),
        lambda: matmul.outer(drawn(3, 4).half(), drawn(3, 5).half()),
        lambda: matmul.bmm(drawn(2, 3, 4).double(), drawn(2, 4, 5).double()),
        lambda: matmul.linear(drawn(3, 4).to("meta"), drawn(5, 4).to("meta")),
    ],
)
def test_other_precisions_and_devices_stay_with_torch(taken: list, call: Callable[[], Tensor]) -> None:
    assert call().shape[-1] == 5
    assert not taken


def test_what_torch_makes_by_default_does_not_matter(taken: list) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert matmul._agrees()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert matmul._agrees()


def test_autocast_and_a_switch_of_torch_are_heard(taken: list) -> None:
    x, weight = drawn(3, 4), drawn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(x, weight).dtype == torch.bfloat16
    torch._C._set_mkldnn_enabled(False)  # what torch.backends.mkldnn.flags() does, which warns besides
    try:
        matmul.linear(x, weight)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert not taken
    matmul.linear(x, weight)
    assert taken


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", ["autocast", "weights of bfloat16"])
def test_bfloat16_without_instructions_is_rounded_float32(
    monkeypatch: pytest.MonkeyPatch, how: str, biased: bool
) -> None:
    """Products of rounded numbers, rounded once, and so are their gradients; small ones stay with torch."""
    monkeypatch.setattr(matmul, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(matmul, "LEAST_HALF", 9 * 6 * 4)
    rounded, calls = matmul._rounded, []
    monkeypatch.setattr(matmul, "_rounded", lambda *given: calls.append(given) or rounded(*given))
    x, weight, bias = drawn(9, 6), drawn(4, 6), drawn(4) if biased else None
    exact = [y.bfloat16().double().requires_grad_() for y in (x, weight, bias) if y is not None]
    expected = F.linear(*exact)
    if how == "weights of bfloat16":
        x, weight, bias = (None if y is None else y.bfloat16() for y in (x, weight, bias))
    given = [y.requires_grad_() for y in (x, weight, bias) if y is not None]
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = matmul.linear(x, weight, bias)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), expected, rtol=2.0**-8, atol=1e-6)
        grad = drawn(9, 4).bfloat16()
        grads = zip(
            torch.autograd.grad(y, given, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
        )
        for (mine, wanted), leaf in zip(grads, given, strict=True):
            assert mine.dtype == leaf.dtype
            torch.testing.assert_close(mine.double(), wanted, rtol=2.0**-8, atol=1e-6)
        assert len(calls) == 1
        assert matmul.linear(x[:8], weight, bias).dtype == torch.bfloat16
        assert matmul.linear(x.double(), weight.double(), None).dtype == torch.float64
        monkeypatch.setattr(matmul, "multiplies_bfloat16", lambda: True)
        assert matmul.linear(x, weight, bias).dtype == torch.bfloat16
    assert len(calls) == 1


def test_nothing_of_it_is_in_a_compiled_graph(taken: list) -> None:
    graph = torch.compile(lambda x, w: matmul.linear(x, w), backend="eager", fullgraph=True)
    x, weight = drawn(3, 4).requires_grad_(), drawn(5, 4)
    close(graph(x, weight), x.double() @ weight.double().T)
    assert not taken


def test_small_products_are_not_worth_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_faster_products", lambda: pytest.fail("asked for a small product"))
    matmul.linear(drawn(3, 4), drawn(5, 4))
    matmul.bmm(drawn(2, 8, 8), drawn(2, 8, 8))


@pytest.mark.parametrize("forget_to", ["zero", "init"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_memory_with_them_is_the_memory(taken: list, depth: int, forget_to: str) -> None:
    """Values and gradients in float32 beside those in float64 without oneDNN."""
    case = Case(tokens=37, chunk=8, width=8, depth=depth, gates=("layer", "layer", "layer"), forget_to=forget_to)
    found = []
    for dtype in (torch.float32, torch.float64):
        call = cast_call(make_call(case), dtype)
        tensors = [x.requires_grad_() for x in call.arguments[:3]]
        o, state, _ = call("chunked")
        loss = (o * torch.linspace(-1.0, 1.0, o.numel(), dtype=dtype).view(o.shape)).sum() + state.M[0].square().sum()
        found.append([o, *state.M, *state.S, *torch.autograd.grad(loss, tensors)])
        assert len(taken) > 50
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-4)
