"""A memory of two layers, one program per memory: its state passes by in tiles of BF hidden channels.

W and S of one head are 16 D F bytes, which at D = 64 and F = 256 no multiprocessor holds (docs/kernels.md). So they
stay in the L2 cache, and each chunk brings every tile in twice: once through the anchor for z_2 of the keys, which δ_2
and with it everything else needs, and once to go back, read and write. Columns of W_1 and rows of W_2 of the same
hidden channels are one tile, so nothing of size C × F leaves a program. Letters are those of docs/derivation.md.
"""

import triton
import triton.language as tl

from titans_lm.ops.triton.kernels.pieces import (
    advanced,
    answer,
    last_error,
    load_ends,
    load_gates,
    load_line,
    load_tile,
    matmul,
    met,
    phi,
    slope,
    store_line,
    store_tile,
    tuned,
)


@triton.jit
def load_first(p, t, D, F, BD: tl.constexpr, BF: tl.constexpr):
    """Columns t … t + BF of a first layer's matrix (D, F), or of hidden rows (C, F)."""
    return load_tile(p + t, D, F - t, F, BD, BF)


@triton.jit
def store_first(p, x, t, D, F, BD: tl.constexpr, BF: tl.constexpr):
    store_tile(p + t, x, D, F - t, F, BD, BF)


@triton.jit
def load_second(p, t, D, F, BF: tl.constexpr, BD: tl.constexpr):
    """Rows t … t + BF of a second layer's matrix (F, D)."""
    return load_tile(p + t * D, F - t, D, D, BF, BD)


@triton.jit
def store_second(p, x, t, D, F, BF: tl.constexpr, BD: tl.constexpr):
    store_tile(p + t * D, x, F - t, D, D, BF, BD)


