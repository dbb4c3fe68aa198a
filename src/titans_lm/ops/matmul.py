"""Matrix products by the faster of the two libraries that torch brings for a CPU.

torch gives float32 products to MKL, which on a CPU that is not Intel's takes its AVX2 code, also where the CPU has
AVX-512. oneDNN, which torch has for convolutions and for what `torch.compile` makes of linear maps, takes the wider
registers everywhere: 2.3 times as fast on a Zen 5. Products of one sort go one way on one machine, so results repeat.
Everywhere else, for small products, other precisions and inside compiled graphs these functions are torch's own; but
a CPU without instructions for bfloat16 takes its linear maps in float32, 9 to 17 times as fast on a Zen with AVX2,
and a step of training under autocast 13 times.
The operator is private to torch (`mkldnn._linear_pointwise`; seen to work in torch 2.13, November 2026): this is the
only file that calls it, `_agrees` looks before, and without it everything goes torch's way.
"""

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 2**20
"""Multiplications from which a product is worth the call."""
LEAST_EACH = 9_000_000
"""The same for each product of a batch, which MKL takes in a single call."""
LEAST_HALF = 2**16
"""Multiplications from which a linear map in bfloat16 is worth casts, where no instruction is there for it."""
MOST = 2**19
"""Numbers of a matrix up to which a product with one vector is a plain reduction."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are what they look like: a quantised weight, or one spread over processes, is of another."""


def once_differentiable(backward: Any) -> Any:
    """Refuse to keep a graph of gradients that are written by hand: RuntimeError.

    torch's decorator of this name does so where the second derivative is taken, and not at all where the incoming
    gradient needs none: the memory's part of it was then missing without a word.
    """

    @functools.wraps(backward)
    def called(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "got create_graph=True through a layer of titans-lm, whose gradients are written by hand; expected "
                'first derivatives alone (neural_memory with backend="reference" has second ones, but '
                "for polynomial keys)"
            )
        return backward(ctx, *grads)

    return called


@functools.cache
def has_faster_products() -> bool:
    """Whether oneDNN's float32 products are the faster ones: MKL, and an AMD CPU with AVX-512, on Linux."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkl.is_available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    info = Path("/proc/cpuinfo")
    if not info.is_file() or "AuthenticAMD" not in info.read_text(encoding="utf-8", errors="replace"):
        return False
    return _agrees()


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16; without them torch takes one number at a time."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def _agrees() -> bool:
    """Whether the operator, which is torch's own business, is there and gives x Wᵀ."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    like: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    x, weight = torch.arange(12.0, **like).view(4, 3), torch.arange(6.0, **like).view(2, 3) - 2.0
    return torch.equal(_one_dnn(x, weight), F.linear(x, weight))


def _one_dnn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _takes(*tensors: Tensor | None) -> bool:
    """Whether oneDNN takes these: plain float32 on a CPU, and nothing traced."""
    for y in tensors:
        if y is not None and not (type(y) in PLAIN and y.is_cpu and y.dtype == torch.float32):
            return False
    return not torch.compiler.is_compiling() and torch._C._get_mkldnn_enabled() and has_faster_products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x (…, K), W (N, K) and b (N,), with gradients.

    A matrix times one vector is all reading, and the library that torch gives it to on a CPU reads neither ahead nor
    with more than one thread: Σ_k W_nk x_k as an ordinary reduction took a half to a third of the time. It holds W ∘ x
    for a moment, so large matrices stay where they were.
    """
    if x.is_cpu and (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")):
        if not _is_slow_bfloat16(x, weight):
            return F.linear(x, weight, bias)
        return (_Rounded.apply if needs_grad(x, weight, bias) else _rounded)(x, weight, bias)
    alone = x.numel() == x.shape[-1] == weight.shape[1] and weight.numel() <= MOST
    if alone and type(weight) in PLAIN and x.is_cpu and x.dtype == weight.dtype and x.dtype.itemsize >= 4:
        y = torch.linalg.vecdot(weight, x.reshape(-1))
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)
    if x.numel() * len(weight) < LEAST or not _takes(x, weight, bias):
        return F.linear(x, weight, bias)
    if needs_grad(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return _one_dnn(x, weight, bias)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether gradients will be asked for; elsewhere the plain expression does, which compilers also understand."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    for x in tensors:  # noqa: SIM110 - asked so often that the frames of a generator would show
        if x is not None and x.requires_grad:
            return True
    return False


def _is_slow_bfloat16(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a large map in bfloat16 on a CPU that has no instructions for it."""
    if x.numel() * len(weight) < LEAST_HALF or torch.compiler.is_compiling():
        return False
    asked = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    given = [asked if y.dtype == torch.float32 else y.dtype for y in (x, weight)]
    return given == [torch.bfloat16] * 2 and type(weight) in PLAIN and not multiplies_bfloat16()


