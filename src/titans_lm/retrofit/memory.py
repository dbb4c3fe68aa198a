"""The memory that stands beside one attention layer: all that is trained of a retrofitted model.

θ, α [, η] = gates(x̂_i)                    x̂ is the hidden state with norm 1, here of the token that is written
M          ← (1 − α) M + α M_init − θ ∇‖M(k̂_i) − v_i‖² [+ η × past surprise]
                                            k̂, q̂ are the layer's own k, q with norm 1 [and φ of them], v its own v
m_t        = 2 σ(x̂_t w) ∘ (M(q̂_t) W)       W (H, D, D) starts at zero: at first the base answers alone

With keys = "hidden", k̂_i and q̂_i are both W_k x_i + b with norm 1, one map of the hidden states as attention gets them,
and the value beside k̂_i is that of the token after, v_{i+1}: what followed a similar token is what is read. Query heads
with the same values then read one memory, each with a map W of its own.

Hidden states of pretrained models have a few channels that are far larger than the rest: gates that saw them as they
are would swing with every step of the optimiser. What is read keeps its size: it says how well q̂ fits what was written.
"""

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.backbone import is_frozen
from titans_lm.config import MemoryConfig, Start, log_spaced
from titans_lm.memory_rule import PolynomialKeys
from titans_lm.ops import MemoryNetwork, MemoryState, neural_memory
from titans_lm.ops.state import state_dtype
from titans_lm.retrofit.settings import Keys, Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EPS = 1e-6
"""Added to mean squares under a root."""


OURS = "titans"
"""What PEFT calls the LoRA of an adapter. One that is added later is the only active one until
`model.set_adapter(["titans", …])`, and is in no file of ours."""


