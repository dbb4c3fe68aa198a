"""What a retrofitted model has read: sinks, window and memory of every layer, as a cache or as a value."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from titans_lm.hf.cache import TitansCacheLayer
from titans_lm.ops.state import state_bytes
from titans_lm.retrofit.attention import LayerState


class RetrofitState(NamedTuple):
    """The states of all layers after `position` (B,) tokens, of the same shapes whatever has been read."""

    position: Int[Tensor, " B"]
    layers: tuple[LayerState, ...]


class RetrofitCacheLayer(TitansCacheLayer):
    """The `LayerState` of one layer, and the slots it has read, padding included."""

    whole = False
    """Whether a state that is begun has all slots of its window."""

    def store(self, state: Any, slots: int) -> None:
        """Keep the state after so many more slots."""
        self.state, self.seen = state, self.seen + slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is laid out beforehand."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hand on the keys and values of the call alone; `attend` knows those before."""
        return key_states, value_states


class RetrofitCache(Cache):
    """What a retrofitted model has read; copy it (`copy.deepcopy`) to go on from one text in several ways."""

    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RetrofitCacheLayer() for _ in range(num_layers)])

    @classmethod
    def around(cls, state: RetrofitState | None, num_layers: int, *, masked: bool) -> "RetrofitCache":
        """Hold a state for one call, or begin one; its rows stand at positions of their own, so no slots count.

        On a CPU, where it costs nothing to look, rows that stand at one place with full windows are read as slots are,
        without a mask for every row, unless the call has one (`masked`).
        """
        cache = cls(num_layers)
        for index, layer in enumerate(cache.layers):
            layer.whole, layer.state = True, None if state is None else state.layers[index]
        if state is not None and not masked and state.position.is_cpu:
            first, *others = state.position.tolist()
            if set(others) <= {first} and first >= max(layer.k.shape[1] for layer in state.layers):
                for layer in cache.layers:
                    layer.state, layer.seen = layer.state._replace(position=None), first
        return cache

    @property
    def value(self) -> RetrofitState:
        """The state that a cache of `around` holds."""
        first = self.layers[0]
        position = first.state.position
        if position is None:
            position = torch.full((len(first.state.k),), first.seen)
        return RetrofitState(position, tuple(layer.state._replace(position=position) for layer in self.layers))

    def state_bytes(self) -> int:
        """Bytes that the cache holds."""
        return sum(state_bytes(layer.state) for layer in self.layers)
