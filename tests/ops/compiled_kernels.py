"""Compile every kernel for an H100 without one, as far as its machine code; a script, in a process of its own.

At the largest chunks of heads of 64 channels with the smallest tile; and of a linear memory's heads of 128 channels in
float32, where shared memory is scarcest.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from titans_lm.ops.triton import LARGEST_CHUNK, LARGEST_DEEP_CHUNK
from titans_lm.ops.triton.kernels.deep import deep_forward
from titans_lm.ops.triton.kernels.deep_adjoint import deep_read_adjoint, deep_write_adjoint
from titans_lm.ops.triton.kernels.linear import (
    linear_forward,
    linear_read_adjoint,
    linear_write_adjoint,
)

KERNELS = (
    linear_forward, linear_read_adjoint, linear_write_adjoint,
    deep_forward, deep_read_adjoint, deep_write_adjoint,
)  # fmt: skip
CONSTANTS = {
    "ACT": 0, "NORM": 2, "RESIDUAL": True, "DOT": False, "INIT": True, "REPLAY": False, "FRESH": False,
    "PRECISION": "tf32", "BC": None, "BD": 64, "BF": 16,
}  # fmt: skip
SIZES = ("n", "R", "H", "C", "D", "F")
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on an H100."""


WIDE = {"PRECISION": "ieee", "BC": 32, "BD": 128, "FRESH": True}


def compile_kernel(kernel: triton.runtime.Autotuner, **changed: object) -> int:
    """Compile it; returns its bytes of shared memory."""
    function = kernel.fn

    def kind(name: str) -> str:
        if name in CONSTANTS:
            return "constexpr"
        return "i32" if name in SIZES else "*i32" if name == "complete" else "*fp32"

    constants = {**CONSTANTS, "BC": LARGEST_DEEP_CHUNK if "deep" in function.__name__ else LARGEST_CHUNK, **changed}
    source = ASTSource(
        fn=function,
        signature={name: kind(name) for name in function.arg_names},
        constexprs={name: constants[name] for name in function.arg_names if name in constants},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 1})
    assert compiled.asm["cubin"]
    return compiled.metadata.shared


if __name__ == "__main__":
    for kernel, changed in [(kernel, {}) for kernel in KERNELS] + [(kernel, WIDE) for kernel in KERNELS[1:3]]:
        shared = compile_kernel(kernel, **changed)
        sys.stdout.write(f"{kernel.fn.__name__}: {shared} bytes of shared memory\n")
        assert shared <= SHARED, kernel.fn.__name__
    sys.stdout.write(f"{len(KERNELS)} kernels\n")
