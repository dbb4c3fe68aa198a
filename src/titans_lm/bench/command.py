"""What `titans bench` runs: the check of the op first, then one kind of measurement or all of them."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from titans_lm.bench.registry import benchmarks
from titans_lm.bench.settings import BenchSettings
from titans_lm.train.options import written_command


def run_bench(settings: BenchSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Check the op, measure, and write one JSON file per kind into the folder; returns what was written.

    Raises ValueError for settings that will not do and for an op that is wrong; nothing is written then. Settings that
    are no kind's own mean every kind: each with its defaults, and with what was set for all.
    """
    from titans_lm.bench.gate import check_op
    from titans_lm.bench.run import Bench
    from titans_lm.train.device import choose_device

    parts, known = kinds(settings), benchmarks()
    device = choose_device(settings.device)
    for name in parts:
        if known[name].needs_gpu and device.type != "cuda":
            raise ValueError(
                f"got device {device.type} for titans bench {name}; expected a CUDA device: kernels are measured where "
                "they run, and Triton's interpreter says nothing about speed"
            )
    check = check_op(device)
    settings.out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made fails now, not after the work
    say(f"the op agrees with its definition in {check['cases']} cases, within {check['largest_difference']:.0e}")
    done = {}
    for name, part in parts.items():
        bench = Bench(part, str(device), say, alone=len(parts) == 1)
        done[name] = bench.run(name, known[name], command_line(name, part), check)
    return done if len(done) > 1 else next(iter(done.values()))


def kinds(settings: BenchSettings) -> dict[str, BenchSettings]:
    """Give the benchmarks that settings mean, each with its own."""
    own = next((name for name, one in benchmarks().items() if type(settings) is one.settings), None)
    if own is not None:
        return {own: settings}
    changed = {**changes(settings), "repeats": settings.repeats, "rounds": settings.rounds}
    return {
        name: one.settings(**{key: value for key, value in changed.items() if key in names_of(one.settings)})
        for name, one in benchmarks().items()
        if not one.needs_gpu
    }


def changes(settings: Any) -> dict[str, Any]:
    """Give the settings that are not at their defaults."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default}


def names_of(cls: type) -> set[str]:
    return {field.name for field in fields(cls)}


def command_line(name: str, settings: BenchSettings) -> str:
    """Write the command that has these settings."""
    return written_command("bench", name, settings=settings)
