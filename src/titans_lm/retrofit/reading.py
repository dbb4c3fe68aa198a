"""Rows that begin a text, read by a retrofitted model as far as it may see: what training and evaluation share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from titans_lm.retrofit.attention import FULL, Reach

PIECE = 256
"""Positions whose logits are made at once: a whole row's would be larger than the model."""


def hidden(model: Any, ids: Int[Tensor, "B T"], reach: Reach) -> Float[Tensor, "B T E"]:
    """The last hidden states of rows that begin a text."""
    return model.base_model(input_ids=ids, use_cache=False, reach=reach).last_hidden_state


@torch.no_grad()
def nats(model: Any, ids: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], reach: Reach) -> Float[Tensor, "B T"]:
    """What every target costs, in nats."""
    head, h = model.get_output_embeddings(), hidden(model, ids, reach)
    parts = zip(h.split(PIECE, 1), targets.split(PIECE, 1), strict=True)
    return torch.cat(
        [F.cross_entropy(head(part).mT.float(), target, reduction="none") for part, target in parts], dim=1
    )


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a base that makes logits otherwise than by its head alone: they are made here piece by piece."""
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % model.config.vocab_size
    logits = model(input_ids=ids, use_cache=False, reach=FULL).logits
    found = model.get_output_embeddings()(hidden(model, ids, FULL))
    if not torch.allclose(found, logits, rtol=1e-3, atol=1e-3 * float(found.abs().max())):
        raise ValueError(f"got a {type(model).__name__}, which scales or caps its logits; expected a plain head")


@contextmanager
def as_base(model: Any) -> Iterator[None]:
    """Leave out LoRA inside the block, where there is one; what is said about memory says the `Reach`."""
    lora = model.retrofit.lora_rank > 0
    if lora:
        model.disable_adapters()
    try:
        yield
    finally:
        if lora:
            model.enable_adapters()
