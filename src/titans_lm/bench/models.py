"""Layers and models: `titans bench model`, each architecture alone; `tnt` and `training`, sides in turn."""

import dataclasses
from itertools import product
from typing import Any, get_args

from titans_lm.bench.registry import Case, Cases, Comparison, Place, allocators, benchmark
from titans_lm.bench.settings import ModelSettings, TNTSettings, TrainingSettings
from titans_lm.config import Architecture
from titans_lm.experiments.models import model_settings
from titans_lm.experiments.settings import small_training

SIZES = {
    "width": 256, "layers": 4, "heads": 4, "ffn": 1024, "depth": 2, "expansion": 4, "chunk": 16, "segment": 128,
    "persistent": 4, "vocab": 256,
}  # fmt: skip
"""The model that is measured: MAC as titans-pytorch's README has it, and the same sizes for all others."""
QUICK = {"width": 32, "layers": 2, "heads": 2, "ffn": 32, "expansion": 1, "chunk": 8, "segment": 16}
LONG = 64
"""Tokens of a chunk that is long for a plain memory."""


def model_case(name: str, quick: bool) -> dict[str, Any]:
    return {"model": name, **SIZES, **(QUICK if quick else {})}


@benchmark("model", ModelSettings)
def model(settings: ModelSettings, _: Place) -> Cases:
    yield model_cases(settings)


def model_cases(s: ModelSettings) -> list[Case]:
    """List a training step, a prompt, and tokens after each context for every model; ValueError for sizes of none."""
    from titans_lm.bench.subjects_model import stack_config

    cases = []
    for name in s.models:
        sizes = model_case(name, s.quick) | ({} if s.quick else {"width": s.width, "layers": s.layers})
        stack_config(sizes, name if name in get_args(Architecture) else "attention")  # now, not when its turn comes
        train, prompt = (64, 64) if s.quick else (1024, s.prefill)
        cases.append(Case(label=name, kind="model", mode="train", case={**sizes, "rows": 4, "tokens": train}))
        cases.append(Case(label=name, kind="model", mode="prefill", case={**sizes, "rows": 1, "tokens": prompt}))
        cases += [
            Case(label=name, kind="model", mode="decode", case={**sizes, "rows": 1, "context": context})
            for context in (tuple(min(c, 50) for c in s.contexts[:1]) if s.quick else s.contexts)
        ]
    return cases


@benchmark("tnt", TNTSettings)
def tnt(settings: TNTSettings, at: Place) -> Cases:
    """Set TNT layers beside plain memories of their local chunk and of long ones; ValueError for sizes of no layer."""
    from titans_lm.bench.subjects_model import layer_config, tnt_settings

    s = dataclasses.replace(settings, widths=(16,), tokens=64, shards=(32,)) if settings.quick else settings
    shared = {"heads": s.heads, "expansion": s.expansion, "forget_to": "init", "rows": s.rows, "tokens": s.tokens}
    for width, shard in product(s.widths, s.shards):  # now, and not when its turn comes
        layer_config({**shared, "width": width}, **tnt_settings(s.chunk, shard))
    for width in s.widths:
        title, base = f"{s.heads} heads of {width // s.heads}, {s.rows} × {s.tokens:,}", {**shared, "width": width}
        sides = [(f"LMM, chunk {chunk}", {"layer": "memory", "chunk": chunk}) for chunk in (s.chunk, LONG)]
        sides += [
            (f"TNT, local chunk {s.chunk}, shard {shard:,}", {"layer": "tnt", "chunk": s.chunk, "shard": shard})
            for shard in s.shards
        ]
        how = {"kind": "layer", "mode": "forward+backward", "allocator": allocators(at.device)[-1]}
        yield Comparison(title, [Case(label=label, case={**base, **own}, **how) for label, own in sides])


@benchmark("training", TrainingSettings)
def training(settings: TrainingSettings, at: Place) -> Cases:
    """Compare all models, by the names that `titans compare` takes; ValueError for a name that is none."""
    sizes = {"parameters": settings.parameters, "vocab": settings.vocab_size}
    sizes |= {"rows": settings.rows, "tokens": settings.tokens}
    if settings.quick:
        sizes |= {"parameters": 80_000, "vocab": 256, "tokens": 64}
    for name in settings.models:  # now, and not when its turn comes
        model_settings(small_training(), name, sizes["parameters"])
    title = f"{sizes['parameters']:,} parameters, {sizes['rows']} × {sizes['tokens']:,}"
    how = {"kind": "model", "mode": "train", "allocator": allocators(at.device)[-1]}
    yield Comparison(title, [Case(label=name, case={"sized": name, **sizes}, **how) for name in settings.models])