def _rounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The map of numbers rounded to bfloat16, in float32, and its result rounded."""
    rounded = [None if y is None else y.bfloat16().float() for y in (x, weight, bias)]
    with torch.autocast("cpu", enabled=False):
        return F.linear(*rounded).bfloat16()


class _Rounded(torch.autograd.Function):
    """The same with gradients, which are rounded too; it keeps what torch would, the numbers in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtypes = [None if y is None else y.dtype for y in (x, weight, bias)]
        x, weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, weight)
        return _rounded(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (x, weight), (by_x, by_weight, by_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].float()
        flat = grad.reshape(-1, grad.shape[-1])
        with torch.autocast("cpu", enabled=False):
            found = (
                grad @ weight.float() if by_x else None,
                flat.t() @ rows.float() if by_weight else None,
                flat.sum(0) if by_bias else None,
            )
        return tuple(y if y is None else y.bfloat16().to(dtype) for y, dtype in zip(found, ctx.dtypes, strict=True))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _one_dnn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            times(grad, weight) if by_x else None,
            outer(grad, x) if by_weight else None,
            grad.flatten(0, -2).sum(0) if by_bias else None,
        )


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """x A for x (…, K) and A (K, N); inside a function that has gradients of its own."""
    if x.numel() * matrix.shape[1] < LEAST or not _takes(x, matrix):
        return x @ matrix
    return _one_dnn(x, matrix.t())


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Σ x ⊗ y over all rows of x (…, M) and y (…, N): (M, N); inside a function that has gradients of its own."""
    x, y = x.flatten(0, -2), y.flatten(0, -2)
    if x.numel() * y.shape[1] < LEAST or not _takes(x, y):
        return x.t() @ y
    if x.shape[1] > y.shape[1]:  # oneDNN copies its first argument where that is transposed: the smaller one then
        return _one_dnn(y.t(), x.t()).t()
    return _one_dnn(x.t(), y.t())


def bmm_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Write x y into `out` for each of R products (R, M, K) (R, K, N), and return it; no gradients."""
    if x.shape[1] * x.shape[2] * y.shape[2] < LEAST_EACH or not _takes(x, y):
        return torch.bmm(x, y, out=out)
    for a, b, c in zip(x, y, out, strict=True):
        c.copy_(_one_dnn(a, b.t()))
    return out


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """x y for each of R products; no gradients."""
    if x.shape[1] * x.shape[2] * y.shape[2] < LEAST_EACH or not _takes(x, y):
        return torch.bmm(x, y)
    return bmm_into(x, y, x.new_empty(x.shape[0], x.shape[1], y.shape[2]))


def add_bmm_(total: Tensor, x: Tensor, y: Tensor, alpha: int = 1) -> Tensor:
    """Add α x y to `total` for each of R products; no gradients."""
    if x.shape[1] * x.shape[2] * y.shape[2] < LEAST_EACH or not _takes(x, y):
        if total.shape[0] > 1 and total.is_cpu and not total.is_contiguous():
            return total.add_(torch.bmm(x, y), alpha=alpha)  # torch would take the products one by one
        return total.baddbmm_(x, y, alpha=alpha)
    for a, b, c in zip(x, y, total, strict=True):
        c.add_(_one_dnn(a, b.t()), alpha=alpha)
    return total
