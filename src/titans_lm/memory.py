"""The neural long-term memory as a layer: projections and gates, the op, and a gated output."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from titans_lm.caching import CachedMemories, Recall, write_in_segments
from titans_lm.config import MemoryConfig, SurpriseSizes
from titans_lm.layers import (
    Diagnostics,
    JoinedMaps,
    Linear,
    Packing,
    RMSNorm,
    Streams,
    check_precision,
    join_maps,
    length_mask,
    make_short_convs,
    make_streams,
    project_and_convolve,
)
from titans_lm.memory_rule import GateProjection, Hidden, JoinedGates, MemoryRule, PolynomialKeys, join_gates
from titans_lm.ops import MemoryNetwork, MemoryState, read
from titans_lm.ops.fused import gated_linear, rms_norm, unit_norm, unit_qkv
from titans_lm.ops.state import detach_state, move_state, state_dtype
from titans_lm.ops.validate import form
from titans_lm.shards import LocalMemories

_NO_STATE = (
    pickle.UnpicklingError, RuntimeError, EOFError, KeyError, IndexError, ValueError, AttributeError, TypeError,
)  # fmt: skip
"""What torch raises for files of something else."""


class LayerState(NamedTuple):
    """What a memory layer carries: the memory itself, the last inputs of its convolutions, and other memories.

    These are cached ones, or those of the open shard.
    """

    memory: MemoryState
    conv: tuple[Tensor, ...]
    cached: CachedMemories | None = None
    local: LocalMemories | None = None

    detach = detach_state
    to = move_state

    def save(self, path: str | os.PathLike) -> None:
        """Write the state to a file, without the history that gradients would follow."""
        whole = os.path.realpath(path)
        part = f"{whole}.part"  # what is there stays whole until all is written
        try:
            torch.save(self.detach(), part)
            os.replace(part, whole)
        finally:
            Path(part).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> "LayerState":
        """Read what `save` wrote, running no code; ValueError for a file of something else, or no such device."""
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"got device={str(device)!r}; expected one that this machine has") from error
        try:
            state = torch.load(path, map_location=device, weights_only=True)
        except _NO_STATE as error:
            raise ValueError(f"got {path}, which holds no state: expected a file that LayerState.save wrote") from error
        if not isinstance(state, cls):
            raise ValueError(f"got {path} with a {type(state).__name__}; expected a file that LayerState.save wrote")
        return state


class Prepared(NamedTuple):
    """A layer's parameters as its calls need them, put together once for all segments of a text."""

    maps: JoinedMaps | None
    gates: JoinedGates | None
    op: Callable[..., tuple]
    reader: MemoryNetwork


# Once, as the list is that of all threads.
torch.serialization.add_safe_globals([CachedMemories, LayerState, LocalMemories, MemoryState])


