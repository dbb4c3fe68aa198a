"""How large momentary surprise, past surprise and what is forgotten are: the same in every backend, however cut."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor
from torch.nn import functional as F

from ops.memory_cases import Call, Case, make_call, named_parts
from ops.test_ops_exact import described, edges, legal_cases, starts, structures
from ops.test_ops_precision import cast_call
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory

BACKENDS = ("reference", "chunked")
MIXED = ("layer", "head", "channel")
SETTINGS = {
    "fresh": Case(tokens=13, rows=3, forget_to="init", gates=MIXED),
    "inside": Case(tokens=13, rows=3, offsets=(2,), gates=("channel", "head", "layer")),
    "rows-apart": Case(tokens=13, rows=3, offsets=(3, 0, 1), forget_to="init"),
    "channels": Case(tokens=13, rows=3, offsets=(3, 0, 1), forget_to="init", gates=("channel",) * 3),
    "padded": Case(tokens=13, rows=3, offsets=(3, 0, 1), padding="scattered"),
    "empty-row": Case(tokens=13, rows=3, padding="empty row", chunk=3, gates=("head", "channel", "head")),
    "wide": Case(tokens=13, rows=3, depth=1, keys=16, residual=False, norm="none", offsets=(1,), forget_to="init"),
    "edges": Case(tokens=13, rows=3, offsets=(1,), edges=("theta", "eta", "alpha"), forget_to="init"),
}


def parts_of(call: Call, backend: str, tokens: slice = slice(None), state: MemoryState | None = None) -> tuple:
    """State and sizes (B, T, H, L, 3) after some tokens of a call; sizes of padding, which are undefined, are zero."""

    def cut(x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return x[:, tokens] if isinstance(x, Tensor) else tuple(y[:, tokens] for y in x)

    *inputs, start = call.arguments
    valid = call.settings["valid"]
    options = {**call.settings, "valid": None if valid is None else valid[:, tokens]}
    state = start if state is None else state
    _, state, sizes = neural_memory(*map(cut, inputs), state, **options, return_surprise="parts", backend=backend)
    return state, sizes if valid is None else sizes.masked_fill(~options["valid"][:, :, None, None, None], 0.0)


def assert_same_sizes(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to a share of the largest number of each kind; where all are zero, zero."""
    assert got.shape == expected.shape
    for i, name in enumerate(("momentary", "past", "forgotten")):
        x, y = got[..., i], expected[..., i]
        if x.numel():
            assert float((x - y).abs().max()) <= tolerance * float(y.abs().max()), name


def spread(gate: Tensor | tuple[Tensor, ...], t: int, layer: int) -> Tensor:
    """One token's gate for one layer, shaped to scale the rows of (B, H, D_in, D_out)."""
    if isinstance(gate, tuple):
        return gate[layer][:, t].unsqueeze(-1)
    return (gate[:, t] if gate.dim() == 3 else gate[:, t, :, layer])[..., None, None]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_definition_by_the_states_themselves(setting: str) -> None:
    """‖η_t S_{t−1}‖ and ‖α_t (M_{t−1} − B)‖, from the state before every token."""
    call = make_call(SETTINGS[setting])
    *_, eta, alpha, state = call.arguments
    network, valid = call.settings["network"], call.settings["valid"]
    with torch.no_grad():
        found = parts_of(call, "reference")[1]
        for t in range(SETTINGS[setting].tokens):
            for i, (M, S) in enumerate(zip(state.M, state.S, strict=True)):
                learned = M - network.initial[i] if network.forget_to == "init" else M
                pair = spread(eta, t, i) * S, spread(alpha, t, i) * learned
                expected = torch.stack([(x * x).sum((-2, -1)).sqrt() for x in pair], dim=-1)
                if valid is not None:
                    expected = expected * valid[:, t, None, None]
                torch.testing.assert_close(found[:, t, :, i, 1:], expected, rtol=1e-12, atol=1e-14)
            state, _ = parts_of(call, "reference", slice(t, t + 1), state)


def assert_backends_agree(case: Case) -> None:
    call = make_call(case)
    expected, got = (parts_of(call, backend)[1].detach() for backend in BACKENDS)
    assert_same_sizes(got, expected)


