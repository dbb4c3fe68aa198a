"""What a training run would take: parameters, memory, FLOPs and GPU-hours, without making the model or reading data.

Memory is counted from the code. Autograd keeps, until the backward pass, the tensors that functions have saved. Which
these are can be read off the blocks, so they are counted here per token, per state and per weight. Not counted:
persistent tokens as tokens of the memory, memory caching, what a block's backward pass makes for a moment, the inside
of calls that is kept (ops/groups.py:KEPT, and KEPT_SHARE on a GPU), gaps between tensors. What is counted for one block
is counted for each kind of block in the stack (`BackboneConfig.by_block`). `tests/recipes/test_activation_memory.py`
compares the count with what autograd does keep, in float32 and bfloat16 on a CPU. Counted and not measured, as a
measurement of one block takes most of a minute even with tensors that hold no numbers: a row of 4,096 tokens is 100,000
small operations.
"""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from titans_lm.bench.flops import model_flops
from titans_lm.config import MEMORY_ALONE, BackboneConfig, check_between, check_positive
from titans_lm.data.tokenizer import VOCAB_SIZE
from titans_lm.ops.groups import group_size, lagging_group
from titans_lm.train.fresh import count_parts, match_parameters, model_without_weights
from titans_lm.train.settings import FitSettings, LanguageSettings

Precision = Literal["float32", "bfloat16"]

PRODUCT_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number that goes through matrix products; residual stream, norms and the memory stay in float32."""

KEPT: dict[Precision, dict[str, tuple[int, int]]] = {
    "float32": {
        "lmm": (14, 0), "mac": (22, 0), "mag": (16, 0), "mal": (16, 0), "tnt": (14, 0),
        "attention": (4, 0), "sliding": (4, 0), "segment": (4, 0),
    },
    "bfloat16": {
        "lmm": (8, 13), "mac": (14, 21), "mag": (12, 17), "mal": (10, 14), "tnt": (8, 13),
        "attention": (2, 3), "sliding": (2, 3), "segment": (2, 3),
    },
}  # fmt: skip
"""Vectors of width E that a token leaves in a block: in float32, and in the precision of products.

What attention itself looks at comes on top (`attention_widths`), what local memories leave (`local_widths`), and the
MLP's hidden layers. In float32 functions with gradients by hand keep little (D27); under autocast they step aside, and
more vectors of half the size are kept. As an example LMM in float32: the residual stream twice and its norm twice (4),
input of the convolutions (3), q, k, v (3), z_L of keys and queries (2), the memory's answer and the gate (2).
"""

JOINED = {"lmm": 0, "mac": 3, "mag": 3, "mal": 3, "tnt": 0, "attention": 3, "sliding": 3, "segment": 3}
"""Maps of attention whose weights are laid side by side once per block: a copy, kept for the backward pass."""
SINGLE = {"lmm": 2, "mac": 5, "mag": 4, "mal": 3, "tnt": 2, "attention": 1, "sliding": 1, "segment": 1}
"""Maps of a block that are used as they are: autocast keeps a copy of each in its own precision."""


@dataclass(frozen=True)
class Step:
    """One batch on its way through a model: `rows` of `tokens` each."""

    config: BackboneConfig
    vocab_size: int
    rows: int
    tokens: int
    precision: Precision

    @property
    def product_bytes(self) -> int:
        return PRODUCT_BYTES[self.precision]


def held_bytes(step: Step) -> dict[str, int]:
    """Bytes that a step holds at its peak, by what they are: all of them estimates.

    `activations` are vectors of tokens, `memory_states` M and S at the start of each segment of chunks (D24),
    `weight_copies` matrices side by side or in bfloat16, and `loss` the log-probabilities and two gradients of their
    size, or the states that a segment's backward pass makes again, whichever is more.
    """
    return {
        "activations": activation_bytes(step),
        "memory_states": memory_state_bytes(step),
        "weight_copies": weight_copy_bytes(step),
        "loss": max(12 * step.vocab_size * step.rows * step.tokens, _states_of_a_segment(step)),
    }


def activation_bytes(step: Step) -> int:
    """Bytes of the vectors that tokens leave in all blocks, and of attention's masks."""
    c, size, kinds = step.config, step.product_bytes, step.config.by_block()
    blocks = sum(n * _token_bytes(step, kind) for kind, n in kinds)
    ends = (4 + size) * c.hidden_size  # the last norm and the head
    masks = sum(n * mask_numbers(kind, step.tokens) for kind, n in kinds)
    return round(step.rows * step.tokens * (blocks + ends)) + size * masks


