"""Polynomial keys: all monomials of a vector's channels up to a degree, so that products of keys are a power series.

    φ(x) · φ(y) = Σ_i a_i (x · y)^i,   i = 0 … p        C(D + p, p) channels for D

A monomial x_1^m_1 … x_D^m_D of degree i stands there once, times √(a_i i! / (m_1! … m_D!)). It is its first channel
times one of a degree less. The gradient by a channel is that by every monomial with it, times one of a degree less:

    x̄_c = Σ_μ m_c(x_c μ) d_{x_c μ} μ        over the monomials μ of degree i − 1

so both are gathered, and nothing is scattered. By Euler Σ d ∘ φ over a degree i is x · x̄ / i.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from titans_lm.ops.matmul import bmm, once_differentiable


def polynomial(x: Float[Tensor, "*s D"], a: Float[Tensor, "*s2 P"]) -> Float[Tensor, "*s K"]:
    """φ(x) for coefficients a_0 … a_p above 0, which broadcast over all but the last dimension of x."""
    return _Polynomial.apply(x, a.sqrt())


def count_monomials(channels: int, degree: int) -> int:
    """Monomials up to a degree."""
    return math.comb(channels + degree, degree) if degree >= 0 else 0


def _degrees(channels: int, degree: int) -> list[slice]:
    """Where the monomials of each degree are."""
    ends = [count_monomials(channels, i) for i in range(-1, degree + 1)]
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


def _constant(function: Any) -> Any:
    """Make what a function gives once, and have it a constant where it is compiled.

    torch.compiler.assume_constant_result does the latter, but loads torch's compiler for it: a second of every start.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def constant(*args: Any) -> Any:
        return cached(*args)

    constant._dynamo_marked_constant = True  # pyrefly: ignore
    return constant


