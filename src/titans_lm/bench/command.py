"""What `titans bench` runs: the check of the op first, then one kind of measurement or all of them."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from titans_lm.bench.settings import (
    BenchSettings,
    KernelsSettings,
    ModelSettings,
    OpsSettings,
    PeersSettings,
    ScalingSettings,
)
from titans_lm.train.settings import written_command

KINDS = {"ops": OpsSettings, "model": ModelSettings, "scaling": ScalingSettings, "peers": PeersSettings}
ALONE = {"kernels": KernelsSettings}
"""Kinds that are no part of all of them: they need a GPU."""


def run_bench(settings: BenchSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Check the op, measure, and write one JSON file per kind into the folder; returns what was written.

    Raises ValueError for settings that will not do and for an op that is wrong; nothing is written then. Settings that
    are no kind's own mean every kind: each with its defaults, and with what was set for all.
    """
    from titans_lm.bench.beside import run_beside
    from titans_lm.bench.gate import check_op
    from titans_lm.bench.kernels import require_gpu, run_kernels
    from titans_lm.bench.models import run_model
    from titans_lm.bench.ops import run_ops
    from titans_lm.bench.peers import run_peers
    from titans_lm.bench.run import Bench
    from titans_lm.bench.scaling import run_scaling
    from titans_lm.train.device import choose_device

    parts = kinds(settings)
    runs: dict[str, Callable[..., dict[str, Any]]] = {
        "ops": run_beside if isinstance(settings, OpsSettings) and settings.backend == "triton" else run_ops,
        "kernels": run_kernels,
        "model": run_model,
        "scaling": run_scaling,
        "peers": partial(run_peers, required=len(parts) == 1),
    }
    device = choose_device(settings.device)
    if "kernels" in parts:
        require_gpu(device)
    check = check_op(device)
    settings.out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made fails now, not after the work
    say(f"the op agrees with its definition in {check['cases']} cases, within {check['largest_difference']:.0e}")
    done = {}
    for name, part in parts.items():
        done[name] = runs[name](part, Bench(part, str(device), say), command_line(name, part), check)
    return done if len(done) > 1 else next(iter(done.values()))


def kinds(settings: BenchSettings) -> dict[str, BenchSettings]:
    """Give the kinds that settings mean, each with its own."""
    own = next((name for name, cls in {**KINDS, **ALONE}.items() if isinstance(settings, cls)), None)
    if own is not None:
        return {own: settings}
    changed = {**changes(settings), "repeats": settings.repeats, "rounds": settings.rounds}
    return {
        name: cls(**{key: value for key, value in changed.items() if key in names_of(cls)})
        for name, cls in KINDS.items()
    }


def changes(settings: Any) -> dict[str, Any]:
    """Give the settings that are not at their defaults."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default}


def names_of(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}


def command_line(name: str, settings: BenchSettings) -> str:
    """Write the command that has these settings."""
    return written_command("bench", name, settings=settings)