@pytest.mark.parametrize("case", described(structures()[::3]))
def test_chunked_is_exact_for_networks_and_gates(case: Case) -> None:
    assert_backends_agree(case)


@pytest.mark.parametrize("case", described(edges()))
def test_chunked_is_exact_at_the_edges_of_the_gates(case: Case) -> None:
    assert_backends_agree(case)


@pytest.mark.parametrize("case", described(starts()))
def test_chunked_is_exact_from_any_start_and_with_padding(case: Case) -> None:
    assert_backends_agree(case)


@settings(max_examples=40)
@given(case=legal_cases())
@example(case=Case(tokens=1, rows=1, heads=1, depth=1))
@example(case=Case(tokens=20, chunk=9, offsets=(8, 3), forget_to="init", gates=("channel",) * 3, edges=("alpha",)))
def test_any_legal_call_gives_the_same_sizes(case: Case) -> None:
    assert_backends_agree(case)


@pytest.mark.slow
@pytest.mark.parametrize(("i", "tokens", "chunk"), [(0, 72, 1), (1, 66, 4), (0, 130, 16), (1, 70, 64)])
@pytest.mark.parametrize(("j", "gates"), [(0, "layer"), (1, "channel")])
def test_chunked_is_exact_over_many_chunks(j: int, gates: str, i: int, tokens: int, chunk: int) -> None:
    """Several groups of chunks, of one size and of different sizes; with padding every other time."""
    padding = "scattered" if (i + j) % 2 else "none"
    case = Case(tokens=tokens, chunk=chunk, gates=(gates,) * 3, forget_to="init", offsets=(chunk - 1, 0))
    assert_backends_agree(replace(case, padding=padding))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sequence_may_be_cut_anywhere(setting: str, backend: str) -> None:
    """Single tokens without padding go another way: the recurrence itself, with the norms of its own tensors."""
    call, T = make_call(SETTINGS[setting]), SETTINGS[setting].tokens
    with torch.no_grad():
        _, whole = parts_of(call, backend)
        for borders in ([0, 5, T], [0, 1, 2, 6, 7, T], [0, 4, 8, 12, T], [0, 4, 4, T], list(range(T + 1))):
            state, found = None, []
            for start, stop in pairwise(borders):
                state, sizes = parts_of(call, backend, slice(start, stop), state)
                found.append(sizes)
            assert_same_sizes(torch.cat(found, dim=1), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_of_the_three_is_what_is_given_alone(setting: str, tokens: int, backend: str) -> None:
    """And asking for more changes neither outputs nor state, by a single bit."""
    call = make_call(replace(SETTINGS[setting], tokens=tokens))
    with torch.no_grad():
        o, state, momentary = call(backend)
        found = neural_memory(*call.arguments, **call.settings, return_surprise="parts", backend=backend)
        _, masked = parts_of(call, backend)
    valid = call.settings["valid"]
    assert torch.equal(masked[..., 0], momentary)
    assert torch.equal(found[0] if valid is None else found[0] * valid[:, :, None, None], o)
    for name, x in named_parts(found[1]).items():
        assert torch.equal(x, named_parts(state)[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_know_nothing_of_the_sizes(backend: str) -> None:
    call = make_call(Case(tokens=11, offsets=(1, 3), gates=MIXED, forget_to="init"))
    leaves = list(call.leaves.values())
    found = []
    for asked in (False, "parts"):
        o, state, *sizes = neural_memory(*call.arguments, **call.settings, return_surprise=asked, backend=backend)
        assert not any(x.requires_grad for x in sizes)
        found.append(torch.autograd.grad(o.square().sum() + sum(w.sum() for w in state.M), leaves))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("forget_to", ["zero", "init"])
def test_without_steps_both_fade_as_their_gates_say(forget_to: str, chunk: int, backend: str) -> None:
    """θ = 0: ‖η_t S_{t−1}‖ = η^t ‖S_0‖; and with S_0 = 0 ‖α_t (M_{t−1} − B)‖ = α (1 − α)^{t−1} ‖M_0 − B‖."""
    case = Case(tokens=9, chunk=chunk, offsets=(0,), edges=("theta",), edge_share=1.0, forget_to=forget_to)
    call = make_call(case)
    q, k, v, theta, eta, alpha, start = call.arguments
    eta, alpha = torch.full_like(eta, 0.7), torch.full_like(alpha, 0.2)
    calm = start._replace(S=tuple(map(torch.zeros_like, start.S)))
    initial = call.settings["network"].initial or (0.0, 0.0)
    age = torch.arange(9, dtype=torch.float64)[:, None]
    _, past = parts_of(replace(call, arguments=(q, k, v, theta, eta, alpha, start)), backend)
    _, forgotten = parts_of(replace(call, arguments=(q, k, v, theta, eta, alpha, calm)), backend)
    assert not forgotten[..., 1].any()
    for i, (M, S) in enumerate(zip(start.M, start.S, strict=True)):
        expected = 0.7 ** (age + 1) * S.flatten(-2).norm(dim=-1).unsqueeze(1)
        torch.testing.assert_close(past[..., i, 1], expected, rtol=1e-9, atol=1e-12)
        expected = 0.2 * 0.8**age * (M - initial[i]).flatten(-2).norm(dim=-1).unsqueeze(1)
        torch.testing.assert_close(forgotten[..., i, 2], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_memory_that_knows_nothing_yet_forgets_nothing(backend: str) -> None:
    """At M_init, and without surprise: what the first token brings is there, all else is exactly zero."""
    call = make_call(Case(tokens=6, forget_to="init"))
    *inputs, _ = call.arguments
    start = MemoryState.initial(call.settings["network"].initial, 2)
    _, sizes = parts_of(replace(call, arguments=(*inputs, start)), backend)
    assert bool((sizes[:, 0, ..., 0] > 0).all())
    assert not sizes[:, 0, ..., 1:].any()
    assert bool((sizes[:, 1:] > 0).all())


def test_what_cancels_leaves_zero_and_no_nan() -> None:
    """The second token takes back what is left of the first: the square of what there is then is rounding."""
    draw = {"dtype": torch.float64}
    k = F.normalize(torch.randn(1, 1, 64, 4, **draw), dim=-1).expand(1, 3, 64, 4)
    v, eta = torch.randn(1, 1, 64, 4, **draw), torch.rand(1, 1, 64, **draw).expand(1, 3, 64)
    values, steps = torch.cat([v, -eta[:, :1, :, None] * v, v], 1), torch.full((1, 3, 64), 0.3, **draw)
    start = MemoryState.initial((torch.zeros(64, 4, 4, **draw),), 1)
    *_, sizes = neural_memory(
        k, k, values, steps, eta, torch.zeros_like(eta), start, network=MemoryNetwork(residual=False), chunk_size=4,
        return_surprise="parts",
    )  # fmt: skip
    assert sizes[:, 2, ..., 1].max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_loses_no_more_than_its_inputs(dtype: torch.dtype, tokens: int, backend: str) -> None:
    call = cast_call(make_call(Case(tokens=tokens, chunk=16, gates=MIXED, offsets=(1,), forget_to="init")), dtype)
    _, sizes = parts_of(call, backend)
    assert sizes.dtype == torch.float32
    _, exact = parts_of(cast_call(call, torch.float64), "reference")
    assert_same_sizes(sizes.double(), exact, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_runs_in_inference_mode(tokens: int, backend: str) -> None:
    call = make_call(Case(tokens=tokens, offsets=(1, 3), gates=MIXED))
    _, expected = parts_of(call, backend)
    with torch.inference_mode():
        assert_same_sizes(parts_of(call, backend)[1], expected.detach())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("asked", ["part", "all", 1, None, ("parts",)])
def test_what_is_asked_for_must_be_known(asked: object) -> None:
    call = make_call(Case(tokens=2))
    message = f'got return_surprise={asked!r}; expected False, True for the momentary surprise, or "parts" for that'
    with pytest.raises(ValueError, match=re.escape(message)):
        neural_memory(*call.arguments, **call.settings, return_surprise=asked)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_have_no_sizes(backend: str) -> None:
    call = make_call(Case(tokens=3))
    assert parts_of(call, backend, slice(0, 0))[1].shape == (2, 0, 2, 2, 3)
