"""What is in memory files: their headers, how large the memories are, and how far two of them are apart."""

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from titans_lm.streaming.file import load_memory, not_finite, read_memory_file
from titans_lm.streaming.memory import Source


def describe_memory(path: str | Path) -> dict[str, Any]:
    """Say what a memory file holds: what was read, by which model, and the norm of every tensor of the state."""
    header, tensors = read_memory_file(path)
    return {
        "file": str(path),
        "file_bytes": Path(path).stat().st_size,
        "written": header.written,
        "rows": len(header.tokens),
        "tokens": list(header.tokens),
        "sources": _by_name([source for row in header.sources for source in row]),
        "model": asdict(header.model),
        "precision": header.precision,
        "rounding": max(header.loss.values(), default=None),
        "norms": {name: _norm(x) for name, x in sorted(header.whole(tensors).items()) if x.is_floating_point()},
    }


def compare_memories(first: str | Path, second: str | Path) -> dict[str, Any]:
    """Say how far two memories of one model are apart: ‖a − b‖ / ‖a‖ for every tensor of the state.

    Raises ValueError for memories of different models, or of different rows.
    """
    (a, xs), (b, ys) = read_memory_file(first), read_memory_file(second)
    other = a.model.difference(b.model)
    if other is not None:
        raise ValueError(f"got memories of two models: in {str(second)!r}, against {str(first)!r}, {other}")
    if len(a.tokens) != len(b.tokens):
        raise ValueError(f"got memories of {len(a.tokens)} and {len(b.tokens)} rows; expected equally many")
    xs, ys = a.whole(xs), b.whole(ys)
    apart = {name: _apart(xs[name], ys[name]) for name in sorted(xs.keys() & ys.keys()) if xs[name].is_floating_point()}
    return {
        "first": str(first),
        "second": str(second),
        "tokens": [list(a.tokens), list(b.tokens)],
        "equal": all(x.shape == ys[name].shape and bool((x == ys[name]).all()) for name, x in xs.items()),
        "apart": apart,
    }


def verify_memory(path: str | Path, model: nn.Module | None = None) -> dict[str, Any]:
    """Check every bit of a memory file and, with a model, that it is this model's; ValueError where it is not."""
    header, tensors = read_memory_file(path)
    if model is not None:
        load_memory(path, model)
    if broken := not_finite(tensors):
        raise ValueError(f"the memory {str(path)!r} holds numbers that are not finite, in {', '.join(broken[:3])}")
    return {"file": str(path), "whole": True, "tokens": list(header.tokens), "checked_with_model": model is not None}


def _by_name(sources: list[Source]) -> dict[str, Any]:
    """What is known of sources, by their names; a second one of the same name has a number."""
    found: dict[str, Any] = {}
    for source in sources:
        values = asdict(source)
        name = values.pop("name")
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        found[name if name not in found else next(one for one in numbered if one not in found)] = values
    return found


def _norm(x: Tensor) -> float:
    return round(x.double().norm().item(), 6)


def _apart(x: Tensor, y: Tensor) -> float | None:
    """‖x − y‖ / ‖x‖; None where there is no such ratio: of two shapes, and of zeros and what is none."""
    if x.shape != y.shape:
        return None
    size, apart = x.double().norm().item(), (x.double() - y.double()).norm().item()
    return round(apart / size, 6) if size else None if apart else 0.0
