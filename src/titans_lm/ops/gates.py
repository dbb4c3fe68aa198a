"""What each token of a chunk still weighs: A, H, R, G, exact at 0 and at 1.

For the positions 1…C of a chunk, with position 0 its start (docs/derivation.md, section 2):

    A(t, j) = ∏_{j<i≤t} (1 − α_i)      H(t, j) = ∏_{j<i≤t} η_i      R = A H      G(t, j) = R(t, j) θ_j

so that M_t = a_t M_0 + f_t S_0 − Σ_{j≤t} G(t, j) u_j with a_t = A(t, 0) and f_t = Σ_{j≤t} A(t, j) H(j, 0). Products run
over intervals, never over ratios or differences of logarithms: α = 1, η = 0 and θ = 0 are legal gates.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from titans_lm.ops.matmul import once_differentiable

FEW_PRODUCTS = 2**14
"""Numbers of P up to which a CPU is faster with products one after another, in few operations, than by doubling."""


class ChunkGates(NamedTuple):
    """The weights of one memory layer in all chunks of a group; "…" is (n R,), K is 1 or D_in (channel-wise gates).

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

    Intervals double in length: one over both halves of a block is the product of what each half leaves of it. Those of
    a small call run one after another. Which way is taken depends on the size of the whole call, and may show in last
    digits; the way back is that of halves for both.
    """
    return _IntervalProducts.apply(d)


class _IntervalProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, d: Tensor) -> Tensor:
        P = _products(d.reshape(-1, 1, d.shape[-1]))
        ctx.save_for_backward(P)
        ctx.shape = d.shape
        C = d.shape[-1]
        return P[:, :C, : C + 1].reshape(*d.shape, C + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (P,), C = ctx.saved_tensors, ctx.shape[-1]
        g = torch.zeros_like(P)
        g[:, :C, : C + 1] = grads[0].reshape(-1, C, C + 1)
        return _products_backward(g, P)[:, :C].reshape(ctx.shape)


def _products(d: Float[Tensor, "X 1 C"]) -> Float[Tensor, "X Z Z1"]:
    """`interval_products`, with factors of 1 up to a power of two: P(t, j) = P(t, m) P(m, j), m a block's middle.

    Every factor stays where it is in P, so P is all that the way back needs.
    """
    C = d.shape[-1]
    size = 1 << (C - 1).bit_length()
    if size > C:
        d = F.pad(d, [0, size - C], value=1.0)
    if d.is_cpu and d.numel() * size <= FEW_PRODUCTS:
        below = torch.ones(size, size + 1, dtype=torch.bool, device=d.device).tril_()
        return torch.where(below, d.mT, 1.0).cumprod(-2).tril_(1)
    P = d.new_zeros(len(d), size, size + 1)
    P.diagonal(1, -2, -1).fill_(1.0)
    P.diagonal(0, -2, -1).copy_(d.squeeze(1))
    for s in _halves(size):
        late, middle, early = _factors(P, s)
        torch.mul(middle, early, out=late)
    return P


def _products_backward(g: Float[Tensor, "X Z Z1"], P: Float[Tensor, "X Z Z1"]) -> Float[Tensor, "X Z"]:
    """From gradients by P, which are used up, to gradients by its factors."""
    for s in reversed(_halves(P.shape[1])):
        (late, middle, early), (_, of_middle, of_early) = _factors(g, s), _factors(P, s)
        middle += (late * of_early).sum(-1, keepdim=True)
        early += (late * of_middle).sum(-2, keepdim=True)
    return g.diagonal(0, -2, -1)


def _halves(size: int) -> list[int]:
    return [1 << i for i in range((size - 1).bit_length())]


def _factors(P: Tensor, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """For all blocks of 2 s positions: P(t, j) with j in the first half and t in the second, P(t, m) and P(m, j)."""
    B, size, width = P.shape
    blocks, step = size // (2 * s), 2 * s * (width + 1)
    matrix, row = size * width, width
    late = P.as_strided((B, blocks, s, s), (matrix, step, row, 1), s * row)
    middle = P.as_strided((B, blocks, s, 1), (matrix, step, row, 1), s * row + s)
    early = P.as_strided((B, blocks, 1, s), (matrix, step, row, 1), (s - 1) * row)
    return late, middle, early


Grads = Sequence[dict[str, Tensor]]
"""For each layer the gradients by the fields of its `ChunkGates`."""
Gates = tuple[Tensor, ...]
"""θ, η and α of all L layers in the chunks of a group: one tensor (n, B, C, H, 3 L) where each token has one value, and
else 3 L tensors, (n, B, C, H) or channel-wise (n, B, C, H, D_in). Of windows a second tensor holds the shares of all
layers, (n, B, C, H, c)."""
Adjoint = Callable[[Grads], list[Tensor]]
"""From gradients by what tokens weigh to gradients by `Gates`."""


def have_channels(gates: Iterable[Sequence[Tensor]]) -> bool:
    """Whether a gate among θ, η, α of all layers has a value for each channel of the keys."""
    return any(gate.dim() > 3 for layers in gates for gate in layers)


def stack_gates(theta: Sequence[Tensor], eta: Sequence[Tensor], alpha: Sequence[Tensor]) -> Gates:
    """Gates of L layers, (B, T, H) each, as one tensor (B, T, H, 3 L); where some are channel-wise, as they are."""
    every = (*theta, *eta, *alpha)
    return (torch.stack(every, dim=-1),) if all([x.dim() == 3 for x in every]) else every


def by_gate(gates: Gates) -> tuple[Gates, Gates, Gates]:
    """θ, η and α again, each of L layers."""
    every = gates[0].unbind(-1) if len(gates) <= 2 else gates
    L = len(every) // 3
    return every[:L], every[L : 2 * L], every[2 * L :]


def chunk_gates(
    gates: Gates, present: Bool[Tensor, "n _ 1 C"] | None, adjoint: bool = False
) -> tuple[list[ChunkGates], Adjoint | None]:
    """`ChunkGates` of every layer, (n R, …), in the n chunks of a group, and with `adjoint` the way back."""
    if len(gates) == 1:
        return _of_tokens(gates[0], present, adjoint)
    if len(gates) == 2:
        return _of_windows(*gates, present, adjoint)

    def weigh(theta: Tensor, eta: Tensor, alpha: Tensor) -> ChunkGates:
        eta = eta if present is None else torch.where(present.unsqueeze(-1), eta, 1.0)
        return channel_gates(theta, eta, alpha, present)

    return by_autograd(gates, weigh, adjoint)


def _of_tokens(gates: Tensor, present: Tensor | None, adjoint: bool) -> tuple[list[ChunkGates], Adjoint | None]:
    """Gates that have a value per token and no more: all layers at once, and the way back by hand."""
    n, B, C, H, each = gates.shape
    theta, eta, alpha = gates.permute(4, 0, 1, 3, 2).reshape(3, -1, 1, C).unbind()
    mask = None
    if present is not None:  # where no token stands, nothing may decay
        mask = present.expand(n, B, H, C).reshape(-1, 1, C).repeat(each // 3, 1, 1)
        eta = torch.where(mask, eta, 1.0)
    together, kept = token_gates(theta, eta, alpha, mask)
    by_layer = zip(*[x.split(n * B * H) for x in together], strict=True)

    def back(grads: Grads) -> list[Tensor]:
        stacked = ChunkGates(*(torch.cat([layer[name] for layer in grads]) for name in ChunkGates._fields))
        d_theta, d_eta, d_alpha = token_gates_backward(kept, stacked)
        if mask is not None:
            d_eta = d_eta * mask.squeeze(1)
        return [torch.stack((d_theta, d_eta, d_alpha)).view(each, n, B, H, C).permute(1, 2, 4, 3, 0)]

    return list(map(ChunkGates._make, by_layer)), back if adjoint else None


def _of_windows(
    gates: Tensor, window: Tensor, present: Tensor | None, adjoint: bool
) -> tuple[list[ChunkGates], Adjoint | None]:
    """A token writes the errors of the last c: G Ω weighs those of the c − 1 tokens before the chunk and of its own.

    The ends of a chunk are rows like those of G: H(C, ·) ∘ θ, and the last of G itself.
    """
    layers, back = _of_tokens(gates, present, adjoint)
    n, B, C, H, c = window.shape
    Omega = band(window.transpose(2, 3).flatten(0, 2))

    def rows(G: Tensor, memory_end: Tensor, surprise_end: Tensor) -> Tensor:
        return torch.cat((G, memory_end.mT, surprise_end.mT), dim=-2)

    def fields(x: Tensor) -> dict[str, Tensor]:
        G, memory_end, surprise_end = x.split((C, 1, 1), dim=-2)
        return {"G": G.contiguous(), "memory_end": memory_end.mT, "surprise_end": surprise_end.mT}

    narrow = [rows(g.G, g.memory_end, g.surprise_end) for g in layers]

    def lead_back(grads: Grads) -> list[Tensor]:
        assert back is not None, "it was asked for"
        d_rows = [rows(*(layer[name] for name in ("G", "memory_end", "surprise_end"))) for layer in grads]
        d_Omega = torch.stack([x.mT @ d for x, d in zip(narrow, d_rows, strict=True)]).sum(0)
        found = back([layer | fields(d @ Omega.mT) for layer, d in zip(grads, d_rows, strict=True)])
        d_window = torch.stack([d_Omega.diagonal(c - 1 - i, -2, -1) for i in range(c)], dim=-1)
        return [*found, d_window.unflatten(0, (n, B, H)).transpose(2, 3)]

    wide = [g._replace(**fields(x @ Omega)) for g, x in zip(layers, narrow, strict=True)]
    return wide, lead_back if adjoint else None


def band(window: Float[Tensor, "*s C c"]) -> Float[Tensor, "*s C J"]:
    """Ω(t, j): the share of token t − i of the chunk at j = t + c − 1 − i, where the first c − 1 are before it."""
    *lead, C, c = window.shape
    Omega = window.new_zeros(*lead, C, C + c - 1)
    for i in range(c):
        Omega.diagonal(c - 1 - i, -2, -1).copy_(window[..., i])
    return Omega


def by_autograd(
    gates: Gates, weigh: Callable[[Tensor, Tensor, Tensor], ChunkGates], adjoint: bool
) -> tuple[list[ChunkGates], Adjoint | None]:
    """Layer by layer what `weigh` makes of θ, η and α, (n, B, H, C, 1 or D_in); and back by autograd."""
    leaves = [x.detach().requires_grad_(adjoint) for x in gates]
    with torch.set_grad_enabled(adjoint):
        layers = []
        for layer in zip(*by_gate(tuple(leaves)), strict=True):
            given = ((x if x.dim() == 5 else x.unsqueeze(-1)).transpose(2, 3) for x in layer)
            layers.append(ChunkGates(*(x.flatten(0, 2) for x in weigh(*given))))

    def back(grads: Grads) -> list[Tensor]:
        outputs, by_output = [], []
        for layer, g in zip(grads, layers, strict=True):
            for name, x in g._asdict().items():
                if name in layer:
                    outputs.append(x)
                    by_output.append(layer[name].view_as(x))
        found = torch.autograd.grad(outputs, leaves, by_output, allow_unused=True)
        return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]

    return [ChunkGates(*(x.detach() for x in g)) for g in layers], back if adjoint else None


def channel_gates(theta: Tensor, eta: Tensor, alpha: Tensor, present: Bool[Tensor, "n _ 1 C"] | None) -> ChunkGates:
    """Turn the gates of every token and channel, (n, B, H, C, D_in), into the weights of its chunk.

    Those that do not depend on the channel may have D_in = 1. A position that holds no token must carry θ = 0, η = 1,
    α = 0 and be absent from `present`: then it is left out of the sum over A H, and neither memory nor surprise moves.
    """
    # Channels go to the front, so that positions are last.
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


Kept = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What `token_gates_backward` needs: θ (X, 1, C), interval products, [f | R] and which positions hold a token."""


