"""One token: the recurrence itself, as ops/recurrent.py has it; one program per memory.

In one pass over the state, with another through the anchor before it where there are two layers:

    S ← η S − θ h ⊗ δ,   M ← (1 − α) M [+ α M_init] + S,   o = M(q)                               (eq. 13–15)
"""

import triton
import triton.language as tl

from titans_lm.ops.triton.kernels.deep import load_first, load_second, store_first, store_second
from titans_lm.ops.triton.kernels.pieces import (
    answer,
    last_error,
    load_line,
    load_tile,
    phi,
    slope,
    store_line,
    store_tile,
)
from titans_lm.ops.triton.kernels.tuning import tuned


@triton.jit
def stepped(memory, surprise, base, h, delta, gates, INIT: tl.constexpr):
    """M and S after a token, for inputs h (…, 1) and errors δ (1, …); `gates` points at θ, η, α."""
    theta, eta, alpha = tl.load(gates), tl.load(gates + 1), tl.load(gates + 2)
    surprise = eta * surprise - theta * h * delta
    memory = (1.0 - alpha) * memory + surprise
    if INIT:
        memory += alpha * base
    return memory, surprise


@tuned()
@triton.jit
def linear_step(
    q, k, v, gates, weight, bias, initial, W, S, A, o, W_new, S_new, sizes,
    H, D,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    head, square = r % H, r * D * D
    w, b = load_line(weight + head * D, D, BD)[None, :], load_line(bias + head * D, D, BD)[None, :]
    ks, qs, vs = load_line(k + r * D, D, BD), load_line(q + r * D, D, BD), load_line(v + r * D, D, BD)
    z = tl.sum(ks[:, None] * load_tile(A + square, D, D, D, BD, BD), 0)[None, :]
    delta = last_error(z, ks[None, :], vs[None, :], w, b, D, NORM, RESIDUAL, DOT, BD)
    memory, surprise = load_tile(W + square, D, D, D, BD, BD), load_tile(S + square, D, D, D, BD, BD)
    base = load_tile(initial + head * D * D, D, D, D, BD, BD) if INIT else memory
    memory, surprise = stepped(memory, surprise, base, ks[:, None], delta, gates + 3 * r, INIT)
    store_tile(W_new + square, memory, D, D, D, BD, BD)
    store_tile(S_new + square, surprise, D, D, D, BD, BD)
    y = tl.sum(qs[:, None] * memory, 0)[None, :]
    store_line(o + r * D, tl.sum(answer(qs[None, :], y, w, b, D, NORM, RESIDUAL, BD), 0), D, BD)
    tl.store(sizes + r, tl.sqrt(tl.sum(ks * ks) * tl.sum(delta * delta)))


@tuned(tiles=True)
@triton.jit
def deep_step(
    q, k, v, gates1, gates2, weight, bias, initial1, initial2, W1, W2, S1, S2, A1, A2,
    o, W1_new, W2_new, S1_new, S2_new, sizes,
    H, D, F,
    ACT: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, INIT: tl.constexpr,
    BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    head, mine = r % H, r * D * F
    w, b = load_line(weight + head * D, D, BD)[None, :], load_line(bias + head * D, D, BD)[None, :]
    ks, qs, vs = load_line(k + r * D, D, BD), load_line(q + r * D, D, BD), load_line(v + r * D, D, BD)
    z, y = tl.zeros_like(ks), tl.zeros_like(ks)
    for t in range(0, F, BF):
        pre = tl.sum(ks[:, None] * load_first(A1 + mine, t, D, F, BD, BF), 0)
        z += tl.sum(phi(pre, ACT)[:, None] * load_second(A2 + mine, t, D, F, BF, BD), 0)
    delta = last_error(z[None, :], ks[None, :], vs[None, :], w, b, D, NORM, RESIDUAL, DOT, BD)
    input_size, error_size = tl.sum(tl.zeros_like(ks)), tl.sum(tl.zeros_like(ks))
    for t in range(0, F, BF):
        pre = tl.sum(ks[:, None] * load_first(A1 + mine, t, D, F, BD, BF), 0)
        h = phi(pre, ACT)
        delta1 = tl.sum(load_second(A2 + mine, t, D, F, BF, BD) * delta, 1) * slope(pre, ACT)
        memory, surprise = load_first(W1 + mine, t, D, F, BD, BF), load_first(S1 + mine, t, D, F, BD, BF)
        base = load_first(initial1 + head * D * F, t, D, F, BD, BF) if INIT else memory
        memory, surprise = stepped(memory, surprise, base, ks[:, None], delta1[None, :], gates1 + 3 * r, INIT)
        store_first(W1_new + mine, memory, t, D, F, BD, BF)
        store_first(S1_new + mine, surprise, t, D, F, BD, BF)
        x = phi(tl.sum(qs[:, None] * memory, 0), ACT)
        memory, surprise = load_second(W2 + mine, t, D, F, BF, BD), load_second(S2 + mine, t, D, F, BF, BD)
        base = load_second(initial2 + head * D * F, t, D, F, BF, BD) if INIT else memory
        memory, surprise = stepped(memory, surprise, base, h[:, None], delta, gates2 + 3 * r, INIT)
        store_second(W2_new + mine, memory, t, D, F, BF, BD)
        store_second(S2_new + mine, surprise, t, D, F, BF, BD)
        y += tl.sum(x[:, None] * memory, 0)
        input_size += tl.sum(h * h)
        error_size += tl.sum(delta1 * delta1)
    answered = answer(qs[None, :], y[None, :], w, b, D, NORM, RESIDUAL, BD)
    store_line(o + r * D, tl.sum(answered, 0), D, BD)
    tl.store(sizes + 2 * r, tl.sqrt(tl.sum(ks * ks) * error_size))
    tl.store(sizes + 2 * r + 1, tl.sqrt(input_size * tl.sum(delta * delta)))
