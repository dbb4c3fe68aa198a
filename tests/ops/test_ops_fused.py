"""Norms, gates and taps with gradients by hand, against the plain expressions and autograd's gradients of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from titans_lm import NeuralMemory
from titans_lm.backbone import Backbone
from titans_lm.config import BackboneConfig
from titans_lm.layers import Linear, RMSNorm, ShortConvolution, make_streams
from titans_lm.ops import fused
from titans_lm.ops.fused import (
    causal_taps,
    clipped_sigmoid,
    gated_linear,
    rms_norm,
    swiglu,
    unit_norm,
    unit_qkv,
)


class Map:
    """A linear map of given tensors, as plain as `Linear`."""

    is_plain = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._forward_hooks = self._forward_pre_hooks = self._backward_hooks = self._backward_pre_hooks = {}

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(Map):
    """An RMSNorm of a given weight, as plain as ours."""

    is_plain = True
    eps = 1e-5

    def __call__(self, x: Tensor) -> Tensor:
        return rms(x, self.weight)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def plain_taps(padded: Tensor, weight: Tensor) -> Tensor:
    T = padded.shape[1] - len(weight) + 1
    return F.silu(sum(padded[:, i : i + T] * w for i, w in enumerate(weight)))


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {}


def case(name: str, ours: Callable[..., Tensor], plain: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    torch.manual_seed(len(CASES))
    CASES[name] = ours, plain, tuple(drawn(*shape) for shape in shapes)


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    return y if weight is None else y * weight


def clipped(x: Tensor, stretch: float) -> Tensor:
    y = (1.0 + 2.0 * stretch) * x.sigmoid() - stretch
    return y + (y.clamp(0.0, 1.0) - y).detach()


case("rms norm", lambda x, w: rms_norm(x, w, 1e-5), rms, (2, 5, 6), (6,))
case("rms norm without weight", lambda x: rms_norm(x, None, 1e-5), lambda x: rms(x, None), (2, 5, 3, 4))
case("unit norm", unit_norm, lambda x: x / x.norm(dim=-1, keepdim=True), (2, 5, 3, 4))
case("q, k and v with their norms", lambda y: torch.stack(unit_qkv(y, 1e-5), dim=2),
     lambda y: torch.stack([y[:, :, 0] / y[:, :, 0].norm(dim=-1, keepdim=True),
                            y[:, :, 1] / y[:, :, 1].norm(dim=-1, keepdim=True), rms(y[:, :, 2], None)], dim=2),
     (2, 5, 3, 2, 4))  # fmt: skip
case("norm, sigmoid, linear", lambda m, y, w, n: gated_linear("memory", Map(w), y, m, Norm(n)),
     lambda m, y, w, n: (m.sigmoid() * rms(y, n).flatten(2)) @ w.T, (2, 5, 6), (2, 5, 3, 2), (4, 6), (2,))  # fmt: skip
case("two norms, sigmoid, linear", lambda m, y, w, n, k: gated_linear("memory", Map(w), y, m, Norm(n), Norm(k)),
     lambda m, y, w, n, k: (rms(m, k).sigmoid() * rms(y, n)) @ w.T,
     (2, 5, 6), (2, 5, 6), (4, 6), (6,), (6,))  # fmt: skip
case("two norms, each a gate of the other, linear",
     lambda y, m, w, n, k: gated_linear("mutual", Map(w), y, m, Norm(n), Norm(k)),
     lambda y, m, w, n, k: (rms(y, n) * rms(m, k).sigmoid() + rms(m, k) * rms(y, n).sigmoid()) @ w.T,
     (2, 5, 6), (2, 5, 6), (4, 6), (6,), (6,))  # fmt: skip
case("SwiGLU", lambda x, *w: swiglu(x, *map(Map, w)), lambda x, g, u, d: (F.silu(x @ g.T) * (x @ u.T)) @ d.T,
     (2, 5, 6), (9, 6), (9, 6), (4, 9))  # fmt: skip
case("clipped sigmoid", lambda x: clipped_sigmoid(x, 0.2), lambda x: clipped(x, 0.2), (2, 5, 6))
case("taps", causal_taps, plain_taps, (2, 8, 3), (4, 3))
case("one tap", causal_taps, plain_taps, (2, 5, 3), (1, 3))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_expression(name: str) -> None:
    ours, plain, inputs = CASES[name]
    mine, other = ([x.clone().requires_grad_() for x in inputs] for _ in "ab")
    y, expected = ours(*mine), plain(*other)
    torch.testing.assert_close(y, expected, rtol=0.0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), expected.detach(), rtol=0.0, atol=1e-12)
    grad = drawn(*y.shape)
    for a, b in zip(torch.autograd.grad(y, mine, grad), torch.autograd.grad(expected, other, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_each_gradient_can_be_asked_for_alone(name: str) -> None:
    ours, plain, inputs = CASES[name]
    grad = drawn(*plain(*inputs).shape)
    for asked in range(len(inputs)):
        found = []
        for function in (ours, plain):
            given = [x.clone().requires_grad_(i == asked) for i, x in enumerate(inputs)]
            found.append(torch.autograd.grad(function(*given), given[asked], grad)[0])
        torch.testing.assert_close(*found, rtol=0.0, atol=1e-11)


def test_an_mlp_of_many_rows_is_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 64 rows, the last one shorter, it is what it is in one."""
    given = [drawn(3, 50, 6), drawn(9, 6), drawn(9, 6), drawn(4, 9)]
    found = []
    for numbers in (1, 2**19):
        monkeypatch.setattr(fused, "BLOCK", numbers)
        inputs = [x.clone().requires_grad_() for x in given]
        y = swiglu(inputs[0], *map(Map, inputs[1:]))
        found.append([y, *torch.autograd.grad(y.square().mean(), inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("block", [1, fused.BLOCK])
def test_the_output_of_an_mlp_may_be_written_into(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that does so needs more than a view that a function has made inside itself."""
    monkeypatch.setattr(fused, "BLOCK", block)
    projs = [Map(drawn(*shape).requires_grad_()) for shape in ((6, 4), (6, 4), (4, 6))]
    x = drawn(2, 70, 4)
    expected = swiglu(x, *projs).detach() + 1.0
    y = swiglu(x, *projs)
    torch.testing.assert_close(y.add_(1.0), expected, rtol=0.0, atol=0.0)
    y.sum().backward()


def test_an_mlp_of_rows_that_lie_otherwise_in_memory() -> None:
    """The gradient by an input that is not contiguous is written where it is looked for."""
    x, *weights = drawn(5, 3, 6), drawn(9, 6), drawn(9, 6), drawn(4, 9)
    found = []
    for given in (x.transpose(0, 1), x.transpose(0, 1).contiguous()):
        given = given.detach().requires_grad_()
        found.append(torch.autograd.grad(swiglu(given, *map(Map, weights)).square().mean(), given)[0])
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-12)


def test_zeros_have_no_direction_and_no_gradient() -> None:
    """And all others the gradient that they had."""
    x = drawn(3, 4)
    x[0], x[1] = 0.0, 1e-13
    given, again, plain = (x.clone().requires_grad_() for _ in range(3))
    unit_norm(given)[:, 0].sum().backward()
    (again / again.norm(dim=-1, keepdim=True).clamp_min(1e-12))[:, 0].sum().backward()
    with pytest.MonkeyPatch.context() as compiled:
        compiled.setattr(torch.compiler, "is_compiling", lambda: True)
        unit_norm(plain)[:, 0].sum().backward()
    for found in (given.grad, plain.grad):
        assert found is not None
        assert again.grad is not None
        assert (found[:2] == 0.0).all()
        torch.testing.assert_close(found[2], again.grad[2], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(unit_norm(x), x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("architecture", ["lmm", "mac", "mag", "mal"])
def test_embeddings_padded_with_zeros_leave_gradients_finite(architecture: str) -> None:
    torch.manual_seed(0)
    backbone = Backbone(
        BackboneConfig(
            architecture=architecture, hidden_size=32, num_attention_heads=2, num_hidden_layers=6, num_persistent=2,
            segment_len=8, window=8, chunk_size=4,
        )
    )  # fmt: skip
    x = torch.randn(2, 16, 32)
    x[:, :5] = 0.0
    x.requires_grad_()
    y, *_ = backbone(x)
    (y * torch.randn_like(y)).sum().backward()
    found = [x.grad, *(p.grad for p in backbone.parameters() if p.grad is not None)]
    assert all(bool(g.isfinite().all()) for g in found if g is not None)
    assert torch.stack([g.norm() for g in found if g is not None]).norm() < 1e8


def test_maps_of_one_input_are_made_together() -> None:
    projs = [Linear(6, 4, bias=False).double() for _ in range(3)]
    x = drawn(2, 5, 6).requires_grad_()
    together, alone = make_streams(x, projs, torch.nn.ModuleList(), (), None)[:3], [proj(x) for proj in projs]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-12)
    weights = [proj.weight for proj in projs]
    a, b = (torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *weights]) for ys in (together, alone))
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-11)


class Wrapped(torch.nn.Module):
    """What PEFT does to a linear map."""

    def __init__(self, inner: Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1.0


@pytest.mark.parametrize("how", ["wrapped", "hooked", "biased"])
def test_a_map_that_is_more_than_a_matrix_is_called(how: str) -> None:
    proj: Any = Linear(6, 3, bias=how == "biased").double()
    if how == "biased":
        torch.nn.init.ones_(proj.bias)
    if how == "hooked":
        proj.register_forward_hook(lambda _, __, y: y + 1.0)
    weight = proj.weight
    proj = Wrapped(proj) if how == "wrapped" else proj
    x, gate = drawn(2, 5, 6), drawn(2, 5, 6)
    torch.testing.assert_close(make_streams(x, [proj] * 3, torch.nn.ModuleList(), (), None).k, x @ weight.T + 1.0)
    norm = RMSNorm(6, 1e-5).double()
    expected = (torch.sigmoid(gate) * rms(x, norm.weight)) @ weight.T + 1.0
    torch.testing.assert_close(gated_linear("memory", proj, x, gate, norm), expected)
    x.requires_grad_()
    torch.testing.assert_close(gated_linear("memory", proj, x, gate, norm), expected)


def test_streams_of_nothing_have_no_direction_and_no_gradient() -> None:
    """As q or k alone: what is shorter than 1e-12 is divided by that; v of zeros stays zero."""
    y = drawn(1, 2, 3, 1, 4)
    y[:, 0] = 0.0
    y.requires_grad_()
    q, k, v = unit_qkv(y, 1e-5)
    assert not any(x[:, 0].any() for x in (q, k, v))
    (q.sum() + k.sum() + v.sum()).backward()
    assert not y.grad[:, 0, :2].any()
    torch.testing.assert_close(y.grad[:, 0, 2], torch.full_like(y.grad[:, 0, 2], 1e-5**-0.5))


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("lengths", [None, torch.tensor([0, 2, 1])])
def test_streams_side_by_side_are_streams(tokens: int, lengths: Tensor | None) -> None:
    convs = torch.nn.ModuleList(ShortConvolution(6, 4).double() for _ in range(3))
    projs, x = [Linear(6, 6, bias=False).double() for _ in range(3)], drawn(3, tokens, 6)
    tails = tuple(drawn(3, 3, 6) for _ in range(3))
    lengths = None if lengths is None else lengths.clamp(max=tokens)
    *together, after, _ = make_streams(x, projs, convs, tails, lengths)
    for i, conv in enumerate(convs):
        y, tail = conv(projs[i](x), tails[i], lengths)
        torch.testing.assert_close(together[i], y, rtol=0.0, atol=1e-12)
        torch.testing.assert_close(after[i], tail, rtol=0.0, atol=1e-12)
        assert after[i].is_contiguous()


@pytest.mark.parametrize("architecture", ["lmm", "mac"])
def test_backward_hooks_are_called(architecture: str) -> None:
    stack = Backbone(
        BackboneConfig(architecture=architecture, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    )
    called: list[str] = []
    hooked = {name: m for name, m in stack.named_modules() if type(m) in (Linear, RMSNorm, ShortConvolution)}
    assert len(hooked) > 8
    for name, module in hooked.items():
        module.register_full_backward_hook(lambda *_, name=name: called.append(name))
    stack(drawn(1, 9, 8).float().requires_grad_())[0].square().sum().backward()
    assert set(called) == set(hooked)


def test_second_derivatives_of_layers_are_refused() -> None:
    """torch's own check misses them where the gradient that comes in needs none, as behind a sum."""
    memory, x = NeuralMemory(hidden_size=8, num_attention_heads=2).double(), drawn(1, 6, 8)

    def loss(a: Tensor) -> Tensor:
        return (a + memory(a)[0]).pow(3).sum()

    for function in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(RuntimeError, match="got create_graph=True through a layer of titans-lm"):
            function(loss, x, x)
    with pytest.raises(RuntimeError, match="expected first derivatives alone"):
        torch.autograd.functional.jvp(lambda a: a + memory(a)[0], x, x)
    (grad,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    assert checkpoint(loss, x, use_reentrant=True).backward() is None
    torch.testing.assert_close(x.grad, grad)
