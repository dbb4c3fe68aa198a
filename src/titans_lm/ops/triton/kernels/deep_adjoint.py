"""The gradients of a memory of two layers (docs/derivation.md, section 10), of which hidden channels pass by in tiles.

Reads go back one program per chunk and memory, in two passes: x hᵀ of the second layer is a sum over all tiles. What
has hidden channels and is needed later, (n, R, C, F), is laid down for the writes: z_1 of the reads and its gradient,
h̄ and δ̄_1. Those go back one program per memory, last chunk first, with gradients by the state in tiles like the state
itself, twice a chunk: up through the errors for δ̄_2, which is a sum over all tiles, and down again from z̄_2.
"""

import triton
import triton.language as tl

from titans_lm.ops.triton.kernels.deep import load_first, load_second, store_first, store_second
from titans_lm.ops.triton.kernels.pieces import (
    advanced_adjoint,
    answer_adjoint,
    curve,
    ends_adjoint,
    last_error,
    last_error_adjoint,
    load_ends,
    load_gates,
    load_line,
    load_tile,
    matmul,
    met,
    met_adjoint,
    phi,
    row_sums,
    slope,
    state_adjoint,
    store_columns,
    store_ends,
    store_line,
    store_tile,
    tuned,
)


@triton.jit
def keys_tile(ks, delta, A1, A2, t, D, F, PRECISION: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr):
    """z_1 and δ_2 W_2ᵀ of the keys at the anchor, for a tile of hidden channels; δ_1 is the second by φ'(the first)."""
    pre = matmul(ks, load_first(A1, t, D, F, BD, BF), PRECISION)
    return pre, matmul(delta, tl.trans(load_second(A2, t, D, F, BF, BD)), PRECISION)


