"""Polynomial keys: all monomials of a vector's channels up to a degree, so that products of keys are a power series.

    φ(x) · φ(y) = Σ_i a_i (x · y)^i,   i = 0 … p        C(D + p, p) channels for D

A monomial x_1^m_1 … x_D^m_D of degree i stands there once, times √(a_i i! / (m_1! … m_D!)).

Monomials that begin with channel c are x_c times those of one degree less of channels c and later, which stand together
at the end of the degree before. So on a CPU all is slices, forward and backward: gathering channels costs several times
as much, and torch's own gradients of slices fill one tensor with zeros for each of them. A block of tokens at a time
they are slices of rows, (n, tokens), which are long where those of channels are not. On a GPU an operation for each
channel costs more than what it does, so there a degree is gathered at once.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from titans_lm.ops.matmul import once_differentiable


def polynomial(x: Float[Tensor, "*s D"], a: Float[Tensor, "*s2 P"]) -> Float[Tensor, "*s K"]:
    """φ(x) for coefficients a_0 … a_p above 0, which broadcast over all but the last dimension of x."""
    return _Polynomial.apply(x, a.sqrt(), _multiplicity(x.shape[-1], a.shape[-1] - 1).to(x))


def _slices(channels: int, degree: int) -> Iterator[tuple[int, slice, slice]]:
    """Of every channel c: c, where the monomials of a degree that begin with it are, and what it multiplies there."""
    start = end = _count(channels, degree - 1)
    for c in range(channels):
        count = math.comb(channels - c + degree - 2, degree - 1)
        yield c, slice(start, start + count), slice(end - count, end)
        start += count


def _count(channels: int, degree: int) -> int:
    """Monomials up to a degree."""
    return math.comb(channels + degree, degree) if degree >= 0 else 0


def _degree(channels: int, degree: int) -> slice:
    """Where the monomials of a degree are."""
    return slice(_count(channels, degree - 1), _count(channels, degree))


def _degrees(channels: int, degree: int) -> list[slice]:
    """Where the monomials of each degree are."""
    return [_degree(channels, i) for i in range(degree + 1)]


def gathers(x: Tensor) -> bool:
    """Whether a degree is gathered at once."""
    return x.is_cuda


def _constant(function: Any) -> Any:
    """What torch.compiler.assume_constant_result does, which loads torch's compiler for it: a second of every start."""
    function._dynamo_marked_constant = True
    return function


