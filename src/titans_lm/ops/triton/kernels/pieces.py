"""What the kernels are made of: tiles, the activation, the LayerNorm, the error of the inner loss, and their gradients.

Rows are the positions of a chunk, padded with zeros to BC of them, and channels are padded to BD; whatever is summed
over a padded place is zero there. ACT is 0 for GELU, 1 for SiLU, 2 for ReLU; NORM is 0 without a LayerNorm, 1 with its
weight, 2 with weight and bias; DOT means the dot-product objective.
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-5)
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_PI = tl.constexpr(0.3989422804014327)


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