@triton.jit
def through_anchor(
    ks, A1, A2, D, F,
    ACT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """z_2 of the keys: the network's forward pass at the anchor."""
    z = tl.zeros((BC, BD), dtype=ks.dtype)
    for t in range(0, F, BF):
        h = phi(matmul(ks, load_first(A1, t, D, F, BD, BF), PRECISION), ACT)
        z += matmul(h, load_second(A2, t, D, F, BF, BD), PRECISION)
    return z


@triton.jit
def write_tile(
    W1, W2, S1, S2, A1, A2, first, second, delta, h, ks, gates1, gates2, ends1, ends2, done, t, step, D, F,
    INIT: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Advance a tile of both layers; `first` and `second` are its W, S, M_init, and δ_1 goes with the first."""
    memory1, surprise1, base1, delta1 = first
    memory2, surprise2, base2 = second
    old1, old2 = load_first(A1, t, D, F, BD, BF), load_second(A2, t, D, F, BF, BD)
    new, left = advanced(
        memory1, surprise1, base1, ks, delta1, gates1[2], gates1[3], ends1, INIT, PRECISION
    )  # fmt: skip
    tl.debug_barrier()  # in place: every thread has taken its part of the tile before one of them changes it
    store_first(W1 + step, new, t, D, F, BD, BF)
    store_first(S1 + step, left, t, D, F, BD, BF)
    if not FRESH:
        store_first(A1 + step, tl.where(done, new, old1), t, D, F, BD, BF)
    new, left = advanced(
        memory2, surprise2, base2, h, delta, gates2[2], gates2[3], ends2, INIT, PRECISION
    )  # fmt: skip
    store_second(W2 + step, new, t, D, F, BF, BD)
    store_second(S2 + step, left, t, D, F, BF, BD)
    if not FRESH:
        store_second(A2 + step, tl.where(done, new, old2), t, D, F, BF, BD)


@tuned("W1", "W2", "S1", "S2", "A1", "A2", tiles=True)
@triton.jit
def deep_forward(
    q, k, v, G1, G2, lines1, lines2, complete, weight, bias, initial1, initial2, W1, W2, S1, S2, A1, A2,
    o, written, read, sizes,
    n, R, H, C, D, F,
    ACT: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr,
    REPLAY: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    """Write and read all chunks of a segment, (n, R, C, D).

    The state goes in and out in place. A replay reads nothing back and leaves the state at the start of every chunk.
    """
    r = tl.program_id(0).to(tl.int64)
    h, step = r % H, (R if REPLAY else 0) * D * F
    w, b = load_line(weight + h * D, D, BD)[None, :], load_line(bias + h * D, D, BD)[None, :]
    for i in range(n):
        at = i * R + r
        tokens, state = at * C * D, (at if REPLAY else r) * D * F
        ks, vs = load_tile(k + tokens, C, D, D, BC, BD), load_tile(v + tokens, C, D, D, BC, BD)
        gates1, gates2 = load_gates(lines1 + at * 5 * C, C, BC), load_gates(lines2 + at * 5 * C, C, BC)
        ends1, ends2 = load_ends(lines1 + at * 5 * C, C), load_ends(lines2 + at * 5 * C, C)
        done = tl.load(complete + at) != 0
        if REPLAY:
            z = load_tile(written + tokens, C, D, D, BC, BD)
        else:
            z = through_anchor(ks, A1 + state, A2 + state, D, F, ACT, PRECISION, BC, BD, BF)
        delta = last_error(z, ks, vs, w, b, D, NORM, RESIDUAL, DOT, BD)
        qs = load_tile(q + tokens, C, D, D, BC, BD)
        weighted = matmul(qs, tl.trans(ks), PRECISION) * load_tile(G1 + at * C * C, C, C, C, BC, BC)
        y, raw = tl.zeros((BC, BD), dtype=qs.dtype), tl.zeros((BC, BC), dtype=qs.dtype)
        input_size, error_size = tl.sum(tl.zeros_like(ks), 1), tl.sum(tl.zeros_like(ks), 1)
        for t in range(0, F, BF):
            pre = matmul(ks, load_first(A1 + state, t, D, F, BD, BF), PRECISION)
            hs = phi(pre, ACT)
            back = matmul(delta, tl.trans(load_second(A2 + state, t, D, F, BF, BD)), PRECISION)
            delta1 = back * slope(pre, ACT)
            memory1, surprise1 = load_first(W1 + state, t, D, F, BD, BF), load_first(S1 + state, t, D, F, BD, BF)
            memory2, surprise2 = load_second(W2 + state, t, D, F, BF, BD), load_second(S2 + state, t, D, F, BF, BD)
            base1 = load_first(initial1 + h * D * F, t, D, F, BD, BF) if INIT else memory1
            base2 = load_second(initial2 + h * D * F, t, D, F, BF, BD) if INIT else memory2
            if not REPLAY:
                x = met(qs, gates1[0], gates1[1], memory1, surprise1, base1, INIT, PRECISION)
                x = phi(x - matmul(weighted, delta1, PRECISION), ACT)
                y += met(x, gates2[0], gates2[1], memory2, surprise2, base2, INIT, PRECISION)
                raw += matmul(x, tl.trans(hs), PRECISION)
                input_size += tl.sum(hs * hs, 1)
                error_size += tl.sum(delta1 * delta1, 1)
            write_tile(
                W1 + state, W2 + state, S1 + state, S2 + state, A1 + state, A2 + state,
                (memory1, surprise1, base1, delta1), (memory2, surprise2, base2), delta, hs, ks,
                gates1, gates2, ends1, ends2, done, t, step, D, F, INIT, FRESH, PRECISION, BD, BF,
            )  # fmt: skip
        if not REPLAY:
            y -= matmul(raw * load_tile(G2 + at * C * C, C, C, C, BC, BC), delta, PRECISION)
            store_tile(o + tokens, answer(qs, y, w, b, D, NORM, RESIDUAL, BD), C, D, D, BC, BD)
            store_tile(written + tokens, z, C, D, D, BC, BD)
            store_tile(read + tokens, y, C, D, D, BC, BD)
            store_line(sizes + at * 2 * C, tl.sqrt(tl.sum(ks * ks, 1) * error_size), C, BC)
            store_line(sizes + at * 2 * C + C, tl.sqrt(input_size * tl.sum(delta * delta, 1)), C, BC)
        tl.debug_barrier()  # the next chunk reads what other threads have written