@_constant
def _factors(channels: int, degree: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every monomial of a degree: its first channel, and the place of what is multiplied by it; both (n,)."""
    return _find_factors(channels, degree, device)


@functools.cache
def _find_factors(channels: int, degree: int, device: torch.device) -> tuple[Tensor, Tensor]:
    found = [(c, place) for c, _, later in _slices(channels, degree) for place in range(later.start, later.stop)]
    first, rest = torch.tensor(found, device=device).unbind(-1)
    return first.contiguous(), rest.contiguous()


BLOCK = 1000
"""Rows of tokens that a CPU works on at a time, as measured; no power of two, or rows share few lines of a cache."""


def _blocks(lead: torch.Size, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Some tokens of tensors (…, *lead, channels) at a time, the same of all."""
    rows = [y.reshape(-1, *lead, y.shape[-1]) for y in tensors]
    if torch.compiler.is_compiling():  # a graph would hold every block, and be another for another number of them
        return iter([rows])
    tokens = max(1, BLOCK // math.prod(lead))
    return map(list, zip(*[y.split(tokens) for y in rows], strict=True))


def _across(x: Float[Tensor, "*s n"]) -> Float[Tensor, "n N"]:
    """Its channels as rows of tokens."""
    return x.flatten(0, -2).t().contiguous()


def _make(x: Float[Tensor, "D N"], degree: int) -> Float[Tensor, "K N"]:
    """All monomials up to a degree, without their factors."""
    D = len(x)
    found = x.new_empty(_count(D, degree), x.shape[1])
    found[0] = 1.0
    if degree > 0:
        found[1 : D + 1] = x
    for i in range(2, degree + 1):
        for c, where, later in _slices(D, i):
            torch.mul(x[c], found[later], out=found[where])
    return found


def _lead_back(d: Float[Tensor, "K N"], x: Float[Tensor, "D N"], degree: int) -> tuple[Tensor, list[Tensor]]:
    """From gradients by the monomials, which are used up, to those by x, and what every degree adds to Σ d ∘ φ.

    The constant leads nowhere. Of the highest degree the sum is that of x ∘ x̄: each monomial has one first channel.
    """
    D, dx = len(x), torch.zeros_like(x)
    if degree == 0:
        return dx, [d[0]]
    lower = _make(x, degree - 1)
    sums = [(d[here] * lower[here]).sum(0) for here in _degrees(D, degree)[:-1]]
    for i in range(degree, 1, -1):
        for c, where, later in _slices(D, i):
            dx[c] += (d[where] * lower[later]).sum(0)
            d[later].addcmul_(d[where], x[c])
        if i == degree:
            sums.append((dx * x).sum(0))
    dx += d[1 : D + 1]
    return dx, sums if degree > 1 else [*sums, (dx * x).sum(0)]


def _gather(x: Tensor, lower: Tensor, into: Tensor, degree: int) -> None:
    """Write the monomials of a degree, without their factors; channels are last."""
    first, rest = _factors(x.shape[-1], degree, x.device)
    torch.mul(x[..., first], lower[..., rest], out=into[..., _degree(x.shape[-1], degree)])


def _scatter(d: Tensor, dx: Tensor, x: Tensor, lower: Tensor, degree: int) -> None:
    """Add gradients by the monomials of a degree to those by x and by the degree before."""
    D = x.shape[-1]
    (first, rest), here, before = _factors(D, degree, x.device), _degree(D, degree), _degree(D, degree - 1)
    dx += _sums(d[..., here] * lower[..., rest], first, D)
    if degree > 1:
        d[..., before] += _sums(d[..., here] * x[..., first], rest - before.start, before.stop - before.start)


def _sums(x: Tensor, places: Tensor, count: int) -> Tensor:
    """Add up the channels of one place: (…, n) to (…, count). A product, which adds in one order on every run."""
    chosen = (places[:, None] == torch.arange(count, device=x.device)).to(x)
    with torch.autocast(x.device.type, enabled=False):
        return x @ chosen


class _Polynomial(torch.autograd.Function):
    """φ(x) from √a. What is kept is x alone on a CPU, elsewhere φ and the monomials below the highest degree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, roots: Tensor, multiplicity: Tensor) -> Tensor:
        (*lead, D), p = x.shape, roots.shape[-1] - 1
        out = x.new_empty(*lead, _count(D, p))
        parts = [multiplicity[here] * roots[..., i : i + 1] for i, here in enumerate(_degrees(D, p))]
        scales = torch.cat(parts, dim=-1)
        if gathers(x):
            lower = x.new_ones(*lead, max(1, _count(D, p - 1)))
            for i in range(1, p + 1):
                _gather(x, lower, lower if i < p else out, i)
            out[..., : lower.shape[-1]] = lower
            out *= scales
            kept = lower, out
        else:
            for rows, into in _blocks(x.shape[-scales.dim() : -1], x, out):
                into.view(-1, into.shape[-1]).copy_(_make(_across(rows), p).t())
                into *= scales  # which is still in the caches
            kept = ()
        ctx.save_for_backward(x, roots, scales, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (x, roots, scales, *kept), g = ctx.saved_tensors, grads[0]
        D, p = x.shape[-1], roots.shape[-1] - 1
        if kept:
            lower, out = kept
            d, dx = g * out, torch.zeros_like(x)
            by_degree = torch.stack([d[..., here].sum(-1) for here in _degrees(D, p)], dim=-1)
            torch.mul(g, scales, out=d)
            for i in range(p, 0, -1):
                _scatter(d, dx, x, lower, i)
        else:
            dx, by_degree = x.new_empty(x.shape), x.new_empty(*x.shape[:-1], p + 1)
            for rows, d, into, sums in _blocks(x.shape[-scales.dim() : -1], x, g, dx, by_degree):
                found, of_degrees = _lead_back(_across(d * scales), _across(rows), p)
                into.copy_(found.t().view_as(into))
                sums.copy_(torch.stack(of_degrees, dim=-1).view_as(sums))
        return dx, (by_degree / roots).sum_to_size(roots.shape), None


@_constant
def _multiplicity(channels: int, degree: int) -> Float[Tensor, " n"]:
    """The root of how often every monomial up to a degree is in the power of a sum; a constant where it is compiled."""
    return _count_monomials(channels, degree)


@functools.cache
def _count_monomials(channels: int, degree: int) -> Float[Tensor, " n"]:
    found = []
    for i in range(degree + 1):
        for one in itertools.combinations_with_replacement(range(channels), i):
            found.append(math.factorial(i) / math.prod(math.factorial(m) for m in Counter(one).values()))
    return torch.tensor(found, dtype=torch.float64).sqrt()
