"""Yaad's and Moneta's losses: what an error pulls by (ops/errors.py), against losses differentiated by autograd."""

import re
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import Case, assert_agree, make_call
from ops.test_ops_exact import GATES, LINEAR, NETWORKS, described
from titans_lm.config import THRESHOLDS, Objective
from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory
from titans_lm.ops.errors import pull, pull_backward

OBJECTIVES = ("huber", "huber_coordinate", "lp")


def networks() -> list[Case]:
    """Every network and kind of gates; chunks, lengths, and where forgetting leads take turns."""
    return [
        Case(
            objective=objective, tokens=(9, 2, 17, 1)[i % 4], chunk=(4, 1, 16)[i % 3],
            gates=GATES[("layer", "head", "channel")[i % 3]], forget_to=("zero", "init")[i % 2], seed=i, **network,
        )
        for i, (objective, network) in enumerate(product(OBJECTIVES, NETWORKS.values()))
    ]  # fmt: skip


def starts_and_edges() -> list[Case]:
    """From inside a chunk, with padding anywhere, and with gates at their ends."""
    paddings = ("none", "left", "middle", "scattered", "empty row", "all empty")
    some = [
        Case(objective=objective, rows=3, tokens=10, chunk=(1, 4, 16)[i % 3], offsets=((0,), (3, 0, 1), (7, 2))[i % 3],
             padding=padding, forget_to=("init", "zero")[i % 2], seed=i)
        for i, (objective, padding) in enumerate(product(OBJECTIVES, paddings))
    ]  # fmt: skip
    ends = [
        Case(objective=objective, tokens=11, offsets=(1, 3), edges=("theta", "eta", "alpha"), edge_share=share)
        for objective, share in product(OBJECTIVES, (0.3, 1.0))
    ]
    return some + ends


@pytest.mark.parametrize("case", described(networks()[::2] + starts_and_edges()[::3]))
def test_the_definition_is_the_gradient_of_the_loss(case: Case) -> None:
    assert_agree(case, "oracle", "reference")


