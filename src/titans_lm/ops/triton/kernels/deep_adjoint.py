"""The gradients of reading from a memory of two layers, one program per chunk and memory.

The hidden channels pass by in tiles, twice: x hᵀ of the second layer is a sum over all of them. What has hidden
channels and is needed later, (n, R, C, F), is laid down for deep_writes.py: z_1 of the reads and its gradient, h̄ and
δ̄_1. Letters are those of docs/derivation.md, section 10.
"""

import triton
import triton.language as tl

from titans_lm.ops.triton.kernels.deep import load_first, load_second
from titans_lm.ops.triton.kernels.layer import met, met_adjoint
from titans_lm.ops.triton.kernels.pieces import (
    answer_adjoint,
    last_error,
    load_gates,
    load_line,
    load_tile,
    matmul,
    phi,
    row_sums,
    slope,
    store_columns,
    store_line,
    store_tile,
)
from titans_lm.ops.triton.kernels.tuning import tuned


@triton.jit
def load_hidden(p, t, C, F, BC: tl.constexpr, BF: tl.constexpr):
    """Channels t … t + BF of hidden rows (C, F)."""
    return load_tile(p + t, C, F - t, F, BC, BF)


@triton.jit
def store_hidden(p, x, t, C, F, BC: tl.constexpr, BF: tl.constexpr):
    store_tile(p + t, x, C, F - t, F, BC, BF)


@triton.jit
def keys_tile(
    ks, delta, A1, A2, t, D, F,
    ACT: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
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
        pre, back = keys_tile(ks, delta, A1, A2, t, D, F, ACT, PRECISION, BD, BF)
        memory, surprise = load_first(W1, t, D, F, BD, BF), load_first(S1, t, D, F, BD, BF)
        base = load_first(initial1, t, D, F, BD, BF) if INIT else memory
        x = met(qs, a, f, memory, surprise, base, INIT, PRECISION)
        x -= matmul(weighted, back * slope(pre, ACT), PRECISION)
        store_hidden(x_pre, x, t, C, F, BC, BF)
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
        pre, back = keys_tile(ks, delta, A1 + state, A2 + state, t, D, F, ACT, PRECISION, BD, BF)
        x = load_hidden(x_pre + hidden, t, C, F, BC, BF)
        x_bar, by_a_here, by_f_here = met_adjoint(
            phi(x, ACT), z_bar, a2, f2, load_second(W2 + state, t, D, F, BF, BD),
            load_second(S2 + state, t, D, F, BF, BD),
            load_second(initial2 + h * D * F, t, D, F, BF, BD) if INIT else z_bar, INIT, PRECISION,
        )  # fmt: skip
        by_a += by_a_here
        by_f += by_f_here
        x_bar += matmul(through, phi(pre, ACT), PRECISION)
        store_hidden(d_h + hidden, matmul(tl.trans(through), phi(x, ACT), PRECISION), t, C, F, BC, BF)
        x_bar *= slope(x, ACT)
        store_hidden(d_x_pre + hidden, x_bar, t, C, F, BC, BF)
        store_hidden(d_delta1 + hidden, -matmul(tl.trans(weighted), x_bar, PRECISION), t, C, F, BC, BF)
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
