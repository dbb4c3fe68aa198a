"""A stack of blocks: hidden states in, hidden states out, state in, state out. It knows no tokens."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titans_lm.blocks import BLOCKS
from titans_lm.config import MEMORY_BLOCKS, SHARING_BLOCKS, BackboneConfig
from titans_lm.layers import (
    Diagnostics,
    ForwardContext,
    Packing,
    RMSNorm,
    Rope,
    device_of,
    init_linear,
    rope_angles,
    weights_at_hand,
)
from titans_lm.memory import NeuralMemory
from titans_lm.memory_rule import MemoryRule
from titans_lm.ops.state import INTEGERS, detach_state, map_state, move_state, state_dtype, state_tensors
from titans_lm.ops.validate import form

Hidden = Float[Tensor, "B T E"]
GRAPHS = 256
"""Graphs of compiled decoding in a process: one for each kind of block and batch size; torch stops at 8 by itself."""


class BackboneState(NamedTuple):
    """What a stack carries between calls: tokens read by each row, and one state per block."""

    position: Int[Tensor, " B"]
    layers: tuple[Any, ...]

    detach = detach_state
    to = move_state


def _run_block(block: nn.Module, x: Hidden, layer: Any, ctx: ForwardContext) -> tuple[Hidden, Any]:
    return block(x, layer, ctx)


@cache
def _compiled_block(backend: str) -> Callable[..., tuple[Hidden, Any]]:
    """Held here and not in a model, which can so be pickled."""
    return torch.compile(_run_block, backend=backend, fullgraph=True, dynamic=False)


_FROZEN: ContextVar[frozenset[int]] = ContextVar("frozen memories", default=frozenset())
_BLOCKS = {"open": 0}
"""How many `frozen_memory` blocks are open, in all threads: compilers can read this, and no context variable."""
_COUNTING = Lock()


@contextmanager
def frozen_memory(model: nn.Module, frozen: bool = True) -> Iterator[None]:
    """Let every memory of a model read and never learn inside the block: θ = η = α = 0, so that M stays (D31).

    All else goes on as before: convolutions, gates of the output, attention. Of a state from outside M and S stay as
    they are; memories that it has cached are not read. A backward pass that makes a retrofitted model's activations
    again belongs inside, too. No module is changed: other threads that use the model go on as they were. While a block
    is open anywhere, no stack can be compiled as one whole graph. With `frozen=False` nothing changes.
    """
    if not frozen:
        yield
        return
    with _COUNTING:
        _BLOCKS["open"] += 1
    token = _FROZEN.set(_FROZEN.get() | {id(module) for module in model.modules()})
    try:
        yield
    finally:
        _FROZEN.reset(token)
        with _COUNTING:
            _BLOCKS["open"] -= 1


def is_frozen(module: nn.Module) -> bool:
    """Whether it is inside of a `frozen_memory` block of its model."""
    return _BLOCKS["open"] > 0 and id(module) in _FROZEN.get()


def reads_embeddings(config: BackboneConfig, place: int) -> bool:
    """Whether a block's memory reads embeddings too: behind another block, unless attention's tokens are its (D56)."""
    name = config.blocks[place]
    shared = config.shared_qkv and name in SHARING_BLOCKS
    return config.memory_reads_embeddings and place > 0 and name in MEMORY_BLOCKS and not shared


def check_compiler(device: torch.device) -> None:
    """Refuse to compile for a CPU on a machine that cannot: ValueError where there is no C++ compiler."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"got no C++ compiler: torch.compile looks for {compiler!r} on a CPU; expected one to be installed "
            "(or named by the environment variable CXX)"
        )


