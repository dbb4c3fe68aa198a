"""Settings of other versions: those that are no more, and those that earlier ones did not have."""

from typing import Any

from titans_lm.beyond_config import CachingConfig, TNTConfig

LATER = (
    "threshold_init",
    "omega_window",
    "key_degree",
    "lookahead_values",
    *CachingConfig.__dataclass_fields__,
    *TNTConfig.__dataclass_fields__,
)
"""Settings that earlier versions did not have: at its default, one changes nothing about a model."""
FORMER: dict[str, tuple[Any, str]] = {
    "memory_targets": ("rms", "norm 1 learned worse, and no norm no better (D15)"),
    "memory_init_scale": (1.0, "both smaller and larger starts learned worse (D14)"),
    "theta_fan_in": (None, "whether there is a LayerNorm decides it (D14)"),
    "memory_reads_persistent": (True, "it made no difference, and num_persistent=0 has none to read (D16)"),
    "alpha_max": (1.0, "nothing was ever better than to let a token forget all"),
}
"""Settings that are no more: the value that each has now, and why."""


def former_settings(decay_first: bool) -> dict[str, Any]:
    """What settings that are no more would be set to; a decay_first memory never forgot all (D44)."""
    former = {name: value for name, (value, _) in FORMER.items()}
    return former | ({"alpha_max": 0.999} if decay_first else {})


def drop_former(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a saved model without those that are no more; ValueError where one had another value."""
    former = former_settings(bool(settings.get("decay_first")))
    for name, value in former.items():
        if name in settings and settings[name] != value:
            raise ValueError(
                f"got {name}={settings[name]!r}, a setting that is no more: {FORMER[name][1]}; expected {value!r} or "
                "none, so this model needs the version that saved it"
            )
    return {name: value for name, value in settings.items() if name not in former}
