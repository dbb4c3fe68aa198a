"""What a retrofitted model has read, as a cache or as a value; and rows that begin a text, read as far as may be."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from titans_lm.hf.cache import Call, CroppableCache, TitansCacheLayer
from titans_lm.hf.naming import CACHE
from titans_lm.retrofit.attention import FULL, LayerState, Reach


class RetrofitState(NamedTuple):
    """The states of all layers after `position` (B,) tokens, of the same shapes whatever has been read."""

    position: Int[Tensor, " B"]
    layers: tuple[LayerState, ...]


class Inputs(NamedTuple):
    """What a call of the base reads: ids or embeddings, which of them are real, and where they stand."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None

    @classmethod
    def of(cls, kwargs: dict[str, Any]) -> "Inputs":
        """Find them among a call's arguments; of a mask what concerns tokens read before is left out."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        embeds, places = kwargs.get("inputs_embeds"), kwargs.get("position_ids")
        if places is not None and len(places) == 1:  # of all rows, each of which may be taken apart later
            places = places.expand(len(embeds if ids is None else ids), -1)
        read = cls(ids, embeds, None, places)
        return read if mask is None else read._replace(attention_mask=mask[:, mask.shape[1] - read.length :])

    @property
    def length(self) -> int:
        """How many slots there are."""
        return next(x.shape[1] for x in (self.input_ids, self.inputs_embeds) if x is not None)

    def part(self, tokens: slice) -> dict[str, Tensor]:
        """The arguments of a call of some of its tokens."""
        return {name: x[:, tokens].contiguous() for name, x in self._asdict().items() if x is not None}


class RetrofitCacheLayer(TitansCacheLayer):
    """The `LayerState` of one layer, and the slots it has read, padding included."""

    whole = False
    """Whether a state that is begun has all slots of its window."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hand on the keys and values of the call alone; `attend` knows those before."""
        return key_states, value_states


class RetrofitCache(CroppableCache):
    """What a retrofitted model has read; copy it (`copy.deepcopy`) to go on from one text in several ways.

    With `keep`, so many tokens can be taken back by `crop`.
    """

    def __init__(self, num_layers: int, *, keep: int = 0) -> None:
        super().__init__([RetrofitCacheLayer() for _ in range(num_layers)], keep)

    def read_again(self, model: Any, call: Call, count: int) -> None:
        model(**call.inputs.part(slice(count)), **call.told, **{CACHE: self}, use_cache=True)

    @classmethod
    def around(cls, state: RetrofitState | None, num_layers: int, *, masked: bool) -> "RetrofitCache":
        """Hold a state for one call, or begin one; its rows stand at positions of their own, so no slots count.

        On a CPU, where it costs nothing to look, rows that stand at one place with full windows and sinks are read as
        slots are, without a mask for every row, unless the call has one (`masked`).
        """
        cache = cls(num_layers)
        for index, layer in enumerate(cache.layers):
            layer.whole, layer.state = True, None if state is None else state.layers[index]
        if state is not None and not masked and state.position.is_cpu:
            first, *others = state.position.tolist()
            full = max(kept.shape[1] for layer in state.layers for kept in (layer.k, layer.sink_k))
            if set(others) <= {first} and first >= full:
                for layer in cache.layers:
                    layer.state, layer.seen = layer.state._replace(position=None), first
        return cache

    @property
    def position(self) -> Tensor | None:
        """Tokens that each row has read (B,): all slots where the layers count none of their own."""
        first = self.layers[0]
        if first.state is None or first.state.position is not None:
            return None if first.state is None else first.state.position
        return torch.full((len(first.state.k),), first.seen, device=first.state.k.device)

    @property
    def value(self) -> RetrofitState:
        """The state that a cache of `around` holds."""
        position = self.position
        return RetrofitState(position, tuple(layer.state._replace(position=position) for layer in self.layers))


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
