"""What `generate()` calls a cache: sinks, window and memory of every layer, of constant size."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from titans_lm.hf.cache import TitansCacheLayer
from titans_lm.ops.state import state_bytes


class RetrofitCacheLayer(TitansCacheLayer):
    """The `LayerState` of one layer, and the slots it has read, padding included."""

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

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RetrofitCacheLayer() for _ in range(num_layers)])

    def state_bytes(self) -> int:
        """Bytes that the cache holds."""
        layers: list[Any] = self.layers
        return sum(state_bytes(layer.state) for layer in layers)
