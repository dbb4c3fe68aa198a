"""What a model knows of what it has read, as a value; and memory caching given to a model after its training."""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from titans_lm.backbone import Backbone
from titans_lm.beyond_config import CachingConfig
from titans_lm.checks import check_known
from titans_lm.config import CACHING_BLOCKS
from titans_lm.hf.cache import Call, Places
from titans_lm.memory import NeuralMemory
from titans_lm.ops.state import map_state, state_bytes, state_tensors, take_rows
from titans_lm.tnt import TNTMemory

NONE = -1
"""In `Memory.pending`: this row has no token yet."""
TOLD = ("tokens", "open", "sources")
"""Of a `Memory`, what is told of every row beside its state."""


@dataclass(frozen=True)
class Source:
    """One thing that was read: its name, how far, and hashes to know it again by."""

    name: str
    tokens: int
    """Tokens of it that were read, without those that mark its start and end."""
    bytes: int | None
    """Bytes these stand for, as far as is known."""
    tokens_sha256: str
    """SHA-256 of these tokens, each as 4 bytes, the lowest first."""
    sha256: str | None = None
    """SHA-256 of all its bytes, once it has been read to its end."""
    complete: bool = False


@dataclass(frozen=True)
class Memory:
    """A memory after some text, for one or more rows.

    The last token of every row is known but not yet written: as in every autoregressive model, what follows a text is
    predicted while its last token is read. So `state` holds the row's first tokens − 1 and `pending` the last one, and
    a text can be continued without anything being read twice.
    """

    state: Any
    """The model's: a `BackboneState`, or the `RetrofitState` of one with an adapter."""
    pending: Tensor
    """(B,) the last token of every row, −1 where there is none yet."""
    tokens: tuple[int, ...]
    """Tokens that each row has read, the pending one included."""
    open: tuple[bool, ...]
    """Whether each row stands inside a document."""
    sources: tuple[tuple[Source, ...], ...]
    """What each row has read, in order."""

    @classmethod
    def empty(cls, state: Any) -> "Memory":
        """The memory before the first token."""
        B = state.position.shape[0]
        return cls(state, torch.full((B,), NONE, dtype=torch.int64, device="cpu"), (0,) * B, (False,) * B, ((),) * B)

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return state_bytes(self.state)

    def to(self, device: torch.device | str) -> "Memory":
        """The same memory on another device."""
        return replace(self, state=map_state(lambda x: x.to(device), self.state))

    @classmethod
    def join(cls, memories: "Sequence[Memory]") -> "Memory":
        """The rows of several memories of one model, side by side."""
        if len(memories) == 1:
            return memories[0]
        kinds = {tuple(x.shape[1:] for x in state_tensors(memory.state)) for memory in memories}
        if len(kinds) != 1:
            raise ValueError(f"got memories of {len(kinds)} kinds of states; expected one or more, all of one model")
        state = map_state(lambda *rows: torch.cat(rows), *(memory.state for memory in memories))
        told = {name: tuple(x for memory in memories for x in getattr(memory, name)) for name in TOLD}
        return cls(state, torch.cat([memory.pending for memory in memories]), **told)

    def take(self, rows: Sequence[int]) -> "Memory":
        """Some of the rows, in the order given and as often."""
        rows = list(rows)
        if not rows or not set(rows) <= set(range(self.rows)):
            raise ValueError(f"got rows {rows} of a memory of {self.rows}; expected some of 0 to {self.rows - 1}")
        if rows == list(range(self.rows)):
            return self
        index = torch.tensor(rows, device="cpu")
        told = {name: tuple(getattr(self, name)[row] for row in rows) for name in TOLD}
        return Memory(take_rows(self.state, index), self.pending[index], **told)

    def row(self, index: int) -> "Memory":
        """One row alone."""
        return self.take([index])

    def repeat(self, times: int) -> "Memory":
        """Every row `times` times, next to itself."""
        if times < 1:
            raise ValueError(f"got times={times}; expected at least 1")
        return self.take([row for row in range(self.rows) for _ in range(times)])


class Told(NamedTuple):
    """What a step of reading leaves besides the state, and what it would have left had it ended earlier (D51).

    Whether rows stand inside a document after the step, and what they have read; `left` is that without sources that
    came after the step and had no token. A step of `marks` reads the end of a document, the start of the next, or both.
    One that reads sources has their hashes before it, `hashed`.
    """

    open: tuple[bool, ...]
    sources: tuple[tuple[Source, ...], ...]
    left: tuple[tuple[Source, ...], ...] = ()
    marks: bool = False
    hashed: tuple[Any, ...] | None = None

    def until(self, call: Call, target: Places, before: "Told") -> "Told":
        """The same where rows have read only up to these places, which may lie before the step or behind it."""
        opened, sources, left = [], [], []
        for row, (start, end, place) in enumerate(zip(call.start, call.end, target, strict=True)):
            cut = start < place < end
            done = self if place >= end else self._cut(row, call.inputs[row], place - start) if cut else before
            opened.append(done.open[row])
            sources.append(done.sources[row])
            left.append(done.left[row] if done.left else done.sources[row])
        return self._replace(open=tuple(opened), sources=tuple(sources), left=tuple(left))

    def _cut(self, row: int, tokens: np.ndarray, count: int) -> "Told":
        """The same where a row, of which alone this speaks, stops inside of the step."""
        if self.marks:  # between an end and a start
            return self._replace(open=tuple(False for _ in self.open))
        if self.hashed is None:
            return self
        *earlier, last = (self.left or self.sources)[row]
        digest = self.hashed[row].copy()
        digest.update(tokens[:count].astype("<u4").tobytes())
        read = last.tokens - len(tokens) + count
        cut = tuple((*earlier, Source(last.name, read, None, digest.hexdigest())) for _ in self.sources)
        return self._replace(sources=cut, left=cut)


def with_caching(model: nn.Module, **settings: Any) -> nn.Module:
    """Give the model with memory caching (D52), as another module with the same parameters; `model` is not touched.

    `settings` are those of a config: memory_caching, caching_segment and so on. Segments are weighed by the memory's
    own queries, as there is no map that was trained for it; the open one has the logit `caching_open` besides. In a
    mixed stack lmm, mag and mal have it. `frozen_memory` takes the module that is given, not `model`; `save_pretrained`
    writes the model without caching. Raises ValueError for other settings, and for a model without one of them.
    """
    check_known(CachingConfig, settings)
    settings = {"memory_caching": "grm", **settings}
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, memo=shared)
    found = 0
    for module in other.modules():
        block = getattr(getattr(module, "config", None), "architecture", None)  # None of a layer alone
        able = isinstance(module, NeuralMemory) and not isinstance(module, TNTMemory)
        if able and block in (None, *CACHING_BLOCKS):
            module.config = dataclasses.replace(module.config, **settings)
            found += 1
        if isinstance(module, Backbone):
            module.forget_layout()
            module._compiled = None  # single tokens are read with the settings of before
    if not found:
        raise ValueError(
            f"got caching for a {type(model).__name__} without a memory that can; expected lmm, mag, mal, or a stack "
            "with one of them"
        )
    return other
