"""`titans bench tnt`: a TNT layer beside plain memories of its local chunk and of long chunks, trained in turn."""

import dataclasses

from titans_lm.bench.registry import Case, Cases, Comparison, Place, allocators, benchmark
from titans_lm.bench.settings import TNTSettings

LONG = 64
"""Tokens of a chunk that is long for a plain memory."""


@benchmark("tnt", TNTSettings)
def tnt(settings: TNTSettings, at: Place) -> Cases:
    """Layers of every width, forward and backward; the global chunk is as long as a shard."""
    s = dataclasses.replace(settings, widths=(16,), tokens=64, shards=(32,)) if settings.quick else settings
    for width in s.widths:
        title = f"{s.heads} heads of {width // s.heads}, {s.rows} × {s.tokens:,}"
        base = {
            "width": width, "heads": s.heads, "expansion": s.expansion, "forget_to": "init",
            "rows": s.rows, "tokens": s.tokens,
        }  # fmt: skip
        sides = [(f"LMM, chunk {chunk}", {"layer": "memory", "chunk": chunk}) for chunk in (s.chunk, LONG)]
        sides += [
            (f"TNT, local chunk {s.chunk}, shard {shard:,}", {"layer": "tnt", "chunk": s.chunk, "shard": shard})
            for shard in s.shards
        ]
        how = {"kind": "layer", "mode": "forward+backward", "allocator": allocators(at.device)[-1]}
        yield Comparison(title, [Case(label=label, case={**base, **own}, **how) for label, own in sides])
