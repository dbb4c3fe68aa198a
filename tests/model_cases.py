"""Small stacks for the tests of everything above ops/: sizes that cross every border, and weights that are awake."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.backbone import Backbone, BackboneState
from titans_lm.config import BackboneConfig

MEMORIES = ("lmm", "mac", "mag", "mal", "tnt")
PLAIN = ("attention", "sliding", "segment")
ARCHITECTURES = MEMORIES + PLAIN
MIXED = ("sliding+lmm+sliding", "lmm+attention+mac", "mag+segment+mal")
"""Stacks of different blocks; in the code they are layer_types. Between them they have a block of every kind."""
STACKS = ARCHITECTURES + MIXED
EVERY_KIND = ("mac", "attention", *MIXED)
"""Few stacks that have a block of every kind, for what lies above the blocks."""
REMEMBERING = MEMORIES + MIXED
BOUNDED = tuple(name for name in STACKS if "attention" not in name)
"""Those whose state has a constant size."""

# Every setting that changes which parameters exist or what they reach, one at a time.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "gates per head": {"gates": "head"},
    "gates channel-wise": {"gates": "channel", "gate_rank": 3},
    "gates see keys": {"gates_see_keys": True},
    "gates channel-wise see keys": {"gates": "channel", "gate_rank": 3, "gates_see_keys": True},
    "no momentum": {"momentum": False},
    "no decay": {"decay": False},
    "linear memory": {"memory_depth": 1},
    "depth 3": {"memory_depth": 3, "memory_expansion": 2},
    "no conv": {"conv_size": 1},
    "attention conv": {"attention_conv_size": 4},
    "no persistent": {"num_persistent": 0},
    "no residual read": {"memory_reads_residual": False},
    "gated by the memory": {"gating": "memory"},
    "forget to zero": {"forget_to": "zero"},
    "no norm": {"memory_norm": False},
    "no residual": {"memory_residual": False},
    "linear with norm and residual": {"memory_depth": 1, "memory_norm": True, "memory_residual": True},
    "dot product": {"memory_objective": "dot"},
    "huber": {"memory_objective": "huber"},
    "huber by channel": {"memory_objective": "huber_coordinate", "memory_depth": 1},
    "third power": {"memory_objective": "lp"},
    "polynomial keys": {"key_degree": 2, "memory_depth": 1},
    "polynomial keys in a window": {
        "key_degree": 3,
        "memory_depth": 1,
        "memory_norm": True,
        "memory_residual": False,
        "omega_window": 2,
    },
    "window": {"omega_window": 3},
    "window, linear": {"omega_window": 6, "memory_depth": 1, "gates": "head"},
    "other starts": {"theta_init": 0.9, "theta_later_init": 0.5},
    "spread starts": {"alpha_init": (0.01, 0.3), "eta_init": (0.1, 0.9), "time_scales": "shifted"},
    "silu": {"memory_activation": "silu"},
    "all turned": {"rotary_fraction": 1.0},
    "none turned": {"rotary_fraction": 0.0},
    "exact recurrence": {"chunk_size": 1},
    "forgets first": {
        "memory_depth": 1,
        "chunk_size": 1,
        "forget_to": "zero",
        "decay_first": True,
    },
}
# The same of blocks whose attention and memory can share.
SHARED_VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {"shared_qkv": True},
    "shared, no conv": {"shared_qkv": True, "conv_size": 1},
    "shared, none turned": {"shared_qkv": True, "rotary_fraction": 0.0},
}
# Stacks that differ in more than their architecture, by the name that tests give in its place.
SHARED: dict[str, dict[str, Any]] = {
    "mac, shared": {"architecture": "mac", "shared_qkv": True, "gating": "memory", "attention_conv_size": 1},
    "mag, shared": {"architecture": "mag", "shared_qkv": True, "attention_conv_size": 1},
}
IN_TNT = {"default", "gates channel-wise", "no momentum", "no decay", "linear memory", "polynomial keys", "huber"}
"""Variants that are tried of TNT, whose memories are those of the others."""
MEMORY_ONLY = {"default", "no persistent", "attention conv", "all turned", "none turned"}
VARIED = [(a, name) for a in ARCHITECTURES for name in VARIANTS if a != "tnt" or name in IN_TNT]


def small_config(architecture: str, **settings: Any) -> BackboneConfig:
    """A config whose segment, window and chunk are all shorter than the sequences that tests use."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 12,
        "segment_len": 8,
        "window": 6,
        "chunk_size": 4,
        "num_persistent": 3,
        "memory_expansion": 2,
    }
    if "tnt" in architecture:
        sizes |= {"tnt_global_chunk": 4, "tnt_local_chunks": (2,), "tnt_shard": 8}
    return BackboneConfig(**(sizes | stack_named(architecture) | settings | SHARED.get(architecture, {})))


def stack_named(name: str) -> dict[str, Any]:
    """Settings of a stack by its name here: an architecture, one of SHARED, or a block for each layer, joined by +."""
    if name in SHARED:
        return SHARED[name]
    blocks = name.split("+")
    return {"architecture": name} if len(blocks) == 1 else {"layer_types": blocks, "num_hidden_layers": len(blocks)}


def one_block(architecture: str) -> dict[str, int]:
    """Settings of a single block of a kind that stands alone: what several blocks are, mixed stacks show."""
    return {"num_hidden_layers": 1 + architecture.count("+")}


def wake(module: nn.Module, scale: float = 0.3) -> None:
    """Move every parameter away from its start, where gates hardly depend on the token and norms are ones."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((scale * noise).to(parameter.dtype))


def small_backbone(
    architecture: str, dtype: torch.dtype = torch.float64, awake: bool = True, **settings: Any
) -> Backbone:
    torch.manual_seed(0)  # stacks of one shape get the same weights
    stack = Backbone(small_config(architecture, **settings)).to(dtype)
    if awake:
        wake(stack)
    return stack


def read_in_pieces(
    stack: Backbone, x: Tensor, cuts: list[int], state: BackboneState | None = None
) -> tuple[Tensor, BackboneState | None]:
    """Read x in calls that end at the cuts."""
    outputs = []
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        y, state = stack(x[:, start:stop], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def assert_close(x: Tensor, y: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to rounding, with a message that says how far apart."""
    torch.testing.assert_close(x, y, rtol=0.0, atol=tolerance)


def close(x: Tensor, y: Tensor, tolerance: float = 1e-9) -> bool:
    """Equal up to rounding; a NaN is close to nothing."""
    return x.shape == y.shape and (x.numel() == 0 or bool((x - y).abs().max() <= tolerance))


def named_tensors(state: Any, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """Walk over every tensor of a nested state with a name for messages."""
    if isinstance(state, Tensor):
        yield name, state
    elif state is not None:
        fields = getattr(state, "_fields", range(len(state)))
        for field, part in zip(fields, state, strict=True):
            yield from named_tensors(part, f"{name}.{field}")


def assert_same_state(x: Any, y: Any, tolerance: float = 1e-9) -> None:
    """All tensors of two nested states, or of two lists, are equal up to rounding."""
    for (name, a), (_, b) in zip(named_tensors(x), named_tensors(y), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
