"""A memory that is read where its errors are taken: at its anchor, the memory at the end of the previous chunk.

Nothing that a chunk writes is read inside it (TNT's global memory; docs/derivation.md, section 15). So all queries of a
chunk read one memory, no token needs to know what it weighs for the others, and a chunk may be long: its products grow
with its tokens and not with their square. What is left of the gates is what tokens weigh at the end.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from titans_lm.ops.chunk_backward import ChunkBackward
from titans_lm.ops.chunk_forward import BatchedNetwork, ChunkStates, ReadCache, by_chunk, halves
from titans_lm.ops.gates import Adjoint, ChunkGates, Gates, by_autograd
from titans_lm.ops.matmul import add_bmm_, bmm
from titans_lm.ops.network import activate_into, activation_grad

LARGEST_GROUP = 2048
"""Tokens of a group of chunks, where a chunk has no more: all that is made for its gradients exists at once."""


def end_gates(
    gates: Gates, present: Bool[Tensor, "n _ 1 C"] | None, adjoint: bool = False
) -> tuple[list[ChunkGates], Adjoint | None]:
    """`chunk_gates` without what is inside a chunk: a and f at its end alone, and no G."""
    return by_autograd(gates, lambda *layer: weights_at_end(*layer, present), adjoint)


def weights_at_end(
    theta: Float[Tensor, "*s C _"],
    eta: Float[Tensor, "*s C _"],
    alpha: Float[Tensor, "*s C _"],
    present: Bool[Tensor, "n _ 1 C"] | None,
) -> ChunkGates:
    """What M_0, S_0 and every gradient of a chunk weigh in M_C and S_C, by products over the tokens that follow.

    Token t leads (M, S) to ((1 − α) M + η S, η S) and then adds −θ u to both. A product of such steps keeps their form,
    (A, F, H): M ← A M + F S, S ← H S. Those over all tokens from t on double in length, as in `interval_products`. A
    place without a token (θ = 0, not `present`) leads to (M, S) itself.
    """
    there = torch.ones_like(eta[..., :1]) if present is None else present.unsqueeze(-1).to(eta.dtype)
    keep, eta, theta = torch.broadcast_tensors(1.0 - alpha, torch.where(there > 0, eta, 1.0), theta)
    A, F, H = keep, eta * there, eta
    length = A.shape[-2]
    for step in (1 << i for i in range((length - 1).bit_length())):
        A_later, F_later, H_later = (_shifted(x, step, one) for x, one in ((A, 1.0), (F, 0.0), (H, 1.0)))
        A, F, H = A_later * A, torch.addcmul(A_later * F, F_later, H), H_later * H
    after = [_shifted(x, 1, one) for x, one in ((A, 1.0), (F, 0.0), (H, 1.0))]
    start = [x[..., :1, :] for x in (A, F, H)]
    return ChunkGates(
        a=start[0], f=start[1], G=A.new_empty(*A.shape[:-2], 0, 0), eta_end=start[2],
        surprise_end=theta * after[2], memory_end=theta * (after[0] + after[1]),
    )  # fmt: skip


def _shifted(x: Tensor, step: int, beyond: float) -> Tensor:
    """x of the position so many later, `beyond` after the last."""
    return torch.cat((x[..., step:, :], torch.full_like(x[..., :step, :], beyond)), dim=-2)


def anchors(states: ChunkStates, layer: int, X: int) -> Tensor:
    """The anchors of a group's X = n R rows, (X, D_in, D_out)."""
    n = X // len(states.at[layer][0])
    if all(states.aliased[:n]):
        return halves(states.both[layer])[0][:X]
    return torch.cat([anchor[layer] for anchor in states.anchors[:n]])


def read_anchors(rows: BatchedNetwork, q: Tensor, states: ChunkStates, kept: Tensor | None = None) -> ReadCache:
    """Read M_a(q) for all chunks of a group, of which `kept` is z_L where it has been made before."""
    found, L = ReadCache([], [], [], [], []), len(states.both)
    x = q
    for layer in range(L):
        if layer > 0:
            x = activate_into(found.pre[-1], torch.empty_like(found.pre[-1]), rows.network.activation)
        again = kept is not None and layer == L - 1
        found.inputs.append(x)
        found.pre.append(kept if again else bmm(x, anchors(states, layer, len(q))))
    return found


class AnchorBackward(ChunkBackward):
    """The gradients of a group that was read at its anchors."""

    def _reads(self, d_out: Tensor, found: ReadCache) -> Tensor:
        dx = dz = self._output(d_out, found.pre[-1])
        for layer in range(self.L - 1, -1, -1):
            g = self.gates[layer]
            self.d_read.insert(0, dz)
            dx = bmm(dz, anchors(self.states, layer, len(dz)).mT)
            self.gate_grads[layer] |= {"a": torch.zeros_like(g.a), "f": torch.zeros_like(g.f)}
            self.d_deltas.insert(0, torch.zeros_like(self.written.deltas[layer]))
            self.d_inputs.insert(0, torch.zeros_like(self.written.inputs[layer]))
            if layer > 0:
                dz = activation_grad(dx, found.pre[layer - 1], torch.empty_like(dx), self.act)
        self.read_t = by_chunk(found.inputs, self.rows.count, transposed=True)
        return dx + d_out if self.rows.network.residual else dx

    def _errors(self, i: int, d_anchor: list[Tensor]) -> None:
        super()._errors(i, d_anchor)
        for layer in range(self.L):
            add_bmm_(d_anchor[layer], self.read_t[layer][i], self.d_read_at[layer][i])
