"""Every backend computes the definition: values, states, surprise and all gradients, in float64, to 1e-10.

The definition (`reference`) is itself checked against an independent loop (memory_oracle.py), `chunked` against it.
"""

from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ops.memory_cases import Case, assert_agree, disagreement, make_call
from titans_lm import NeuralMemory
from titans_lm.ops.groups import ChunkedCall

LINEAR = {"depth": 1, "residual": False, "norm": "none"}
NETWORKS = {
    "linear": LINEAR,
    "linear-norm": {"depth": 1},
    "default": {},
    "no-norm": {"norm": "none"},
    "no-residual": {"residual": False, "norm": "weight"},
    "wide": {"expansion": 4},
    "depth3": {"depth": 3},
    "depth4": {"depth": 4, "norm": "weight"},
    "depth4-bare": {"depth": 4, "norm": "none", "residual": False},
}
MIXED = ("layer", "head", "channel")
GATES = {kind: (kind,) * 3 for kind in ("head", "layer", "channel")} | {
    "mixed": MIXED,
    "theta-channel": ("channel", "head", "head"),
    "eta-channel": ("head", "channel", "layer"),
}
LENGTHS = (1, 2, 15, 16, 17, 63)
CHUNKS = (1, 4, 16, 64)


def described(cases: list[Case]) -> list:
    """Parametrize over the cases, each named by what is unlike the default in it."""
    unique = dict.fromkeys(cases)
    return [pytest.param(case, id=str(case)) for case in unique]


