"""What a kernel of the memory must compute and must move, counted from the equations, before one is written.

Per chunk, per head and per token; docs/kernels.md compares a machine's numbers with these. Nothing here was measured.
"""

from dataclasses import dataclass
from itertools import pairwise, product

from titans_lm.bench.flops import memory_flops, memory_widths

FLOAT = 4
"""Bytes of a number of the state."""
GATES = 3
"""θ, η and α."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What one GPU holds and moves, from its maker's data sheet."""

    name: str
    multiprocessors: int
    registers: int
    """Bytes of registers of a multiprocessor."""
    shared: int
    """Bytes of shared memory that one program may have."""
    l2: int
    """Bytes of the cache that all multiprocessors share."""
    flops_per_second: float
    """Products in tf32, dense."""
    bytes_per_second: float
    """To and from its main memory."""

    @property
    def ridge(self) -> float:
        """Operations that a byte of main memory must be worth, or memory is what limits."""
        return self.flops_per_second / self.bytes_per_second


H100 = Accelerator(
    name="H100 SXM", multiprocessors=132, registers=256 * 1024, shared=227 * 1024, l2=50 * 1024**2,
    flops_per_second=494.7e12, bytes_per_second=3.35e12,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A memory of one head, and how it is run."""

    width: int
    expansion: int
    chunk_size: int
    depth: int = 2
    token_bytes: int = 2
    """Bytes of a number of q, k, v and o."""
    checkpoint: int = 8
    """Chunks between two states that are kept for the backward pass."""

    @property
    def widths(self) -> tuple[int, ...]:
        return memory_widths(self.width, self.depth, self.expansion)

    @property
    def weights(self) -> int:
        """Numbers of M: Σ_l D_{l−1} D_l."""
        return sum(a * b for a, b in pairwise(self.widths))

    @property
    def state_bytes(self) -> int:
        """M and S."""
        return 2 * FLOAT * self.weights


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Per token and head, unless it says otherwise."""

    forward_flops: int
    backward_flops: int
    """Gradients, and what is made again for them."""
    forward_bytes: float
    """The fewest: tokens and gates in, o and z_L out, a checkpoint now and then. The state never leaves the chip."""
    backward_bytes: float
    streamed_bytes: float
    """To and from L2 in the forward pass, where the state does not fit: each chunk M and S in and out, M twice in."""

    @property
    def forward_intensity(self) -> float:
        """Operations for each of the fewest bytes."""
        return self.forward_flops / self.forward_bytes

    @property
    def backward_intensity(self) -> float:
        return self.backward_flops / self.backward_bytes


def kernel_cost(shape: Shape) -> Cost:
    """Count what one token of one head costs (docs/kernels.md).

        forward         memory_flops: errors, reads, writes, and the masked attention inside the chunk
        gradients       2 × forward
        made again      2 (Σ_{l<L} n_l + Σ_{l≥2} n_l + 2 Σ_{l<L} n_l + 2 Σ_l n_l + C Σ_l D_{l−1} + C Σ_{l<L} D_l)

    n_l = D_{l−1} D_l. z_L of keys and queries is kept, so the last layer is neither met by the keys nor read again.
    """
    widths, C, D = shape.widths, shape.chunk_size, shape.width
    sizes = [a * b for a, b in pairwise(widths)]
    forward = memory_flops(widths, C)
    again = 3 * sum(sizes[:-1]) + sum(sizes[1:]) + 2 * sum(sizes) + C * (sum(widths[:-1]) + sum(widths[1:-1]))
    token, gates, kept = D * shape.token_bytes, GATES * shape.depth * FLOAT, 2 * D * FLOAT
    between = shape.state_bytes / (shape.checkpoint * C)
    return Cost(
        forward_flops=forward,
        backward_flops=2 * forward + 2 * again,
        forward_bytes=4 * token + gates + kept + between,
        backward_bytes=7 * token + 2 * gates + kept + between,
        streamed_bytes=(2.5 * shape.state_bytes) / C,
    )


def lives_in(state_bytes: int, gpu: Accelerator = H100) -> str:
    """Name the nearest place that holds M and S of a head with room to work; half of a multiprocessor is for tiles."""
    if state_bytes <= gpu.registers / 2:
        return "registers"
    if state_bytes <= gpu.shared:
        return "shared memory, nothing else"
    return "L2" if state_bytes * gpu.multiprocessors <= gpu.l2 else "main memory"


COLUMNS = (
    "D", "expansion", "C", "state, KB", "lives in", "forward, MFLOP a chunk", "backward", "forward, KFLOP a token",
    "backward", "forward, bytes a token", "backward", "FLOP a byte, forward", "backward", "streamed, bytes a token",
)  # fmt: skip


def cost_table(width: int = 64, expansions: tuple[int, ...] = (1, 2, 4), chunks: tuple[int, ...] = (16, 32, 64)) -> str:
    """Lay the costs of a memory of two layers out as a table for docs/kernels.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for expansion, C in product(expansions, chunks):
        shape = Shape(width=width, expansion=expansion, chunk_size=C)
        c = kernel_cost(shape)
        cells = (
            width, expansion, C, f"{shape.state_bytes / 1e3:.0f}", lives_in(shape.state_bytes),
            f"{c.forward_flops * C / 1e6:.1f}", f"{c.backward_flops * C / 1e6:.1f}",
            f"{c.forward_flops / 1e3:.0f}", f"{c.backward_flops / 1e3:.0f}",
            f"{c.forward_bytes:,.0f}", f"{c.backward_bytes:,.0f}",
            f"{c.forward_intensity:.0f}", f"{c.backward_intensity:.0f}", f"{c.streamed_bytes:,.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
