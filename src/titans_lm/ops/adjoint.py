"""A segment of chunks, backward: the gradients of `segment.py` by hand (docs/derivation.md, section 10).

The graph of a call would keep the weights of every chunk. Here the states of one segment at a time are made again from
a checkpoint, all its reads are led back in batched products, and then its chunks, last first, are led back through
their writes. x̄ in the comments is the gradient of the outer loss by x.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_lm.ops.gates import ChunkGates
from titans_lm.ops.network import LAYER_NORM_EPS, curvature, slope_times
from titans_lm.ops.products import add_bmm_, bmm, bmm_into
from titans_lm.ops.segment import (
    Read,
    Rows,
    States,
    Tokens,
    Written,
    by_head,
    flat,
    halves,
    heads_first,
    layer_norm_adjoint,
    misses,
    times_shared,
)


@dataclass
class Carried:
    """Gradients by the state after the chunk at hand, led back chunk by chunk; `anchor` None is zero.

    `both` has those by W and by S as halves, (R, 2 D_in, D_out).
    """

    both: list[Tensor]
    anchor: list[Tensor] | None

    def __post_init__(self) -> None:
        self.W = [halves(x)[0] for x in self.both]
        self.S = [halves(x)[1] for x in self.both]


@dataclass
class Parameters:
    """Gradients by what all chunks share, added up: LayerNorm (R, 1, D) and M_init (H, D_in, D_out).

    What the network lacks is empty and stays so.
    """

    weight: Tensor
    bias: Tensor
    initial: list[Tensor]


class SegmentAdjoint:
    """The gradients of one segment; `run` returns those by q, k, v and by every layer's `ChunkGates`."""

    def __init__(
        self, rows: Rows, tokens: Tokens, gates: list[ChunkGates], states: States, written: Written, shared: Parameters
    ) -> None:
        self.rows, self.tokens, self.gates, self.states, self.written = rows, tokens, gates, states, written
        self.shared = shared
        self.act = rows.network.activation
        self.n, self.L = tokens.q.shape[0], len(gates)
        self.gate_grads: list[dict[str, Tensor]] = [{} for _ in gates]
        self.d_inputs: list[Tensor] = []  # h̄_{l−1}
        self.d_deltas: list[Tensor] = []  # δ̄_l
        self.d_pre = [torch.empty_like(z) for z in written.pre]  # z̄_l, by the errors
        self.d_read: list[Tensor] = []  # z̄_l of the reads

    def run(
        self, d_out: Tensor, found: Read, complete: tuple[bool | Tensor, ...], carried: Carried
    ) -> tuple[Tensor, Tensor, Tensor, list[dict[str, Tensor]]]:
        dq = self._reads(d_out, found)
        self._writes(found, complete, carried)
        dk, dv = self._tokens()
        return dq, dk, dv, self.gate_grads

    # Reads: all chunks at once.

    def _reads(self, d_out: Tensor, found: Read) -> Tensor:
        rows, n = self.rows, self.n
        dz = d_out
        if rows.weight is not None:
            z = found.pre[-1]
            unit, _, rstd = torch.native_layer_norm(z, (z.shape[-1],), None, None, LAYER_NORM_EPS)
            self.shared.weight += (d_out * unit).sum((0, 2)).unsqueeze(1)
            if rows.bias is not None:
                self.shared.bias += d_out.sum((0, 2)).unsqueeze(1)
            dz = layer_norm_adjoint(d_out * rows.weight, unit, rstd)
        dx = dz
        for layer in range(self.L - 1, -1, -1):
            g, x = self.gates[layer], found.inputs[layer]
            self.d_read.insert(0, dz)
            shape = x.shape
            d_both = bmm(flat(dz), flat(self.states.both[layer][:n]).transpose(1, 2))
            d_kept, d_past = d_both.view(*shape[:-1], -1).chunk(2, dim=-1)
            through_init = None
            if rows.leads_to is not None:
                initial = rows.leads_to[layer]
                through_init = times_shared(dz, initial.transpose(1, 2), rows)
                d_kept -= through_init
                forgotten = heads_first(x - found.both[layer][..., : shape[-1]], rows)
                add_bmm_(self.shared.initial[layer], forgotten.transpose(1, 2), heads_first(dz, rows))
            self.gate_grads[layer] |= {
                "a": (d_kept * x).sum_to_size(g.a.shape),
                "f": (d_past * x).sum_to_size(g.f.shape),
            }
            dx = d_kept * g.a if through_init is None else through_init.addcmul_(d_kept, g.a)
            dx.addcmul_(d_past, g.f)
            self._similarity(layer, dz, dx, found)
            if layer > 0:
                dz = slope_times(dx, found.pre[layer - 1], torch.empty_like(dx), self.act)
        return dx + d_out if rows.network.residual else dx

    def _similarity(self, layer: int, dz: Tensor, dx: Tensor, found: Read) -> None:
        """Through −((x hᵀ) ∘ G) Δ; adds to x̄ and begins h̄ and δ̄."""
        g, x, h, delta = self.gates[layer], found.inputs[layer], self.written.inputs[layer], self.written.deltas[layer]
        weighted = found.weighted[layer]
        minus = -flat(dz)
        d_weighted = bmm(minus, flat(delta).transpose(1, 2)).view(weighted.shape)
        self.d_deltas.insert(0, bmm(flat(weighted).transpose(1, 2), minus).view(delta.shape))
        dh, self.gate_grads[layer]["G"] = similarity_adjoint(d_weighted, found.raw[layer], x, h, g.G, dx)
        self.d_inputs.insert(0, dh)

    # Writes: last chunk first.

    def _writes(self, found: Read, complete: tuple[bool | Tensor, ...], carried: Carried) -> None:
        self._prepare()
        for i in range(self.n - 1, -1, -1):
            self._leave_anchor(complete[i], carried)
            for layer in range(self.L):
                self._advance(layer, i, carried)
                add_bmm_(carried.both[layer], found.both[layer][i].transpose(1, 2), self.d_read[layer][i])
            if self.states.aliased[i]:
                target = carried.W
                if carried.anchor is not None:
                    for dW, dA in zip(carried.W, carried.anchor, strict=True):
                        dW += dA
                    carried.anchor = None
            else:
                if carried.anchor is None:
                    carried.anchor = [torch.zeros_like(w) for w in carried.W]
                target = carried.anchor
            self._errors(i, target)
        self._ends()

    def _ends(self) -> None:
        """What tokens weigh at the ends of chunks, from what the loop has left."""
        for layer, g in enumerate(self.gates):
            h, grads = self.written.inputs[layer], self.gate_grads[layer]
            to_memory, to_surprise = self.d_scaled[layer].chunk(2, dim=-1)
            grads["memory_end"] = (to_memory * h).sum_to_size(g.memory_end.shape)
            grads["surprise_end"] = (to_surprise * h).sum_to_size(g.surprise_end.shape)
            for name in ("a", "f"):
                grads[name][:, :, -1:] += grads.pop(f"{name}_end").transpose(2, 3)
            grads["eta_end"] = grads["eta_end"].transpose(2, 3)

    def _prepare(self) -> None:
        """What the loop over chunks needs and no state: for all chunks at once."""
        w = self.written
        self.d_scaled = [torch.empty_like(x) for x in w.scaled]
        for g, grads in zip(self.gates, self.gate_grads, strict=True):
            for name, like in (("a_end", g.a), ("f_end", g.f), ("eta_end", g.eta_end)):
                grads[name] = like.new_empty(self.n, like.shape[1], like.shape[-1], 1)
        ones = [torch.ones_like(z) for z in w.pre[:-1]]
        self.slopes = [slope_times(one, z, one, self.act) for one, z in zip(ones, w.pre, strict=False)]
        curves = [curvature(z, self.act) for z in w.pre[:-1]]
        self.bends = [None if c is None else c.mul_(y) for c, y in zip(curves, w.back, strict=True)]
        self.d_back = [torch.empty_like(y) for y in w.back]
        if self.rows.weight is not None:
            self.d_error = torch.empty_like(w.error)
            self.scale = 2.0 * self.rows.weight * self.rows.weight
            self.error_scaled = w.rstd * w.error
            self.unit_scaled = w.rstd * w.unit
            self.unit_part = w.rstd * (w.error * w.unit).mean(-1, keepdim=True)

    @staticmethod
    def _leave_anchor(complete: bool | Tensor, carried: Carried) -> None:
        """The anchor after a complete chunk is the memory it left."""
        if carried.anchor is None:
            return
        if isinstance(complete, Tensor):
            for dW, dA in zip(carried.W, carried.anchor, strict=True):
                dW += torch.where(complete, dA, 0.0)
                dA.masked_fill_(complete, 0.0)
        elif complete:
            for dW, dA in zip(carried.W, carried.anchor, strict=True):
                dW += dA
            carried.anchor = None

    def _advance(self, layer: int, i: int, carried: Carried) -> None:
        """Through W ← a W + f S [+ (1 − a) W_init] − (h ∘ memory_end)ᵀ δ and S ← η_end S − (h ∘ surprise_end)ᵀ δ."""
        g, grads = self.gates[layer], self.gate_grads[layer]
        dW, dS = carried.W[layer], carried.S[layer]
        W, S = self.states.W[layer][i], self.states.S[layer][i]
        minus = -self.written.deltas[layer][i]
        d_scaled = bmm_into(minus, carried.both[layer].transpose(1, 2), self.d_scaled[layer][i])
        d_memory, d_surprise = d_scaled.chunk(2, dim=-1)
        self.d_inputs[layer][i].addcmul_(d_memory, g.memory_end[i]).addcmul_(d_surprise, g.surprise_end[i])
        add_bmm_(self.d_deltas[layer][i], self.written.scaled[layer][i], carried.both[layer], alpha=-1)
        a, f, e = (x[i, :, -1:].transpose(1, 2) for x in (g.a, g.f, g.eta_end))
        product = dW * W
        if self.rows.leads_to is not None:
            initial = self.rows.leads_to[layer]
            by_head(product, self.rows).addcmul_(by_head(dW, self.rows), initial, value=-1)
            self.shared.initial[layer].add_(by_head(dW * (1.0 - a), self.rows).sum(0))
        grads["a_end"][i] = product.sum_to_size(a.shape)
        grads["f_end"][i] = torch.mul(dW, S, out=product).sum_to_size(f.shape)
        grads["eta_end"][i] = torch.mul(dS, S, out=product).sum_to_size(e.shape)
        dS.mul_(e).addcmul_(dW, f)
        dW.mul_(a)

    def _errors(self, i: int, d_anchor: list[Tensor]) -> None:
        """Through the errors of chunk i: δ̄ and h̄ become z̄, and gradients by the anchor."""
        w, anchor, L = self.written, self.states.anchors[i], self.L
        d_delta = self.d_deltas[0][i]
        for layer in range(L - 1):  # δ_l = (δ_{l+1} W_{l+1}ᵀ) ∘ φ'(z_l)
            bend = self.bends[layer]
            if bend is None:
                self.d_pre[layer][i].zero_()
            else:
                torch.mul(d_delta, bend[i], out=self.d_pre[layer][i])
            d_back = torch.mul(d_delta, self.slopes[layer][i], out=self.d_back[layer][i])
            add_bmm_(d_anchor[layer + 1], d_back.transpose(1, 2), w.deltas[layer + 1][i])
            d_delta = add_bmm_(self.d_deltas[layer + 1][i], d_back, anchor[layer + 1])
        self._last_error(i, d_delta)
        for layer in range(L - 1, 0, -1):
            d_z = self.d_pre[layer][i]
            add_bmm_(d_anchor[layer], w.inputs[layer][i].transpose(1, 2), d_z)
            d_h = add_bmm_(self.d_inputs[layer][i], d_z, anchor[layer].transpose(1, 2))
            self.d_pre[layer - 1][i].addcmul_(d_h, self.slopes[layer - 1][i])
        add_bmm_(d_anchor[0], w.inputs[0][i].transpose(1, 2), self.d_pre[0][i])
        add_bmm_(self.d_inputs[0][i], self.d_pre[0][i], anchor[0].transpose(1, 2))

    def _last_error(self, i: int, g: Tensor) -> None:
        """Through δ_L: with a LayerNorm through its backward pass, δ = r (p − ⟨p⟩ − u ⟨p u⟩), ⟨·⟩ the mean.

        p̄ = r (g − ⟨g⟩ − u ⟨g u⟩),   ū = −r (g ⟨p u⟩ + p ⟨g u⟩) + p̄ ∂p/∂u,   z̄ = r (ū − ⟨ū⟩ − u ⟨ū u⟩) − r u ⟨g δ⟩
        """
        dot = self.rows.network.objective == "dot"
        if self.rows.weight is None:
            if dot:
                self.d_pre[-1][i].zero_()
            else:
                torch.mul(g, 2.0, out=self.d_pre[-1][i])
            return
        w = self.written
        rstd, unit = w.rstd[i], w.unit[i]
        d_error = layer_norm_adjoint(g, unit, rstd)
        self.d_error[i] = d_error
        d_unit = g * self.unit_part[i]
        d_unit.addcmul_(self.error_scaled[i], (g * unit).mean(-1, keepdim=True)).neg_()
        if not dot:
            d_unit.addcmul_(d_error, self.scale)
        d_z = layer_norm_adjoint(d_unit, unit, rstd)
        d_z.addcmul_(self.unit_scaled[i], (g * w.deltas[-1][i]).mean(-1, keepdim=True), value=-1)
        self.d_pre[-1][i] = d_z

    # Keys, values and the LayerNorm: all chunks at once.

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """p = 2 (u w + x) w with x = [k +] [bias] − v without a LayerNorm 2 (z + x); for the dot product −v [w]."""
        rows, dk = self.rows, self.d_inputs[0]
        dot = rows.network.objective == "dot"
        if rows.weight is None:
            d_miss = self.d_deltas[-1] if dot else 2.0 * self.d_deltas[-1]
        else:
            d_miss = self.d_error * rows.weight
            miss = misses(rows, self.tokens)
            if not dot:
                d_miss.mul_(2.0)
                miss = 2.0 * miss
                miss.addcmul_(self.written.unit, rows.weight, value=4)
            self.shared.weight += (self.d_error * miss).sum((0, 2)).unsqueeze(1)
            if rows.bias is not None and not dot:
                self.shared.bias += d_miss.sum((0, 2)).unsqueeze(1)
        if rows.network.residual and not dot:
            dk = dk + d_miss
        return dk, -d_miss


def similarity_adjoint(
    d_weighted: Tensor, raw: Tensor | None, x: Tensor, h: Tensor, G: Tensor, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Through (x hᵀ) ∘ G, whose gradient is used up: adds to x̄, and returns h̄ and Ḡ."""
    if raw is not None:
        d_G = d_weighted * raw
        d_weighted.mul_(G)
        add_bmm_(dx.view(-1, *dx.shape[2:]), flat(d_weighted), flat(h))  # in place: no copy of x̄ will do
        return bmm(flat(d_weighted).transpose(1, 2), flat(x)).view(h.shape), d_G
    through_x = torch.einsum("nrtj,nrdtj->nrtjd", d_weighted, G)
    dx += torch.einsum("nrtjd,nrjd->nrtd", through_x, h)
    dh = torch.einsum("nrtjd,nrtd->nrjd", through_x, x)
    return dh, torch.einsum("nrtj,nrtd,nrjd->nrdtj", d_weighted, x, h)
