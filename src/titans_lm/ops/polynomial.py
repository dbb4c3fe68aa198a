"""Polynomial keys: all monomials of a vector's channels up to a degree, so that products of keys are a power series.

    φ(x) · φ(y) = Σ_i a_i (x · y)^i,   i = 0 … p        C(D + p, p) channels for D

A monomial x_1^m_1 … x_D^m_D of degree i stands there once, times √(a_i i! / (m_1! … m_D!)).
"""

import functools
import itertools
import math
from collections import Counter

import torch
from jaxtyping import Float
from torch import Tensor


def polynomial(x: Float[Tensor, "*s D"], a: Float[Tensor, "*s2 P"]) -> Float[Tensor, "*s K"]:
    """φ(x) for coefficients a_0 … a_p above 0, which broadcast over all but the last dimension of x."""
    D, roots = x.shape[-1], a.sqrt()
    pieces, scales = [torch.ones_like(x[..., :1])], [roots[..., :1]]
    product = pieces[0]
    for i in range(1, a.shape[-1]):
        # Monomials that begin with a channel are it times those of one degree less of it and later ones, which are the
        # last C(D − c + i − 2, i − 1) there: slices, as gathering channels costs several times as much.
        later = [product[..., product.shape[-1] - math.comb(D - c + i - 2, i - 1) :] for c in range(D)]
        found = [x[..., c : c + 1] * later[c] for c in range(D)]
        product = torch.cat(found, dim=-1) if i < a.shape[-1] - 1 else product
        pieces.extend(found)
        scales.append(_multiplicity(D, i).to(x) * roots[..., i : i + 1])
    return torch.cat(pieces, dim=-1) * torch.cat(scales, dim=-1)


@functools.cache
def _multiplicity(channels: int, degree: int) -> Float[Tensor, " n"]:
    """The root of how often every monomial of a degree is in the power of a sum."""
    every = itertools.combinations_with_replacement(range(channels), degree)
    counts = [math.prod(math.factorial(m) for m in Counter(one).values()) for one in every]
    return torch.tensor([math.sqrt(math.factorial(degree) / count) for count in counts], dtype=torch.float64)
