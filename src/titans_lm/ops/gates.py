"""What each token of a chunk still weighs: A, H, R, G, exact at 0 and at 1.

For the positions 1…C of a chunk, with position 0 its start (MATH §3):

    A(t, j) = ∏_{j<i≤t} (1 − α_i)      H(t, j) = ∏_{j<i≤t} η_i      R = A H      G(t, j) = R(t, j) θ_j

so that M_t = a_t M_0 + f_t S_0 − Σ_{j≤t} G(t, j) u_j with a_t = A(t, 0) and f_t = Σ_{j≤t} A(t, j) H(j, 0). Products run
over intervals, never over ratios or differences of logarithms: α = 1, η = 0 and θ = 0 are legal gates.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class ChunkGates(NamedTuple):
    """The weights of one memory layer in every chunk of a call; "…" is (N, B, H), K is 1 or D_in (channel-wise gates).

    a, f (…, C, K): what M_0 and S_0 still weigh at position t. G (…, C, C), or (…, D_in, C, C): what the gradient of j
    weighs in M_t. The last three say what is left at the end of the chunk, for the surprise: η_end (…, 1, K) for S_0,
    surprise_end (…, C, K) for the gradients, and memory_end (…, C, K), the last row of G.
    """

    a: Float[Tensor, "... C K"]
    f: Float[Tensor, "... C K"]
    G: Tensor
    eta_end: Float[Tensor, "... 1 K"]
    surprise_end: Float[Tensor, "... C K"]
    memory_end: Float[Tensor, "... C K"]


def interval_products(d: Float[Tensor, "*s C"]) -> Float[Tensor, "*s C C1"]:
    """P(t, j) = ∏_{j<i≤t} d_i for t = 1…C (rows) and j = 0…C (columns); 1 on the diagonal, 0 above it.

    Intervals double in length: one over both halves of a block is the product of what each half leaves of it.
    """
    return _IntervalProducts.apply(d)


class _IntervalProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, d: Tensor) -> Tensor:
        P = _products(d.reshape(-1, d.shape[-1]))
        ctx.save_for_backward(P)
        ctx.shape = d.shape
        C = d.shape[-1]
        return P[:, :C, : C + 1].reshape(*d.shape, C + 1)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (P,), C = ctx.saved_tensors, ctx.shape[-1]
        g = torch.zeros_like(P)
        g[:, :C, : C + 1] = grads[0].reshape(-1, C, C + 1)
        return _products_adjoint(g, P)[:, :C].reshape(ctx.shape)


def _products(d: Float[Tensor, "X C"]) -> Float[Tensor, "X Z Z1"]:
    """`interval_products`, with factors of 1 up to a power of two: P(t, j) = P(t, m) P(m, j), m a block's middle.

    Every factor stays where it is in P, so P is all that the way back needs.
    """
    C = d.shape[-1]
    size = 1 << (C - 1).bit_length()
    P = d.new_zeros(len(d), size, size + 1)
    P.diagonal(1, -2, -1).fill_(1.0)
    P.diagonal(0, -2, -1)[:, C:] = 1.0
    P.diagonal(0, -2, -1)[:, :C] = d
    for s in _halves(size):
        late, middle, early = _factors(P, s)
        torch.mul(middle.unsqueeze(-1), early.unsqueeze(-2), out=late)
    return P


def _products_adjoint(g: Float[Tensor, "X Z Z1"], P: Float[Tensor, "X Z Z1"]) -> Float[Tensor, "X Z"]:
    """From gradients by P, which are used up, to gradients by its factors."""
    for s in reversed(_halves(P.shape[1])):
        (late, middle, early), (_, of_middle, of_early) = _factors(g, s), _factors(P, s)
        middle += (late * of_early.unsqueeze(-2)).sum(-1)
        early += (late * of_middle.unsqueeze(-1)).sum(-2)
    return g.diagonal(0, -2, -1)


def _halves(size: int) -> list[int]:
    return [1 << i for i in range((size - 1).bit_length())]


def _factors(P: Tensor, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """For all blocks of 2 s positions: P(t, j) with j in the first half and t in the second, P(t, m) and P(m, j)."""
    B, size, width = P.shape
    blocks, step = size // (2 * s), 2 * s * (width + 1)
    matrix, row = size * width, width
    late = P.as_strided((B, blocks, s, s), (matrix, step, row, 1), s * row)
    middle = P.as_strided((B, blocks, s), (matrix, step, row), s * row + s)
    early = P.as_strided((B, blocks, s), (matrix, step, 1), (s - 1) * row)
    return late, middle, early


def chunk_gates(theta: Tensor, eta: Tensor, alpha: Tensor, present: Bool[Tensor, "... C"] | None) -> ChunkGates:
    """Turn the gates of every token, (N, B, H, C) or channel-wise (N, B, H, C, D_in), into the weights of its chunk.

    Of channel-wise gates, those that do not depend on the channel may have D_in = 1.

    A position that holds no token must carry θ = 0, η = 1, α = 0 and be absent from `present`: then it is left out of
    the sum over A H, and neither memory nor surprise moves there.
    """
    if theta.dim() == 4:
        return ChunkGates(*_ChunkGates.apply(theta, eta, alpha, present))
    # Channels go to the front, so that positions are last for both kinds.
    theta, eta, alpha = (x.transpose(-1, -2) for x in (theta, eta, alpha))
    keep = 1.0 - alpha
    if keep.shape == eta.shape:
        A, H = interval_products(torch.stack((keep, eta))).unbind(0)
    else:  # channel-wise one, shared by the channels the other
        A, H = interval_products(keep), interval_products(eta)
    summed = H if present is None else H * present.unsqueeze(-2).unsqueeze(-1)
    fR = A[..., 1:] @ summed  # column 0 is f, the others are R
    f, G = fR[..., 0], fR[..., 1:] * theta.unsqueeze(-2)
    a, surprise_end, memory_end, eta_end = A[..., 0], H[..., -1, 1:] * theta, G[..., -1, :], H[..., -1, :1]
    a, f, eta_end, surprise_end, memory_end = (x.transpose(-1, -2) for x in (a, f, eta_end, surprise_end, memory_end))
    return ChunkGates(a, f, G, eta_end, surprise_end, memory_end)


class _ChunkGates(torch.autograd.Function):
    """The same for gates that all have a value per token and no more, with gradients by hand: no slice is padded."""

    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, eta: Tensor, alpha: Tensor, present: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        C, lead = theta.shape[-1], theta.shape[:-1]
        P = _products(torch.stack((1.0 - alpha, eta)).view(-1, C))
        A, H = P[:, :C, : C + 1].unflatten(0, (2, -1)).unbind(0)
        theta = theta.reshape(-1, 1, C)
        mask = None if present is None else present.expand(theta.view(*lead, C).shape).reshape(-1, C, 1)
        fR = torch.bmm(A[..., 1:], H if mask is None else H * mask)
        G = fR[..., 1:] * theta
        surprise_end = H[:, -1, 1:] * theta[:, 0]
        ctx.save_for_backward(theta, P, fR, mask)
        parts = A[..., :1].clone(), fR[..., :1].clone(), G, H[:, -1:, :1].clone(), surprise_end, G[:, -1].clone()
        shapes = (C, 1), (C, 1), (C, C), (1, 1), (C, 1), (C, 1)
        a, f, G, eta_end, surprise_end, memory_end = (
            x.view(*lead, *shape) for x, shape in zip(parts, shapes, strict=True)
        )
        return a, f, G, eta_end, surprise_end, memory_end

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: once_differentiable's own annotation loses the name of ctx
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        theta, P, fR, mask = ctx.saved_tensors
        X, _, C = theta.shape
        lead = grads[0].shape[:-2]
        A, H = P[:, :C, : C + 1].unflatten(0, (2, -1)).unbind(0)
        d_a, d_f, d_G, d_eta_end, d_surprise_end, d_memory_end = grads
        d_G = d_G.reshape(X, C, C).clone()
        d_G[:, -1] += d_memory_end.reshape(X, C)
        d_surprise_end = d_surprise_end.reshape(X, C)
        d_theta = (d_G * fR[..., 1:]).sum(-2).addcmul_(d_surprise_end, H[:, -1, 1:])
        d_fR = torch.empty_like(fR)
        d_fR[..., 0] = d_f.reshape(X, C)
        torch.mul(d_G, theta, out=d_fR[..., 1:])
        whole = P.shape[1] == C
        d_P = (torch.empty_like if whole else torch.zeros_like)(P)
        d_A, d_H = d_P[:, :C, : C + 1].unflatten(0, (2, -1)).unbind(0)
        d_A[..., 0] = d_a.reshape(X, C)
        d_A[..., 1:] = torch.bmm(d_fR, (H if mask is None else H * mask).transpose(1, 2))
        d_summed = torch.bmm(A[..., 1:].transpose(1, 2), d_fR)
        d_H.copy_(d_summed if mask is None else d_summed.mul_(mask))
        d_H[:, -1, 1:].addcmul_(d_surprise_end, theta[:, 0])
        d_H[:, -1, 0] += d_eta_end.reshape(X)
        d_keep, d_eta = (x.reshape(*lead, C) for x in _products_adjoint(d_P, P)[:, :C].unflatten(0, (2, -1)).unbind(0))
        return d_theta.view(*lead, C), d_eta, -d_keep, None
