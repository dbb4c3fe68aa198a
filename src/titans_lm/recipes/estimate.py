"""What a training run would take: parameters, memory, FLOPs and GPU-hours, without making the model or reading data."""

import dataclasses
from typing import Any

from titans_lm.bench.flops import model_flops
from titans_lm.config import check_between, check_positive
from titans_lm.data.tokenizer import VOCAB_SIZE
from titans_lm.recipes.activation_memory import Precision, Step, held_bytes
from titans_lm.train.fresh import count_parts, model_without_weights
from titans_lm.train.match import match_parameters
from titans_lm.train.settings import FitSettings, LanguageSettings

SECONDS_PER_HOUR = 3600
EXPLAINED = {
    "weights": "float32",
    "gradients": "float32",
    "adamw": "two moments in float32",
    "activations": "estimate: what blocks keep for the backward pass, counted per token",
    "memory_states": "estimate: memory and surprise at the start of each segment of chunks",
    "weight_copies": "estimate: matrices side by side, or in bfloat16",
    "loss": "estimate: log-probabilities and two gradients of their size",
    "total": "estimate; the GPU's own context and gaps between tensors come on top",
}
"""Memory that is known, and what it consists of; and what is estimated, and how."""


def estimate_training(
    settings: LanguageSettings, *, peak_tflops: float = 989.0, utilisation: float = 0.05
) -> dict[str, Any]:
    """Estimate a training run: counts are exact for parameters, and say what they are of everywhere else.

    `memory_bytes` is for one GPU that holds the whole model and one batch of `batch_size` rows. `flops_per_token`
    counts matrix products from the equations, forward and backward as three forward passes. `gpu_hours` is tokens ×
    FLOPs over `peak_tflops` (TFLOP/s; an H100's 989 in bfloat16 by default) × `utilisation` (0 to 1). The default of
    5 % is what others report for small chunks (TNT, arXiv 2511.07343: below 5 to 10 %); nothing was measured here.

    Raises ValueError for a baseline, for a peak or a utilisation that is not above 0, and a utilisation above 1.
    """
    check_positive("peak_tflops", peak_tflops)
    check_positive("utilisation", utilisation)
    check_between("utilisation", utilisation, 0.0, 1.0)
    if settings.baseline is not None:
        raise ValueError(
            f"got baseline={settings.baseline!r} with an estimate, which knows our architectures; expected no baseline"
        )
    if settings.activation_checkpointing:
        raise ValueError(
            "got activation_checkpointing=True with an estimate, which counts what blocks keep and no second forward "
            "pass; expected none: less memory than it says, and a third more time"
        )
    vocab_size = VOCAB_SIZE if settings.vocab_size is None else settings.vocab_size
    if settings.parameters is not None:
        matched = match_parameters(settings.model, vocab_size, settings.parameters)
        settings = dataclasses.replace(settings, model=matched)
    parts = count_parts(model_without_weights(settings.model, vocab_size))
    parameters, precision = sum(parts.values()), product_precision(settings)
    step = Step(settings.model, vocab_size, settings.batch_size, settings.seq_len, precision)
    memory = {"weights": 4 * parameters, "gradients": 4 * parameters, "adamw": 8 * parameters, **held_bytes(step)}
    forward = model_flops(settings.model, vocab_size, settings.seq_len)
    training = 3.0 * sum(forward.values())
    tokens_per_step = settings.batch_size * settings.seq_len * settings.accumulate
    tokens = settings.steps * tokens_per_step
    return {
        "architecture": settings.model.architecture,
        "vocab_size": vocab_size,
        "parameters": parameters,
        "parameters_by_part": parts,
        "batch": {"rows": step.rows, "tokens_of_a_row": step.tokens, "precision": precision},
        "memory_bytes": {**memory, "total": sum(memory.values())},
        "flops_per_token": {"forward": sum(forward.values()), "training": training, "forward_by_part": forward},
        "steps": settings.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "peak_tflops": peak_tflops,
        "utilisation": utilisation,
        "gpu_hours": tokens * training / (peak_tflops * 1e12 * utilisation) / SECONDS_PER_HOUR,
    }


def product_precision(settings: FitSettings) -> Precision:
    """The precision of matrix products that the settings mean on a GPU with bfloat16, or on the CPU if they name it."""
    if settings.precision == "auto":
        return "float32" if settings.device.startswith("cpu") else "bfloat16"
    return settings.precision


def estimate_lines(estimate: dict[str, Any]) -> list[str]:
    """Lay an estimate out for reading; a GB is 10⁹ bytes."""
    batch, memory, flops = estimate["batch"], estimate["memory_bytes"], estimate["flops_per_token"]
    shares = (f"{name} {value / flops['forward']:.0%}" for name, value in flops["forward_by_part"].items())
    return [
        f"{estimate['architecture']}: {estimate['parameters']:,} parameters, vocabulary of {estimate['vocab_size']:,}",
        *(f"  {name:<22}{count:>16,}" for name, count in estimate["parameters_by_part"].items()),
        f"memory of one GPU, which holds the whole model and a batch of {batch['rows']} × {batch['tokens_of_a_row']:,} "
        f"tokens, products in {batch['precision']}:",
        *(f"  {name.replace('_', ' '):<22}{size / 1e9:>13.3f} GB  {EXPLAINED[name]}" for name, size in memory.items()),
        f"FLOPs per token: {flops['forward']:.4g} forward, {flops['training']:.4g} forward and backward "
        "(matrix products by the equations; backward counted as two forward passes)",
        f"  forward: {', '.join(shares)}",
        f"{estimate['tokens']:,} tokens: {estimate['steps']:,} steps of {estimate['tokens_per_step']:,}",
        f"GPU-hours: {_readable(estimate['gpu_hours'])}, if a GPU can do {estimate['peak_tflops']:g} TFLOP/s and "
        f"training reaches {estimate['utilisation']:.3g} of that (--peak-tflops, --utilisation; assumed, not measured)",
    ]


def _readable(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
