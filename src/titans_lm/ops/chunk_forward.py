"""A chunk group, forward: one after another the chunks write, then all of them read at once.

Only writing is sequential: the gradients of a chunk need the weights that the chunk before has left. A read needs those
too, but no other read, so the queries of all chunks of a group go through each memory layer in one batched product.
Inside here a row is one memory, R = B · H of them, and tensors are (n, R, C, …) for the n chunks of a group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titans_lm.ops.errors import pull
from titans_lm.ops.gates import ChunkGates
from titans_lm.ops.matmul import add_bmm_, bmm, bmm_into
from titans_lm.ops.network import LAYER_NORM_EPS, MemoryNetwork, activate_into, activation_grad, layer_norm_backward

Weights = tuple[Tensor, ...]


class Tokens(NamedTuple):
    """Queries, keys and values of a group, (n, R, C, D), contiguous; and thresholds (n, R, C, 1) if there are any."""

    q: Tensor
    k: Tensor
    v: Tensor
    threshold: Tensor | None = None


@dataclass(frozen=True)
class BatchedNetwork:
    """The network as the rows of a call see it: `weight` and `bias` of the LayerNorm are (R, 1, D)."""

    network: MemoryNetwork
    batch: int
    weight: Tensor | None
    bias: Tensor | None
    decay_target: Weights | None
    """M_init (H, D_in, D_out) where forgetting leads there."""


def halves(both: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of (…, 2 D_in, D_out), of weights and of surprise."""
    first, second = both.chunk(2, dim=-2)
    return first, second


