"""One layer of a memory inside a chunk, whole or a tile of its hidden channels: read, advance, and their gradients.

x are rows that read and y = x M_t, h and δ the inputs and errors of the keys; `a`, `f`, `memory_end` and `surprise_end`
are columns, `ends` is (a_C, f_C, η_end). Sections 4 and 10 of docs/derivation.md.
"""

import triton
import triton.language as tl

from titans_lm.ops.triton.kernels.pieces import matmul, row_sums


@triton.jit
def met(x, a, f, memory, surprise, base, INIT: tl.constexpr, PRECISION: tl.constexpr):
    """What rows x meet of the state at the chunk's start: (a x) W + (f x) S [+ ((1 − a) x) M_init]."""
    y = matmul(a * x, memory, PRECISION) + matmul(f * x, surprise, PRECISION)
    if INIT:
        y += matmul(x - a * x, base, PRECISION)
    return y


@triton.jit
def met_adjoint(x, y_bar, a, f, memory, surprise, base, INIT: tl.constexpr, PRECISION: tl.constexpr):
    """Back through `met`: x̄, and what a and f get of it."""
    kept, past = matmul(y_bar, tl.trans(memory), PRECISION), matmul(y_bar, tl.trans(surprise), PRECISION)
    x_bar = a * kept + f * past
    if INIT:
        based = matmul(y_bar, tl.trans(base), PRECISION)
        x_bar += (1.0 - a) * based
        kept -= based
    return x_bar, row_sums(x * kept), row_sums(x * past)


@triton.jit
def advanced(
    memory, surprise, base, h, delta, memory_end, surprise_end, ends, INIT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """W ← a W + f S [+ (1 − a) M_init] − (h ∘ memory_end)ᵀ δ and S ← η_end S − (h ∘ surprise_end)ᵀ δ."""
    a_end, f_end, eta_end = ends
    new = a_end * memory + f_end * surprise - matmul(tl.trans(memory_end * h), delta, PRECISION)
    if INIT:
        new += (1.0 - a_end) * base
    return new, eta_end * surprise - matmul(tl.trans(surprise_end * h), delta, PRECISION)


@triton.jit
def advanced_adjoint(h, delta, W_bar, S_bar, memory_end, surprise_end, PRECISION: tl.constexpr):
    """Back through the outer products of `advanced`: h̄, δ̄, and what memory_end and surprise_end get."""
    to_memory, to_surprise = matmul(delta, tl.trans(W_bar), PRECISION), matmul(delta, tl.trans(S_bar), PRECISION)
    h_bar = -memory_end * to_memory - surprise_end * to_surprise
    delta_bar = -matmul(memory_end * h, W_bar, PRECISION) - matmul(surprise_end * h, S_bar, PRECISION)
    return h_bar, delta_bar, -row_sums(h * to_memory), -row_sums(h * to_surprise)


@triton.jit
def ends_adjoint(W_bar, S_bar, memory, surprise, base, INIT: tl.constexpr):
    """What a_C, f_C and η_end get of `advanced`."""
    by_a = tl.sum(W_bar * (memory - base)) if INIT else tl.sum(W_bar * memory)
    return by_a, tl.sum(W_bar * surprise), tl.sum(S_bar * surprise)


@triton.jit
def state_adjoint(W_bar, S_bar, x, y_bar, a, f, ends, INIT: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients by the state at a chunk's start: W̄, S̄, and what M_init gets."""
    a_end, f_end, eta_end = ends
    base_bar = W_bar
    if INIT:
        base_bar = (1.0 - a_end) * W_bar + matmul(tl.trans(x - a * x), y_bar, PRECISION)
    before = eta_end * S_bar + f_end * W_bar + matmul(tl.trans(f * x), y_bar, PRECISION)
    return a_end * W_bar + matmul(tl.trans(a * x), y_bar, PRECISION), before, base_bar