@pytest.mark.parametrize("case", described(networks() + starts_and_edges()))
def test_chunked_is_exact_for_every_loss(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("network", ["linear", "default"])
def test_chunked_is_exact_over_several_groups(objective: str, network: str) -> None:
    assert_agree(Case(tokens=100, chunk=4, objective=objective, **NETWORKS[network]), "reference", "chunked")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_cut_anywhere_and_single_tokens_change_nothing(objective: str) -> None:
    """A token at a time without gradients is `step`; pieces are chunks that begin anywhere."""
    call = make_call(Case(objective=objective, tokens=9, forget_to="init"))
    q, k, v, theta, eta, alpha, state = call.arguments
    with torch.no_grad():
        whole, end, sizes = call("chunked")
        for borders in ([0, 1, 5, 9], list(range(10))):
            pieces, now, found = [], state, []
            for start, stop in pairwise(borders):
                here = slice(start, stop)
                limit = call.settings["extra"].threshold
                o, now, size = neural_memory(
                    *(x[:, here] for x in (q, k, v, theta, eta, alpha)), now, network=call.settings["network"],
                    chunk_size=4, extra=PerToken(None if limit is None else limit[:, here]), return_surprise=True,
                )  # fmt: skip
                pieces.append(o)
                found.append(size)
            torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(torch.cat(found, 1), sizes, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(now.M, end.M, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", THRESHOLDS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_an_infinite_threshold_is_l2(objective: Objective, backend: str) -> None:
    """In values and in gradients, of which none is NaN; the threshold itself has none."""
    for case in (Case(tokens=9), Case(tokens=9, **LINEAR)):
        call = make_call(case)
        threshold = torch.full((2, 9, 2), torch.inf, dtype=torch.float64, requires_grad=True)
        found = []
        for name, extra in (("l2", PerToken()), (objective, PerToken(threshold))):
            network = MemoryNetwork(**{**vars(call.settings["network"]), "objective": name})
            o, state = neural_memory(*call.arguments, network=network, chunk_size=4, extra=extra, backend=backend)
            mixed = o.sin().sum() + sum(w.sin().sum() for w in state.M)
            leaves = [*call.leaves.values(), *extra.given()]
            found.append([o, *state.M, *torch.autograd.grad(mixed, leaves, allow_unused=True)])
        *others, by_threshold = found[1]
        for x, y in zip(found[0], others, strict=True):
            if x is not None:
                torch.testing.assert_close(y, x, rtol=1e-13, atol=1e-13)
        assert not by_threshold.any()


@pytest.mark.parametrize("objective", [name for name in get_args(Objective) if name != "dot"])
def test_the_gradients_of_a_pull_are_right(objective: Objective) -> None:
    """By e and by the threshold, at e = 0 too."""
    e = torch.randn(5, 3, 4, dtype=torch.float64)
    e[0] = 0.0
    threshold = torch.rand(5, 3, 1, dtype=torch.float64) + 0.5 if objective in THRESHOLDS else None
    given = [e.requires_grad_(), *([] if threshold is None else [threshold.requires_grad_()])]
    g = pull(*(given[0], objective, threshold))
    d_g = torch.randn_like(g)
    expected = torch.autograd.grad(g, given, d_g)
    found = pull_backward(d_g, e.detach(), objective, None if threshold is None else threshold.detach())
    for x, y in zip(expected, found, strict=False):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", THRESHOLDS)
def test_a_pull_is_bounded_and_continuous_at_its_threshold(objective: Objective) -> None:
    limit, direction = torch.tensor([1.5]).double(), F.normalize(torch.tensor([3.0, -4.0, 0.0]).double(), dim=-1)
    at = torch.linspace(0.0, 9.0, 200, dtype=torch.float64)[:, None] * direction
    g = pull(at, objective, limit)
    size = g.norm(dim=-1) if objective == "huber" else g.abs().amax(-1)
    assert size.max() <= 2 * 1.5 * (1 + 1e-12)
    assert (size.diff() >= -1e-12).all(), "it grows up to the threshold, and stays"
    assert (g.diff(dim=0).norm(dim=-1) <= 2 * 9.0 / 199 * (1 + 1e-9)).all(), "it does not jump"


def one_call(network: MemoryNetwork, extra: PerToken, **settings: Any) -> Any:
    q = F.normalize(torch.randn(2, 3, 2, 4), dim=-1)
    gate = 0.1 * torch.rand(2, 3, 2)
    state = MemoryState.initial((torch.zeros(2, 4, 4),), 2)
    return neural_memory(q, q, q, gate, gate, gate, state, network=network, chunk_size=2, extra=extra, **settings)


def limits(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (2, 3, 2), value)


REFUSED: dict[str, tuple[str, PerToken, str]] = {
    "none": ("huber", PerToken(), "got no threshold with objective='huber'; expected one, (B, T, H)"),
    "for l2": (
        "l2",
        PerToken(limits(1.0)),
        "got a threshold with objective='l2'; expected it with huber or",
    ),
    "for lp": ("lp", PerToken(limits(1.0)), "got a threshold with objective='lp'; expected it with huber or"),
    "zero": ("huber", PerToken(limits(0.0)), "got a threshold of 0; expected all above 0"),
    "negative": ("huber_coordinate", PerToken(limits(-2.0)), "got a threshold of -2; expected all above 0"),
    "no number": ("huber", PerToken(limits(torch.nan)), "got a threshold of nan; expected all above 0"),
    "shape": ("huber", PerToken(limits(1.0, 2, 3)), "got threshold float32 (2, 3); expected floating point (B, T, H)"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_threshold_is_refused(name: str) -> None:
    objective, extra, said = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        one_call(MemoryNetwork(residual=False, objective=objective), extra)


def test_kernels_refuse_other_losses() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"with objective='lp'; expected .* objective l2 or dot"):
        one_call(MemoryNetwork(residual=False, objective="lp"), PerToken(), backend="triton")


@pytest.mark.parametrize("objective", THRESHOLDS)
def test_padding_may_hold_anything(objective: Objective) -> None:
    """A threshold of NaN or 0 where no token stands reaches nothing."""
    case = Case(objective=objective, padding="middle", tokens=9)
    call = make_call(case)
    o, *_ = call("chunked")
    threshold, padded = call.settings["extra"].threshold, ~call.settings["valid"][:, :, None]
    for value in (torch.nan, 0.0):
        call.settings["extra"] = PerToken(threshold.masked_fill(padded, value))
        assert torch.equal(call("chunked")[0], o)