def _token_bytes(step: Step, kind: BackboneConfig) -> float:
    """Bytes of the vectors that a token leaves in one block."""
    E = kind.hidden_size
    whole, product = KEPT[step.precision][kind.architecture]
    whole, product = whole + local_widths(kind), product + attention_widths(kind, step.tokens)
    vectors = 4 * whole * E + step.product_bytes * product * E
    by_head = 4 * kind.num_attention_heads  # the softmax's sum
    if kind.has_memory:
        by_head *= (6 * kind.gates_per_head + 4) * kind.memories  # three gates twice; norms
    mlp = 8 * kind.mlp_width  # two hidden layers of float32, or four of half the size
    return vectors + by_head + 4 * key_numbers(kind) + mlp


def key_numbers(config: BackboneConfig) -> int:
    """Numbers per token that polynomial keys keep: what is read in two parts.

    And all monomials of queries and of keys where no groups of chunks make them: for windows and for TNT's memories. Of
    small chunks, by tiles, more is kept than is counted here.
    """
    if not config.has_memory or config.key_degree == 1:
        return 0
    before = config.omega_window > 1 or "tnt" in config.blocks
    monomials = config.num_attention_heads * config.memory_widths[0] if before else 0
    return 2 * config.memories * (monomials + config.hidden_size)


def local_widths(config: BackboneConfig) -> int:
    """Vectors of width E per token that local memories keep: z_L of keys and of queries.

    A projection of these keeps z_L of both, the query as it comes and as it is cut.
    """
    return 2 * (config.memories - 1) + 4 * (config.architecture == "tnt" and config.tnt_projection)


def attention_widths(config: BackboneConfig, tokens: int) -> float:
    """Vectors of width E per token that attention keeps: queries, keys and values as they are seen, and the output.

    With a short convolution what enters it, too. Keys and values are seen behind the persistent rows; by a window's
    tokens together with those of the window before; in MAC together with as many recalled ones.
    """
    if config.architecture in MEMORY_ALONE:
        return 0.0
    return _seen_widths(config, tokens) + 3 * (config.attention_conv_size > 1)


