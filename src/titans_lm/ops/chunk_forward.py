"""A chunk group, forward: one after another the chunks write, then all of them read at once.

Only writing is sequential: the gradients of a chunk need the weights that the chunk before has left. A read needs those
too, but no other read, so the queries of all chunks of a group go through each memory layer in one batched product.
Inside here a row is one memory, R = B · H of them, and tensors are (n R, C, …) for the n chunks of a group, chunk by
chunk: what all chunks do at once is one batched product.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titans_lm.ops.errors import pull
from titans_lm.ops.gates import ChunkGates
from titans_lm.ops.matmul import add_bmm_, bmm, bmm_into
from titans_lm.ops.network import (
    LAYER_NORM_EPS,
    MemoryNetwork,
    activate,
    activate_into,
    activation_grad,
    layer_norm_backward,
)
from titans_lm.ops.polynomial import Narrow

Weights = tuple[Tensor, ...]
NOTHING = torch.empty(0, device="cpu")
"""In the place of what a call does not make."""


class Tokens(NamedTuple):
    """Queries, keys and values of a group, (n R, C, D), contiguous; and thresholds (n R, C, 1) if there are any.

    `narrow` is what polynomial queries and keys were made of, where the group has made them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    threshold: Tensor | None = None
    narrow: Narrow | None = None


@dataclass(frozen=True)
class BatchedNetwork:
    """The network as the rows of a group see it: `weight` and `bias` of the LayerNorm are (n R, 1, D)."""

    network: MemoryNetwork
    batch: int
    heads: int
    count: int
    """R, rows of one chunk."""
    weight: Tensor | None
    bias: Tensor | None
    decay_target: Weights | None
    """M_init (H, D_in, D_out) where forgetting leads there."""
    wide: bool = False
    """Whether gates scale outputs and errors in place of keys (wide.py)."""


def halves(both: Tensor, wide: bool = False) -> tuple[Tensor, Tensor]:
    """The two halves of (…, 2 D_in, D_out), of weights and of surprise; of wide memories, (…, D_in, 2 D_out)."""
    first, second = both.chunk(2, dim=-1 if wide else -2)
    return first, second


def by_chunk(tensors: Iterable[Tensor], R: int, transposed: bool = False) -> list[tuple[Tensor, ...]]:
    """Views of each tensor by chunk, made at once: one for each use would cost more than many of the products."""
    found = []
    for x in tensors:
        found.append((x.mT if transposed else x).split(R))
    return found


class ChunkStates:
    """Weights and surprise at the start of every chunk and at the end: L buffers ((n + 1) R, 2 D_in, D_out).

    W and S are the two halves of a buffer, so that what goes through both goes through in one product. `at` and
    `memory` are views of both and of W by chunk, `W` and `S` the same by head, (B, H, D_in, D_out). Of a wide memory
    `both` are [W | S], (…, D_in, 2 D_out), but the buffer and `at` are their transposes, as halves have to be whole.
    `anchors` holds for each chunk where its gradients are taken: the weights at its start, or others where a call began
    inside a chunk or rows end at different places. `aliased` says which of the two.
    """

    def __init__(self, chunks: int, like: Weights, rows: BatchedNetwork) -> None:
        R, by_head = rows.count, (chunks + 1, rows.batch, rows.heads)
        buffers = []
        for w in like:
            tall, width = reversed(w.shape[2:]) if rows.wide else w.shape[2:]
            buffers.append(w.new_empty((chunks + 1) * R, 2 * tall, width))
        self.both = [x.mT for x in buffers] if rows.wide else buffers
        self.at, self.W, self.S, memory = by_chunk(buffers, R), [], [], []
        for both in self.both:
            W, S = halves(both.unflatten(0, by_head), rows.wide)
            self.W.append(W.unbind())
            self.S.append(S.unbind())
            memory.append(both[:, : W.shape[-2], : W.shape[-1]].split(R))
        self.memory: list[Weights] = list(zip(*memory, strict=True))
        self.anchors: list[Weights] = []
        self.aliased: list[bool] = []

    def begin(self, W: Weights, S: Weights, anchor: Weights | None) -> None:
        """Start a group; without an anchor the gradients of its first chunk are taken at W."""
        torch._foreach_copy_([x[0] for x in (*self.W, *self.S)], [*W, *S])
        self.anchors, self.aliased = [self.memory[0] if anchor is None else anchor], [anchor is None]

    def close(self, i: int, complete: bool | Tensor) -> None:
        """Chunk i is written: where it is complete, gradients are now taken at what it left."""
        anchor = self.memory[i + 1]
        if isinstance(complete, Tensor):
            pairs = zip(anchor, self.anchors[-1], strict=True)
            anchor = tuple(torch.where(complete, w, a) for w, a in pairs)
        elif not complete:
            anchor = self.anchors[-1]
        self.anchors.append(anchor)
        self.aliased.append(complete is True)

    def end(self, n: int) -> tuple[Weights, Weights, Weights | None]:
        """The memory, the surprise and the anchor after n chunks; an anchor of None is the memory itself."""
        W, S = (tuple([x[n] for x in several]) for several in (self.W, self.S))
        return W, S, None if self.aliased[-1] else self.anchors[-1]