def structures() -> list[Case]:
    """Every network with every kind of gates and either goal of forgetting; lengths, chunks and the rest take turns."""
    cases = []
    for i, (network, gates, forget_to) in enumerate(product(NETWORKS.values(), GATES.values(), ("zero", "init"))):
        cases.append(
            Case(
                tokens=LENGTHS[i % 5] if i % 7 else LENGTHS[5],
                chunk=CHUNKS[(i + i // 4) % 4],
                gates=gates,
                forget_to=forget_to,
                activation=("gelu", "silu", "relu")[(i // 2) % 3],
                objective="dot" if i % 5 == 4 else "l2",
                seed=1093 if i == 93 else i,  # 93 makes 1.5e-10 of a last digit of M, in `reference` alone
                **network,
            )
        )
    return cases


def edges() -> list[Case]:
    """θ = 0, η = 0, α = 1, alone and together, here and there and everywhere."""
    which = (("theta",), ("eta",), ("alpha",), ("eta", "alpha"), ("theta", "eta", "alpha"))
    return [
        Case(tokens=11, offsets=(1, 3), gates=GATES[gates], forget_to=forget_to, edges=names, edge_share=share)
        for names, share, gates, forget_to in product(
            which, (0.3, 1.0), ("layer", "mixed", "channel"), ("zero", "init")
        )
    ]


def starts() -> list[Case]:
    """Calls that begin inside a chunk (S ≠ 0, anchor ≠ M), rows alike or not, with padding anywhere."""
    paddings = ("none", "left", "right", "middle", "scattered", "empty row", "all empty")
    cases = []
    for i, (padding, chunk, alike) in enumerate(product(paddings, (1, 4, 16), (True, False))):
        last = chunk - 1
        cases.append(
            Case(
                rows=3,
                tokens=(1, 2, 9, 18)[i % 4] if padding == "none" else 10,
                chunk=chunk,
                offsets=(last // 2,) if alike else (last, 0, last // 2),
                padding=padding,
                gates=MIXED,
                forget_to=("init", "zero")[i % 2],
                seed=i,
            )
        )
    return cases


def alone() -> list[Case]:
    """A single row, or a single head, of which tensors by row and by head are laid out unlike those of several."""
    return [
        Case(rows=rows, tokens=tokens, heads=heads, forget_to=forget_to, gates=GATES[gates], **network)
        for tokens, (rows, heads), forget_to, gates, network in product(
            (3, 9), ((1, 1), (1, 2), (2, 1)), ("zero", "init"), ("head", "layer", "channel"), (LINEAR, {})
        )
    ]


@pytest.mark.parametrize("case", described(structures()[::3] + starts()[::3] + edges()[::7]))
def test_what_is_kept_of_a_small_call_is_what_would_be_made_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(case)
    kept = call.results("chunked")
    monkeypatch.setattr(import_module("titans_lm.ops.groups"), "KEPT", 0)
    for x, y in zip(kept, call.results("chunked"), strict=True):
        assert x.keys() == y.keys()
        wrong = {name: error for name, error in disagreement(x, y).items() if not error <= 1e-12}
        assert not wrong, f"{case}: kept and made again differ by {wrong}"


def many_chunks() -> list[Case]:
    """Nine chunks each, two groups of a call that is not kept; of 64 once, as the definition takes a step a token."""
    cases, found = [], structures()[::5] + starts()[::5] + edges()[::9]
    long = next(i for i, case in enumerate(found) if case.chunk == 64)
    for i, case in enumerate(found):
        chunk = case.chunk if case.chunk < 16 or i == long else 16 if i < 2 else 5
        offsets = tuple(min(offset, chunk - 1) for offset in case.offsets)
        cases.append(replace(case, chunk=chunk, tokens=9 * chunk, offsets=offsets))
    return cases


@pytest.mark.parametrize("case", described(many_chunks()))
def test_a_call_that_is_kept_whole_as_on_a_gpu_gives_the_definition(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one group, although it has more than eight chunks."""
    monkeypatch.setattr(ChunkedCall, "_is_kept", lambda call, group: not call.lags)
    assert_agree(case, "reference", "chunked")


def test_gradients_of_a_small_call_may_be_asked_for_again() -> None:
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    memory = NeuralMemory(hidden_size=8, num_attention_heads=2, chunk_size=4).double()
    loss = memory(x)[0].square().sum()
    first, again = (torch.autograd.grad(loss, list(memory.parameters()), retain_graph=True) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", described(alone()))
def test_chunked_is_exact_for_a_single_row_or_head(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize("case", described(structures()[::4] + edges()[::5] + starts()[::2]))
def test_the_definition_is_plain_autograd(case: Case) -> None:
    assert_agree(case, "oracle", "reference")


def pairs() -> list[Case]:
    """Of `structures`, each network with each kind of gates; the goal of forgetting takes turns with both."""
    goals = ("zero", "init")
    kinds = len(GATES)
    return [
        case for i, case in enumerate(structures()) if case.forget_to == goals[(i // 2 // kinds + i // 2 % kinds) % 2]
    ]


@pytest.mark.parametrize("case", described(pairs()))
def test_chunked_is_exact_for_every_network_and_gate(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize("case", described(edges()))
def test_chunked_is_exact_at_the_edges_of_the_gates(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize("case", described(starts()))
def test_chunked_is_exact_from_any_start_and_with_padding(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.slow
@pytest.mark.parametrize(("i", "tokens", "chunk"), [(0, 72, 1), (1, 66, 4), (0, 70, 8), (1, 70, 64)])
@pytest.mark.parametrize(("j", "network"), [(0, "linear"), (1, "default"), (2, "depth4")])
def test_chunked_is_exact_over_many_chunks(j: int, network: str, i: int, tokens: int, chunk: int) -> None:
    """Several groups of chunks, of one size and of different sizes, and chunks longer than a call's tail.

    Either way of starting with every length and with every network.
    """
    case = Case(tokens=tokens, chunk=chunk, gates=MIXED, forget_to="init", **NETWORKS[network])
    if (i + j) % 2:
        case = replace(case, offsets=(chunk - 1, 0), padding="scattered")
    assert_agree(case, "reference", "chunked")


@st.composite
def legal_cases(draw: st.DrawFn) -> Case:
    chunk = draw(st.integers(1, 9))
    padding = draw(st.sampled_from(["none", "left", "right", "middle", "scattered", "empty row", "all empty"]))
    return Case(
        tokens=draw(st.integers(1, 20)),
        chunk=chunk,
        rows=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 2)),
        width=draw(st.integers(4, 6)),
        depth=draw(st.integers(1, 4)),
        expansion=draw(st.integers(2, 4)),
        gates=tuple(draw(st.sampled_from(["head", "layer", "channel"])) for _ in range(3)),
        activation=draw(st.sampled_from(["gelu", "silu", "relu"])),
        residual=draw(st.booleans()),
        norm=draw(st.sampled_from(["none", "weight", "weight and bias"])),
        objective=draw(st.sampled_from(["l2", "dot"])),
        forget_to=draw(st.sampled_from(["zero", "init"])),
        offsets=tuple(draw(st.lists(st.integers(0, chunk - 1), max_size=3))),
        padding=padding,
        edges=tuple(draw(st.sets(st.sampled_from(["theta", "eta", "alpha"])))),
        edge_share=draw(st.sampled_from([0.3, 1.0])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=40)
@given(case=legal_cases())
@example(case=Case(tokens=1, rows=1, heads=1, depth=1))
def test_any_legal_call_gives_the_same_in_all_three(case: Case) -> None:
    assert_agree(case, "oracle", "reference")
    assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("forget_to", ["zero", "init"])
@pytest.mark.parametrize("gates", [GATES["layer"], GATES["channel"]], ids=["layer", "channel"])
def test_a_gradient_reaches_every_input(backend: str, forget_to: str, gates: tuple[str, str, str]) -> None:
    """Comparing gradients means something only where they are not all zero."""
    case = Case(tokens=9, offsets=(1, 3), gates=gates, forget_to=forget_to)
    _, gradients = make_call(case).results(backend)
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        assert (gradient != 0).any(), name


@pytest.mark.parametrize(("chunk", "offsets"), [(1, ()), (4, ()), (4, (1, 0)), (16, (1, 0))])
@pytest.mark.parametrize("gates", [("layer",) * 3, ("channel",) * 3, MIXED])
@pytest.mark.parametrize("network", [{**LINEAR, "keys": 3}, LINEAR, {"norm": "none"}])
def test_values_of_one_channel(network: dict, gates: tuple, chunk: int, offsets: tuple) -> None:
    """Where there is nothing to sum over, a sum may be the very tensor that it was asked of."""
    for forget_to in ("zero", "init"):
        case = Case(width=1, gates=gates, chunk=chunk, offsets=offsets, forget_to=forget_to, **network)
        assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize("asked", ["norm_weight", "norm_bias", "initial"])
def test_one_token_leads_back_to_the_norm_alone_and_to_m_init(asked: str) -> None:
    call = make_call(Case(tokens=1, forget_to="init"))
    for x in call.leaves.values():
        x.requires_grad_(False)
    wanted = [x.requires_grad_() for name, x in call.leaves.items() if name.startswith(asked)]
    grads = []
    for backend in ("reference", "chunked"):
        o, state, _ = call(backend)
        grads.append(torch.autograd.grad(o.square().sum() + state.M[0].sum(), wanted, allow_unused=True))
    for exact, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    assert wanted
    assert all(x.abs().max() > 0 for x in grads[0])
