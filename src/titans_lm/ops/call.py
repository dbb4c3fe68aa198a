"""A chunked call as values: what it is given, what it keeps for its gradients, and what its groups make on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.chunk_forward import ReadCache, Tokens, Weights, WriteCache
from titans_lm.ops.gates import Adjoint, ChunkGates
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.tiles import System

State = tuple[Weights, Weights, Weights | None]
"""M and S, (B, H, D_in, D_out), and the anchor by rows, (R, D_in, D_out); an anchor of None is M itself."""


def copied(state: State, into: Sequence[Tensor] = (), order: torch.memory_format = torch.contiguous_format) -> State:
    """Copies of a state's tensors, in the given ones as far as they go; `order` is that of new ones in memory."""
    given, parts = iter(into), []
    for part in state:
        copies = []
        for x in part or ():
            buffer = next(given, None)
            copies.append(x.clone(memory_format=order) if buffer is None else buffer.copy_(x))
        parts.append(None if part is None else tuple(copies))
    M, S, anchor = parts
    return M, S, anchor


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass besides its inputs.

    `starts` is the state before every group but the first. `written` and `read` are z_L of the keys at the anchor and
    of the queries, (n R, C, D) for each group: the size of k and of o, and with them the last layer's products are not
    made again. Of a wide memory `parts` are the two of what is read, (n R, C, 2 D) (wide.py). All three are empty where
    the call keeps its inside.
    """

    starts: list[State]
    written: list[Tensor]
    read: list[Tensor]
    parts: list[Tensor]


class Inside(NamedTuple):
    """What a group makes on its way that its gradients need."""

    tokens: Tokens
    gates: list[ChunkGates]
    back: Adjoint | None
    written: WriteCache
    system: System | None
    found: ReadCache


class Inputs(NamedTuple):
    """Everything a gradient may reach.

    Tokens are laid out in chunks, (N, B, C, H, D), k and v of windows with those before each chunk; so are the gates
    (ops/gates.py) and thresholds (N, B, C, H, 1). Weights are (B, H, D_{l−1}, D_l), `initial` is (H, D_{l−1}, D_l) or
    empty. With `roots`, √a (H, P), queries and keys are those that every group makes polynomials of.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Weights
    M: Weights
    S: Weights
    anchor: Weights
    threshold: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    roots: Tensor | None
    initial: Weights

    def flat(self) -> list[Tensor | None]:
        """All tensors in a row, as autograd wants them."""
        return [x for part in self for x in (part if isinstance(part, tuple) else (part,))]

    @classmethod
    def of(cls, flat: Sequence[Tensor | None], L: int, gates: int) -> "Inputs":
        """Undo `flat` for a memory of L layers and so many tensors of gates."""
        start = 3 + gates
        M, S, anchor = [tuple(flat[i : i + L]) for i in range(start, start + 3 * L, L)]
        *parts, initial = *flat[start + 3 * L : start + 3 * L + 4], tuple(flat[start + 3 * L + 4 :])
        return cls(*flat[:3], tuple(flat[3:start]), M, S, anchor, *parts, initial)


@dataclass(frozen=True)
class CallSpec:
    """What a call is besides the tensors of `Inputs`; the tensors of `network` are to be taken from there."""

    network: MemoryNetwork
    present: Tensor | None
    complete: tuple[bool | Tensor, ...]
    anchored: bool
    """Whether the first chunk takes its gradients at `Inputs.anchor`; otherwise at M."""
    surprise: SurpriseSizes
    inside: int | None = None
    """Tokens of a chunk where what is laid out are tiles of them; None where it is the chunks."""
