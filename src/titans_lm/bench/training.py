"""`titans bench training`: training steps of models of equal size in turn, each by the name that `compare` takes."""

from titans_lm.bench.registry import Case, Cases, Comparison, Place, allocators, benchmark
from titans_lm.bench.settings import TrainingSettings
from titans_lm.experiments.models import model_settings
from titans_lm.experiments.settings import small_training


@benchmark("training", TrainingSettings)
def training(settings: TrainingSettings, at: Place) -> Cases:
    """One comparison of all models: forward, backward, AdamW. ValueError for a name that is none."""
    sizes = {"parameters": settings.parameters, "vocab": settings.vocab_size}
    sizes |= {"rows": settings.rows, "tokens": settings.tokens}
    if settings.quick:
        sizes |= {"parameters": 80_000, "vocab": 256, "tokens": 64}
    for name in settings.models:  # now, and not when its turn comes
        model_settings(small_training(), name, sizes["parameters"])
    title = f"{sizes['parameters']:,} parameters, {sizes['rows']} × {sizes['tokens']:,}"
    how = {"kind": "model", "mode": "train", "allocator": allocators(at.device)[-1]}
    yield Comparison(title, [Case(label=name, case={"sized": name, **sizes}, **how) for name in settings.models])
