"""What the kernels are made of: tiles, activation, LayerNorm, error of the inner loss, one layer of a memory.

All come with their gradients. Which tiles and warps are tried for a kernel is at the top.

Rows are the positions of a chunk, padded with zeros to BC of them, and channels are padded to BD; whatever is summed
over a padded place is zero there. ACT is 0 for GELU, 1 for SiLU, 2 for ReLU; NORM is 0 without a LayerNorm, 1 with its
weight, 2 with weight and bias; DOT means the dot-product objective. Of a layer, x are rows that read and y = x M_t, h
and δ the inputs and errors of the keys; `a`, `f`, `memory_end` and `surprise_end` are columns, `ends` is
(a_C, f_C, η_end). Sections 4 and 10 of docs/derivation.md.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

EPS = tl.constexpr(1e-5)
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_PI = tl.constexpr(0.3989422804014327)
WARPS = (4, 8)
TILES = (16, 32, 64)
"""Hidden channels of a deep memory that are worked on at a time."""
INTERPRETED_TILE = 16
KEYS = ("C", "D", "F", "NORM", "INIT", "FRESH", "REPLAY", "PRECISION")
"""What a choice depends on, as far as a kernel is told it; the types of its tensors come on their own."""


def configurations(tiles: bool) -> list[triton.Config]:
    """List what is tried; `tiles` for kernels that work on BF hidden channels at a time."""
    if triton.knobs.runtime.interpret:
        return [triton.Config({"BF": INTERPRETED_TILE} if tiles else {})]
    return [
        triton.Config({"BF": tile} if tiles else {}, num_warps=warps, num_stages=1)
        for tile in (TILES if tiles else TILES[:1])
        for warps in WARPS
    ]


def tuned(*restored: str, tiles: bool = False) -> Callable[[Any], Any]:
    """Decorate a kernel, whose tiles and warps are the fastest of a few: no choice changes what it computes.

    `restored` names what it changes in place, which a trial must not.
    """

    def decorate(kernel: Any) -> Any:
        keys = [key for key in KEYS if key in kernel.arg_names]
        return triton.autotune(
            configurations(tiles),
            key=keys,
            restore_value=list(restored),
            cache_results=not triton.knobs.runtime.interpret,
        )(kernel)

    return decorate


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """a b, added up in the precision of a; "ieee" is float32 throughout, "tf32" rounds what enters a product."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@triton.jit
def load_tile(p, height, width, stride, BH: tl.constexpr, BW: tl.constexpr):
    """A tile of a row-major matrix, zero beyond `height` and `width`."""
    i, j = tl.arange(0, BH)[:, None], tl.arange(0, BW)[None, :]
    return tl.load(p + i * stride + j, mask=(i < height) & (j < width), other=0.0)


@triton.jit
def store_tile(p, x, height, width, stride, BH: tl.constexpr, BW: tl.constexpr):
    i, j = tl.arange(0, BH)[:, None], tl.arange(0, BW)[None, :]
    tl.store(p + i * stride + j, x, mask=(i < height) & (j < width))


@triton.jit
def load_line(p, width, BW: tl.constexpr):
    """A vector, zero beyond `width`."""
    j = tl.arange(0, BW)
    return tl.load(p + j, mask=j < width, other=0.0)


@triton.jit
def store_line(p, x, width, BW: tl.constexpr):
    j = tl.arange(0, BW)
    tl.store(p + j, x, mask=j < width)


@triton.jit
def load_gates(p, C, BC: tl.constexpr):
    """Columns (BC, 1) of a chunk's weights: a and f of its positions, memory_end and surprise_end of its gradients."""
    a, f = load_line(p, C, BC), load_line(p + C, C, BC)
    memory, surprise = load_line(p + 2 * C, C, BC), load_line(p + 3 * C, C, BC)
    return a[:, None], f[:, None], memory[:, None], surprise[:, None]


@triton.jit
def load_ends(p, C):
    """What is left of W and S at the end of a chunk: a_C and f_C for the memory, η_end for the surprise."""
    return tl.load(p + C - 1), tl.load(p + 2 * C - 1), tl.load(p + 4 * C)


@triton.jit
def store_columns(p, x, y, C, BC: tl.constexpr):
    """Two columns (BC, 1), one after the other."""
    store_line(p, tl.sum(x, 1), C, BC)
    store_line(p + C, tl.sum(y, 1), C, BC)


@triton.jit
def store_ends(p, by_a, by_f, by_eta):
    tl.store(p, by_a)
    tl.store(p + 1, by_f)
    tl.store(p + 2, by_eta)


@triton.jit
def phi(z, ACT: tl.constexpr):
    if ACT == 0:
        return 0.5 * z * (1.0 + tl.erf(z * ROOT_HALF))
    elif ACT == 1:
        return z / (1.0 + tl.exp(-z))
    else:
        return tl.maximum(z, 0.0)


@triton.jit
def slope(z, ACT: tl.constexpr):
    """φ'(z)."""
    if ACT == 0:
        return 0.5 * (1.0 + tl.erf(z * ROOT_HALF)) + z * tl.exp(-0.5 * z * z) * ROOT_TWO_PI
    elif ACT == 1:
        s = 1.0 / (1.0 + tl.exp(-z))
        return s * (1.0 + z * (1.0 - s))
    else:
        return tl.where(z > 0.0, 1.0, 0.0).to(z.dtype)