def token_gates(
    theta: Float[Tensor, "X 1 C"],
    eta: Float[Tensor, "X 1 C"],
    alpha: Float[Tensor, "X 1 C"],
    present: Bool[Tensor, "X 1 C"] | None,
) -> tuple[ChunkGates, Kept]:
    """`channel_gates` for gates without channels, (X, 1, C), and what the way back needs."""
    C = theta.shape[-1]
    P = _products(torch.cat((1.0 - alpha, eta)))
    A, H = (P if P.shape[1] == C else P[:, :C, : C + 1]).chunk(2)
    mask = None if present is None else present.mT
    a, later = A.split([1, C], dim=-1)
    fR = torch.bmm(later, H if mask is None else H * mask)
    (f, R), (eta_end, H_end) = fR.split([1, C], dim=-1), H[:, -1:].split([1, C], dim=-1)
    G = R * theta
    return ChunkGates(a, f, G, eta_end, (H_end * theta).mT, G[:, -1:].mT), (theta, P, fR, mask)


def token_gates_backward(kept: Kept, grads: ChunkGates) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by θ, η and α, (X, C), from those by what they weigh, (…), of which G is used up."""
    theta, P, fR, mask = kept
    X, _, C = theta.shape
    A, H = P[:, :C, : C + 1].chunk(2)
    d_G = grads.G.view(X, C, C)
    d_G[:, -1] += grads.memory_end.reshape(X, C)
    d_surprise_end = grads.surprise_end.reshape(X, C)
    d_theta = (d_G * fR[..., 1:]).sum(-2).addcmul_(d_surprise_end, H[:, -1, 1:])
    d_fR = torch.empty_like(fR)
    d_fR[..., 0] = grads.f.reshape(X, C)
    torch.mul(d_G, theta, out=d_fR[..., 1:])
    d_P = (torch.empty_like if P.shape[1] == C else torch.zeros_like)(P)
    d_A, d_H = d_P[:, :C, : C + 1].chunk(2)
    d_A[..., 0] = grads.a.reshape(X, C)
    d_A[..., 1:] = torch.bmm(d_fR, (H if mask is None else H * mask).transpose(1, 2))
    d_summed = torch.bmm(A[..., 1:].transpose(1, 2), d_fR)
    d_H.copy_(d_summed if mask is None else d_summed.mul_(mask))
    d_H[:, -1, 1:].addcmul_(d_surprise_end, theta[:, 0])
    d_H[:, -1, 0] += grads.eta_end.reshape(X)
    d_keep, d_eta = _products_backward(d_P, P)[:, :C].chunk(2)
    return d_theta, d_eta, d_keep.neg()
