"""Floating point operations of the op and of a language model, counted from their equations."""

from itertools import pairwise

from titans_lm.config import MEMORY_ALONE, THRESHOLDS, BackboneConfig

MAPS = {"lmm": 5, "mac": 15, "mag": 10, "mal": 9, "tnt": 5, "attention": 4, "sliding": 4, "segment": 4}
"""Linear maps of E × E that a token of a block goes through: five of the memory, four of attention, one behind ⊗.

MAC takes three of the memory's twice, to ask and to write, and two of attention's twice, for what it recalled."""
SHARED = {"mac": 1, "mag": 3}
"""How many of them `shared_qkv` saves: attention's three; MAC still makes k and v twice, of s and of z."""


def memory_flops(widths: tuple[int, ...], chunk_size: int, *, forget_to_init: bool = False) -> int:
    """Operations of the forward pass per token and head, a multiplication and an addition each as one.

        n_l = D_{l−1} D_l
        2 Σ_l n_l               errors: forward through the anchor
        2 Σ_{l≥2} n_l           errors: back through it, to the pre-activations
        4 Σ_l n_l               reading: M and S of the chunk's start
        2 Σ_l n_l               reading: M_init, where forgetting leads there
        2 Σ_l C (D_{l−1} + D_l) reading: the masked attention inside the chunk
        4 Σ_l n_l               writing: M and S of the chunk's end

    Only products are counted. A whole chunk is counted where causality needs half of it, and the products with M and
    S of a chunk whose two coefficients meet in one product: it is the count of the equations, not of a program, and
    the same for every backend. Forward and backward together are three forward passes; what a backward pass computes
    again is not counted.
    """
    sizes = [a * b for a, b in pairwise(widths)]
    total = sum(sizes)
    attention = chunk_size * sum(a + b for a, b in pairwise(widths))
    return 2 * (total + sum(sizes[1:]) + 2 * total + (total if forget_to_init else 0) + attention + 2 * total)


def memory_widths(width: int, depth: int, expansion: int) -> tuple[int, ...]:
    """Widths D_0 … D_L of the memory network of a head."""
    return (width, *[expansion * width] * (depth - 1), width)


def model_flops(config: BackboneConfig, vocab_size: int, seq_len: int) -> dict[str, float]:
    """Operations of a language model's forward pass per token of a row of `seq_len` tokens, by part.

        projections     2 E² for each linear map of a block (MAPS), and the maps that make the gates
                        (with shared_qkv less SHARED)
        memory          the op (`memory_flops`), and in MAC the recall before it, 2 Σ_l n_l per head; in TNT that of all
                        its memories, and 8 D² for the projection of queries: M and S, written and read
        attention       4 E for each key that a token sees: scores, and the mean of values
        mlp             6 E F
        head            2 E V

    Matrix products only, like `memory_flops`: no norms, no short convolutions, no memory caching, and not the
    persistent tokens, which are read once per batch. Forward and backward together are three forward passes.
    """
    E, H, kinds = config.hidden_size, config.num_attention_heads, config.by_block()
    return {
        "projections": float(sum(n * 2 * _map_weights(c) for c, n in kinds)),
        "memory": float(sum(n * H * _op_flops(c) for c, n in kinds)),
        "attention": sum(n * 4 * E * visible_keys(c, seq_len) for c, n in kinds),
        "mlp": float(config.num_hidden_layers * 6 * E * config.mlp_width),
        "head": float(2 * E * vocab_size),
    }


def _op_flops(config: BackboneConfig) -> int:
    """Operations of the op per token and head, in a block of a stack of one kind."""
    if not config.has_memory:
        return 0
    c, widths, to_init = config, config.memory_widths, config.forget_to == "init"
    sizes = [a * b for a, b in pairwise(widths)]
    if c.architecture == "tnt":
        whole = 2 * (4 * sum(sizes) + sum(sizes[1:]))  # read at its anchor: errors, one read, M and S at the end
        local = sum(memory_flops(widths, chunk, forget_to_init=to_init) for chunk in c.tnt_local_chunks)
        return whole + local + c.tnt_projection * 8 * c.head_dim**2
    return memory_flops(widths, c.chunk_size, forget_to_init=to_init) + 2 * sum(sizes) * (c.architecture == "mac")


def visible_keys(config: BackboneConfig, seq_len: int) -> float:
    """Mean number of keys that a token of a row attends to: persistent rows, itself, and for MAC what it recalled.

    Like the other counts of a block it is asked for a stack of one kind (`BackboneConfig.by_block`).
    """
    if config.architecture in MEMORY_ALONE:
        return 0.0
    own = seq_len * (seq_len + 1) / 2
    if config.has_segments:
        whole, rest = divmod(seq_len, config.segment_len)
        own = whole * config.segment_len * (config.segment_len + 1) / 2 + rest * (rest + 1) / 2
    elif not config.state_grows:
        window = min(config.window, seq_len)
        own = window * (window + 1) / 2 + (seq_len - window) * window
    return config.num_persistent + own / seq_len * (2 if config.architecture == "mac" else 1)


def _map_weights(config: BackboneConfig) -> int:
    """Weights of a block's maps of E × E, and of those that make its gates: θ, η, α, a threshold, a window's shares."""
    maps = MAPS[config.architecture] - config.shared_qkv * SHARED.get(config.architecture, 0)
    if not config.has_memory:
        return maps * config.hidden_size**2
    E, numbers = config.hidden_size, config.num_attention_heads * config.gates_per_head
    inputs = E * (1 + config.gates_see_keys)
    one = config.gate_rank * (inputs + numbers) if config.gates == "channel" else inputs * numbers
    per_head = inputs * (config.memory_objective in THRESHOLDS) + E * config.omega_window * (config.omega_window > 1)
    gates = one * (1 + config.momentum + config.decay)
    return maps * E * E + (gates + config.num_attention_heads * per_head) * config.memories
