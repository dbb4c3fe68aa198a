"""Floating point operations of the op, counted from its equations."""

from itertools import pairwise


def memory_flops(widths: tuple[int, ...], chunk_size: int, *, forget_to_init: bool = False) -> int:
    """Operations of the forward pass per token and head, a multiplication and an addition each as one.

        n_l = D_{l−1} D_l
        2 Σ_l n_l               errors: forward through the anchor
        2 Σ_{l≥2} n_l           errors: back through it, to the pre-activations
        4 Σ_l n_l               reading: M and S of the chunk's start
        2 Σ_l n_l               reading: M_init, where forgetting leads there
        2 Σ_l C (D_{l−1} + D_l) reading: the masked attention inside the chunk
        4 Σ_l n_l               writing: M and S of the chunk's end

    Only products are counted. A whole chunk is counted where causality needs half of it, and the products with M and
    S of a chunk whose two coefficients meet in one product: it is the count of the equations, not of a program, and
    the same for every backend. Forward and backward together are three forward passes; what a backward pass computes
    again is not counted.
    """
    sizes = [a * b for a, b in pairwise(widths)]
    total = sum(sizes)
    attention = chunk_size * sum(a + b for a, b in pairwise(widths))
    return 2 * (total + sum(sizes[1:]) + 2 * total + (total if forget_to_init else 0) + attention + 2 * total)


def memory_widths(width: int, depth: int, expansion: int) -> tuple[int, ...]:
    """Widths D_0 … D_L of the memory network of a head."""
    return (width, *[expansion * width] * (depth - 1), width)
