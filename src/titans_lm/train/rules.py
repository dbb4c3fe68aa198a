"""Other models' memories as settings of our op: names that the command line knows before it imports torch."""

from typing import Any

DELTA_RULE: dict[str, Any] = {
    "architecture": "lmm", "layer_types": None, "shared_qkv": False,
    "memory_depth": 1, "memory_residual": False, "memory_norm": False, "memory_objective": "l2",
    "chunk_size": 1, "momentum": False, "forget_to": "zero", "gates": "head", "theta_bound": 0.5,
    "theta_stretch": 0.0, "alpha_stretch": 0.0,
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "delta-net": {**DELTA_RULE, "decay": False, "alpha_init": 0.002},
    "gated-delta-net": {**DELTA_RULE, "decay": True, "decay_first": True},
}
"""Settings that make the rule of another model of our op, in our block and from our start; 2 θ is its β."""