def _seen_widths(config: BackboneConfig, tokens: int) -> float:
    P, T, W = config.num_persistent, tokens, config.window
    if config.has_segments:
        rows = 2 if config.architecture == "mac" else 1
        return 2 + 2 * (rows + P * len(segments(config, T)) / T)
    if config.state_grows:
        return 4 * (1 + P / T)
    if T <= W:
        return 2 + 2 * (1 + P / T)
    later = -(-T // W) - 1  # windows after the first, the last one filled up
    first, others = 2 * (P + W) / T, 2 * later * (P + 2 * W) / T
    return 1 + later * W / T + first + others + (W + later * W) / T + 1  # both outputs, and put together


def mask_numbers(config: BackboneConfig, tokens: int) -> int:
    """Numbers of a block's attention masks, which all rows and heads share."""
    P, W = config.num_persistent, config.window
    if config.has_segments:
        rows = 2 if config.architecture == "mac" else 1
        return sum(length * (P + rows * length) for length in segments(config, tokens))
    if config.architecture in (*MEMORY_ALONE, "attention"):  # causal attention from the start of a text needs none
        return 0
    return tokens * (P + tokens) if tokens <= W else W * (P + W) + W * (P + 2 * W)


def memory_state_bytes(step: Step) -> int:
    """Bytes of M and S at the start of each segment of chunks, and of M_init at its scale, in all blocks (float32)."""
    return 4 * sum(n * _state_numbers(step, kind) for kind, n in step.config.by_block())


def _state_numbers(step: Step, kind: BackboneConfig) -> int:
    memory, later = memory_numbers(kind), memory_numbers(kind, first=1)
    numbers = 0
    for call in memory_calls(kind, step.rows, step.tokens):
        numbers += call.rows * 2 * memory * -(-call.chunks // call.group)
        numbers += later if kind.forget_to == "init" else 0
    if kind.architecture == "tnt" and kind.tnt_projection:
        numbers += step.rows * -(-step.tokens // kind.tnt_shard) * 2 * kind.hidden_size * kind.head_dim  # of keys
    if kind.memory_begins_persistent:
        numbers += step.rows * memory  # the anchor: a tensor of its own where a state was repeated for all rows
    return numbers


def weight_copy_bytes(step: Step) -> int:
    """Bytes of weights that stand in memory a second time until the backward pass."""
    blocks = sum(n * _copied_weights(step, kind) for kind, n in step.config.by_block())
    head = 0 if step.precision == "float32" else step.vocab_size * step.config.hidden_size
    return step.product_bytes * (blocks + head)


def _copied_weights(step: Step, kind: BackboneConfig) -> int:
    E, F = kind.hidden_size, kind.mlp_width
    calls = len(memory_calls(kind, step.rows, step.tokens)) if kind.architecture != "tnt" else 1
    joined = (5 if kind.architecture == "mac" else 3) * calls + JOINED[kind.architecture]
    if kind.architecture not in MEMORY_ALONE and kind.num_persistent > 1:
        joined += 2  # keys and values of the persistent rows
    if step.precision == "float32":
        return joined * E * E + 2 * E * F
    return (joined + SINGLE[kind.architecture]) * E * E + 3 * E * F


def memory_numbers(config: BackboneConfig, first: int = 0) -> int:
    """Numbers of one row's memory M in one block, of its layers from the given one on."""
    return config.num_attention_heads * sum(a * b for a, b in list(pairwise(config.memory_widths))[first:])


class MemoryCall(NamedTuple):
    """A call that writes into a memory, of `rows` of `tokens` each; one that is read with lag has smaller groups."""

    rows: int
    tokens: int
    chunk: int
    lags: bool = False

    @property
    def chunks(self) -> int:
        return max(-(-self.tokens // self.chunk), 1)

    @property
    def group(self) -> int:
        """Chunks that are worked on at once."""
        return lagging_group(self.chunks, self.chunk) if self.lags else group_size(self.chunks)


def memory_calls(config: BackboneConfig, rows: int, tokens: int) -> list[MemoryCall]:
    """Calls that write into a block's memories: MAC makes one per segment, TNT one per memory, shards as rows."""
    chunk = config.chunk_size
    if not config.has_memory:
        return []
    if config.architecture == "mac":
        return [MemoryCall(rows, length, chunk) for length in segments(config, tokens)]
    if config.architecture == "tnt":
        shards, length = -(-tokens // config.tnt_shard), min(tokens, config.tnt_shard)
        local = [MemoryCall(rows * shards, length, own) for own in config.tnt_local_chunks]
        return [MemoryCall(rows, tokens, config.tnt_global_chunk, lags=True), *local]
    first = [MemoryCall(1, config.num_persistent, chunk)] * config.memory_begins_persistent
    return [*first, MemoryCall(rows, tokens, chunk)]


def segments(config: BackboneConfig, tokens: int) -> list[int]:
    """Tokens of each segment of a row."""
    whole, rest = divmod(tokens, config.segment_len)
    return [config.segment_len] * whole + [rest] * (rest > 0)


def _states_of_a_segment(step: Step) -> int:
    """Bytes of the states of one segment's chunks, made again for its gradients, and of the gradients by them."""
    c = step.config
    calls = [call for kind, _ in c.by_block() for call in memory_calls(kind, step.rows, step.tokens)]
    return max((4 * call.rows * 2 * memory_numbers(c) * (call.group + 4) for call in calls), default=0)


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

    Raises ValueError for a baseline, for activation_checkpointing, for a peak or a utilisation that is not
    above 0, and a utilisation above 1.
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
