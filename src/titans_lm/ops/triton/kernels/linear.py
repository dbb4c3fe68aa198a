"""A linear memory, one program per memory: W, S and the anchor stay in registers over all chunks of a segment.

The forward kernel writes and reads chunk by chunk (docs/derivation.md, sections 4 and 5). The backward pass replays the
writing from a checkpoint, leads all reads back at once, one program per chunk and memory, and then goes through the
writes from the last chunk to the first (section 10). Letters are those of the derivation; x_bar is x̄.
"""

import triton
import triton.language as tl

from titans_lm.ops.triton.kernels.pieces import (
    advanced,
    advanced_adjoint,
    answer,
    answer_adjoint,
    ends_adjoint,
    last_error,
    last_error_adjoint,
    load_ends,
    load_gates,
    load_line,
    load_tile,
    matmul,
    met,
    row_sums,
    state_adjoint,
    store_columns,
    store_ends,
    store_line,
    store_tile,
    tuned,
)


@tuned("W", "S", "A")
@triton.jit
def linear_forward(
    q, k, v, G, gates, complete, weight, bias, initial, W, S, A, o, written, read, sizes,
    n, R, H, C, D,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr, REPLAY: tl.constexpr,
    FRESH: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write and read all chunks of a segment, (n, R, C, D).

    The state goes in and out in place. A replay reads nothing back and leaves the state at the start of every chunk.
    """
    r = tl.program_id(0).to(tl.int64)
    h, square = r % H, r * D * D
    w, b = load_line(weight + h * D, D, BD)[None, :], load_line(bias + h * D, D, BD)[None, :]
    memory, surprise = load_tile(W + square, D, D, D, BD, BD), load_tile(S + square, D, D, D, BD, BD)
    anchor = memory if FRESH else load_tile(A + square, D, D, D, BD, BD)
    base = load_tile(initial + h * D * D, D, D, D, BD, BD) if INIT else tl.zeros_like(memory)
    for i in range(n):
        at = i * R + r
        tokens, given = at * C * D, gates + at * 5 * C
        ks, vs = load_tile(k + tokens, C, D, D, BC, BD), load_tile(v + tokens, C, D, D, BC, BD)
        a, f, memory_end, surprise_end = load_gates(given, C, BC)
        if FRESH:
            anchor = memory
        z = matmul(ks, anchor, PRECISION)
        delta = last_error(z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD)
        if not REPLAY:
            qs = load_tile(q + tokens, C, D, D, BC, BD)
            weighted = matmul(qs, tl.trans(ks), PRECISION) * load_tile(G + at * C * C, C, C, C, BC, BC)
            y = met(qs, a, f, memory, surprise, base, INIT, PRECISION) - matmul(weighted, delta, PRECISION)
            store_tile(o + tokens, answer(qs, y, w, b, D, NORM, RESIDUAL, BD), C, D, D, BC, BD)
            store_tile(written + tokens, z, C, D, D, BC, BD)
            store_tile(read + tokens, y, C, D, D, BC, BD)
            store_line(sizes + at * C, tl.sqrt(tl.sum(ks * ks, 1) * tl.sum(delta * delta, 1)), C, BC)
        memory, surprise = advanced(
            memory, surprise, base, ks, delta, memory_end, surprise_end, load_ends(given, C), INIT, PRECISION
        )  # fmt: skip
        if not FRESH:
            anchor = tl.where(tl.load(complete + at) != 0, memory, anchor)
        if REPLAY:
            after = (at + R) * D * D
            store_tile(W + after, memory, D, D, D, BD, BD)
            store_tile(S + after, surprise, D, D, D, BD, BD)
            if not FRESH:
                store_tile(A + after, anchor, D, D, D, BD, BD)
    if not REPLAY:
        store_tile(W + square, memory, D, D, D, BD, BD)
        store_tile(S + square, surprise, D, D, D, BD, BD)
        if not FRESH:
            store_tile(A + square, anchor, D, D, D, BD, BD)


@tuned()
@triton.jit
def linear_read_adjoint(
    d_o, q, k, v, G, gates, weight, bias, initial, W, S, written, read,
    d_q, d_k, d_delta, d_z, d_G, d_af, d_weight, d_bias,
    R, H, C, D,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr, PRECISION: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Lead the reads of one chunk back, for every chunk and memory on its own."""
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, at = r % H, i * R + r
    tokens, square = at * C * D, at * D * D
    w, b = load_line(weight + h * D, D, BD)[None, :], load_line(bias + h * D, D, BD)[None, :]
    qs, ks = load_tile(q + tokens, C, D, D, BC, BD), load_tile(k + tokens, C, D, D, BC, BD)
    vs, g = load_tile(v + tokens, C, D, D, BC, BD), load_tile(d_o + tokens, C, D, D, BC, BD)
    a, f, _, _ = load_gates(gates + at * 5 * C, C, BC)
    delta = last_error(
        load_tile(written + tokens, C, D, D, BC, BD), ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD
    )  # fmt: skip
    z_bar, w_bar, b_bar = answer_adjoint(g, load_tile(read + tokens, C, D, D, BC, BD), w, D, NORM, BD)
    raw, weights = matmul(qs, tl.trans(ks), PRECISION), load_tile(G + at * C * C, C, C, C, BC, BC)
    p_bar = -matmul(z_bar, tl.trans(delta), PRECISION)
    through = p_bar * weights
    # One tile of the state at a time: three of 128 × 128 are more than the shared memory of an H100.
    kept = matmul(z_bar, tl.trans(load_tile(W + square, D, D, D, BD, BD)), PRECISION)
    past = matmul(z_bar, tl.trans(load_tile(S + square, D, D, D, BD, BD)), PRECISION)
    q_bar = a * kept + f * past
    if INIT:
        based = matmul(z_bar, tl.trans(load_tile(initial + h * D * D, D, D, D, BD, BD)), PRECISION)
        q_bar += (1.0 - a) * based
        kept -= based
    by_a, by_f = row_sums(qs * kept), row_sums(qs * past)
    q_bar += matmul(through, ks, PRECISION)
    if RESIDUAL:
        q_bar += g
    store_tile(d_q + tokens, q_bar, C, D, D, BC, BD)
    store_tile(d_k + tokens, matmul(tl.trans(through), qs, PRECISION), C, D, D, BC, BD)
    store_tile(d_delta + tokens, -matmul(tl.trans(raw * weights), z_bar, PRECISION), C, D, D, BC, BD)
    store_tile(d_z + tokens, z_bar, C, D, D, BC, BD)
    store_tile(d_G + at * C * C, p_bar * raw, C, C, C, BC, BC)
    store_columns(d_af + at * 2 * C, by_a, by_f, C, BC)
    store_line(d_weight + at * D, w_bar, D, BD)
    store_line(d_bias + at * D, b_bar, D, BD)


@tuned("d_W", "d_S", "d_A", "d_initial", "d_k", "d_weight", "d_bias")
@triton.jit
def linear_write_adjoint(
    q, k, v, gates, complete, weight, bias, initial, W, S, A, written, d_delta, d_z,
    d_W, d_S, d_A, d_initial, d_k, d_v, d_lines, d_ends, d_weight, d_bias,
    n, R, H, C, D,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr, FRESH: tl.constexpr,
    PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Lead the writes of a segment back, last chunk first; gradients by the state go in and out in place."""
    r = tl.program_id(0).to(tl.int64)
    h, square = r % H, r * D * D
    w, b = load_line(weight + h * D, D, BD)[None, :], load_line(bias + h * D, D, BD)[None, :]
    W_bar, S_bar = load_tile(d_W + square, D, D, D, BD, BD), load_tile(d_S + square, D, D, D, BD, BD)
    A_bar = tl.zeros_like(W_bar) if FRESH else load_tile(d_A + square, D, D, D, BD, BD)
    base, base_bar = tl.zeros_like(W_bar), tl.zeros_like(W_bar)
    if INIT:
        base = load_tile(initial + h * D * D, D, D, D, BD, BD)
        base_bar = load_tile(d_initial + square, D, D, D, BD, BD)
    w_bar, b_bar = load_line(d_weight + r * D, D, BD), load_line(d_bias + r * D, D, BD)
    for back in range(n):
        i = n - 1 - back
        at = i * R + r
        tokens, given, state = at * C * D, gates + at * 5 * C, at * D * D
        ks, vs = load_tile(k + tokens, C, D, D, BC, BD), load_tile(v + tokens, C, D, D, BC, BD)
        a, f, memory_end, surprise_end = load_gates(given, C, BC)
        memory, surprise = load_tile(W + state, D, D, D, BD, BD), load_tile(S + state, D, D, D, BD, BD)
        z = load_tile(written + tokens, C, D, D, BC, BD)
        delta = last_error(z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD)
        if not FRESH:  # the anchor after a complete chunk is the memory it left
            done = tl.load(complete + at) != 0
            W_bar = tl.where(done, W_bar + A_bar, W_bar)
            A_bar = tl.where(done, 0.0, A_bar)
        h_bar, delta_bar, by_memory, by_surprise = advanced_adjoint(
            ks, delta, W_bar, S_bar, memory_end, surprise_end, PRECISION
        )  # fmt: skip
        k_bar = load_tile(d_k + tokens, C, D, D, BC, BD) + h_bar
        delta_bar += load_tile(d_delta + tokens, C, D, D, BC, BD)
        store_columns(d_lines + at * 2 * C, by_memory, by_surprise, C, BC)
        by_a, by_f, by_eta = ends_adjoint(W_bar, S_bar, memory, surprise, base, INIT)
        store_ends(d_ends + at * 3, by_a, by_f, by_eta)
        qs, y_bar = load_tile(q + tokens, C, D, D, BC, BD), load_tile(d_z + tokens, C, D, D, BC, BD)
        W_bar, S_bar, base_more = state_adjoint(
            W_bar, S_bar, qs, y_bar, a, f, load_ends(given, C), INIT, PRECISION
        )  # fmt: skip
        base_bar += base_more
        z_bar, v_bar, gained, w_more, b_more = last_error_adjoint(
            delta_bar, z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD
        )  # fmt: skip
        to_anchor = matmul(tl.trans(ks), z_bar, PRECISION)
        if FRESH:
            W_bar += to_anchor
            k_bar += matmul(z_bar, tl.trans(memory), PRECISION)
        else:
            A_bar += to_anchor
            k_bar += matmul(z_bar, tl.trans(load_tile(A + state, D, D, D, BD, BD)), PRECISION)
        store_tile(d_k + tokens, k_bar + gained, C, D, D, BC, BD)
        store_tile(d_v + tokens, v_bar, C, D, D, BC, BD)
        w_bar += w_more
        b_bar += b_more
    store_tile(d_W + square, W_bar, D, D, D, BD, BD)
    store_tile(d_S + square, S_bar, D, D, D, BD, BD)
    if not FRESH:
        store_tile(d_A + square, A_bar, D, D, D, BD, BD)
    if INIT:
        store_tile(d_initial + square, base_bar, D, D, D, BD, BD)
    store_line(d_weight + r * D, w_bar, D, BD)
    store_line(d_bias + r * D, b_bar, D, BD)