class Backbone(nn.Module):
    """A stack of blocks, of one kind or several, with a final norm.

    `forward(x, state=None, valid=None)` is the one path of training, prefill and decoding: hidden states (B, T, E) and
    the state after earlier tokens go in, hidden states and the state after these go out, so any sequence may be cut
    anywhere. `valid` (B, T) marks real tokens, with padding anywhere; padding moves no state and its output is zero.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        if not isinstance(config, BackboneConfig):
            raise ValueError(
                f"got a {type(config).__name__} for a stack; expected a BackboneConfig, or the backbone_config() of a "
                "TitansConfig"
            )
        self.config = config
        self._kinds = [config.with_architecture(name) for name in config.blocks]
        self.layers = nn.ModuleList(BLOCKS[kind.architecture](kind) for kind in self._kinds)
        reading = [block for place, block in enumerate(self.layers) if reads_embeddings(config, place)]
        for block in reading:
            block.read_embeddings()
        self._embeddings_read = bool(reading)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.checkpoint_every = 1
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        self._layout: list[tuple[int, ...]] | None = None
        self._compiled: str | None = None
        for name, module in self.named_modules():  # said here, as weights may be drawn module by module, in any order
            if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
                module.init_std = (800 * config.num_hidden_layers * module.in_features) ** -0.5
        if config.time_scales == "shifted":
            memories = [module for module in self.modules() if isinstance(module, MemoryRule)]
            for place, memory in enumerate(memories):
                memory.spread(place, len(memories))
        if any(hasattr(weight, "ds_id") and not weight.numel() for weight in self.parameters()):
            raise ValueError(
                "got a model that is made under DeepSpeed ZeRO-3, which takes weights away before they are drawn; "
                "expected a lower stage, or FSDP"
            )
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        """Draw a module's weights: the one place where every parameter of a model gets its first value.

        Linear maps N(0, 1 / fan-in); embeddings N(0, 1 / 4E); maps into the residual stream (o_proj, down_proj)
        N(0, 1 / (800 · blocks · fan-in)), so that no branch drowns the tokens at the start (D22); gate projections
        N(0, 0.02²), their biases as D2 says; the memory as D14 says.
        """
        if isinstance(module, nn.Linear):
            init_linear(module)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5 * module.embedding_dim**-0.5)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def init_state(self, batch_size: int) -> BackboneState:
        """The state at the start of a document, persistent tokens read."""
        start, frozen = self._start(batch_size), is_frozen(self)
        states = []
        for block in self.layers:
            with weights_at_hand(block):
                states.append(block.init_state(batch_size, frozen))
        return start._replace(layers=tuple(states))

    def _start(self, batch_size: int) -> BackboneState:
        """The same without the blocks' states, which each makes for itself where it is given None."""
        if not isinstance(batch_size, INTEGERS) or batch_size < 1:
            raise ValueError(f"got batch_size={batch_size!r}; expected an integer of at least 1")
        position = torch.zeros(batch_size, dtype=torch.int64, device=device_of(self.norm))
        return BackboneState(position, (None,) * len(self.layers))

    def compile_decoding(self, backend: str = "inductor") -> None:
        """Run single tokens through one compiled graph per kind of block, shared by all blocks and places in the text.

        What a token costs in PyTorch is mostly the calling of small operations; `torch.compile` joins them. It compiles
        on the first token (some seconds), again for another batch size, and needs a C++ compiler on a CPU. Training,
        longer calls and `surprise` are not touched. Raises ValueError without a compiler, for memory caching, and for
        full attention, whose state grows and would be compiled again and again.
        """
        if self.config.state_grows:
            raise ValueError(
                "got compile_decoding() of a stack with full attention, whose keys and values grow with every token; "
                "expected blocks with a state of constant size"
            )
        memories = [module for module in self.modules() if isinstance(module, NeuralMemory)]
        caching = next((m.config.memory_caching for m in memories if m.config.memory_caching is not None), None)
        if caching is not None:
            raise ValueError(
                f"got compile_decoding() with memory_caching={caching!r}, whose segments end at "
                "other tokens in every row; expected a model without it"
            )
        if backend == "inductor":
            check_compiler(self.norm.weight.device)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        self._compiled = backend

    def _decodes(self, x: Hidden, is_start: bool, lengths: Tensor | None, told: bool) -> bool:
        """Whether the compiled graph is for this call."""
        alone = x.shape[1] == 1 and not is_start and lengths is None and not told
        return self._compiled is not None and alone and not torch.is_grad_enabled()

    def forward(
        self,
        x: Hidden,
        state: BackboneState | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> tuple[Hidden, BackboneState]:
        """Read hidden states; `diagnostics` receives what it asks for.

        Raises ValueError for an input, a mask or a state that does not belong to this stack or to the batch.
        """
        self._check(x, state, valid)
        told = diagnostics is not None and bool(diagnostics.surprise)
        checkpointed = self.gradient_checkpointing and self.training and torch.is_grad_enabled() and not told
        if checkpointed and self.config.has_memory and self.config.memory_backend == "reference":
            raise ValueError(
                'got gradient checkpointing with memory_backend="reference", whose torch.func gradients torch cannot '
                'recompute; expected memory_backend="auto" or "chunked", which give the same result'
            )
        is_start = state is None
        if x.shape[1] == 0:
            return self._read_nothing(x, state, diagnostics)
        state = self._start(x.shape[0]) if state is None else state
        state = state._replace(position=state.position.to(x.device))  # blocks may lie on several devices
        packing = None
        if valid is not None and not bool(valid.all()):
            packing = Packing.of(valid)
            x = packing.pack(x.masked_fill(~valid[..., None], 0.0))  # a NaN times zero would stay one
        lengths = None if packing is None else packing.lengths
        found = Diagnostics(diagnostics.surprise) if diagnostics is not None and told else None
        decodes = self._decodes(x, is_start, lengths, told)
        if decodes:  # one graph for all places
            places, x = None, x.clone(memory_format=torch.contiguous_format)
        else:
            places = self._host_positions(x, state.position, is_start)
        frozen = is_frozen(self)
        # A copy: compiled graphs would tell a block whose input is the same tensor.
        embeddings = x.clone() if self._embeddings_read else None
        contexts = {
            kind: ForwardContext(state.position, lengths, rope, is_start, places, found, frozen, embeddings)
            for kind, rope in self._ropes(x, state.position, is_start).items()
        }
        run = _compiled_block(self._compiled) if decodes else _run_block
        layers, passed = [], []
        for place, (block, kind, layer) in enumerate(zip(self.layers, self._kinds, state.layers, strict=True)):
            ctx = contexts[kind.has_segments]
            if checkpointed and place % self.checkpoint_every == 0:
                x, layer = self._gradient_checkpointing_func(block, x, layer, ctx)
            else:
                x, layer = run(block, x, layer, ctx)
            layers.append(layer)
            passed.append(x)
        x = passed[-1] = self.norm(x)
        if diagnostics is not None:
            norms = [] if found is None else found.surprise_norms
            for collected, into in ((norms, diagnostics.surprise_norms), (passed, diagnostics.hidden_states)):
                into.extend(collected if packing is None else [packing.unpack(y, valid) for y in collected])
        if packing is not None:
            x = packing.unpack(x, valid)
        after = BackboneState(state.position + (x.shape[1] if lengths is None else lengths), tuple(layers))
        return x, after if decodes else self._compact(after)

    def _read_nothing(
        self, x: Hidden, state: BackboneState | None, diagnostics: Diagnostics | None
    ) -> tuple[Hidden, BackboneState]:
        if diagnostics is not None:
            diagnostics.hidden_states.extend(x for _ in self.layers)
            told = Diagnostics(diagnostics.surprise)
            if told.surprise:  # of no token, in the form of one
                self(x.new_zeros(x.shape[0], 1, x.shape[2]), state, diagnostics=told)
            diagnostics.surprise_norms.extend(norms[:, :0] for norms in told.surprise_norms)
        return x, self.init_state(x.shape[0]) if state is None else state

    def _compact(self, state: BackboneState) -> BackboneState:
        """The state with a tight storage for each tensor: for any other layout the graph would be compiled again."""
        if self._compiled is None or torch.is_grad_enabled():
            return state
        return map_state(lambda x: x.clone(memory_format=torch.contiguous_format), state)

    def _host_positions(self, x: Hidden, position: Int[Tensor, " B"], is_start: bool) -> tuple[int, ...] | None:
        """Where the rows stand, if it is known or can be, looked up once for all blocks (see `ForwardContext`)."""
        if is_start:
            return (0,)
        if torch.compiler.is_compiling():
            return None
        cut = x.shape[1] > 1 and self.config.has_segments  # segments must be found
        return tuple(sorted(set(position.tolist()))) if cut or position.is_cpu else None

    def _ropes(self, x: Hidden, position: Int[Tensor, " B"], is_start: bool) -> dict[bool, Rope]:
        """Angles by whether positions count inside a segment, as far as the blocks need them."""
        c = self.config
        places = torch.arange(x.shape[1], device=x.device)[None]
        if not is_start:
            places = position[:, None] + places
        return {
            inside: rope_angles(places % c.segment_len if inside else places, c.rotary_dim, c.rope_theta, x.dtype)
            for inside in {kind.has_segments for kind in self._kinds}
        }

    def _check(self, x: Tensor, state: BackboneState | None, valid: Tensor | None) -> None:
        E = self.config.hidden_size
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != E or not x.dtype.is_floating_point:
            raise ValueError(f"got hidden states {form(x)}; expected floating point (B, T, E) with E = {E}")
        masks = isinstance(valid, Tensor) and valid.dtype == torch.bool and valid.shape == x.shape[:2]
        if valid is not None and not masks:
            raise ValueError(f"got valid {form(valid)}; expected bool (B, T) = {tuple(x.shape[:2])}")
        if state is not None:
            self._check_state(x, state)

    def forget_layout(self) -> None:
        """Look again at what a state is made of, after settings of a layer have changed."""
        self._layout = None

    def _check_state(self, x: Tensor, state: BackboneState) -> None:
        if not isinstance(state, BackboneState):
            raise ValueError(f"got a state of type {type(state).__name__}; expected BackboneState (see init_state)")
        if self._layout is None:
            with torch.no_grad():
                self._layout = self._shapes(self.init_state(1))
        tensors = state_tensors(state)
        if len(state.layers) != len(self.layers) or self._shapes(state) != self._layout:
            raise ValueError(
                "got the state of another model: its blocks or tensor sizes differ; start from init_state()"
            )
        precision = state_dtype(self.norm.weight.dtype)
        wrong = {dtype for dtype in {y.dtype for y in tensors} if dtype.is_floating_point} - {precision}
        if wrong:
            raise ValueError(f"got a state in {wrong.pop()}; expected {precision}, the precision of this model's state")
        if state.position.shape[0] != x.shape[0]:
            raise ValueError(f"got a state of {state.position.shape[0]} rows and {x.shape[0]} rows of input")

    def _shapes(self, state: BackboneState) -> list[tuple[int, ...]]:
        """Shapes of a state without its batch; full attention's keys and values have no fixed length."""
        shapes = [state.position.shape[1:]]
        for kind, layer in zip(self._kinds, state.layers, strict=True):
            grows = kind.state_grows
            shapes += [x.shape[2:] if grows and x.dim() == 4 else x.shape[1:] for x in state_tensors(layer)]
        return shapes
