"""The values that flow: what a memory knows after the tokens it has read, and a checked call that goes on from it.

State is a value, never a buffer of a module: every function takes one and returns a new one, so a sequence may be cut
anywhere, a state can be kept, compared, forked and saved, and two users of one model never meet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from titans_lm.config import SurpriseSizes
from titans_lm.ops.network import MemoryNetwork

State = TypeVar("State")
Weights = tuple[Float[Tensor, "B H _ _"], ...]
INTEGERS = (int, torch.SymInt, Integral)
"""What a number of rows may be: torch's own while a graph is traced, and NumPy's."""


class MemoryState(NamedTuple):
    """What one memory layer knows after some tokens, one memory per row and head.

    M holds the weights of the memory network and S the surprise with its past, each a tuple of L tensors
    (B, H, D_{l-1}, D_l). `anchor` is M at the end of the previous chunk, where the gradients of this chunk are taken,
    and `offset` (B,) counts the tokens since then, from 0 to chunk_size − 1. `tail` holds keys and values of the last W
    tokens, (B, W, H, D_0) and (B, W, H, D_L), where a window reaches back to them: zero, which writes nothing, before a
    document.
    """

    M: Weights
    S: Weights
    anchor: Weights
    offset: Int[Tensor, " B"]
    tail: tuple[Float[Tensor, "B W H _"], ...] = ()

    def earlier(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens before a call with these, none where no window reaches back."""
        return (self.tail[0], self.tail[1]) if self.tail else (k[:, :0], v[:, :0])

    def detach(self) -> "MemoryState":
        """The same values, without the history that gradients would follow."""
        return detach_state(self)

    def to(self, *args: Any, **kwargs: Any) -> "MemoryState":
        """The state on another device, as `Tensor.to` takes it."""
        return move_state(self, *args, **kwargs)

    @classmethod
    def initial(cls, weights: Sequence[Float[Tensor, "H _ _"]], batch_size: int) -> "MemoryState":
        """Start every row from the same weights (H, D_{l-1}, D_l) with no surprise: M_0 = M_init, S_0 = 0 (D4).

        The state is at least float32 whatever the weights are, and gradients reach the weights through it.
        """
        if not isinstance(weights, tuple | list) or not weights:
            got = "no weights" if isinstance(weights, tuple | list) else f"weights of type {type(weights).__name__}"
            raise ValueError(f"got {got}; expected a tuple of L tensors (H, D_in, D_out)")
        for weight in weights:
            if not isinstance(weight, Tensor) or weight.dim() != 3:
                got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"type {type(weight).__name__}"
                raise ValueError(f"got initial weights of {got}; expected (H, D_in, D_out)")
        if not isinstance(batch_size, INTEGERS) or batch_size < 1:
            raise ValueError(f"got batch_size={batch_size!r}; expected an integer of at least 1")
        M = tuple([w.to(state_dtype(w.dtype)).repeat(batch_size, 1, 1, 1) for w in weights])
        S = tuple(map(torch.zeros_like, M))
        offset = torch.zeros(batch_size, dtype=torch.int64, device=M[0].device)
        return cls(M, S, M, offset)


class PerToken(NamedTuple):
    """What a token brings besides q, k, v and θ, η, α; None where the memory does not ask for it.

    threshold (B, T, H): where its error stops to pull harder. window (B, T, H, c): the shares of the last c tokens'
    errors in what it writes, its own first; state.tail then holds the last c − 1 tokens.
    """

    threshold: Float[Tensor, "B T H"] | None = None
    window: Float[Tensor, "B T H c"] | None = None

    def given(self) -> list[Tensor]:
        """What there is of it."""
        return [x for x in self if x is not None]