class NeuralMemory(MemoryRule):
    """A memory that learns while it reads, at inference too: one network per row and head, whose weights are the state.

        q, k, v = conv(x W_Q), conv(x W_K), conv(x W_V)      SiLU after the convolution; ‖q‖ = ‖k‖ = 1
        θ, η, α = gates(x)                                   each bounded, θ and η together             (D2, D10)
        o, M    = memory(q, k, v, θ, η, α, M)                write, then read                           (eq. 11–15)
        y       = (RMSNorm(o) ∘ σ(x W_G)) W_O

    `forward(x, state=None)` takes and returns (B, T, E) and a state of constant size, so any sequence may be cut
    anywhere. M_init and every gate are trained through the write path. It is made of a `MemoryConfig` or of the
    settings themselves:

        memory = NeuralMemory(hidden_size=64, num_attention_heads=4)
        y, state = memory(x)                            x, y (B, T, 64)
        more, state = memory(following, state)          goes on after x
    """

    def __init__(self, config: MemoryConfig | None = None, **settings: Any) -> None:
        """Set it up from a config, or from the settings of one; ValueError for both at once, or an unknown setting."""
        if config is None:
            config = MemoryConfig(**settings)
        elif settings:
            raise ValueError(f"got a config and {', '.join(settings)}; expected a config or settings, not both")
        if not isinstance(config, MemoryConfig):
            raise ValueError(f"got config={config!r}; expected a MemoryConfig, or settings such as hidden_size=64")
        super().__init__(config)
        E = config.hidden_size
        self.q_proj = Linear(E, E, bias=False)
        self.k_proj = Linear(E, E, bias=False)
        self.v_proj = Linear(E, E, bias=False)
        self.gate_proj = Linear(E, E, bias=False)
        self.gate_proj.init_std = 0.02  # the gate starts half open for every token, and learns whom to let through
        self.o_proj = Linear(E, E, bias=False)
        self.recall_proj = Linear(E, E, bias=False) if config.memory_caching in ("grm", "ssc") else None
        self.open_logit = None if self.recall_proj is None else nn.Parameter(torch.empty(config.num_attention_heads))
        self.convs = make_short_convs(
            self.q_proj, self.k_proj, config.conv_size, config.induction_init, config.lookahead_values
        )
        self.add_parts()
        self.key_map = PolynomialKeys(config) if config.key_degree > 1 else None
        self.o_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the norm, and the weight of the open segment among cached ones."""
        super().reset_parameters()
        if self.open_logit is not None:
            nn.init.constant_(self.open_logit, self.config.caching_open)

    @property
    def reader(self) -> MemoryNetwork:
        """The same network for `read`, which writes nothing and so needs no M_init to forget to."""
        return MemoryNetwork(
            self.config.memory_activation, self.config.use_residual, self.norm_weight, self.norm_bias,
            coefficients=self.coefficients,
        )  # fmt: skip

    @property
    def coefficients(self) -> Tensor | None:
        return None if self.key_map is None else self.key_map(None)

    def init_state(self, batch_size: int) -> LayerState:
        """The state before the first token: M_init in every row, no surprise."""
        memory, c = self.initial_memory(batch_size), self.config
        cached = None if c.memory_caching is None else CachedMemories.empty(memory.M, c.caching_slots)
        return LayerState(memory, tuple(conv.init_tail(batch_size) for conv in self.convs), cached)

    def normed(self, i: int, y: Hidden) -> Float[Tensor, "B T H D"]:
        """q, k or v by heads with its norm: ‖q‖ = ‖k‖ = 1, and v of unit RMS (D15)."""
        y = y.unflatten(-1, (self.config.num_attention_heads, -1)).to(state_dtype(y.dtype))
        return unit_norm(y) if i < 2 else rms_norm(y, None, self.config.norm_eps)

    def prepare(self, tokens: int, surprise: SurpriseSizes = False) -> Prepared:
        """What a call of so many tokens needs, however it is cut."""
        maps = None if tokens == 1 else join_maps((self.q_proj, self.k_proj, self.v_proj), self.convs)
        gates = join_gates(self.theta_proj, self.eta_proj, self.alpha_proj)
        return Prepared(maps, gates, self.op(surprise), self.reader)

    def streams(
        self,
        x: Hidden,
        tails: tuple[Tensor, ...],
        lengths: Int[Tensor, " B"] | None,
        maps: JoinedMaps | None = None,
    ) -> Streams:
        """q, k and v before their norms, as far as it goes together; attention may share them (D41)."""
        return make_streams(x, (self.q_proj, self.k_proj, self.v_proj), self.convs, tails, lengths, maps)

    def norm_streams(self, streams: Streams) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by heads with their norms."""
        y = streams.together
        if y is None:
            return self.normed(0, streams.q), self.normed(1, streams.k), self.normed(2, streams.v)
        y = y.unflatten(-1, (3, self.config.num_attention_heads, -1)).to(state_dtype(y.dtype))
        return unit_qkv(y, self.config.norm_eps)

    def forward(
        self,
        x: Hidden,
        state: LayerState | None = None,
        lengths: Int[Tensor, " B"] | None = None,
        diagnostics: Diagnostics | None = None,
        frozen: bool = False,
        streams: Streams | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        caching: bool = True,
    ) -> tuple[Hidden, LayerState]:
        """Read (B, T, E) into the memory and answer every token from the memory it has just changed.

        `valid` (B, T) marks real tokens, with padding anywhere, whose output is zero; `lengths` (B,) are the real
        tokens of right-padded rows. `diagnostics` receives the norms of surprise that it asks for. With `frozen`
        nothing is written and nothing forgotten: M and S stay, and cached memories are not read. `streams` are those of
        x after the state's tails, where the caller has made them already. Without `caching` these tokens are of no
        cached segment and see none, as those before a document. Raises ValueError for an input, a mask or a state of
        another form.
        """
        self._check(x, state, lengths, valid)
        if valid is not None:
            if streams is not None:
                raise ValueError("got both valid and streams; expected lengths beside streams, which stand in order")
            packing = Packing.of(valid)
            packed = packing.pack(x.masked_fill(~valid[..., None], 0.0))
            found = None if diagnostics is None else Diagnostics(diagnostics.surprise)
            # not self(…): hooks of the layer are called once
            y, state = self.forward(packed, state, packing.lengths, found, frozen, caching=caching)
            if diagnostics is not None and found is not None:
                diagnostics.surprise_norms.extend(packing.unpack(norms, valid) for norms in found.surprise_norms)
            return packing.unpack(y, valid), state
        state = self.init_state(x.shape[0]) if state is None else state
        surprise = False if diagnostics is None else diagnostics.surprise
        cached, state = state.cached, state if caching else state._replace(cached=None)
        o, state, norms = self.write(x, state, lengths, surprise, frozen, streams)
        state = state if caching else state._replace(cached=cached)
        if diagnostics is not None and norms is not None:
            diagnostics.surprise_norms.append(norms)
        return self.project_output(o, self.gate_proj(x)), state

    def _check(self, x: Tensor, state: Any, lengths: Tensor | None, valid: Tensor | None) -> None:
        """Refuse what `forward` cannot mean; the op looks at the rest of the state."""
        E = self.config.hidden_size
        if not isinstance(x, Tensor):
            raise ValueError(f"got x of type {type(x).__name__}; expected a tensor, and a state after it")
        if x.dim() != 3 or x.shape[-1] != E or not x.dtype.is_floating_point:
            raise ValueError(f"got x {x.dtype} {tuple(x.shape)}; expected floating point (B, T, E) with E = {E}")
        check_precision(x, self.q_proj.weight.dtype)
        B, T, _ = x.shape
        if state is not None:
            self._check_state(state, B)
        masks = isinstance(valid, Tensor) and valid.dtype == torch.bool and valid.shape == (B, T) and lengths is None
        if valid is not None and not masks:
            raise ValueError(f"got valid {form(valid)}; expected bool (B, T) = ({B}, {T}), without lengths")
        if lengths is None:
            return
        counts = isinstance(lengths, Tensor) and lengths.shape == (B,) and not lengths.dtype.is_floating_point
        if not counts or lengths.dtype == torch.bool:
            raise ValueError(f"got lengths {form(lengths)}; expected integers (B,) = ({B},)")
        if lengths.is_cpu and not torch.compiler.is_compiling() and not bool(((lengths >= 0) & (lengths <= T)).all()):
            raise ValueError(f"got lengths {lengths.tolist()}; expected 0 to T = {T}")

    def _check_state(self, state: Any, rows: int) -> None:
        """Refuse a state of another layer or batch, by what it carries besides one memory."""
        if not isinstance(state, LayerState):
            raise ValueError(f"got a state of type {type(state).__name__}; expected LayerState (see init_state)")
        tails, convs = state.conv, self.convs
        if len(tails) != len(convs) or not all(c.fits(tail, rows) for c, tail in zip(convs, tails, strict=True)):
            got, expected = ([tuple(tail.shape) for tail in found] for found in (tails, self.init_state(rows).conv))
            raise ValueError(
                f"got a state with tails of shapes {got}; expected {expected}, as this layer and x have: a state "
                "belongs to one batch and one conv_size"
            )
        if not self._has_form_of(state):
            raise ValueError("got a state of another form; expected one of this layer's: start from init_state()")

    def _has_form_of(self, state: LayerState) -> bool:
        """Whether a state has what this layer carries besides one memory, and no more."""
        c, slots = self.config, None if state.cached is None else state.cached.tokens.shape[1]
        return state.local is None and slots == (None if c.memory_caching is None else c.caching_slots)

    def write(
        self,
        x: Hidden,
        state: LayerState,
        lengths: Int[Tensor, " B"] | None = None,
        surprise: SurpriseSizes = False,
        frozen: bool = False,
        streams: Streams | None = None,
        prepared: Prepared | None = None,
    ) -> tuple[Float[Tensor, "B T H D"], LayerState, Tensor | None]:
        """`forward` up to what the memory answers, which `project_output` makes the output of; norms of surprise."""
        if prepared is None:
            prepared = self.prepare(x.shape[1] if streams is None else 1, surprise)
        streams = self.streams(x, state.conv, lengths, prepared.maps) if streams is None else streams
        valid = length_mask(lengths, x.shape[1])
        o, state, norms = self.learn(x, self.norm_streams(streams), state, valid, surprise, frozen, prepared)
        return o, state._replace(conv=streams.tails), norms

    def learn(
        self,
        x: Hidden,
        tokens: tuple[Tensor, Tensor, Tensor],
        state: LayerState,
        valid: Bool[Tensor, "B T"] | None,
        surprise: SurpriseSizes,
        frozen: bool,
        prepared: Prepared,
    ) -> tuple[Float[Tensor, "B T H D"], LayerState, Tensor | None]:
        """Write q, k, v of the tokens x and answer them; the real ones come first in every row."""
        q, k, v = tokens
        theta, eta, alpha = self.gates(x, k, frozen, prepared.gates)
        extra = self.per_token(x, k)
        by_key = k, q if self.recall_proj is None else self.recall_proj(x).unflatten(-1, q.shape[2:]).to(q.dtype)
        kept = None
        if self.config.decay_first and not frozen:
            # ∇ at (1 − α) M: (1 − α) M + 2 θ kᵀ (v − k (1 − α) M) is the write of θ (1 − α) and v / (1 − α) at M.
            kept = 1.0 - alpha
            theta, v = kept * theta, v / kept
        op, cached = prepared.op, state.cached
        given = q, k, v, theta, eta, alpha
        if cached is None or frozen or not x.shape[1]:
            o, memory, *norms = op(*given, state.memory, valid=valid, extra=extra)
        else:
            start = None if self.config.caching_start == "checkpoint" else self.init_state(x.shape[0]).memory
            open_logit = self.config.caching_open if self.open_logit is None else self.open_logit
            recall = Recall(prepared.reader, self.config, open_logit)
            o, memory, cached, norms = write_in_segments(
                op, given, extra, by_key, (state.memory, cached), start, recall, valid
            )
        if frozen:  # what was only read is not written later either, and what was on its way still is
            memory = memory._replace(S=state.memory.S, tail=state.memory.tail)
        found = norms[0] if norms else None
        if kept is not None and found is not None:  # the op was given v / (1 − α): ∇ℓ is as many times too large
            parts = surprise == "parts"
            found = torch.cat([found[..., :1] * kept[..., None], found[..., 1:]], dim=-1) if parts else found * kept
        return o, state._replace(memory=memory, cached=cached), found

    def project_query(
        self,
        x: Hidden,
        tails: tuple[Tensor, ...],
        lengths: Int[Tensor, " B"] | None = None,
        streams: Streams | None = None,
    ) -> tuple[Float[Tensor, "B T H D"], Hidden, tuple[Tensor, ...]]:
        """What `retrieve` needs besides a memory: queries (those of `streams`, if given), the gate, and the tails.

        The query's convolution has its own tail.
        """
        gate = self.gate_proj(x)  # in a product of its own: it is kept for its gradients, and would keep q with it
        if streams is None:
            (q,), tails = project_and_convolve(x, (self.q_proj,), self.convs[:1], tails, lengths)
        else:
            q, tails = streams.q, streams.tails
        q = self.normed(0, q)
        return q, gate, tails

    def retrieve(
        self,
        M: tuple[Tensor, ...],
        q: Float[Tensor, "B T H D"],
        gate: Hidden,
        prepared: Prepared | None = None,
    ) -> Hidden:
        """Only read: h = M*(q), finished as an output is (eq. 21)."""
        return self.project_output(read(M, q, self.reader if prepared is None else prepared.reader), gate)

    def project_output(self, o: Float[Tensor, "B T H D"], gate: Hidden) -> Hidden:
        """(RMSNorm(o) ∘ σ(gate)) W_O."""
        return gated_linear("memory", self.o_proj, o, gate, self.o_norm)

    def init_tails(self, batch_size: int) -> tuple[Tensor, ...]:
        """Tails for `project_query`: of the query's convolution alone."""
        return tuple(conv.init_tail(batch_size) for conv in self.convs[:1])


def write_gates(model: nn.Module) -> list[GateProjection]:
    """What makes θ and α in all memories of a model: where both are zero, nothing is written and nothing forgotten."""
    memories = [module for module in model.modules() if isinstance(module, MemoryRule)]
    return [gate for memory in memories for gate in (memory.theta_proj, memory.alpha_proj) if gate is not None]