@triton.jit
def hidden_reads(
    qs, ks, delta, weighted, a, f, W1, S1, initial1, A1, A2, x_pre, C, D, F,
    ACT: tl.constexpr, INIT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    """Read the first layer again, into `x_pre`, and give x hᵀ of the second, a sum over the hidden channels."""
    raw = tl.zeros((BC, BC), dtype=qs.dtype)
    for t in range(0, F, BF):
        pre, back = keys_tile(ks, delta, A1, A2, t, D, F, PRECISION, BD, BF)
        memory, surprise = load_first(W1, t, D, F, BD, BF), load_first(S1, t, D, F, BD, BF)
        base = load_first(initial1, t, D, F, BD, BF) if INIT else memory
        x = met(qs, a, f, memory, surprise, base, INIT, PRECISION)
        x -= matmul(weighted, back * slope(pre, ACT), PRECISION)
        store_first(x_pre, x, t, C, F, BC, BF)
        raw += matmul(phi(x, ACT), tl.trans(phi(pre, ACT)), PRECISION)
    return raw


@tuned(tiles=True)
@triton.jit
def deep_read_adjoint(
    d_o, q, k, v, G1, G2, lines1, lines2, weight, bias, initial1, initial2, W1, W2, S1, S2, A1, A2, written, read,
    d_q, d_k, d_delta, d_z, x_pre, d_x_pre, d_h, d_delta1, d_G1, d_G2, d_af1, d_af2, d_weight, d_bias,
    R, H, C, D, F,
    ACT: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr,
    PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Lead the reads of one chunk back, for every chunk and memory on its own."""
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, at = r % H, i * R + r
    tokens, state, hidden, square = at * C * D, at * D * F, at * C * F, at * C * C
    w, b = load_line(weight + h * D, D, BD)[None, :], load_line(bias + h * D, D, BD)[None, :]
    qs, ks = load_tile(q + tokens, C, D, D, BC, BD), load_tile(k + tokens, C, D, D, BC, BD)
    vs, g = load_tile(v + tokens, C, D, D, BC, BD), load_tile(d_o + tokens, C, D, D, BC, BD)
    a1, f1, _, _ = load_gates(lines1 + at * 5 * C, C, BC)
    a2, f2, _, _ = load_gates(lines2 + at * 5 * C, C, BC)
    z = load_tile(written + tokens, C, D, D, BC, BD)
    delta = last_error(z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD)
    raw1 = matmul(qs, tl.trans(ks), PRECISION)
    weighted = raw1 * load_tile(G1 + square, C, C, C, BC, BC)
    raw2 = hidden_reads(
        qs, ks, delta, weighted, a1, f1, W1 + state, S1 + state, initial1 + h * D * F, A1 + state, A2 + state,
        x_pre + hidden, C, D, F, ACT, INIT, PRECISION, BC, BD, BF,
    )  # fmt: skip
    tl.debug_barrier()
    z_bar, w_bar, b_bar = answer_adjoint(g, load_tile(read + tokens, C, D, D, BC, BD), w, D, NORM, BD)
    store_line(d_weight + at * D, w_bar, D, BD)
    store_line(d_bias + at * D, b_bar, D, BD)
    store_tile(d_z + tokens, z_bar, C, D, D, BC, BD)
    p_bar, G = -matmul(z_bar, tl.trans(delta), PRECISION), load_tile(G2 + square, C, C, C, BC, BC)
    store_tile(d_G2 + square, p_bar * raw2, C, C, C, BC, BC)
    store_tile(d_delta + tokens, -matmul(tl.trans(raw2 * G), z_bar, PRECISION), C, D, D, BC, BD)
    through = p_bar * G
    by_a, by_f = tl.zeros_like(a2), tl.zeros_like(a2)
    p_bar = tl.zeros_like(p_bar)
    kept, past, based = tl.zeros_like(g), tl.zeros_like(g), tl.zeros_like(g)
    for t in range(0, F, BF):
        pre, back = keys_tile(ks, delta, A1 + state, A2 + state, t, D, F, PRECISION, BD, BF)
        x = load_first(x_pre + hidden, t, C, F, BC, BF)
        x_bar, by_a_here, by_f_here = met_adjoint(
            phi(x, ACT), z_bar, a2, f2, load_second(W2 + state, t, D, F, BF, BD),
            load_second(S2 + state, t, D, F, BF, BD),
            load_second(initial2 + h * D * F, t, D, F, BF, BD) if INIT else z_bar, INIT, PRECISION,
        )  # fmt: skip
        by_a += by_a_here
        by_f += by_f_here
        x_bar += matmul(through, phi(pre, ACT), PRECISION)
        store_first(d_h + hidden, matmul(tl.trans(through), phi(x, ACT), PRECISION), t, C, F, BC, BF)
        x_bar *= slope(x, ACT)
        store_first(d_x_pre + hidden, x_bar, t, C, F, BC, BF)
        store_first(d_delta1 + hidden, -matmul(tl.trans(weighted), x_bar, PRECISION), t, C, F, BC, BF)
        p_bar -= matmul(x_bar, tl.trans(back * slope(pre, ACT)), PRECISION)
        kept += matmul(x_bar, tl.trans(load_first(W1 + state, t, D, F, BD, BF)), PRECISION)
        past += matmul(x_bar, tl.trans(load_first(S1 + state, t, D, F, BD, BF)), PRECISION)
        if INIT:
            based += matmul(x_bar, tl.trans(load_first(initial1 + h * D * F, t, D, F, BD, BF)), PRECISION)
    store_columns(d_af2 + at * 2 * C, by_a, by_f, C, BC)
    store_columns(d_af1 + at * 2 * C, row_sums(qs * (kept - based)), row_sums(qs * past), C, BC)
    store_tile(d_G1 + square, p_bar * raw1, C, C, C, BC, BC)
    through = p_bar * load_tile(G1 + square, C, C, C, BC, BC)
    q_bar = a1 * kept + f1 * past + matmul(through, ks, PRECISION)
    if INIT:
        q_bar += (1.0 - a1) * based
    if RESIDUAL:
        q_bar += g
    store_tile(d_q + tokens, q_bar, C, D, D, BC, BD)
    store_tile(d_k + tokens, matmul(tl.trans(through), qs, PRECISION), C, D, D, BC, BD)


@triton.jit
def first_back(
    W, S, initial, d_W, d_S, d_A, d_initial, ks, qs, delta1, delta1_bar, y_bar, gates, ends, done, t, D, F,
    INIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """A tile of the first layer: from the state after the chunk to the state before it.

    Returns δ̄_1 and what the sums over tiles get: k̄, the columns by memory_end and surprise_end, and the three ends.
    """
    W_bar, S_bar = load_first(d_W, t, D, F, BD, BF), load_first(d_S, t, D, F, BD, BF)
    memory, surprise = load_first(W, t, D, F, BD, BF), load_first(S, t, D, F, BD, BF)
    base = load_first(initial, t, D, F, BD, BF) if INIT else memory
    if not FRESH:  # the anchor after a complete chunk is the memory it left
        A_bar = load_first(d_A, t, D, F, BD, BF)
        W_bar = tl.where(done, W_bar + A_bar, W_bar)
        tl.debug_barrier()
        store_first(d_A, tl.where(done, 0.0, A_bar), t, D, F, BD, BF)
    k_bar, delta_bar, by_memory, by_surprise = advanced_adjoint(
        ks, delta1, W_bar, S_bar, gates[2], gates[3], PRECISION
    )  # fmt: skip
    by_a, by_f, by_eta = ends_adjoint(W_bar, S_bar, memory, surprise, base, INIT)
    W_bar, S_bar, base_bar = state_adjoint(W_bar, S_bar, qs, y_bar, gates[0], gates[1], ends, INIT, PRECISION)
    tl.debug_barrier()
    store_first(d_W, W_bar, t, D, F, BD, BF)
    store_first(d_S, S_bar, t, D, F, BD, BF)
    if INIT:
        store_first(d_initial, load_first(d_initial, t, D, F, BD, BF) + base_bar, t, D, F, BD, BF)
    return delta1_bar + delta_bar, k_bar, by_memory, by_surprise, by_a, by_f, by_eta


@triton.jit
def second_back(
    W, S, A, initial, d_W, d_S, d_A, d_initial, h, x, delta, y_bar, back_bar, gates, ends, done, t, D, F,
    INIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """A tile of the second layer; `back_bar` is ȳ_1, the gradient by δ_2 W_2ᵀ.

    Returns what h̄ gets, and for the sums over tiles δ̄_2, the two columns and the three ends.
    """
    W_bar, S_bar = load_second(d_W, t, D, F, BF, BD), load_second(d_S, t, D, F, BF, BD)
    memory, surprise = load_second(W, t, D, F, BF, BD), load_second(S, t, D, F, BF, BD)
    base = load_second(initial, t, D, F, BF, BD) if INIT else memory
    A_bar = W_bar
    if not FRESH:
        A_bar = load_second(d_A, t, D, F, BF, BD)
        W_bar = tl.where(done, W_bar + A_bar, W_bar)
        A_bar = tl.where(done, 0.0, A_bar)
    h_bar, delta_bar, by_memory, by_surprise = advanced_adjoint(
        h, delta, W_bar, S_bar, gates[2], gates[3], PRECISION
    )  # fmt: skip
    delta_bar += matmul(back_bar, load_second(A, t, D, F, BF, BD), PRECISION)
    by_a, by_f, by_eta = ends_adjoint(W_bar, S_bar, memory, surprise, base, INIT)
    W_bar, S_bar, base_bar = state_adjoint(W_bar, S_bar, x, y_bar, gates[0], gates[1], ends, INIT, PRECISION)
    to_anchor = matmul(tl.trans(back_bar), delta, PRECISION)
    tl.debug_barrier()
    store_second(d_W, W_bar + to_anchor if FRESH else W_bar, t, D, F, BF, BD)
    store_second(d_S, S_bar, t, D, F, BF, BD)
    if not FRESH:
        store_second(d_A, A_bar + to_anchor, t, D, F, BF, BD)
    if INIT:
        store_second(d_initial, load_second(d_initial, t, D, F, BF, BD) + base_bar, t, D, F, BF, BD)
    return h_bar, delta_bar, by_memory, by_surprise, by_a, by_f, by_eta


@triton.jit
def anchor_back(
    A1, A2, d_A1, d_A2, ks, delta, z_bar, d_h, d_pre, D, F, C,
    ACT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Down through the anchor: from z̄_2 and h̄ to Ā and what k̄ gets; `d_pre` holds z̄_1 as far as the errors gave it."""
    k_bar = tl.zeros_like(ks)
    for t in range(0, F, BF):
        first, second = load_first(A1, t, D, F, BD, BF), load_second(A2, t, D, F, BF, BD)
        pre = matmul(ks, first, PRECISION)
        h_bar = load_first(d_h, t, C, F, BC, BF) + matmul(z_bar, tl.trans(second), PRECISION)
        pre_bar = load_first(d_pre, t, C, F, BC, BF) + h_bar * slope(pre, ACT)
        k_bar += matmul(pre_bar, tl.trans(first), PRECISION)
        first_bar = load_first(d_A1, t, D, F, BD, BF) + matmul(tl.trans(ks), pre_bar, PRECISION)
        second_bar = load_second(d_A2, t, D, F, BF, BD) + matmul(tl.trans(phi(pre, ACT)), z_bar, PRECISION)
        tl.debug_barrier()
        store_first(d_A1, first_bar, t, D, F, BD, BF)
        store_second(d_A2, second_bar, t, D, F, BF, BD)
    return k_bar


@tuned(
    "d_W1", "d_W2", "d_S1", "d_S2", "d_A1", "d_A2", "d_initial1", "d_initial2", "d_h", "d_pre", "d_k", "d_weight",
    "d_bias", tiles=True,
)  # fmt: skip
@triton.jit
def deep_write_adjoint(
    q, k, v, lines1, lines2, complete, weight, bias, initial1, initial2, W1, W2, S1, S2, A1, A2, written, d_delta, d_z,
    x_pre, d_x_pre, d_h, d_pre,
    d_W1, d_W2, d_S1, d_S2, d_A1, d_A2, d_initial1, d_initial2, d_k, d_v, d_lines1, d_lines2, d_ends1, d_ends2,
    d_weight, d_bias,
    n, R, H, C, D, F,
    ACT: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr,
    FRESH: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Lead the writes of a segment back; `d_h` comes with h̄ of the reads, `d_pre` with δ̄_1, and leaves as z̄_1."""
    r = tl.program_id(0).to(tl.int64)
    head, mine = r % H, r * D * F
    w, b = load_line(weight + head * D, D, BD)[None, :], load_line(bias + head * D, D, BD)[None, :]
    w_bar, b_bar = load_line(d_weight + r * D, D, BD), load_line(d_bias + r * D, D, BD)
    given1, given2 = initial1 + head * D * F, initial2 + head * D * F
    for last in range(n):
        at = (n - 1 - last) * R + r
        tokens, hidden, state = at * C * D, at * C * F, at * D * F
        ks, vs = load_tile(k + tokens, C, D, D, BC, BD), load_tile(v + tokens, C, D, D, BC, BD)
        qs, y_bar = load_tile(q + tokens, C, D, D, BC, BD), load_tile(d_z + tokens, C, D, D, BC, BD)
        gates1, gates2 = load_gates(lines1 + at * 5 * C, C, BC), load_gates(lines2 + at * 5 * C, C, BC)
        ends1, ends2 = load_ends(lines1 + at * 5 * C, C), load_ends(lines2 + at * 5 * C, C)
        done = tl.load(complete + at) != 0
        z = load_tile(written + tokens, C, D, D, BC, BD)
        delta = last_error(z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD)
        delta_bar, k_bar = load_tile(d_delta + tokens, C, D, D, BC, BD), load_tile(d_k + tokens, C, D, D, BC, BD)
        none, zero = tl.zeros_like(gates1[0]), tl.sum(tl.zeros_like(w))
        memory1, surprise1, memory2, surprise2 = none, none, none, none
        a1, f1, eta1, a2, f2, eta2 = zero, zero, zero, zero, zero, zero
        for t in range(0, F, BF):
            pre, back = keys_tile(ks, delta, A1 + state, A2 + state, t, D, F, PRECISION, BD, BF)
            delta1_bar, k_more, memory_more, surprise_more, a_more, f_more, eta_more = first_back(
                W1 + state, S1 + state, given1, d_W1 + mine, d_S1 + mine, d_A1 + mine, d_initial1 + mine, ks, qs,
                back * slope(pre, ACT), load_first(d_pre + hidden, t, C, F, BC, BF),
                load_first(d_x_pre + hidden, t, C, F, BC, BF), gates1, ends1, done, t, D, F,
                INIT, FRESH, PRECISION, BD, BF,
            )  # fmt: skip
            k_bar += k_more
            memory1, surprise1 = memory1 + memory_more, surprise1 + surprise_more
            a1, f1, eta1 = a1 + a_more, f1 + f_more, eta1 + eta_more
            h_more, delta_more, memory_more, surprise_more, a_more, f_more, eta_more = second_back(
                W2 + state, S2 + state, A2 + state, given2, d_W2 + mine, d_S2 + mine, d_A2 + mine, d_initial2 + mine,
                phi(pre, ACT), phi(load_first(x_pre + hidden, t, C, F, BC, BF), ACT), delta, y_bar,
                delta1_bar * slope(pre, ACT), gates2, ends2, done, t, D, F, INIT, FRESH, PRECISION, BD, BF,
            )  # fmt: skip
            delta_bar += delta_more
            memory2, surprise2 = memory2 + memory_more, surprise2 + surprise_more
            a2, f2, eta2 = a2 + a_more, f2 + f_more, eta2 + eta_more
            h_more += load_first(d_h + hidden, t, C, F, BC, BF)
            tl.debug_barrier()
            store_first(d_h + hidden, h_more, t, C, F, BC, BF)
            store_first(d_pre + hidden, delta1_bar * back * curve(pre, ACT), t, C, F, BC, BF)
        store_columns(d_lines1 + at * 2 * C, memory1, surprise1, C, BC)
        store_columns(d_lines2 + at * 2 * C, memory2, surprise2, C, BC)
        store_ends(d_ends1 + at * 3, a1, f1, eta1)
        store_ends(d_ends2 + at * 3, a2, f2, eta2)
        z_bar, v_bar, gained, w_more, b_more = last_error_adjoint(
            delta_bar, z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD
        )  # fmt: skip
        tl.debug_barrier()  # what follows reads what other threads have written
        k_bar += gained + anchor_back(
            A1 + state, A2 + state, (d_W1 if FRESH else d_A1) + mine, (d_W2 if FRESH else d_A2) + mine,
            ks, delta, z_bar, d_h + hidden, d_pre + hidden, D, F, C, ACT, PRECISION, BC, BD, BF,
        )  # fmt: skip
        store_tile(d_k + tokens, k_bar, C, D, D, BC, BD)
        store_tile(d_v + tokens, v_bar, C, D, D, BC, BD)
        w_bar, b_bar = w_bar + w_more, b_bar + b_more
        tl.debug_barrier()
    store_line(d_weight + r * D, w_bar, D, BD)
    store_line(d_bias + r * D, b_bar, D, BD)
