"""What was asked of speed and memory, beside what was measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Results = dict[str, list[dict[str, Any]]]
Find = Callable[[Results], float | None]


@dataclass(frozen=True)
class Target:
    """One thing that was asked: how it is found in the results, the floor and the goal, and how it is written."""

    what: str
    find: Find
    floor: float
    goal: float | None = None
    unit: str = "×"
    at_most: bool = False
    """Whether the number is to stay below the floor."""


def target_lines(found: Results) -> list[str]:
    """Lay out the targets as a table; a number that is not there is said to be missing."""
    found = {kind: [result for result in results if not result["quick"]] for kind, results in found.items()}
    if not any(found.values()):
        return []
    lines = ["", "## What was asked, what came", "", "| what | asked | goal | measured | |", "|---|---:|---:|---:|---|"]
    for target in targets():
        value = target.find(found)
        sign = "≤" if target.at_most else "≥"
        goal = "" if target.goal is None else f"{sign} {written(target.goal, target.unit)}"
        came = "not measured" if value is None else written(value, target.unit)
        asked = f"{sign} {written(target.floor, target.unit)}"
        lines.append(f"| {target.what} | {asked} | {goal} | {came} | {verdict(target, value)} |")
    return lines


def written(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.0f} %"
    if unit == "GB":
        return f"{value / 1e9:.2f} GB"
    return f"{value:.3g} ×"


def verdict(target: Target, value: float | None) -> str:
    """Say in a word whether a number is what was asked."""

    def reached(limit: float) -> bool:
        return value is not None and (value <= limit if target.at_most else value >= limit)

    if value is None:
        return ""
    if target.goal is not None and reached(target.goal):
        return "goal"
    return "yes" if reached(target.floor) else "**no**"


def peer_row(
    label: str, starts: str, allocator: str = "tuned", mode: str | None = None
) -> Callable[[Results], Row | None]:
    """Find a side of a comparison by how its title starts, and by what was run."""

    def find(found: Results) -> Row | None:
        rows = [row for result in found["peers"][:1] for row in result["rows"] if mode in (None, row["mode"])]
        rows = [row for row in rows if (row["label"], row["allocator"]) == (label, allocator)]
        return next((row for row in rows if row["comparison"].startswith(starts)), None)

    return find


def value_of(row: Callable[[Results], Row | None], *path: str) -> Find:
    """Follow names into a row; None where one is not there."""

    def find(found: Results) -> float | None:
        value: Any = row(found)
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    return find


def scaling_row(label: str) -> Callable[[Results], Row | None]:
    def find(found: Results) -> Row | None:
        return next((r for result in found["scaling"][:1] for r in result["rows"] if r["label"] == label), None)

    return find


def quotient(above: Find, below: Find) -> Find:
    """Divide two numbers of the results, where both are there."""

    def find(found: Results) -> float | None:
        a, b = above(found), below(found)
        return a / b if a is not None and b else None

    return find


def decoding(context: int) -> Find:
    def find(found: Results) -> float | None:
        rows = [row for result in found["model"][:1] for row in result["rows"]]
        row = next((r for r in rows if r["label"] == "mac" and r["case"].get("context") == context), None)
        return None if row is None else row.get("milliseconds_per_call")

    return find


def exact_rule(allocator: str) -> Find:
    """Our op against the only setting of titans-pytorch that computes the same."""
    row = peer_row("our op, chunk 16", "The exact rule", allocator)
    return value_of(row, "against", "titans-pytorch, chunk 1, batch 16", "median")


def targets() -> list[Target]:
    """List what issue 3 asks for, in its order."""
    peer, speed, memory = "titans-pytorch NeuralMemory", "tokens_per_second", "peak_memory_bytes"
    layer, paper, mac = "Layer of width 384", "6 heads of 64", "MAC model of width 256"
    model, generation = "titans-pytorch MAC transformer", "MAC model, 256"
    both = "forward+backward"
    op, default = peer_row("our op", layer, mode=both), peer_row("our op", layer, "default", both)
    six, chunk16 = peer_row("our op", paper), peer_row("our MAC, chunk 16", mac)
    at_4096 = value_of(scaling_row("2 × 4,096"), speed)
    rows = [
        Target("layer, forward + backward: share of matmul", value_of(op, "share_of_matmul"), 0.45, 0.55, "%"),
        Target(
            "layer, forward alone: share of matmul",
            value_of(peer_row("our op", layer, mode="forward"), "share_of_matmul"), 0.65, None, "%",
        ),
        Target("layer against titans-pytorch, both tuned", value_of(op, "against", peer, "median"), 1.3),
        Target("layer against titans-pytorch, both default", value_of(default, "against", peer, "median"), 4.0),
        Target("layer: peak memory", value_of(op, memory), 1.2e9, None, "GB", True),
        Target("paper's form against the Llama block", value_of(six, "against", "Llama block", "median"), 0.5, 0.7),
        Target("paper's form: peak memory", value_of(six, memory), 0.8e9, None, "GB", True),
        Target(
            "exact rule at chunk 16 against titans-pytorch",
            exact_rule("tuned"), 30.0, 60.0,
        ),
        Target("the same, both default", exact_rule("default"), 30.0, 60.0),
    ]  # fmt: skip
    for label in ("2 × 16,384", "1 × 65,536"):
        long = scaling_row(label)
        rows.append(Target(f"{label}: speed against 2 × 4,096", quotient(value_of(long, speed), at_4096), 0.9))
        rows.append(Target(f"{label}: peak memory", value_of(long, memory), 3e9, None, "GB", True))
    chunk64 = value_of(peer_row("our MAC, chunk 64", mac), "against", model, "median")

    def of_default(chunk: int) -> Find:
        return value_of(peer_row(f"our MAC, chunk {chunk}", mac, "default"), "against", model, "median")

    written_by = {
        how: value_of(peer_row(f"our MAC, {how}", generation), "against", model, "median")
        for how in ("plain loop, compiled", "generate(), compiled", "plain loop", "generate()")
    }
    rows += [
        Target("MAC model, training, chunk 16", value_of(chunk16, "against", model, "median"), 1.3, 2.0),
        Target("MAC model, training, chunk 64", chunk64, 2.0),
        Target("MAC model, training, chunk 16, both default", of_default(16), 1.3, 2.0),
        Target("MAC model, training, chunk 64, both default", of_default(64), 2.0),
        Target("MAC model, training, chunk 16: peak memory", value_of(chunk16, memory), 1.5e9, None, "GB", True),
        Target(
            "MAC model, training, chunk 64: peak memory", value_of(peer_row("our MAC, chunk 64", mac), memory), 1.5e9,
            None, "GB", True,
        ),
        *(Target(f"MAC model, cached generation, {how}", value, 5.0) for how, value in written_by.items()),
        Target(
            "MAC model, ms per token at 100,000 against 100", quotient(decoding(100_000), decoding(100)), 1.1,
            None, "×", True,
        ),
    ]  # fmt: skip
    for name in ("lmm", "mac"):
        end = scaling_row(name)
        rows.append(Target(f"{name}, 1M tokens: memory at the end against 100K", value_of(end, "memory_ratio"), 1.02,
                           None, "×", True))  # fmt: skip
        rows.append(Target(f"{name}, 1M tokens: speed at the end", value_of(end, "throughput_ratio"), 0.9))
    return rows
