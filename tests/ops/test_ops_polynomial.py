"""Polynomial keys: products of them are a power series, and a memory may have keys of another width than its values."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import Call, Case, assert_agree, disagreement, make_call
from ops.test_ops_exact import described
from titans_lm.config import LARGEST_POLYNOMIAL, MemoryConfig
from titans_lm.memory import NeuralMemory
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory, read
from titans_lm.ops.groups import ChunkedCall
from titans_lm.ops.polynomial import polynomial


@pytest.mark.parametrize(("channels", "degree"), [(5, 0), (5, 1), (1, 4), (5, 2), (4, 3), (3, 5)])
def test_products_of_polynomials_are_a_power_series(channels: int, degree: int) -> None:
    q, k = torch.randn(2, 7, 3, channels, dtype=torch.float64)
    a = torch.rand(3, degree + 1, dtype=torch.float64)  # of each of three heads
    left, right = polynomial(q, a), polynomial(k, a)
    assert left.shape == (7, 3, math.comb(channels + degree, degree))
    series = sum(a[:, i] * (q * k).sum(-1) ** i for i in range(degree + 1))
    torch.testing.assert_close((left * right).sum(-1), series, rtol=1e-12, atol=1e-12)


def test_degree_one_is_the_key_itself_up_to_its_scale() -> None:
    x, a = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0.3, 1.7], dtype=torch.float64)
    found = polynomial(x, a)
    torch.testing.assert_close(found[:, 1:], x * 1.7**0.5)
    torch.testing.assert_close(found[:, 0], torch.full((4,), 0.3, dtype=torch.float64).sqrt())


@pytest.mark.parametrize("block", [1, 60, 10**6])
def test_the_gradients_of_a_polynomial_are_right(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are worked on at a time, the last of which are fewer; and without any but the constant."""
    module = import_module("titans_lm.ops.polynomial")
    monkeypatch.setattr(module, "BLOCK", block)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    a = torch.rand(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(polynomial, (x, a))
    assert torch.autograd.gradcheck(polynomial, (torch.cat((x, x)), a))
    assert torch.autograd.gradcheck(polynomial, (x, a[:1]))
    of_heads = torch.rand(2, 1, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(polynomial, (y, of_heads))  # coefficients that stand still over a dimension


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_what_stands_in_padding_reaches_no_gradient(backend: str, tokens: int) -> None:
    """A NaN neither; and its surprise is none."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k, v = draw(2, tokens, 2, 3), draw(2, tokens, 2, 3), draw(2, tokens, 2, 2)
    valid = torch.arange(tokens) >= torch.tensor([[0], [tokens // 2 + 1]])
    for x in (q, k, v):
        x[~valid] = torch.nan
        x.requires_grad_()
    a = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64, requires_grad=True)
    gates = [torch.full((2, tokens, 2), one, dtype=torch.float64) for one in (0.1, 0.5, 0.1)]
    network = MemoryNetwork(residual=False, coefficients=a)
    state = MemoryState.initial((draw(2, 10, 2),), 2)
    o, _, surprise = neural_memory(
        q, k, v, *gates, state, network=network, chunk_size=4, valid=valid, return_surprise=True, backend=backend
    )
    assert not surprise[~valid].any()
    o[valid].square().sum().backward()
    for x in (q, k, v, a):
        assert bool(x.grad.isfinite().all())
    assert bool(a.grad.any())


def test_polynomials_of_no_tokens_are_none() -> None:
    x, a = torch.randn(2, 0, 2, 7, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    polynomial(x, a).sum().backward()
    assert polynomial(x, a).shape == (2, 0, 2, 36)
    assert not a.grad.any()
    M = (torch.randn(2, 2, 36, 7),)
    assert read(M, x, MemoryNetwork(residual=False, coefficients=a)).shape == (2, 0, 2, 7)


def test_a_graph_has_no_block_of_its_own_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("titans_lm.ops.polynomial")
    monkeypatch.setattr(module, "BLOCK", 2 * 10**6)
    assert [len(x) for x, *_ in module._blocks(torch.Size(), 10**6, torch.ones(7, 3))] == [2, 2, 2, 1]
    assert [len(x) for x, *_ in module._blocks(torch.Size((3,)), 10**6, torch.ones(7, 3, 4))] == [1] * 7
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert len(list(module._blocks(torch.Size(), 10**6, torch.ones(7, 3)))) == 1


def cases() -> list[Case]:
    """Linear memories with wider and narrower keys: chunks that are written by tiles and others, padding, windows.

    Keys of 16 channels make them wide (ops/wide.py), but for tiles.
    """
    paddings = ("none", "middle", "empty row")
    some = [
        Case(
            keys=keys, depth=1, residual=False, norm=("none", "weight and bias")[i % 2], chunk=chunk, rows=3,
            tokens=(9, 1, 40)[i % 3], padding=padding, offsets=((), (chunk - 1, 0))[i // 2 % 2], seed=i,
            forget_to=("zero", "init")[i // 3 % 2], objective=("l2", "lp", "dot", "l2")[i % 4], window=(0, 0, 3)[i % 3],
        )
        for i, (keys, chunk, padding) in enumerate(product((7, 2, 16), (1, 4, 16), paddings))
    ]  # fmt: skip
    wide = [
        Case(
            keys=17,
            depth=1,
            residual=False,
            norm=norm,
            objective=objective,
            chunk=4,
            tokens=11,
            offsets=(3, 0),
            gates=("head", "layer", "head"),
            forget_to=forget_to,
            edges=edges,
            window=window,
        )
        for norm, objective, forget_to, edges, window in (
            ("weight", "huber", "init", (), 0),
            ("none", "lp", "zero", (), 3),
            ("none", "huber", "init", ("alpha",), 0),
            ("weight and bias", "l2", "init", ("theta", "eta", "alpha"), 0),
            ("none", "dot", "init", ("eta",), 2),
        )
    ]
    channels = Case(keys=16, depth=1, residual=False, norm="none", gates=("channel", "head", "channel"), tokens=18)
    return [
        *some,
        *wide,
        channels,
        Case(keys=7, residual=False),
        Case(keys=5, depth=1, residual=False, norm="none", chunk=1, tokens=70),
    ]


@pytest.mark.parametrize("case", described(cases()))
def test_keys_may_be_of_another_width_than_values(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize(
    "case", described([case for case in cases() if case.keys > 15 and "channel" not in case.gates])
)
@pytest.mark.parametrize(("kept", "least"), [(0, 1), (0, 10**6), (2**40, 10**6)])
def test_a_wide_memory_is_the_definition_in_groups_and_kept_whole(
    case: Case, kept: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of few chunks, in one that is made again for its gradients, and in one whose inside is kept."""
    groups, calls = import_module("titans_lm.ops.groups"), []
    monkeypatch.setattr(groups, "KEPT", kept)
    monkeypatch.setattr(groups, "LEAST_CHUNKS", least)
    monkeypatch.setattr(groups.ChunkedCall, "forward", noted(groups.ChunkedCall.forward, calls))
    assert_agree(replace(case, tokens=min(15 * case.chunk + 1, 41)), "reference", "chunked")
    wide = [call for call in calls if call.wide]
    assert calls
    assert all(call.wide or call.spec.inside is not None for call in calls), "which is by tiles"
    assert all(call.is_kept == bool(kept) for call in wide)
    assert all(len(call.groups) == 1 for call in wide) or least == 1


def polynomial_cases() -> list[Case]:
    """Memories of polynomial keys: wide ones, whose groups make them, and those for which they are made before."""
    plain = {"depth": 1, "residual": False, "norm": "none", "gates": ("head",) * 3, "keys": 7, "degree": 2, "chunk": 4}
    several: list[dict[str, Any]] = [
        {},
        {"tokens": 40, "offsets": (3, 0), "forget_to": "init"},
        {"padding": "scattered", "rows": 3, "offsets": (1, 2, 0), "forget_to": "init"},
        {"padding": "empty row", "rows": 3, "norm": "weight and bias", "gates": ("layer",) * 3},
        {"objective": "huber", "norm": "weight", "edges": ("theta", "eta", "alpha")},
        {"objective": "dot", "forget_to": "init", "edges": ("alpha",)},
        {"keys": 4, "degree": 3, "tokens": 21, "chunk": 16},
        {"keys": 20, "degree": 1, "tokens": 17},
        {"tokens": 1, "offsets": (2,)},
        {"keys": 2},  # narrow
        {"gates": ("channel", "head", "head")},
        {"window": 3, "offsets": (1,)},
        {"chunk": 1, "tokens": 40, "keys": 3},  # by tiles
        {"read_at": "anchor"},
        {"depth": 2, "norm": "weight and bias"},
    ]
    return [Case(**(plain | own), seed=i) for i, own in enumerate(several)]


@pytest.mark.parametrize("case", described(polynomial_cases()))
def test_polynomial_keys_of_a_call_are_those_made_before(case: Case) -> None:
    """The definition is given keys that are there; values and gradients, those by the coefficients too."""
    assert_agree(case, "reference", "chunked")
    call = make_call(case)
    network, (q, k) = call.settings["network"].make_keys(*call.arguments[:2])
    assert network.coefficients is None
    assert q.shape[-1] == case.widths[0]
    made = Call(call.leaves, (q, k, *call.arguments[2:]), call.settings | {"network": network})
    for x, y in zip(call.results("reference"), made.results("reference"), strict=True):
        assert all(error <= 1e-12 for error in disagreement(x, y).values())


@pytest.mark.parametrize("case", described(polynomial_cases()[:8]))
@pytest.mark.parametrize(("kept", "least"), [(0, 1), (0, 10**6), (2**40, 10**6)])
def test_groups_make_polynomial_keys(case: Case, kept: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, calls = import_module("titans_lm.ops.groups"), []
    monkeypatch.setattr(groups, "KEPT", kept)
    monkeypatch.setattr(groups, "LEAST_CHUNKS", least)
    monkeypatch.setattr(groups.ChunkedCall, "forward", noted(groups.ChunkedCall.forward, calls))
    assert_agree(replace(case, chunk=16, tokens=83), "reference", "chunked")  # small chunks go by tiles
    assert calls
    assert all(call.wide and call.q.shape[-1] == case.keys and call.roots is not None for call in calls)


def test_coefficients_of_another_form_are_refused() -> None:
    q, gate = torch.randn(1, 2, 1, 3), torch.zeros(1, 2, 1)
    state = MemoryState.initial((torch.zeros(1, 10, 3),), 1)

    def call(*shape: int) -> Tensor:
        network = MemoryNetwork(residual=False, coefficients=torch.ones(shape))
        return neural_memory(q, q, q, gate, gate, gate, state, network=network, chunk_size=2)[0]

    assert call(1, 3).shape == q.shape
    for shape in ((3,), (2, 3), (1, 0)):
        with pytest.raises(
            ValueError, match=r"got network\.coefficients of shape .*; expected \(H, p \+ 1\) with H = 1"
        ):
            call(*shape)
    with pytest.raises(ValueError, match=r"got state\.M\[0\] of shape \(1, 1, 10, 3\); expected"):
        call(1, 2)


def noted(forward: Callable[..., Any], calls: list[ChunkedCall]) -> Callable[..., Any]:
    """A method that also says whose it was."""

    def noting(call: ChunkedCall, *args: Any, **others: Any) -> Any:
        calls.append(call)
        return forward(call, *args, **others)

    return noting


@pytest.mark.parametrize("case", described(cases()[::4]))
def test_the_definition_with_such_keys_is_plain_autograd(case: Case) -> None:
    assert_agree(case, "oracle", "reference")


@pytest.mark.parametrize("case", described([cases()[0], cases()[3], cases()[-1]]))
def test_a_state_has_its_gradients_where_no_answer_is_asked_for(case: Case) -> None:
    """As of persistent tokens, which are written and whose answers nobody reads."""
    found = []
    for backend in ("reference", "chunked"):
        call = make_call(case)
        _, state, _ = call(backend)
        written = [leaf for name, leaf in call.leaves.items() if name != "q"]
        found.append(torch.autograd.grad(sum(w.sin().sum() for w in state.M), written))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-12)


def test_a_factor_of_all_coefficients_is_one_of_the_step() -> None:
    """Keys of φ with Σ a_i = s and steps of θ / s answer as keys of norm 1 and steps of θ do: D10 holds for both."""
    q, k = F.normalize(torch.randn(2, 1, 20, 2, 4, dtype=torch.float64), dim=-1)
    v, a = torch.randn(1, 20, 2, 3, dtype=torch.float64), torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    theta, eta, alpha = torch.rand(3, 1, 20, 2, dtype=torch.float64)
    empty = MemoryState.initial((torch.zeros(2, 15, 3, dtype=torch.float64),), 1)
    found = [
        neural_memory(
            polynomial(q, shares), polynomial(k, shares), v, theta * step / 16, eta, alpha, empty,
            network=MemoryNetwork(residual=False), chunk_size=4,
        )[0]
        for shares, step in ((a, 1 / a.sum()), (a / a.sum(), 1.0))
    ]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("followed", [True, False])
def test_reading_alone_is_reading_with_such_keys(followed: bool) -> None:
    q = torch.randn(2, 6, 2, 7, dtype=torch.float64, requires_grad=followed)
    M, weight = torch.randn(2, 2, 7, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    expected = torch.einsum("bthd,bhde->bthe", q, M)
    for network, y in (
        (MemoryNetwork(residual=False), expected),
        (MemoryNetwork(residual=False, norm_weight=weight), F.layer_norm(expected, (4,)) * weight),
    ):
        o = read((M,), q, network)
        torch.testing.assert_close(o, y, rtol=1e-12, atol=1e-12)
        if followed:
            d = torch.randn_like(o)
            torch.testing.assert_close(*(torch.autograd.grad(x, q, d, retain_graph=True)[0] for x in (o, y)))


def test_a_layer_starts_with_the_highest_degree_and_learns_the_shares() -> None:
    layer = NeuralMemory(hidden_size=8, num_attention_heads=2, memory_depth=1, key_degree=2)
    shares = layer.key_map.log_shares.softmax(-1)
    torch.testing.assert_close(shares, torch.tensor([[1.0, 20.0, 400.0]] * 2) / 421.0)
    y, state = layer(torch.randn(1, 9, 8))
    assert state.memory.M[0].shape == (1, 2, 15, 4)
    y.sin().sum().backward()
    assert (layer.key_map.log_shares.grad != 0).all()


def test_a_fresh_layer_answers_with_what_followed_a_token_once() -> None:
    """With shares of 1 / i! all keys have 0.4 in common, and the cosine is 0.21."""
    layer = NeuralMemory(hidden_size=64, num_attention_heads=2, memory_depth=1, key_degree=2, alpha_init=0.001)
    text = torch.randn(8, 128, 64)
    with torch.no_grad():
        state = layer.init_state(8)
        v = layer.norm_streams(layer.streams(text, state.conv, None))[2]
        _, state = layer(text, state)
        again = text[:, :64]
        o = layer.write(again, state, frozen=True)[0]
    o, v = (x - x.mean((0, 1)) for x in (o, v))
    assert torch.cosine_similarity(o[:, 8:-1], v[:, 9:64], dim=-1).mean() > 0.7


def test_a_hundred_thousand_equal_keys_stay_finite() -> None:
    layer = NeuralMemory(hidden_size=4, num_attention_heads=1, memory_depth=1, key_degree=2)
    for gate in (layer.theta_proj, layer.eta_proj):
        torch.nn.init.constant_(gate.proj.bias, 20.0)
    state = None
    with torch.no_grad():
        for _ in range(10):
            y, state = layer(torch.ones(1, 10_000, 4), state)
            assert y.isfinite().all()
            assert state.memory.M[0].abs().max() < 10.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deep": ({"key_degree": 2}, "got key_degree=2; expected with it memory_depth=1 without residual, gates per head"),
    "residual": (
        {"key_degree": 2, "memory_depth": 1, "memory_residual": True},
        "got key_degree=2; expected with it mem",
    ),
    "channels": (
        {"key_degree": 2, "memory_depth": 1, "gates": "channel"},
        "got key_degree=2; expected with it memory_d",
    ),
    "kernels": ({"key_degree": 2, "memory_depth": 1, "memory_backend": "triton"}, "got key_degree=2; expected with it"),
    "none": ({"key_degree": 0}, "got key_degree=0; expected an integer of at least 1"),
    "large": (
        {"key_degree": 3, "memory_depth": 1, "hidden_size": 256},
        "got key_degree=3 with heads of 64 channels, a memory of 3,065,920 numbers a head; expected at most 2,097,152:",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_degree_is_refused(name: str) -> None:
    settings, said = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        MemoryConfig(**settings)
    assert LARGEST_POLYNOMIAL == 2**21


@pytest.mark.usefixtures("unchecked")
def test_a_residual_needs_keys_as_wide_as_values() -> None:
    q, v, gate = torch.randn(1, 2, 1, 5), torch.randn(1, 2, 1, 4), torch.zeros(1, 2, 1)
    state = MemoryState.initial((torch.zeros(1, 5, 4),), 1)
    arguments = (q, q, v, gate, gate, gate, state)
    o, _ = neural_memory(*arguments, network=MemoryNetwork(residual=False), chunk_size=2)
    assert o.shape == v.shape
    with pytest.raises(
        ValueError, match=r"got q float32 \(1, 2, 1, 5\) and v float32 \(1, 2, 1, 4\); expected q, k and v"
    ):
        neural_memory(*arguments, network=MemoryNetwork(residual=True), chunk_size=2)
    with pytest.raises(ValueError, match=r"got state.M ending in 4 channels; expected 3, the channels of v"):
        neural_memory(q, q, v[..., :3], *arguments[3:], network=MemoryNetwork(residual=False), chunk_size=2)
