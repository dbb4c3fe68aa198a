"""Read rows of any length in pieces, and keep the logits of the few places that are asked for."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.config import check_at_least
from titans_lm.evaluate.carried import TRIED, ByCache, goes_on

PIECE = 2048
"""Tokens that are read at once: enough to keep a processor busy, few enough for long rows of a batch."""


@torch.no_grad()
def logits_at(
    model: nn.Module,
    input_ids: Tensor,
    columns: Tensor,
    *,
    piece_len: int = PIECE,
    on_piece: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the logits (B, columns, V) of ascending columns of rows (B, T), read in pieces of `piece_len` tokens.

    Models with a state of ours or a cache of transformers' carry it from piece to piece, so that the memory needed does
    not grow with T beyond what the model itself keeps; the result is that of one pass. Whether a cache does that is
    tried on some tokens first: some models take a prompt only at once, and read whole rows. `on_piece` is told the
    tokens of every piece, and at last of what lies behind the last column, which nobody reads.
    """
    check_at_least("piece_len", piece_len, 1)
    if input_ids.shape[1] > piece_len and not carries(model):
        piece_len = input_ids.shape[1]
    pieces = PieceReader(model)
    kept = []
    last = int(columns[-1]) + 1 if len(columns) else 0
    for start in range(0, last, piece_len):
        piece = input_ids[:, start : start + piece_len]
        here = columns[(columns >= start) & (columns < start + piece_len)] - start
        logits = pieces.read(piece, here if len(here) else torch.zeros_like(columns[:1]))
        if len(here):
            kept.append(logits)
        if on_piece is not None:
            on_piece(piece.numel())
    if on_piece is not None and (rest := input_ids[:, -(-last // piece_len) * piece_len :].numel()):
        on_piece(rest)
    return torch.cat(kept, dim=1)


@torch.no_grad()
def read_all(model: nn.Module, input_ids: Tensor, *, piece_len: int = PIECE) -> Any:
    """Read rows (B, T) in pieces into a cache of transformers' form, and return the output of the last piece."""
    check_at_least("piece_len", piece_len, 1)
    last = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
    if input_ids.shape[1] <= piece_len or not carries(model):
        return model(input_ids=input_ids, use_cache=True, **last)
    output: Any = None
    for piece in input_ids.split(piece_len, dim=1):
        cache = None if output is None else output.past_key_values
        output = model(input_ids=piece, past_key_values=cache, use_cache=True, **last)
    return output


@torch.no_grad()
def carries(model: nn.Module) -> bool:
    """Tell whether a model goes on from piece to piece: ours do, of a cache it is tried."""
    if hasattr(model, "init_state"):
        return True
    if not _takes(model, "past_key_values"):
        return False
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    gives = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None) is not None
    return gives and goes_on(ByCache(model, TRIED // 3, "past_key_values"))


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


class PieceReader:
    """Reads rows piece by piece with any causal language model; what it carries is kept in between."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.carried = model, None
        self.has_state, self.has_cache = hasattr(model, "init_state"), _takes(model, "past_key_values")
        self.keeps = _takes(model, "logits_to_keep")

    def read(self, input_ids: Tensor, columns: Tensor) -> Tensor:
        """Read a piece after those before, and give the logits of some of its columns."""
        extra: dict[str, Any] = {"use_cache": False}
        if self.has_state:
            extra |= {"state": self.carried, "return_state": True}
        elif self.has_cache:
            extra = {"use_cache": True, "past_key_values": self.carried}
        if self.keeps:
            extra["logits_to_keep"] = columns
        output = self.model(input_ids=input_ids, **extra)
        self.carried = output.state if self.has_state else getattr(output, "past_key_values", None)
        return output.logits if self.keeps else output.logits[:, columns]