@triton.jit
def curve(z, ACT: tl.constexpr):
    """φ''(z)."""
    if ACT == 0:
        square = z * z
        return (2.0 - square) * tl.exp(-0.5 * square) * ROOT_TWO_PI
    elif ACT == 1:
        s = 1.0 / (1.0 + tl.exp(-z))
        return s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))
    else:
        return tl.zeros_like(z)


@triton.jit
def mean(x, D):
    return (tl.sum(x, 1) / D)[:, None]


@triton.jit
def standardise(z, D, BD: tl.constexpr):
    """(z − ⟨z⟩) r and r = 1 / std, over the channels."""
    inside = tl.arange(0, BD)[None, :] < D
    centred = tl.where(inside, z - mean(z, D), 0.0)
    rstd = 1.0 / tl.sqrt(mean(centred * centred, D) + EPS)
    return centred * rstd, rstd


@triton.jit
def norm_adjoint(g, unit, rstd, D, BD: tl.constexpr):
    """r (g − ⟨g⟩ − u ⟨g u⟩): back through `standardise`."""
    inside = tl.arange(0, BD)[None, :] < D
    return tl.where(inside, rstd * (g - mean(g, D) - unit * mean(g * unit, D)), 0.0)


@triton.jit
def misses(k, v, b, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
    """What the loss misses besides the network's z_L: [k +] [b] − v."""
    x = -v
    if RESIDUAL:
        x += k
    if NORM == 2:
        x += b
    return x


@triton.jit
def last_error(
    z, k, v, w, b, D, NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """δ_L of the inner loss at z_L (docs/derivation.md, section 5)."""
    if NORM == 0:
        if DOT:
            return -v
        else:
            return 2.0 * (z + misses(k, v, b, NORM, RESIDUAL))
    else:
        unit, rstd = standardise(z, D, BD)
        p = -v * w if DOT else 2.0 * (unit * w + misses(k, v, b, NORM, RESIDUAL)) * w
        return norm_adjoint(p, unit, rstd, D, BD)


@triton.jit
def last_error_adjoint(
    g, z, k, v, w, b, D, NORM: tl.constexpr, RESIDUAL: tl.constexpr, DOT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """From g = δ̄_L to z̄_L, v̄, what k̄ gains, and the LayerNorm's w̄ and b̄ (docs/derivation.md, section 10)."""
    none = tl.sum(tl.zeros_like(g), 0)
    if NORM == 0:
        if DOT:
            return tl.zeros_like(g), -g, tl.zeros_like(g), none, none
        else:
            return 2.0 * g, -2.0 * g, 2.0 * g if RESIDUAL else tl.zeros_like(g), none, none
    else:
        unit, rstd = standardise(z, D, BD)
        p_bar = norm_adjoint(g, unit, rstd, D, BD)
        if DOT:
            p = -v * w
            v_bar, gained = -p_bar * w, tl.zeros_like(g)
            w_bar, b_bar = tl.sum(-p_bar * v, 0), none
            through_p = tl.zeros_like(g)
        else:
            x = misses(k, v, b, NORM, RESIDUAL)
            p = 2.0 * (unit * w + x) * w
            missed = 2.0 * p_bar * w
            v_bar, gained = -missed, missed if RESIDUAL else tl.zeros_like(g)
            w_bar, b_bar = tl.sum(p_bar * (4.0 * unit * w + 2.0 * x), 0), tl.sum(missed, 0)
            through_p = 2.0 * p_bar * w * w
        u_bar = through_p - rstd * (g * mean(p * unit, D) + p * mean(g * unit, D))
        delta = norm_adjoint(p, unit, rstd, D, BD)
        z_bar = norm_adjoint(u_bar, unit, rstd, D, BD) - rstd * unit * mean(g * delta, D)
        return z_bar, v_bar, gained, w_bar, b_bar


@triton.jit
def answer(q, z, w, b, D, NORM: tl.constexpr, RESIDUAL: tl.constexpr, BD: tl.constexpr):
    """o = [q +] [LN](z_L)."""
    o = z
    if NORM > 0:
        unit, _ = standardise(z, D, BD)
        o = unit * w
    if NORM == 2:
        o += b
    if RESIDUAL:
        o += q
    return o


@triton.jit
def answer_adjoint(g, z, w, D, NORM: tl.constexpr, BD: tl.constexpr):
    """From g = ō to z̄_L of the read, w̄ and b̄; the residual's share of q̄ is g itself."""
    if NORM == 0:
        none = tl.sum(tl.zeros_like(g), 0)
        return g, none, none
    else:
        unit, rstd = standardise(z, D, BD)
        return norm_adjoint(g * w, unit, rstd, D, BD), tl.sum(g * unit, 0), tl.sum(g, 0)


@triton.jit
def row_sums(x):
    """Σ over the channels, (BC, 1)."""
    return tl.sum(x, 1)[:, None]


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