def by_chunk(tensors: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
    """Views of each tensor by chunk, made at once: one for each use would cost more than many of the products."""
    return list(map(torch.unbind, tensors))


class ChunkStates:
    """Weights and surprise at the start of every chunk and at the end: L buffers (n + 1, R, 2 D_in, D_out).

    W and S are the two halves of a buffer, so that what goes through both goes through in one product. `at`, `W` and
    `S` are views by chunk.
    `anchors` holds for each chunk where its gradients are taken: the weights at its start, or others where a call began
    inside a chunk or rows end at different places. `aliased` says which of the two.
    """

    def __init__(self, chunks: int, like: Weights, rows: BatchedNetwork) -> None:
        self.both = [w.new_empty(chunks + 1, w.shape[0], 2 * w.shape[1], w.shape[2]) for w in like]
        self.at = by_chunk(self.both)
        parts = [halves(x) for x in self.both]
        self.W, self.S = [W.unbind() for W, _ in parts], [S.unbind() for _, S in parts]
        by_heads = parts if rows.decay_target is not None else []
        self.W_by_head = [W.unflatten(1, (rows.batch, -1)).unbind() for W, _ in by_heads]
        self.anchors: list[Weights] = []
        self.aliased: list[bool] = []

    def begin(self, W: Weights, S: Weights, anchor: Weights | None) -> None:
        """Start a group; without an anchor the gradients of its first chunk are taken at W."""
        for mine, given in zip((*self.W, *self.S), (*W, *S), strict=True):
            mine[0].copy_(given)
        self.anchors, self.aliased = [], []
        self._next_anchor = self.weights(0) if anchor is None else anchor
        self._next_aliased = anchor is None

    def weights(self, i: int) -> Weights:
        """The memory at the start of chunk i."""
        return tuple([w[i] for w in self.W])

    def surprise(self, i: int) -> Weights:
        """The surprise at the start of chunk i."""
        return tuple([s[i] for s in self.S])

    def anchor(self) -> Weights:
        """Give the next chunk its anchor."""
        self.anchors.append(self._next_anchor)
        self.aliased.append(self._next_aliased)
        return self._next_anchor

    def close(self, i: int, complete: bool | Tensor) -> None:
        """Chunk i is written: where it is complete, gradients are now taken at what it left."""
        if isinstance(complete, Tensor):
            new = self.weights(i + 1)
            self._next_anchor = tuple(torch.where(complete, w, a) for w, a in zip(new, self._next_anchor, strict=True))
            self._next_aliased = False
        elif complete:
            self._next_anchor, self._next_aliased = self.weights(i + 1), True
        else:
            self._next_aliased = False

    def end_anchor(self) -> Weights | None:
        """The anchor that goes on, None where it is the memory itself."""
        return None if self._next_aliased else self._next_anchor


class WriteCache(NamedTuple):
    """What writing a group leaves for reading it and for its gradients, over all its chunks.

    inputs[l] is h_{l−1}, scaled[l] is [h ∘ memory_end | h ∘ surprise_end], pre[l] is z_l, deltas[l] is δ_l and
    back[l − 1] is δ_{l+1} W_{l+1}ᵀ, before the slope. For a LayerNorm, `unit` and `rstd` = 1 / std belong to z_L and
    `error` is ∂ℓ/∂unit; empty where there is none.
    """

    inputs: list[Tensor]
    scaled: list[Tensor]
    pre: list[Tensor]
    deltas: list[Tensor]
    back: list[Tensor]
    unit: Tensor
    rstd: Tensor
    error: Tensor


def inner_residual(rows: BatchedNetwork, tokens: Tokens) -> Tensor:
    """What the inner loss misses besides the network's z_L: [k +] [bias] − v, or −v for the dot product."""
    if rows.network.objective == "dot":
        return -tokens.v
    x = tokens.k - tokens.v if rows.network.residual else -tokens.v
    return x if rows.bias is None else x + rows.bias


class LastError:
    """δ_L of the chunks of a group, one after another; what does not depend on the state is made once for all.

    ∂ℓ/∂unit = base + scale ∘ unit with a LayerNorm, whose backward pass then leads to z_L; ∂ℓ/∂z_L = base + 2 z_L
    without; for the dot product the base alone. Of other objectives the base is what e lacks (errors.py), and the error
    g(e) [∘ weight]. With `collect`, `unit`, `rstd` and `error` are kept.
    """

    def __init__(self, rows: BatchedNetwork, tokens: Tokens, collect: bool) -> None:
        self.objective, self.weight, self.collect = rows.network.objective, rows.weight, collect
        self.dot, self.plain = self.objective == "dot", self.objective in ("dot", "l2")
        self.base = inner_residual(rows, tokens)
        if self.objective == "l2":
            self.base = 2.0 * self.base
        if rows.weight is not None and self.plain:
            self.base, self.scale = self.base * rows.weight, 2.0 * rows.weight * rows.weight
        self.base_at = self.base.unbind()
        self.threshold = tokens.threshold
        self.neutral: tuple[Tensor, Tensor] | None = None
        self.unit: list[Tensor] = []
        self.rstd: list[Tensor] = []
        self.error: list[Tensor] = []

    def into(self, out: Tensor, i: int, z: Tensor) -> None:
        """Write δ_L of chunk i into `out`."""
        if self.weight is not None:
            unit, _, rstd = torch.native_layer_norm(z, (z.shape[-1],), None, None, LAYER_NORM_EPS)
            if self.plain:
                error = self.base_at[i] if self.dot else torch.addcmul(self.base_at[i], unit, self.scale)
            else:
                error = self._pull(torch.addcmul(self.base_at[i], unit, self.weight), i) * self.weight
            self.neutral = self.neutral or (torch.zeros_like(rstd), torch.ones_like(rstd))
            layer_norm_backward(error, unit, rstd, self.neutral, out)
            if self.collect:
                self.unit.append(unit)
                self.rstd.append(rstd)
                self.error.append(error)
        elif self.dot:
            out.copy_(self.base_at[i])
        elif self.plain:
            torch.add(self.base_at[i], z, alpha=2, out=out)
        else:
            out.copy_(self._pull(self.base_at[i] + z, i))

    def _pull(self, e: Tensor, i: int) -> Tensor:
        """g(e) of chunk i."""
        return pull(e, self.objective, None if self.threshold is None else self.threshold[i])


def write(
    rows: BatchedNetwork,
    tokens: Tokens,
    gates: list[ChunkGates],
    states: ChunkStates,
    complete: tuple[bool | Tensor, ...],
    kept: Tensor | None = None,
    collect: bool = False,
) -> WriteCache:
    """Write all chunks of a group, one after another: z, h, δ of every token, and the states between.

    A second time, for the gradients of writing, `kept` is z_L of the first (n, R, C, D), which then is not made again;
    with `collect` the first time leaves all that they need.
    """
    k, n, L, act = tokens.k, len(complete), len(gates), rows.network.activation
    lead, widths = k.shape[:3], [x.shape[-1] for x in states.both]
    inputs = [k] + [k.new_empty(*lead, width) for width in widths[:-1]]
    pre = [k.new_empty(*lead, width) for width in (widths if kept is None else widths[:-1])]
    if kept is not None:
        pre.append(kept)
    deltas = [k.new_empty(*lead, width) for width in widths]
    back = [k.new_empty(*lead, width) for width in widths[:-1]]
    last = LastError(rows, tokens, collect=collect or kept is not None)
    scaled = [k.new_empty(*lead, 2 * h.shape[-1]) for h in inputs]
    scale_pair(k, gates[0].memory_end, gates[0].surprise_end, scaled[0])
    h, z, delta, d_h = by_chunk(inputs), by_chunk(pre), by_chunk(deltas), by_chunk(back)
    scaled_t, ends = by_chunk([x.mT for x in scaled]), [chunk_ends(rows, g) for g in gates]
    pairs = [
        by_chunk([g.memory_end, g.surprise_end, *halved.chunk(2, dim=-1)])
        for g, halved in zip(gates, scaled, strict=True)
    ][1:]
    for i in range(n):
        anchor = states.anchor()
        for layer, W in enumerate(anchor):
            if layer > 0:
                activate_into(z[layer - 1][i], h[layer][i], act)
            if kept is None or layer < L - 1:
                bmm_into(h[layer][i], W, z[layer][i])
        last.into(delta[-1][i], i, z[-1][i])
        for layer in range(L - 1, 0, -1):
            bmm_into(delta[layer][i], anchor[layer].mT, d_h[layer - 1][i])
            activation_grad(d_h[layer - 1][i], z[layer - 1][i], delta[layer - 1][i], act)
        for layer, (memory_end, surprise_end, first, second) in enumerate(pairs, 1):
            torch.mul(h[layer][i], memory_end[i], out=first[i])
            torch.mul(h[layer][i], surprise_end[i], out=second[i])
        if kept is None or i < n - 1:  # no gradient needs what the last chunk leaves
            for layer in range(L):
                advance(rows, states, layer, i, ends[layer][i], scaled_t[layer][i], delta[layer][i])
            states.close(i, complete[i])
    none = k.new_empty(0)
    norm = [torch.stack(x) if x else none for x in (last.unit, last.rstd, last.error)]
    return WriteCache(inputs, scaled, pre, deltas, back, *norm)


def scale_pair(x: Tensor, first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    """Write [x ∘ first | x ∘ second] into `out` and return it."""
    D = x.shape[-1]
    torch.mul(x, first, out=out[..., :D])
    torch.mul(x, second, out=out[..., D:])
    return out


def chunk_ends(rows: BatchedNetwork, g: ChunkGates) -> list[tuple[Tensor, ...]]:
    """a, f and η_end of every chunk, (R, 1, 1) or (R, D_in, 1), and 1 − a by head where forgetting leads to M_init."""
    a, f, e = g.a[:, :, -1:].mT, g.f[:, :, -1:].mT, g.eta_end.mT
    parts = [a.unbind(), f.unbind(), e.unbind()]
    if rows.decay_target is not None:
        parts.append((1.0 - a).unflatten(1, (rows.batch, -1)).unbind())
    return list(zip(*parts, strict=True))


def advance(
    rows: BatchedNetwork,
    states: ChunkStates,
    layer: int,
    i: int,
    ends: tuple[Tensor, ...],
    scaled_t: Tensor,
    delta: Tensor,
) -> None:
    """Memory and surprise of one layer at the end of chunk i.

    W ← a W + f S [+ (1 − a) W_init] − (h ∘ memory_end)ᵀ δ        S ← η_end S − (h ∘ surprise_end)ᵀ δ
    """
    a, f, e, *forgotten = ends
    W, S = states.W[layer], states.S[layer]
    torch.mul(W[i], a, out=W[i + 1])
    W[i + 1].addcmul_(S[i], f)
    if rows.decay_target is not None:
        states.W_by_head[layer][i + 1].addcmul_(rows.decay_target[layer], forgotten[0])
    torch.mul(S[i], e, out=S[i + 1])
    add_bmm_(states.at[layer][i + 1], scaled_t, delta, alpha=-1)


def by_head(x: Tensor, rows: BatchedNetwork) -> Tensor:
    """(R, …) as (B, H, …)."""
    return x.unflatten(0, (rows.batch, -1))


class ReadCache(NamedTuple):
    """What reading a group leaves for its gradients, over all its chunks, one entry per memory layer.

    inputs[l] is x, both[l] is [a ∘ x | f ∘ x], raw[l] is x hᵀ (None with channel-wise gates), weighted[l] is
    (x hᵀ) ∘ G and pre[l] is z_l.
    """

    inputs: list[Tensor]
    both: list[Tensor]
    raw: list[Tensor | None]
    weighted: list[Tensor]
    pre: list[Tensor]


def read(
    rows: BatchedNetwork,
    q: Tensor,
    gates: list[ChunkGates],
    written: WriteCache,
    states: ChunkStates,
    kept: Tensor | None = None,
) -> ReadCache:
    """Read M_t(q_t) at every position t of every chunk without building any M_t.

    z_l = (a x) W_l + (f x) S_l + ((1 − a) x) W_init − ((x h_{l−1}ᵀ) ∘ G_l) Δ_l      x = q, then φ(z_{l−1})

    A second time, for the gradients of reading, `kept` is z_L of the first, which then is not made again.
    """
    n, L = q.shape[0], len(gates)
    found = ReadCache([], [], [], [], [])
    x = q
    for layer, g in enumerate(gates):
        if layer > 0:
            x = activate_into(found.pre[-1], torch.empty_like(found.pre[-1]), rows.network.activation)
        both = scale_pair(x, g.a, g.f, x.new_empty(*x.shape[:-1], 2 * x.shape[-1]))
        raw, weighted = similarity(x, written.inputs[layer], g.G)
        if kept is not None and layer == L - 1:
            z = kept
        else:
            z = bmm(flat(both), flat(states.both[layer][:n]))
            z = add_bmm_(z, flat(weighted), flat(written.deltas[layer]), alpha=-1).view(*x.shape[:-1], -1)
            if rows.decay_target is not None:
                z += times_shared(x - both[..., : x.shape[-1]], rows.decay_target[layer], rows)
        for several, value in zip(found, (x, both, raw, weighted, z), strict=True):
            several.append(value)
    return found


def network_output(rows: BatchedNetwork, q: Tensor, z: Tensor) -> Tensor:
    """Finish the network: o = [q +] [LN](z_L)."""
    if rows.weight is None:
        return z + q if rows.network.residual else z
    o = torch.native_layer_norm(z, (z.shape[-1],), None, None, LAYER_NORM_EPS)[0] * rows.weight
    for part in (rows.bias, q if rows.network.residual else None):
        if part is not None:
            o += part
    return o


def similarity(x: Tensor, h: Tensor, G: Tensor) -> tuple[Tensor | None, Tensor]:
    """x hᵀ and (x hᵀ) ∘ G for all chunks; with channel-wise gates only Σ_d x_td h_jd G_dtj."""
    if G.dim() == 4:
        raw = bmm(flat(x), flat(h).transpose(1, 2)).view(G.shape)
        return raw, raw * G
    return None, torch.einsum("nrtd,nrjd,nrdtj->nrtj", x, h, G)


def flat(x: Tensor) -> Tensor:
    """(n, R, …) as (n R, …)."""
    return x.flatten(0, 1)


def heads_first(x: Tensor, rows: BatchedNetwork) -> Tensor:
    """(n, R, C, D) as (H, n B C, D): one product per head where all rows meet the same weights."""
    return x.unflatten(1, (rows.batch, -1)).permute(2, 0, 1, 3, 4).flatten(1, 3)


def times_shared(x: Tensor, weight: Tensor, rows: BatchedNetwork) -> Tensor:
    """x W for weights (H, D_in, D_out) that all rows of a head share; contiguous, whatever the rows are."""
    n, _, C, _ = x.shape
    z = bmm(heads_first(x, rows), weight)
    # of a single row, flatten alone would give a view in another order, of which `flat` is a copy
    return z.unflatten(1, (n, rows.batch, C)).permute(1, 2, 0, 3, 4).flatten(1, 2).contiguous()