class WriteCache(NamedTuple):
    """What writing a group leaves for reading it and for its gradients, over all its chunks.

    inputs[l] is h_{l−1}, scaled[l] is [h ∘ memory_end | h ∘ surprise_end], pre[l] is z_l, deltas[l] is δ_l and
    back[l − 1] is δ_{l+1} W_{l+1}ᵀ, before the slope. For a LayerNorm, `unit` and `rstd` = 1 / std belong to z_L and
    `error` is ∂ℓ/∂unit; empty where there is none. Of a wide memory scaled[0] has δ in the place of h.
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
        self.objective, self.collect = rows.network.objective, collect
        self.dot, self.plain = self.objective == "dot", self.objective in ("dot", "l2")
        self.weight, base, R = rows.weight, inner_residual(rows, tokens), rows.count
        if self.weight is not None and self.plain:
            twice = 2.0 * self.weight
            base, self.scale = base * (self.weight if self.dot else twice), (twice * self.weight)[:R]
        elif self.plain and not self.dot:
            base = 2.0 * base
        self.base_at = base.split(R)
        self.threshold = None if tokens.threshold is None else tokens.threshold.split(R)
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
                weight = self.weight[: len(z)]
                error = self._pull(torch.addcmul(self.base_at[i], unit, weight), i) * weight
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

    def norm(self) -> list[Tensor]:
        """What a LayerNorm's gradients need, of all chunks."""
        found = []
        for x in (self.unit, self.rstd, self.error):
            found.append(torch.cat(x) if x else NOTHING)
        return found

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

    A second time, for the gradients of writing, `kept` is z_L of the first (n R, C, D), which then is not made again;
    with `collect` the first time leaves all that they need.
    """
    k, n, L, R, act = tokens.k, len(complete), len(gates), rows.count, rows.network.activation
    *hidden, out = [x.shape[-1] for x in states.both]
    (inputs, pre, deltas, back), (h, z, delta, d_h) = hidden_layers(k, hidden, n)
    scaled = [scale_pair(k, gates[0].memory_end, gates[0].surprise_end)]
    scaled += [k.new_empty(*x.shape[:2], 2 * x.shape[2]) for x in inputs]
    inputs, h = [k, *inputs], [k.split(R), *h]
    pre.append(k.new_empty(*k.shape[:2], out) if kept is None else kept)
    deltas.append(k.new_empty(*k.shape[:2], out))
    z.append(pre[-1].split(R))
    delta.append(deltas[-1].split(R))
    last = LastError(rows, tokens, collect=collect or kept is not None)
    scaled_t, ends = by_chunk(scaled, R, True), chunk_ends(rows, gates)
    pairs = []
    for g, both in zip(gates[1:], scaled[1:], strict=True):
        pairs.append(by_chunk([g.memory_end, g.surprise_end, *both.chunk(2, dim=-1)], R))
    for i in range(n):
        anchor = states.anchors[i]
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
            advance(rows, states, i, ends[i], scaled_t, delta)
            states.close(i, complete[i])
    return WriteCache(inputs, scaled, pre, deltas, back, *last.norm())


def hidden_layers(k: Tensor, widths: list[int], n: int) -> tuple[list[list[Tensor]], list[list[tuple[Tensor, ...]]]]:
    """Room for h_l, z_l, δ_l and δ_{l+1} W_{l+1}ᵀ of the hidden layers, and the same by chunk: one tensor for four."""
    whole, at = [[], [], [], []], [[], [], [], []]
    for width in widths:
        room = k.new_empty(4 * len(k), k.shape[1], width)
        chunks = room.split(len(k) // n)
        for i, x in enumerate(room.split(len(k))):
            whole[i].append(x)
            at[i].append(chunks[i * n : (i + 1) * n])
    return whole, at


def scale_pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """[x ∘ first | x ∘ second]."""
    return torch.cat((x * first, x * second), dim=-1)


def chunk_ends(rows: BatchedNetwork, gates: list[ChunkGates]) -> list[tuple[Tensor, ...]]:
    """a, f and η_end of every layer at the end of a chunk, (B, H, 1 or D_in, 1), for every chunk."""
    parts = []
    for g in gates:
        parts += [g.a[:, -1], g.f[:, -1], g.eta_end[:, 0]]
    n, by_head = len(parts[0]) // rows.count, (-1, rows.batch, rows.heads)
    if len({x.shape for x in parts}) == 1:  # views of one tensor are made together
        together = torch.cat(parts).view(*by_head, parts[0].shape[-1], 1).unbind()
        return [together[i::n] for i in range(n)]
    return list(zip(*[x.reshape(*by_head, x.shape[-1], 1).unbind() for x in parts], strict=True))


def advance(
    rows: BatchedNetwork,
    states: ChunkStates,
    i: int,
    ends: tuple[Tensor, ...],
    scaled_t: list[tuple[Tensor, ...]],
    delta: list[tuple[Tensor, ...]],
) -> None:
    """Memory and surprise of all layers at the end of chunk i.

    W ← a W + f S [+ (1 − a) W_init] − (h ∘ memory_end)ᵀ δ        S ← η_end S − (h ∘ surprise_end)ᵀ δ
    """
    for layer, (W, S) in enumerate(zip(states.W, states.S, strict=True)):
        a, f, e = ends[3 * layer : 3 * layer + 3]
        if rows.decay_target is None:
            torch.mul(W[i], a, out=W[i + 1])
        else:
            torch.lerp(rows.decay_target[layer], W[i], a, out=W[i + 1])
        W[i + 1].addcmul_(S[i], f)
        torch.mul(S[i], e, out=S[i + 1])
        add_bmm_(states.at[layer][i + 1], scaled_t[layer][i], delta[layer][i], alpha=-1)


class ReadCache(NamedTuple):
    """What reading a group leaves for its gradients, over all its chunks, one entry per memory layer.

    inputs[l] is x, both[l] is [a ∘ x | f ∘ x], raw[l] is x hᵀ (None with channel-wise gates), weighted[l] is
    (x hᵀ) ∘ G and pre[l] is z_l. Of a wide memory both[0] is what is read in two parts (wide.py).
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
    found, last = ReadCache([], [], [], [], []), len(gates) - 1
    x = q
    for layer, g in enumerate(gates):
        if layer > 0:
            x = activate(found.pre[-1], rows.network.activation)
        of_memory = x * g.a
        both = torch.cat((of_memory, x * g.f), dim=-1)
        raw, weighted = similarity(x, written.inputs[layer], g.G)
        if kept is not None and layer == last:
            z = kept
        else:
            z = bmm(both, states.both[layer][: len(q)])
            add_bmm_(z, weighted, written.deltas[layer], alpha=-1)
            if rows.decay_target is not None:
                forgotten = bmm(heads_first(x - of_memory, rows), rows.decay_target[layer])
                by_head = z.unflatten(0, (-1, rows.heads)).transpose(0, 1)
                by_head += forgotten.view(by_head.shape)
        for several, value in zip(found, (x, both, raw, weighted, z), strict=True):
            several.append(value)
    return found


def similarity(x: Tensor, h: Tensor, G: Tensor) -> tuple[Tensor | None, Tensor]:
    """x hᵀ and (x hᵀ) ∘ G for all chunks; with channel-wise gates only Σ_d x_td h_jd G_dtj."""
    if G.dim() == 3:
        raw = bmm(x, h.mT)
        return raw, raw * G
    return None, torch.einsum("ntd,njd,ndtj->ntj", x, h, G)


def heads_first(x: Tensor, rows: BatchedNetwork) -> Tensor:
    """(n R, C, D) as (H, n B C, D): one product per head where all rows meet the same weights."""
    return x.unflatten(0, (-1, rows.heads)).transpose(0, 1).flatten(1, 2)


def rows_first(x: Tensor, rows: BatchedNetwork, C: int) -> Tensor:
    """`heads_first` undone, for chunks of C."""
    return x.unflatten(1, (-1, C)).transpose(0, 1).flatten(0, 1)
