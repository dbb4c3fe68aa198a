"""What surprised the memory, what still drove it, what it gave up for it, and what the model itself did not expect.

    ‖∇ℓ(M_a; k_t, v_t)‖    momentary: how far the memory was from knowing token t's value by its key    (eq. 8, 12)
    ‖η_t S_{t−1}‖          past: what the surprise of earlier tokens still pushes                       (eq. 10, 14)
    ‖α_t (M_{t−1} − B)‖    forgotten: what it gives up; B = 0, or M_init where forgetting leads there   (eq. 13, D13)
    −log₂ p(token t)       how many bits the model needed for the token, from those before it

The first three are what writing is made of, one number each per block, head and layer of the memory; the last is the
model's own surprise. They are different things and need not agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from titans_lm.config import check_at_least, check_choice
from titans_lm.evaluate.bits_per_byte import bits_of
from titans_lm.evaluate.stream import evaluating, has_state
from titans_lm.streaming.memory import NONE, Memory

Part = Literal["momentary", "past", "forgotten"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Surprise:
    """Surprise along one document of T tokens."""

    tokens: np.ndarray
    """(T,) ids."""
    bits: np.ndarray
    """(T,) bits of each token, from those before it; NaN for the first of all, which nothing predicts."""
    blocks: tuple[np.ndarray, ...]
    """(T, H, L) ‖∇ℓ‖ of each block with a memory: by token, head and layer of the memory."""
    past: tuple[np.ndarray, ...] = ()
    """‖η_t S_{t−1}‖, like `blocks`."""
    forgotten: tuple[np.ndarray, ...] = ()
    """‖α_t (M_{t−1} − B)‖, like `blocks`."""

    def part(self, what: Part = "momentary") -> np.ndarray:
        """One of the three sizes for all blocks, (T, blocks, H, L); ValueError where it was not measured."""
        check_choice("what", what, PARTS)
        sizes = {"momentary": self.blocks, "past": self.past, "forgotten": self.forgotten}[what]
        if not sizes:
            raise ValueError(f"got a Surprise without {what!r}; expected one that measure_surprise has made")
        return np.stack(sizes, axis=1)

    def scale(self, what: Part = "momentary") -> np.ndarray:
        """What a size is measured by: its median over the document, (blocks, H, L), or 1 where that says nothing."""
        middle = np.median(self.part(what), axis=0)
        return np.where((middle > 0.0) & np.isfinite(middle), middle, 1.0)

    def summary(self, what: Part = "momentary") -> np.ndarray:
        """One number per token: a size in multiples of its median over the document, averaged over all memories.

        Sizes of different layers and heads differ by orders of magnitude; each counts the same here.
        """
        return (self.part(what) / self.scale(what)).mean(axis=(1, 2, 3))


def measure_surprise(
    model: nn.Module,
    ids: Sequence[int] | np.ndarray,
    *,
    piece_len: int = 512,
    memory: Memory | None = None,
    on_piece: Callable[[int], None] = lambda _: None,
) -> Surprise:
    """Read one document of any length in pieces and keep what surprised the memory.

    The pieces change nothing but speed; `on_piece` is told after each how many tokens lie behind. With a `memory` the
    ids follow what it has read, as they are, and the first is predicted too; the memory itself stays as it is. Raises
    ValueError for fewer than two tokens (for none, after a memory), for a model without memory, and for a memory of
    several rows.
    """
    check_at_least("piece_len", piece_len, 1)
    tokens = np.asarray(ids).astype(np.int64)
    before = _before(memory)
    if tokens.ndim != 1 or len(tokens) + len(before) < 2 or not len(tokens):
        raise ValueError(
            f"got token ids of shape {tokens.shape}; expected one document of two tokens or more, or "
            "of one after a memory"
        )
    check_surprised(model)
    read = np.concatenate([before, tokens])
    bits, pieces = [np.full(1, np.nan)], []
    with evaluating(model) as device:
        state = None if memory is None else memory.to(device).state
        for start in range(0, len(read), piece_len):
            piece = torch.from_numpy(read[None, start : start + piece_len + 1]).to(device)
            out = model(piece[:, :piece_len], state=state, return_state=True, use_cache=False, output_surprise="parts")
            state, targets = out.state, piece[:, 1:]
            bits.append(bits_of(out.logits[:, : targets.shape[1]], targets)[0])
            pieces.append([size[0].float().cpu().numpy() for size in out.surprise])
            on_piece(min(start + piece_len, len(read)) - len(before))
    found = [np.concatenate(parts)[len(before) :] for parts in zip(*pieces, strict=True)]
    momentary, past, forgotten = (tuple(np.ascontiguousarray(size[..., i]) for size in found) for i in range(3))
    return Surprise(tokens, np.concatenate(bits)[len(before) :], momentary, past, forgotten)


def check_surprised(model: nn.Module) -> None:
    """Refuse a model that has no memory to be surprised: ValueError."""
    config: Any = model.config
    if hasattr(model, "retrofit"):
        raise ValueError(
            f"got a {type(model).__name__} with an adapter, whose memory writes a token once it has left the window; "
            "expected a Titans model, whose memory writes every token as it reads it"
        )
    if not has_state(model) or not config.backbone_config().has_memory:
        raise ValueError(
            f"got a {type(model).__name__} without memory; expected a stack with lmm, mac, mag, mal or tnt in it"
        )


def _before(memory: Memory | None) -> np.ndarray:
    """The token that a memory has read but not written, which comes before all others."""
    if memory is not None and memory.rows != 1:
        raise ValueError(f"got a memory of {memory.rows} rows; expected one row (see Memory.row)")
    waiting = [] if memory is None else [token for token in memory.pending.tolist() if token != NONE]
    return np.array(waiting, dtype=np.int64)
