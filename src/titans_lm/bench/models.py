"""`titans bench model`: training step, prompt and decoding of every architecture, and of Llama and Mamba2."""

from typing import Any, get_args

from titans_lm.bench.registry import Case, Cases, Place, benchmark
from titans_lm.bench.settings import ModelSettings
from titans_lm.config import Architecture

SIZES = {
    "width": 256, "layers": 4, "heads": 4, "ffn": 1024, "depth": 2, "expansion": 4, "chunk": 16, "segment": 128,
    "persistent": 4, "vocab": 256,
}  # fmt: skip
"""The model that is measured: MAC as titans-pytorch's README has it, and the same sizes for all others."""
QUICK = {"width": 32, "layers": 2, "heads": 2, "ffn": 32, "expansion": 1, "chunk": 8, "segment": 16}


def model_case(name: str, quick: bool) -> dict[str, Any]:
    """Sizes of a model of that architecture."""
    return {"model": name, **SIZES, **(QUICK if quick else {})}


@benchmark("model", ModelSettings)
def model(settings: ModelSettings, _: Place) -> Cases:
    """Measure every model."""
    yield model_cases(settings)


def model_cases(s: ModelSettings) -> list[Case]:
    """List the cases: for each model a training step, a prompt, and tokens after each context.

    Decoding after a long context is repeated less often: reading the context is most of its time. ValueError for sizes
    that make no model.
    """
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
