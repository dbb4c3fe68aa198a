"""Training in turn: `titans bench tnt`, layers of TNT and plain memories; `titans bench training`, models of a size."""

import dataclasses
from itertools import product

from titans_lm.bench.registry import Case, Cases, Comparison, Place, allocators, benchmark
from titans_lm.bench.settings import TNTSettings, TrainingSettings
from titans_lm.experiments.models import model_settings
from titans_lm.experiments.settings import small_training

LONG = 64
"""Tokens of a chunk that is long for a plain memory."""


@benchmark("tnt", TNTSettings)
def tnt(settings: TNTSettings, at: Place) -> Cases:
    """A TNT layer beside plain memories of its local chunk and of long chunks, forward and backward, by width.

    The global chunk is as long as a shard. ValueError for sizes that make no layer.
    """
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
    """One comparison of all models, by the names that `titans compare` takes: forward, backward, AdamW.

    ValueError for a name that is none.
    """
    sizes = {"parameters": settings.parameters, "vocab": settings.vocab_size}
    sizes |= {"rows": settings.rows, "tokens": settings.tokens}
    if settings.quick:
        sizes |= {"parameters": 80_000, "vocab": 256, "tokens": 64}
    for name in settings.models:  # now, and not when its turn comes
        model_settings(small_training(), name, sizes["parameters"])
    title = f"{sizes['parameters']:,} parameters, {sizes['rows']} × {sizes['tokens']:,}"
    how = {"kind": "model", "mode": "train", "allocator": allocators(at.device)[-1]}
    yield Comparison(title, [Case(label=name, case={"sized": name, **sizes}, **how) for name in settings.models])