PLAIN = PerToken()
"""Of Titans' own memory nothing is asked."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of a state: at least float32, float64 in a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def map_state(fn: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply a function to every tensor of a nested state, or to matching tensors of several states."""
    if isinstance(state, Tensor):
        return fn(state, *others)
    if state is None:
        return None
    if not isinstance(state, tuple):
        raise TypeError(f"got {type(state).__name__} inside a state; expected tensors, tuples and None")
    parts = [map_state(fn, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def state_tensors(state: Any) -> list[Tensor]:
    """Every tensor of a nested state, in order; without a call for each part, since every token asks."""
    found, left = [], [state]
    while left:
        part = left.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif part is not None:
            left.extend(reversed(part))
    return found


def detach_state(state: State) -> State:
    """Cut the graph: the same values, without the history that gradients would follow."""
    return map_state(torch.Tensor.detach, state)


def move_state(state: State, *args: Any, **kwargs: Any) -> State:
    """The state on another device, as `Tensor.to` takes it; counts stay integers where a precision is asked for.

    ValueError for a precision below float32, in which no call would take it.
    """

    def move(x: Tensor) -> Tensor:
        moved = x.to(*args, **kwargs)
        if x.dtype.is_floating_point and moved.dtype not in (x.dtype, torch.float32, torch.float64):
            raise ValueError(
                f"got {moved.dtype} for a state; expected torch.float32 or torch.float64, or a device alone"
            )
        return moved if x.dtype.is_floating_point else moved.to(x.dtype)

    return map_state(move, state)


def take_rows(state: State, index: Int[Tensor, " N"]) -> State:
    """Pick rows of the batch, in any order and as often as asked: beams, forks, one row of many.

    ValueError for rows that are no integers, or that a state on a CPU does not have.
    """
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"got rows {index!r}; expected a tensor of integers (N,), such as torch.tensor([0, 2])")
    try:
        return map_state(lambda x: x.index_select(0, index.to(x.device)), state)
    except IndexError as error:  # raised on CPU; looking first would wait for a GPU
        count = len(state_tensors(state)[0])
        raise ValueError(f"got rows {index.tolist()} of a state; expected numbers from 0 to {count - 1}") from error


def take_places(x: Tensor, places: Int[Tensor, "B N"]) -> Tensor:
    """Pick places of (B, T, …) for every row, in any order: (B, N, …)."""
    return x.gather(1, places.reshape(*places.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def repeat_rows(state: State, times: int) -> State:
    """Repeat every row next to itself, as beam search and several samples per prompt do; ValueError for 0 times."""
    if not isinstance(times, INTEGERS) or times < 1:
        raise ValueError(f"got times={times!r}; expected an integer of at least 1")
    return map_state(lambda x: x.repeat_interleave(times, dim=0), state)


def select_rows(mask: Bool[Tensor, " B"], a: State, b: State) -> State:
    """Take row i from `a` where the mask is true and from `b` elsewhere; ValueError where they do not go together."""

    def pick(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(mask.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, y)

    try:
        return map_state(pick, a, b)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        # looked at only then: tokens pass here one by one
        rows, others = ([tuple(x.shape) for x in state_tensors(state)] for state in (a, b))
        told = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"of type {type(mask).__name__}"
        if rows == others and told == f"torch.bool {rows[0][:1]}":
            raise
        raise ValueError(
            f"got a mask {told} and states whose tensors are {rows[:3]} … and "
            f"{others[:3]} …; expected bool (B,) and two states of one model, of B rows"
        ) from error


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state, each counted in full.

    At a chunk's border M and anchor may be one tensor; a count that noticed would change with the place in the chunk.
    """
    return sum(x.numel() * x.element_size() for x in state_tensors(state))


Outcome = tuple[Tensor, MemoryState, Tensor | None]
"""o (B, T, H, D), the state after the call, and on request the sizes of surprise, (B, T, H, L) or of three parts."""


@dataclass
class Call:
    """What `neural_memory` is given: gates come as one tensor per memory layer, (B, T, H) or (B, T, H, D_{l-1})."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T H D"]
    theta: tuple[Tensor, ...]
    eta: tuple[Tensor, ...]
    alpha: tuple[Tensor, ...]
    state: MemoryState
    network: MemoryNetwork
    chunk_size: int
    valid: Bool[Tensor, "B T"] | None = None
    return_surprise: SurpriseSizes = False
    extra: PerToken = PLAIN

    @property
    def gates(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """θ, η and α."""
        return self.theta, self.eta, self.alpha

    def with_keys(self) -> "Call":
        """The same call of the polynomials that its queries and keys stand for."""
        network, (q, k) = self.network.make_keys(self.q, self.k)
        return replace(self, q=q, k=k, network=network)
