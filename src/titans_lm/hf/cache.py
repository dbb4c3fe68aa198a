"""What `generate()` calls a cache: the state of the stack, of constant size, that a cache object carries along."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from titans_lm.backbone import BackboneState
from titans_lm.ops.state import detach_state, map_state, repeat_rows, state_bytes, state_tensors, take_rows


class TitansCacheLayer(CacheLayerMixin):
    """One layer in the eyes of transformers, holding the state of the whole stack and the slots it has read."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.keys = self.values = None
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("a Titans cache holds the state of a memory, not keys and values; it fills itself in forward")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("a Titans cache is written by the model's forward, not by update()")

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_seq_length(self, *_: Any) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.state: BackboneState | None = None
        self.seen = 0

    def crop(self, *_: Any) -> None:
        raise ValueError("a memory cannot forget single tokens on request: keep a copy of the cache instead")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = take_rows(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = repeat_rows(self.state, repeats)

    def offload(self) -> None:
        self.state = map_state(lambda x: x.to("cpu", non_blocking=True), self.state)

    def prefetch(self) -> None:
        if self.state is not None and torch.cuda.is_available():
            self.state = map_state(lambda x: x.to("cuda", non_blocking=True), self.state)


class TitansCache(Cache):
    """The state of a Titans model between calls, in the form that `generate()` passes around.

    `state` is the `BackboneState`, detached from the graph; `get_seq_length()` counts the token slots read, padding
    included. Copy it (`copy.deepcopy`) to ask several questions of one memory.
    """

    def __init__(self, state: BackboneState | None = None, seen: int = 0) -> None:
        layer = TitansCacheLayer()
        super().__init__(layers=[layer])
        if state is not None:
            self.store(state, seen)

    @property
    def state(self) -> BackboneState | None:
        return self.layers[0].state

    def store(self, state: BackboneState, tokens: int) -> None:
        """Keep the state after `tokens` more token slots."""
        followed = any(x.requires_grad for x in state_tensors(state))  # seldom while decoding: nothing to cut off
        self.layers[0].state = detach_state(state) if followed else state
        self.layers[0].seen += tokens

    def state_bytes(self) -> int:
        """Bytes that the cache holds."""
        return state_bytes(self.state)