class LayerMemory(nn.Module):
    """A memory per row and head of `config`, written with attention's values, by its keys or by keys of its own.

    The heads of `config` are those of the queries, or with own keys those of the values, each for several of `queries`.
    """

    def __init__(
        self,
        width: int,
        config: MemoryConfig,
        keys: Keys = "attention",
        queries: int | None = None,
        rotary: Rotary = "before",
    ) -> None:
        super().__init__()
        self.config = config
        self.before_rotary = rotary == "before" and keys == "attention"
        H, D = config.num_attention_heads, config.head_dim
        queries = queries or H
        self.starts: list[tuple[Start, float]] = [(config.theta_init, config.theta_max), (config.alpha_init, 1.0)]
        if config.momentum:
            self.starts.append((config.eta_init, config.eta_max))
        self.gate_proj = nn.Linear(width, len(self.starts) * H)
        self.read_proj = nn.Linear(width, queries)
        self.output = nn.Parameter(torch.empty(queries, D, D))
        self.key_proj = nn.Linear(width, H * D) if keys == "hidden" else None
        deep = config.memory_depth > 1
        self.key_map = PolynomialKeys(config) if config.key_degree > 1 else None
        self.initial = nn.ParameterList(torch.empty(H, a, b) for a, b in pairwise(config.memory_widths) if deep)
        self.norm_weight = nn.Parameter(torch.empty(H, D)) if config.use_norm else None
        self.norm_bias = nn.Parameter(torch.empty(H, D)) if config.use_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every token starts with the same gates, their time scales spread over the heads; the output is zero."""
        shares = [share for start, _ in self.starts for share in log_spaced(start, self.config.num_attention_heads)]
        with torch.no_grad():
            self.gate_proj.bias.copy_(torch.tensor([math.log(share / (1.0 - share)) for share in shares]))
        for zero in (self.gate_proj.weight, self.read_proj.weight, self.read_proj.bias, self.output):
            nn.init.zeros_(zero)
        for weight in self.initial:
            nn.init.normal_(weight)
        if self.key_proj is not None:  # keys are cut to norm 1: how large these numbers are says how fast they change
            nn.init.normal_(self.key_proj.weight)
            nn.init.zeros_(self.key_proj.bias)
        if self.norm_weight is not None and self.norm_bias is not None:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.norm_bias)

    @property
    def num_gates(self) -> int:
        """Numbers that the gates of one token are."""
        return self.gate_proj.out_features

    def notes(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T X"]:
        """What is kept of tokens with these hidden states until they are written, and own keys.

        First come the shares of θ, α and η, by kind and then by head.
        """
        gates = self._gate(self.gate_proj, hidden)
        if self.key_proj is None:
            return gates
        return torch.cat((gates, self.key_proj(hidden.to(self.key_proj.weight.dtype))), -1)

    def own_keys(self, notes: Float[Tensor, "B T X"]) -> Float[Tensor, "B T H D"]:
        """The keys among what is kept of tokens, which are their queries too."""
        return notes[..., self.num_gates :].unflatten(-1, (self.config.num_attention_heads, -1))

    @torch.no_grad()
    def start_keys(self, states: Float[Tensor, "N E"]) -> None:
        """Start own keys as the first D principal components of hidden states, each of the same deviation."""
        if self.key_proj is None:
            raise ValueError("got a memory with the keys of attention; expected keys='hidden'")
        x, weight = states.to(torch.float64), self.key_proj.weight
        mean, deviation = x.mean(0), x.std(0).clamp(min=EPS)
        values, vectors = torch.linalg.eigh(((x - mean) / deviation).T.cov())
        first = (vectors / values.clamp(min=EPS).sqrt()).flip(1)[:, : self.config.head_dim] / deviation[:, None]
        first = first / first.square().mean().sqrt()  # only directions count, and how fast the optimiser turns them
        weight.copy_(first.T.repeat(self.config.num_attention_heads, 1))
        self.key_proj.bias.copy_(-(weight.double() @ mean))

    def init_state(self, batch_size: int) -> MemoryState:
        """A linear memory starts empty, a deep one at its learned M_init."""
        return MemoryState.initial(self._initial, batch_size)

    @property
    def _initial(self) -> tuple[Tensor, ...]:
        if not len(self.initial):
            return (self.output.detach().new_zeros(self.config.num_attention_heads, *self.config.memory_widths),)
        return tuple(w * (1.0 if i == 0 else w.shape[1] ** -0.5) for i, w in enumerate(self.initial))

    def forward(
        self,
        q: Float[Tensor, "B T M D"],
        k: Float[Tensor, "B T _ D"],
        v: Float[Tensor, "B T K D"],
        gates: Float[Tensor, "B T G"],
        hidden: Float[Tensor, "B T E"],
        state: MemoryState,
        valid: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T H D"], MemoryState]:
        """Write the tokens of k and v with their gates, each before the query beside it reads; K heads serve M
        memories, and these H queries of attention.

        `hidden` are the hidden states of the readers; where `valid` is false nothing is written.
        """
        c, heads = self.config, self.config.num_attention_heads
        dtype = state_dtype(q.dtype)
        q, k, v = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k, v))
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
        if c.use_norm:  # what ends in a LayerNorm cannot reach other sizes
            v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)
        theta, alpha, *rest = (
            share * bound for share, (_, bound) in zip(gates.to(dtype).split(heads, -1), self.starts, strict=True)
        )
        frozen, past = is_frozen(self), state.S
        if frozen:
            theta, alpha, rest = torch.zeros_like(theta), torch.zeros_like(alpha), []
        thetas = torch.stack([theta * scale for scale in c.theta_scales], dim=-1)
        network = MemoryNetwork(
            c.memory_activation, c.use_residual, self.norm_weight, self.norm_bias, "l2",
            "init" if len(self.initial) else "zero", self._initial if len(self.initial) else None,
            coefficients=None if self.key_map is None else self.key_map(None),
        )  # fmt: skip
        o, state, *_ = neural_memory(
            q, k, v, thetas, rest[0] if rest else torch.zeros_like(theta), alpha, state,
            network=network, chunk_size=c.chunk_size, valid=valid,
        )  # fmt: skip
        state = state._replace(S=past) if frozen else state
        o = o.to(self.output.dtype).repeat_interleave(len(self.output) // heads, dim=2)
        o = torch.einsum("bthd,hde->bthe", o, self.output)
        return 2.0 * self._gate(self.read_proj, hidden)[..., None] * o, state

    @staticmethod
    def _gate(proj: nn.Linear, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T G"]:
        return torch.sigmoid(proj(F.normalize(hidden.to(proj.weight.dtype), dim=-1)))


def adapter_of(model: "PreTrainedModel") -> nn.ModuleDict:
    """All that is trained, as one module: memories, and LoRA where there is one; the names are the model's own."""
    parts = {
        name.replace(".", "/"): module
        for name, module in model.named_modules()
        if isinstance(module, LayerMemory) or name.endswith((f"lora_A.{OURS}", f"lora_B.{OURS}"))
    }
    if not hasattr(model, "retrofit"):
        raise ValueError(f"got a {type(model).__name__} without a memory; expected a model of add_memory or load")
    return nn.ModuleDict(parts)
