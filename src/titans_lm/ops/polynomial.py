"""Polynomial keys: all monomials of a vector's channels up to a degree, so that products of keys are a power series.

    φ(x) · φ(y) = Σ_i a_i (x · y)^i,   i = 0 … p        C(D + p, p) channels for D

A monomial x_1^m_1 … x_D^m_D of degree i stands there once, times √(a_i i! / (m_1! … m_D!)).
"""

import functools
import itertools
import math
from collections import Counter

import torch
from jaxtyping import Float, Int
from torch import Tensor


def polynomial(x: Float[Tensor, "*s D"], a: Float[Tensor, "*s2 P"]) -> Float[Tensor, "*s K"]:
    """φ(x) for coefficients a_0 … a_p above 0, which broadcast over all but the last dimension of x."""
    roots, degree = a.sqrt(), a.shape[-1] - 1
    parts = [torch.ones_like(x[..., :1]) * roots[..., :1]]
    for i in range(1, degree + 1):
        index, multiplicity = _monomials(x.shape[-1], i)
        product = functools.reduce(torch.mul, [x[..., column] for column in index.to(x.device)])
        parts.append(product * multiplicity.to(x) * roots[..., i : i + 1])
    return torch.cat(parts, dim=-1)


@functools.cache
def _monomials(channels: int, degree: int) -> tuple[Int[Tensor, "i n"], Float[Tensor, " n"]]:
    """The channels of every monomial of a degree, and the root of how often it is in the power of a sum."""
    every = list(itertools.combinations_with_replacement(range(channels), degree))
    counts = [math.prod(math.factorial(m) for m in Counter(one).values()) for one in every]
    roots = torch.tensor([math.sqrt(math.factorial(degree) / count) for count in counts], dtype=torch.float64)
    return torch.tensor(every).T.contiguous(), roots
