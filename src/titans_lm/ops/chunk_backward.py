"""A chunk group, backward: the gradients of `chunk_forward.py` by hand (docs/derivation.md, section 10).

The graph of a call would keep the weights of every chunk. Here the states of one group at a time are made again from
a checkpoint, all its reads are led back in batched products, and then its chunks, last first, are led back through
their writes. x̄ in the comments is the gradient of the outer loss by x.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_lm.ops.chunk_forward import (
    BatchedNetwork,
    ChunkStates,
    ReadCache,
    Tokens,
    WriteCache,
    by_chunk,
    chunk_ends,
    halves,
    heads_first,
    inner_residual,
    rows_first,
)
from titans_lm.ops.errors import pull, pull_backward
from titans_lm.ops.gates import ChunkGates
from titans_lm.ops.matmul import add_bmm_, bmm, bmm_into
from titans_lm.ops.network import LAYER_NORM_EPS, activation_grad, layer_norm_backward, second_derivative


@dataclass
class StateGrads:
    """Gradients by the state after the chunk at hand, led back chunk by chunk; `anchor` None is zero.

    `both` has those by W and by S as halves, (R, 2 D_in, D_out). `memory` is those by W, and `W` and `S` are both by
    head, (B, H, D_in, D_out). Of a wide memory `both`, `memory` and `anchor` are transposed.
    """

    both: list[Tensor]
    anchor: list[Tensor] | None
    heads: int
    wide: bool = False

    def __post_init__(self) -> None:
        self.memory, self.W, self.S = [], [], []
        for x in self.both:
            by_head = x.unflatten(0, (-1, self.heads))
            W, S = halves(by_head.mT if self.wide else by_head, self.wide)
            self.memory.append(halves(x)[0])
            self.W.append(W)
            self.S.append(S)


@dataclass
class Parameters:
    """Gradients by what all chunks share, added up: LayerNorm (H, D), M_init (H, D_in, D_out) and √a (H, 1, P).

    What the call lacks is empty and stays so.
    """

    weight: Tensor
    bias: Tensor
    initial: list[Tensor]
    roots: Tensor


class ChunkBackward:
    """The gradients of one group; `run` returns those by its `Tokens` and by every layer's `ChunkGates`."""

    def __init__(
        self,
        rows: BatchedNetwork,
        tokens: Tokens,
        gates: list[ChunkGates],
        states: ChunkStates,
        written: WriteCache,
        shared: Parameters,
    ) -> None:
        self.rows, self.tokens, self.gates, self.states, self.written = rows, tokens, gates, states, written
        self.shared = shared
        self.act = rows.network.activation
        self.n, self.L = len(tokens.q) // rows.count, len(gates)
        self.gate_grads: list[dict[str, Tensor]] = [{} for _ in gates]
        self.paired = written.inputs  # what the weights at the end of a chunk scale
        self.d_inputs: list[Tensor] = []  # h̄_{l−1}
        self.d_deltas: list[Tensor] = []  # δ̄_l
        self.d_pre = [torch.empty_like(z) for z in written.pre]  # z̄_l, by the errors
        self.d_read: list[Tensor] = []  # z̄_l of the reads

    def run(
        self, d_out: Tensor, found: ReadCache, complete: tuple[bool | Tensor, ...], carried: StateGrads
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        dq = self._reads(d_out, found)
        self._writes(found, complete, carried)
        dk, dv = self._tokens()
        by_token = [dq, dk, dv] if self.tokens.threshold is None else [dq, dk, dv, self.d_threshold]
        return by_token, self.gate_grads

    # Reads: all chunks at once.

    def _reads(self, d_out: Tensor, found: ReadCache) -> Tensor:
        rows = self.rows
        dx = dz = self._output(d_out, found.pre[-1])
        for layer in range(self.L - 1, -1, -1):
            g, x = self.gates[layer], found.inputs[layer]
            self.d_read.insert(0, dz)
            d_kept, d_past = bmm(dz, self.states.both[layer][: len(x)].mT).chunk(2, dim=-1)
            through_init = None
            if rows.decay_target is not None:
                forgotten = x - found.both[layer][..., : x.shape[-1]]
                through_init = self._through_init(layer, rows.decay_target[layer], dz, d_kept, forgotten)
            self.gate_grads[layer] |= {
                "a": (d_kept * x).sum_to_size(g.a.shape),
                "f": (d_past * x).sum_to_size(g.f.shape),
            }
            dx = d_kept * g.a if through_init is None else through_init.addcmul_(d_kept, g.a)
            dx.addcmul_(d_past, g.f)
            self._similarity(layer, dz, dx, found)
            if layer > 0:
                dz = activation_grad(dx, found.pre[layer - 1], torch.empty_like(dx), self.act)
        return dx + d_out if rows.network.residual else dx

    def _through_init(self, layer: int, initial: Tensor, dz: Tensor, d_kept: Tensor, forgotten: Tensor) -> Tensor:
        """Through ((1 − a) ∘ x) W_init: takes its part from the gradient by a ∘ x, and returns the one by x."""
        by_head = heads_first(dz, self.rows)
        add_bmm_(self.shared.initial[layer], heads_first(forgotten, self.rows).mT, by_head)
        found = rows_first(bmm(by_head, initial.mT), self.rows, dz.shape[1])
        d_kept -= found
        return found

    def _by_head(self, x: Tensor) -> Tensor:
        """The sum over all tokens, (H, D)."""
        return x.unflatten(0, (-1, self.rows.heads)).sum((0, 2))

    def _output(self, d_out: Tensor, z: Tensor) -> Tensor:
        """Through the LayerNorm of what was read, if there is one: z̄_L."""
        rows = self.rows
        if rows.weight is None:
            return d_out
        unit, _, rstd = torch.native_layer_norm(z, (z.shape[-1],), None, None, LAYER_NORM_EPS)
        self.shared.weight += self._by_head(d_out * unit)
        if rows.bias is not None:
            self.shared.bias += self._by_head(d_out)
        return layer_norm_backward(d_out * rows.weight, unit, rstd)

    def _similarity(self, layer: int, dz: Tensor, dx: Tensor, found: ReadCache) -> None:
        """Through −((x hᵀ) ∘ G) Δ; adds to x̄ and begins h̄ and δ̄."""
        g, x, h, delta = self.gates[layer], found.inputs[layer], self.written.inputs[layer], self.written.deltas[layer]
        weighted = found.weighted[layer]
        minus = -dz
        d_weighted = bmm(minus, delta.mT)
        self.d_deltas.insert(0, bmm(weighted.mT, minus))
        dh, self.gate_grads[layer]["G"] = self._similar(d_weighted, found.raw[layer], x, h, g.G, dx)
        self.d_inputs.insert(0, dh)

    def _similar(
        self, d_weighted: Tensor, raw: Tensor | None, x: Tensor, h: Tensor, G: Tensor, dx: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Through (x hᵀ) ∘ G, whose gradient is used up: adds to x̄, and returns h̄ and Ḡ."""
        if raw is not None:
            d_G = d_weighted * raw
            d_weighted.mul_(G)
            add_bmm_(dx, d_weighted, h)
            return bmm(d_weighted.mT, x), d_G
        through_x = torch.einsum("ntj,ndtj->ntjd", d_weighted, G)
        dx += torch.einsum("ntjd,njd->ntd", through_x, h)
        dh = torch.einsum("ntjd,ntd->njd", through_x, x)
        return dh, torch.einsum("ntj,ntd,njd->ndtj", d_weighted, x, h)

    # Writes: last chunk first.

    def _writes(self, found: ReadCache, complete: tuple[bool | Tensor, ...], carried: StateGrads) -> None:
        self._prepare(found)
        for i in range(self.n - 1, -1, -1):
            self._leave_anchor(complete[i], carried)
            for layer in range(self.L):
                self._advance(layer, i, carried)
            for both, x_t, d_read in zip(carried.both, self.both_t, self.d_read_at, strict=False):
                add_bmm_(both, x_t[i], d_read[i])
            if self.states.aliased[i]:
                target = carried.memory
                if carried.anchor is not None:
                    for dW, dA in zip(carried.memory, carried.anchor, strict=True):
                        dW += dA
                    carried.anchor = None
            else:
                if carried.anchor is None:
                    carried.anchor = [torch.zeros_like(w) for w in carried.memory]
                target = carried.anchor
            self._errors(i, target)
        self._ends()

    def _prepare(self, found: ReadCache) -> None:
        """What the loop over chunks needs and no state, for all chunks at once; and views by chunk of what it meets."""
        w, rows, R = self.written, self.rows, self.rows.count
        self.d_scaled = [torch.empty_like(x) for x in w.scaled]
        ones = [torch.ones_like(z) for z in w.pre[:-1]]
        slopes = [activation_grad(one, z, one, self.act) for one, z in zip(ones, w.pre, strict=False)]
        curves = [second_derivative(z, self.act) for z in w.pre[:-1]]
        self.bend = [None if c is None else c.mul_(y).split(R) for c, y in zip(curves, w.back, strict=True)]
        d_back = [torch.empty_like(y) for y in w.back]
        self.h_t, self.delta, self.scaled = by_chunk(w.inputs, R, True), by_chunk(w.deltas, R), by_chunk(w.scaled, R)
        self.d_h, self.d_delta = by_chunk(self.d_inputs, R), by_chunk(self.d_deltas, R)
        self.d_z, self.slope = by_chunk(self.d_pre, R), by_chunk(slopes, R)
        self.d_back, self.d_scaled_at = by_chunk(d_back, R), by_chunk(self.d_scaled, R)
        self.both_t, self.d_read_at = by_chunk(found.both, R, True), by_chunk(self.d_read, R)
        self.ends = chunk_ends(rows, self.gates)
        self.weighs = [by_chunk([g.memory_end, g.surprise_end], R) for g in self.gates]
        self.end_grads: list[list[tuple[Tensor, ...]]] = [[] for _ in self.gates]
        self.plain = rows.network.objective in ("l2", "dot")
        if not self.plain:
            made = w.pre[-1] if rows.weight is None else w.unit * rows.weight
            e = inner_residual(rows, self.tokens) + made
            self.d_e, self.d_threshold = torch.empty_like(e), e.new_zeros(*e.shape[:-1], 1)
            self.e, self.e_at = e, list(zip(*by_chunk([e, self.d_e, self.d_threshold], R), strict=True))
            given = self.tokens.threshold
            self.threshold = None if given is None else given.split(R)
        if rows.weight is not None:
            self.d_error = torch.empty_like(w.error)
            self.weight = rows.weight[:R]
            self.scale = 2.0 * self.weight * self.weight
            unit_part = w.rstd * (w.error * w.unit).mean(-1, keepdim=True)
            norm = [w.rstd, w.unit, w.rstd * w.error, w.rstd * w.unit, unit_part, self.d_error]
            self.norm_at = list(zip(*by_chunk(norm, R), strict=True))
            self.neutral = torch.zeros_like(w.rstd[:R]), torch.ones_like(w.rstd[:R])

    @staticmethod
    def _leave_anchor(complete: bool | Tensor, carried: StateGrads) -> None:
        """The anchor after a complete chunk is the memory it left."""
        if carried.anchor is None:
            return
        if isinstance(complete, Tensor):
            for dW, dA in zip(carried.memory, carried.anchor, strict=True):
                dW += torch.where(complete, dA, 0.0)
                dA.masked_fill_(complete, 0.0)
        elif complete:
            for dW, dA in zip(carried.memory, carried.anchor, strict=True):
                dW += dA
            carried.anchor = None

    def _advance(self, layer: int, i: int, carried: StateGrads) -> None:
        """Through W ← a W + f S [+ (1 − a) W_init] − (h ∘ memory_end)ᵀ δ and S ← η_end S − (h ∘ surprise_end)ᵀ δ."""
        self._added(layer, i, carried.both[layer])
        a, f, e = self.ends[i][3 * layer : 3 * layer + 3]
        by_end = self._decayed if a.numel() == f.numel() == e.numel() == self.rows.count else self._decayed_by_channel
        self.end_grads[layer].insert(0, by_end(layer, i, carried, a, f, e))
        dW, dS = carried.W[layer], carried.S[layer]
        dS.mul_(e).addcmul_(dW, f)
        dW.mul_(a)

    def _decayed(self, layer: int, i: int, carried: StateGrads, a: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """Through a W + (1 − a) W_init, f S and e S: the gradients by a, f and e are inner products of whole states."""
        R, heads = self.rows.count, self.rows.heads
        both, at = carried.both[layer].view(R, 2, -1), self.states.at[layer][i].view(R, 2, -1)
        dW, (W, S) = both[:, :1], at.split(1, dim=1)
        if self.rows.decay_target is not None:
            target, by_target = (
                (x.mT if self.rows.wide else x).view(heads, 1, -1)
                for x in (self.rows.decay_target[layer], self.shared.initial[layer])
            )
            W = W.unflatten(0, (-1, heads)).sub(target).flatten(0, 1)  # both may be large beside their difference
            of_head = dW.squeeze(1).unflatten(0, (-1, heads)).transpose(0, 1)
            by_target.baddbmm_((1.0 - a).flatten(1).t().unsqueeze(1), of_head)
        d_a, d_both = torch.bmm(dW, W.mT), torch.bmm(both, S.mT)
        d_f, d_e = d_both.split(1, dim=1)
        return tuple([d.unflatten(0, (-1, heads)) for d in (d_a, d_f, d_e)])

    def _decayed_by_channel(
        self, layer: int, i: int, carried: StateGrads, a: Tensor, f: Tensor, e: Tensor
    ) -> tuple[Tensor, ...]:
        """The same with a, f or e by channel."""
        dW, dS, W, S = carried.W[layer], carried.S[layer], self.states.W[layer][i], self.states.S[layer][i]
        product = dW * W
        if self.rows.decay_target is not None:
            product.addcmul_(dW, self.rows.decay_target[layer], value=-1)
            self.shared.initial[layer].add_((dW * (1.0 - a)).sum(0))
        d_a = summed_to(product, a)
        d_f = summed_to(torch.mul(dW, S, out=product), f)
        return d_a, d_f, summed_to(torch.mul(dS, S, out=product), e)

    def _added(self, layer: int, i: int, both: Tensor) -> None:
        """Through −(h ∘ memory_end)ᵀ δ and −(h ∘ surprise_end)ᵀ δ to h̄ and δ̄; `d_scaled` is minus the gradient."""
        d_scaled = bmm_into(self.delta[layer][i], both.mT, self.d_scaled_at[layer][i])
        d_memory, d_surprise = d_scaled.chunk(2, dim=-1)
        memory_end, surprise_end = self.weighs[layer]
        self.d_h[layer][i].addcmul_(d_memory, memory_end[i], value=-1).addcmul_(d_surprise, surprise_end[i], value=-1)
        add_bmm_(self.d_delta[layer][i], self.scaled[layer][i], both, alpha=-1)

    def _ends(self) -> None:
        """What tokens weigh at the ends of chunks, from what the loop has left."""
        for layer, g in enumerate(self.gates):
            scaled, grads = self.paired[layer], self.gate_grads[layer]
            to_memory, to_surprise = self.d_scaled[layer].chunk(2, dim=-1)
            grads["memory_end"] = (to_memory * scaled).sum_to_size(g.memory_end.shape).neg_()
            grads["surprise_end"] = (to_surprise * scaled).sum_to_size(g.surprise_end.shape).neg_()
            by_end = zip(*self.end_grads[layer], strict=True)
            d_a, d_f, d_e = (torch.stack(several).flatten(0, 2).mT for several in by_end)
            grads["a"][:, -1:] += d_a
            grads["f"][:, -1:] += d_f
            grads["eta_end"] = d_e

    def _errors(self, i: int, d_anchor: list[Tensor]) -> None:
        """Through the errors of chunk i: δ̄ and h̄ become z̄, and gradients by the anchor."""
        anchor, L = self.states.anchors[i], self.L
        d_delta = self.d_delta[0][i]
        for layer in range(L - 1):  # δ_l = (δ_{l+1} W_{l+1}ᵀ) ∘ φ'(z_l)
            bend, d_z = self.bend[layer], self.d_z[layer][i]
            if bend is None:
                d_z.zero_()
            else:
                torch.mul(d_delta, bend[i], out=d_z)
            d_back = torch.mul(d_delta, self.slope[layer][i], out=self.d_back[layer][i])
            add_bmm_(d_anchor[layer + 1], d_back.mT, self.delta[layer + 1][i])
            d_delta = add_bmm_(self.d_delta[layer + 1][i], d_back, anchor[layer + 1])
        self._last_error(i, d_delta)
        for layer in range(L - 1, -1, -1):
            d_z = self.d_z[layer][i]
            add_bmm_(d_anchor[layer], self.h_t[layer][i], d_z)
            d_h = add_bmm_(self.d_h[layer][i], d_z, anchor[layer].mT)
            if layer > 0:
                self.d_z[layer - 1][i].addcmul_(d_h, self.slope[layer - 1][i])

    def _last_error(self, i: int, g: Tensor) -> None:
        """Through δ_L: with a LayerNorm through its backward pass, δ = r (p − ⟨p⟩ − u ⟨p u⟩), ⟨·⟩ the mean.

        p̄ = r (g − ⟨g⟩ − u ⟨g u⟩),   ū = −r (g ⟨p u⟩ + p ⟨g u⟩) + p̄ ∂p/∂u,   z̄ = r (ū − ⟨ū⟩ − u ⟨ū u⟩) − r u ⟨g δ⟩
        """
        dot, d_z = self.rows.network.objective == "dot", self.d_z[-1][i]
        if self.rows.weight is None:
            if dot:
                d_z.zero_()
            elif self.plain:
                torch.mul(g, 2.0, out=d_z)
            else:
                d_z.copy_(self._pull(i, g))
            return
        rstd, unit, error_scaled, unit_scaled, unit_part, d_error = self.norm_at[i]
        layer_norm_backward(g, unit, rstd, self.neutral, d_error)
        d_unit = g * unit_part
        d_unit.addcmul_(error_scaled, (g * unit).mean(-1, keepdim=True)).neg_()
        if not self.plain:
            d_unit.addcmul_(self._pull(i, d_error * self.weight), self.weight)
        elif not dot:
            d_unit.addcmul_(d_error, self.scale)
        layer_norm_backward(d_unit, unit, rstd, self.neutral, d_z)
        d_z.addcmul_(unit_scaled, (g * self.delta[-1][i]).mean(-1, keepdim=True), value=-1)

    def _pull(self, i: int, d_g: Tensor) -> Tensor:
        """Through g(e) of chunk i."""
        (e, d_e, d_threshold), threshold = self.e_at[i], None if self.threshold is None else self.threshold[i]
        by_e, by_threshold = pull_backward(d_g, e, self.rows.network.objective, threshold)
        if by_threshold is not None:
            d_threshold.copy_(by_threshold)
        return d_e.copy_(by_e)

    # Keys, values and the LayerNorm: all chunks at once.

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """p = 2 (u w + x) w with x = [k +] [bias] − v without a LayerNorm 2 (z + x); for the dot product −v [w].

        Of other objectives p = g(e) w with e = u w + x.
        """
        rows, dk = self.rows, self.d_inputs[0]
        dot = rows.network.objective == "dot"
        if not self.plain:
            d_miss = self.d_e
            if rows.weight is not None:
                by_weight = self.d_error * pull(self.e, rows.network.objective, self.tokens.threshold)
                self.shared.weight += self._by_head(by_weight.addcmul_(d_miss, self.written.unit))
                if rows.bias is not None:
                    self.shared.bias += self._by_head(d_miss)
        elif rows.weight is None:
            d_miss = self.d_deltas[-1] if dot else 2.0 * self.d_deltas[-1]
        else:
            d_miss = self.d_error * rows.weight
            miss = inner_residual(rows, self.tokens)
            if not dot:
                d_miss.mul_(2.0)
                miss = 2.0 * miss
                miss.addcmul_(self.written.unit, rows.weight, value=4)
            self.shared.weight += self._by_head(self.d_error * miss)
            if rows.bias is not None and not dot:
                self.shared.bias += self._by_head(d_miss)
        if rows.network.residual and not dot:
            dk = dk + d_miss
        return dk, -d_miss


def summed_to(x: Tensor, like: Tensor) -> Tensor:
    """x summed to the shape of another, never x itself."""
    return x.clone() if x.shape == like.shape else x.sum_to_size(like.shape)
