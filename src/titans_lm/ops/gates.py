"""What each token of a chunk still weighs: A, H, R, G, exact at 0 and at 1.

For the positions 1…C of a chunk, with position 0 its start (MATH §3):

    A(t, j) = ∏_{j<i≤t} (1 − α_i)      H(t, j) = ∏_{j<i≤t} η_i      R = A H      G(t, j) = R(t, j) θ_j

so that M_t = a_t M_0 + f_t S_0 − Σ_{j≤t} G(t, j) u_j with a_t = A(t, 0) and f_t = Σ_{j≤t} A(t, j) H(j, 0). Products run
over intervals, never over ratios or differences of logarithms: α = 1, η = 0 and θ = 0 are legal gates.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F


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
    C = d.shape[-1]
    doublings = (C - 1).bit_length()
    d = F.pad(d, (0, 2**doublings - C), value=1.0)
    P = torch.stack((d, torch.ones_like(d)), dim=-1).unsqueeze(-2)  # blocks of one position: P(1, 0) = d, P(1, 1) = 1
    for _ in range(doublings):
        first, second = P[..., 0::2, :, :], P[..., 1::2, :, :]
        size = first.shape[-2]
        upper = F.pad(first, (0, size))
        lower = torch.cat((second[..., :1] * first[..., -1:, :], second[..., 1:]), dim=-1)
        P = torch.cat((upper, lower), dim=-2)
    return P.squeeze(-3)[..., :C, : C + 1]


def chunk_gates(theta: Tensor, eta: Tensor, alpha: Tensor, present: Bool[Tensor, "... C"] | None) -> ChunkGates:
    """Turn the gates of every token, (N, B, H, C) or channel-wise (N, B, H, C, D_in), into the weights of its chunk.

    Of channel-wise gates, those that do not depend on the channel may have D_in = 1.

    A position that holds no token must carry θ = 0, η = 1, α = 0 and be absent from `present`: then it is left out of
    the sum over A H, and neither memory nor surprise moves there.
    """
    channelwise = theta.dim() == 5
    if channelwise:  # channels go to the front, so that positions are last for both kinds
        theta, eta, alpha = (x.transpose(-1, -2) for x in (theta, eta, alpha))
        present = None if present is None else present.unsqueeze(-2)
    keep = 1.0 - alpha
    if keep.shape == eta.shape:
        A, H = interval_products(torch.stack((keep, eta))).unbind(0)
    else:  # channel-wise one, shared by the channels the other
        A, H = interval_products(keep), interval_products(eta)
    summed = H if present is None else H * present.unsqueeze(-1)
    fR = A[..., 1:] @ summed  # column 0 is f, the others are R
    f, G = fR[..., 0], fR[..., 1:] * theta.unsqueeze(-2)
    a, surprise_end, memory_end, eta_end = A[..., 0], H[..., -1, 1:] * theta, G[..., -1, :], H[..., -1, :1]
    if channelwise:
        a, f, eta_end, surprise_end, memory_end = (
            x.transpose(-1, -2) for x in (a, f, eta_end, surprise_end, memory_end)
        )
        return ChunkGates(a, f, G, eta_end, surprise_end, memory_end)
    a, f, eta_end, surprise_end, memory_end = (x.unsqueeze(-1) for x in (a, f, eta_end, surprise_end, memory_end))
    return ChunkGates(a, f, G, eta_end, surprise_end, memory_end)
