"""What the memory found surprising: for every token, the size of the gradient that it wrote with, and its own cost.

    ‖∇ℓ(M; k_t, v_t)‖     how far the memory was from knowing token t's value by its key      (eq. 8, 12)
    −log₂ p(token t)      how many bits the model needed for the token, from those before it

The first is what drives the writing, one number per block, head and layer of the memory; the second is the model's own
surprise. They are two things and need not agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from titans_lm.config import check_at_least
from titans_lm.train.heldout import LN2


@dataclass(frozen=True)
class Surprise:
    """Surprise along one document of T tokens."""

    tokens: np.ndarray
    """(T,) ids."""
    bits: np.ndarray
    """(T,) bits of each token, from those before it; NaN for the first, which nothing predicts."""
    blocks: tuple[np.ndarray, ...]
    """(T, H, L) ‖∇ℓ‖ of each block with a memory: by token, head and layer of the memory."""

    def summary(self) -> np.ndarray:
        """One number per token: ‖∇ℓ‖ in multiples of its median over the document, averaged over all memories.

        Gradients of different layers and heads differ in size by orders of magnitude; each counts the same here.
        """
        series = np.concatenate([block.reshape(len(self.tokens), -1) for block in self.blocks], axis=1)
        middle = np.median(series, axis=0)
        return (series / np.where(middle > 0.0, middle, 1.0)).mean(axis=1)


@torch.no_grad()
def measure_surprise(model: nn.Module, ids: Sequence[int] | np.ndarray, *, piece_len: int = 512) -> Surprise:
    """Read one document of any length in pieces and keep what surprised the memory.

    The pieces change nothing but speed. Raises ValueError for fewer than two tokens and for a model without memory.
    """
    check_at_least("piece_len", piece_len, 1)
    tokens = np.asarray(ids).astype(np.int64)
    if tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(f"got token ids of shape {tokens.shape}; expected one document of two tokens or more")
    config: Any = model.config
    if not hasattr(model, "init_state") or not config.backbone_config().has_memory:
        raise ValueError(f"got a {type(model).__name__} without memory; expected lmm, mac, mag or mal")
    device = next(model.parameters()).device
    was_training, state = model.training, None
    model.eval()
    bits, pieces = [np.full(1, np.nan)], []
    try:
        for start in range(0, len(tokens), piece_len):
            piece = torch.from_numpy(tokens[None, start : start + piece_len + 1]).to(device)
            out = model(piece[:, :piece_len], state=state, return_state=True, use_cache=False, output_surprise=True)
            state = out.state
            targets = piece[0, 1:]
            nats = nn.functional.cross_entropy(out.logits[0, : len(targets)].float(), targets, reduction="none")
            bits.append((nats / LN2).cpu().numpy())
            pieces.append([size[0].float().cpu().numpy() for size in out.surprise])
    finally:
        model.train(was_training)
    blocks = tuple(np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return Surprise(tokens, np.concatenate(bits), blocks)
