"""A memory that is read at its anchor, the memory at the end of the previous chunk: TNT's global one."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from ops.memory_cases import PADDINGS, Case, assert_agree, make_call, taking_turns
from ops.test_ops_exact import GATES, LINEAR, NETWORKS, described
from titans_lm.ops import neural_memory


def lagging() -> list[Case]:
    """Networks, gates, lengths, starts and padding take turns."""
    networks, gates = list(NETWORKS.values()), list(GATES.values())
    return [
        Case(
            read_at="anchor", padding=padding, objective=("l2", "l2", "dot", "huber")[i // 3 % 4],
            gates=gates[i % len(gates)], **taking_turns(i, chunk), **networks[i % len(networks)],
        )
        for i, (chunk, padding) in enumerate(product((1, 4, 16), PADDINGS))
    ]  # fmt: skip


@pytest.mark.parametrize("case", described(lagging()[::3]))
def test_the_definition_is_plain_autograd(case: Case) -> None:
    assert_agree(case, "oracle", "reference")


@pytest.mark.parametrize("case", described(lagging()))
def test_chunked_is_exact(case: Case) -> None:
    assert_agree(case, "reference", "chunked")


@pytest.mark.parametrize("network", ["linear", "default"])
def test_chunked_is_exact_over_several_groups(network: str) -> None:
    assert_agree(Case(tokens=50, chunk=4, offsets=(3,), read_at="anchor", **NETWORKS[network]), "reference", "chunked")


@pytest.mark.parametrize("borders", [[0, 1, 5, 11], list(range(12))], ids=["pieces", "tokens"])
@pytest.mark.parametrize("surprise", [True, "parts"])
def test_a_cut_anywhere_and_single_tokens_change_nothing(borders: list[int], surprise: Any) -> None:
    call = make_call(Case(tokens=11, forget_to="init", offsets=(2,), read_at="anchor"))
    *streams, state = call.arguments
    settings = {"network": call.settings["network"], "chunk_size": 4, "return_surprise": surprise}
    with torch.no_grad():
        whole, end, sizes = neural_memory(*streams, state, **settings, backend="reference")
        pieces, found = [], []
        for start, stop in pairwise(borders):
            o, state, size = neural_memory(*(x[:, start:stop] for x in streams), state, **settings)
            pieces.append(o)
            found.append(size)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(found, 1), sizes, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((state.M, state.anchor), (end.M, end.anchor), rtol=1e-12, atol=1e-12)


def test_sizes_of_surprise_do_not_stand_in_the_way_of_gradients() -> None:
    call = make_call(Case(tokens=11, read_at="anchor"))
    found = []
    for surprise in (False, "parts"):
        o, *_ = neural_memory(*call.arguments, **call.settings, return_surprise=surprise)
        found.append(torch.autograd.grad(o.square().sum(), list(call.leaves.values()), allow_unused=True))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_nothing_is_read_of_what_a_chunk_has_written() -> None:
    """All of a chunk is answered from its start, so a chunk beyond the text answers from the first memory."""
    call = make_call(Case(tokens=9, chunk=16, read_at="anchor", **LINEAR))
    q, *_, state = call.arguments
    o, after, _ = call("chunked")
    torch.testing.assert_close(o, torch.einsum("bthi,bhio->btho", q, state.M[0]), rtol=1e-12, atol=1e-12)
    assert not torch.equal(after.M[0], state.M[0])