@_constant
def _places(channels: int, degree: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Of the monomials of a degree: their first channels, and where the rest is among those of one degree less; (n,).

    And for every channel c and every μ of one degree less, (D · n',), where x_c μ is among all monomials, and how often
    it has c times the root of how often it is in the power of a sum.
    """
    below, here = (
        {one: place for place, one in enumerate(itertools.combinations_with_replacement(range(channels), i))}
        for i in (degree - 1, degree)
    )
    start, roots = count_monomials(channels, degree - 1), _multiplicity(channels, degree).tolist()
    whole, times = [], []
    for c in range(channels):
        for mu in below:
            one = tuple(sorted((c, *mu)))
            whole.append(start + here[one])
            times.append(one.count(c) * roots[whole[-1]])
    first, rest = [one[0] for one in here], [below[one[1:]] for one in here]
    places = [torch.tensor(several, device=device) for several in (first, rest, whole)]
    return *places, torch.tensor(times, dtype=dtype, device=device)


BLOCK = 2_000_000
"""Numbers of some tokens that a CPU gathers at a time."""


def _blocks(lead: torch.Size, each: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Some tokens of tensors (…, *lead, channels) at a time, the same of all; a row makes `each` numbers."""
    rows = [y.reshape(-1, *lead, y.shape[-1]) for y in tensors]
    if rows[0].is_cuda or torch.compiler.is_compiling():  # a graph would be another for another number of them
        return iter([rows])
    return map(list, zip(*[y.split(max(1, BLOCK // (each * math.prod(lead)))) for y in rows], strict=True))


def _by_degree(x: Float[Tensor, "N D"], degree: int) -> list[Float[Tensor, "N _"]]:
    """The monomials of each degree, without their factors."""
    found = [x.new_ones(len(x), 1), x][: degree + 1]
    for i in range(2, degree + 1):
        first, rest, *_ = _places(x.shape[1], i, x.device, x.dtype)
        found.append(x.index_select(1, first).mul_(found[-1].index_select(1, rest)))
    return found


def monomial_scales(roots: Float[Tensor, "*s P"], channels: int) -> Float[Tensor, "*s K"]:
    """Factors of the monomials of so many channels, from √a."""
    p = roots.shape[-1] - 1
    multiplicity = _multiplicity(channels, p).to(roots)
    parts = [multiplicity[here] * roots[..., i : i + 1] for i, here in enumerate(_degrees(channels, p))]
    return torch.cat(parts, dim=-1)


def monomials(x: Float[Tensor, "*s D"], scales: Float[Tensor, "*s2 K"], degree: int) -> Float[Tensor, "*s K"]:
    """φ(x), without a graph."""
    out, D = x.new_empty(*x.shape[:-1], scales.shape[-1]), x.shape[-1]
    for rows, into in _blocks(x.shape[-scales.dim() : -1], out.shape[-1], x, out):
        for here, part in zip(_degrees(D, degree), _by_degree(rows.reshape(-1, D), degree), strict=True):
            into[..., here] = part.view(*rows.shape[:-1], part.shape[-1]) * scales[..., here]
    return out


def lead_monomials_back(
    g: Float[Tensor, "*s K"], x: Float[Tensor, "*s D"], roots: Float[Tensor, "*s2 P"]
) -> tuple[Float[Tensor, "*s D"], Float[Tensor, "*s P"]]:
    """From gradients by φ(x) to those by x, and by √a for every row."""
    D, p = x.shape[-1], roots.shape[-1] - 1
    dx, by_root = torch.zeros_like(x), [g[..., 0]]
    for i in range(1, p + 1):
        h = _lead_back(g.reshape(-1, g.shape[-1]), x.reshape(-1, D), i).view(x.shape)
        by_root.append((x * h).sum(-1) / i)
        dx.addcmul_(h, roots[..., i : i + 1])
    return dx, torch.stack(by_root, dim=-1)


def _lead_back(g: Float[Tensor, "N K"], x: Float[Tensor, "N D"], degree: int) -> Float[Tensor, "N D"]:
    """From gradients by the monomials of a degree to those by x, without √a."""
    D = x.shape[1]
    if degree == 1:
        return g[:, 1 : D + 1]
    *_, whole, times = _places(D, degree, x.device, x.dtype)
    found = x.new_empty(x.shape)
    for rows, d, into in _blocks(torch.Size(), len(whole), x, g, found):
        below = _by_degree(rows, degree - 1)[-1]
        by_rest = d.index_select(1, whole).mul_(times).unflatten(1, (D, len(whole) // D))
        into.copy_(by_rest.mul_(below.unsqueeze(1)).sum(-1))
    return found


class Narrow(NamedTuple):
    """What the queries and keys of a group were made of: (n R, C, D), and √a (H, 1, P)."""

    q: Tensor
    k: Tensor
    roots: Tensor

    def by_head(self, x: Tensor) -> Tensor:
        """(n R, …) as (n B, H, …)."""
        return x.unflatten(0, (-1, len(self.roots)))

    def monomials(self) -> list[Tensor]:
        """φ(q) and φ(k)."""
        scales = monomial_scales(self.roots, self.q.shape[-1])
        return [monomials(self.by_head(x), scales, self.roots.shape[-1] - 1).flatten(0, 1) for x in (self.q, self.k)]

    def similarity(self) -> Tensor:
        """φ(q) φ(k)ᵀ of every pair in a chunk: Σ_i a_i s^i."""
        return self._series(self._powers(), list(self.roots.square().unbind(-1)))

    def lead_similarity_back(self, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From gradients by φ(q) φ(k)ᵀ to those by q, k and √a; by s it is Σ_i i a_i s^(i − 1)."""
        powers, (_, *a) = self._powers(), self.roots.square().unbind(-1)
        by_a = torch.stack([self.by_head(d * power).sum((0, 2, 3)) for power in powers], dim=-1)
        d_s = self._series(powers[:-1], [i * a_i for i, a_i in enumerate(a, 1)]).mul_(d)
        return bmm(d_s, self.k), bmm(d_s.mT, self.q), 2.0 * self.roots * by_a.unsqueeze(1)

    def _powers(self) -> list[Tensor]:
        """s = q kᵀ to the powers from 0 to p."""
        s = bmm(self.q, self.k.mT)
        powers = [torch.ones_like(s)]
        for _ in range(1, self.roots.shape[-1]):
            powers.append(s * powers[-1])
        return powers

    def _series(self, powers: list[Tensor], weights: list[Tensor]) -> Tensor:
        """Σ of powers (n R, C, C) times weights (H, 1)."""
        found = self.q.new_zeros(*self.q.shape[:2], self.q.shape[1])
        for power, weight in zip(powers, weights, strict=True):
            self.by_head(found).addcmul_(self.by_head(power), weight.unsqueeze(-1))
        return found


class _Polynomial(torch.autograd.Function):
    """φ(x) from √a; all that is kept is x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, roots: Tensor) -> Tensor:
        ctx.save_for_backward(x, roots)
        return monomials(x, monomial_scales(roots, x.shape[-1]), roots.shape[-1] - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, roots = ctx.saved_tensors
        dx, by_root = lead_monomials_back(grads[0], x, roots)
        return dx, by_root.sum_to_size(roots.shape)


@_constant
def _multiplicity(channels: int, degree: int) -> Float[Tensor, " n"]:
    """The root of how often every monomial up to a degree is in the power of a sum."""
    found = []
    for i in range(degree + 1):
        for one in itertools.combinations_with_replacement(range(channels), i):
            found.append(math.factorial(i) / math.prod(math.factorial(m) for m in Counter(one).values()))
    return torch.tensor(found, dtype=torch.float64, device="cpu").sqrt()
