"""What a kernel must compute and move, against counts by hand; the table of docs/kernels.md against the function."""

from pathlib import Path

import pytest

from titans_lm.bench.intensity import H100, Shape, cost_table, kernel_cost, lives_in

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("expansion", "C"), [(1, 16), (2, 32), (4, 64)])
def test_two_layers_are_those_of_the_derivation(expansion: int, C: int) -> None:
    """docs/derivation.md, section 10, in multiply-adds: 11 D E + 2 C (D + E), and 8 D E + C (D + 2 E) made again."""
    D, E = 64, 64 * expansion
    cost = kernel_cost(Shape(width=D, expansion=expansion, chunk_size=C))
    forward, again = 11 * D * E + 2 * C * (D + E), 8 * D * E + C * (D + 2 * E)
    assert cost.forward_flops == 2 * forward
    assert cost.backward_flops == 2 * (2 * forward + again)


def test_a_linear_memory_keeps_its_products() -> None:
    """Nothing but z_L is made of k and q, and it was kept: again are the writes and the similarities."""
    cost = kernel_cost(Shape(width=64, expansion=1, chunk_size=16, depth=1))
    assert cost.forward_flops == 2 * (64 * 64 + 2 * 64 * 64 + 16 * 128 + 2 * 64 * 64)
    assert cost.backward_flops == 2 * cost.forward_flops + 2 * (2 * 64 * 64 + 16 * 64)


def test_bytes_are_those_of_tokens_gates_and_checkpoints() -> None:
    shape = Shape(width=64, expansion=4, chunk_size=64, checkpoint=8)
    assert shape.state_bytes == 262_144  # W and S of one head in float32: more than a program's 227 KB
    cost = kernel_cost(shape)
    between = 262_144 / 512
    assert cost.forward_bytes == 4 * 64 * 2 + 6 * 4 + 2 * 64 * 4 + between
    assert cost.backward_bytes == 7 * 64 * 2 + 12 * 4 + 2 * 64 * 4 + between
    assert cost.streamed_bytes == (2 * 262_144 + 131_072) / 64
    assert cost.forward_intensity == cost.forward_flops / cost.forward_bytes
    assert cost.backward_intensity == cost.backward_flops / cost.backward_bytes


def test_a_state_lives_where_it_fits() -> None:
    half = H100.registers // 2
    assert lives_in(half) == "registers"
    assert lives_in(half + 1) == "shared memory, nothing else"
    assert lives_in(H100.shared + 1) == "L2"
    assert lives_in(H100.l2 // H100.multiprocessors + 1) == "main memory"


def test_the_table_in_the_documents_is_the_functions() -> None:
    assert cost_table() in (DOCS / "kernels.md").read_text(encoding="utf-8")
