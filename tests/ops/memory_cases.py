"""Calls of `neural_memory` to compare backends on, each made from one line that a test can print."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ops.memory_oracle import oracle
from titans_lm.config import THRESHOLDS
from titans_lm.ops import MemoryNetwork, MemoryState, PerToken, neural_memory

EDGES = {"theta": 0.0, "eta": 0.0, "alpha": 1.0}


PADDINGS = ("none", "middle", "left", "scattered", "empty row", "all empty", "right")


@dataclass(frozen=True)
class Case:
    """One call: sizes, kind of every gate, network, state, padding, and gates set to their edge values.

    `gates` names the kind of θ, η and α in this order. `offsets` says where in its chunk each row starts, with S and
    an anchor unlike M; empty is a fresh chunk. `edges` names the gates of which the share `edge_share` is exactly at
    its edge (θ = 0, η = 0, α = 1). `window` is how many tokens one writes, 0 for a call that has no window.
    `keys` is the width of q and k where it is not that of v, and `degree` that of the polynomials they stand for.
    """

    tokens: int = 9
    chunk: int = 4
    rows: int = 2
    heads: int = 2
    width: int = 4
    depth: int = 2
    expansion: int = 2
    gates: tuple[str, str, str] = ("layer", "layer", "layer")
    activation: str = "gelu"
    residual: bool = True
    norm: str = "weight and bias"
    objective: str = "l2"
    forget_to: str = "zero"
    offsets: tuple[int, ...] = ()
    padding: str = "none"
    edges: tuple[str, ...] = ()
    edge_share: float = 0.3
    window: int = 0
    keys: int = 0
    degree: int = 0
    read_at: str = "token"
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        said = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return ",".join(f"{name}={value}" for name, value in said.items()).replace(" ", "") or "default"

    @property
    def widths(self) -> list[int]:
        keys = self.keys or self.width
        inputs = math.comb(keys + self.degree, self.degree) if self.degree else keys
        return [inputs, *[self.expansion * self.width] * (self.depth - 1), self.width]


def padding_mask(kind: str, rows: int, tokens: int, generator: torch.Generator) -> Tensor | None:
    """Which tokens are real; rows differ in how many are not."""
    if kind == "none":
        return None
    place = torch.arange(tokens).expand(rows, tokens)
    count = torch.tensor([(tokens + 1) // (row + 2) for row in range(rows)]).unsqueeze(1)
    if kind == "left":
        return place >= count
    if kind == "right":
        return place < tokens - count
    if kind == "middle":
        start = (tokens - count) // 2
        return (place < start) | (place >= start + count)
    scattered = torch.rand(rows, tokens, generator=generator) < 0.6
    if kind == "empty row":
        scattered[rows // 2] = False
    if kind == "all empty":
        scattered[:] = False
    return scattered


@dataclass(frozen=True)
class Call:
    """The tensors of a case: `leaves` are those that gradients are asked for."""

    leaves: dict[str, Tensor]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]

    def __call__(self, backend: str) -> tuple[Tensor, MemoryState, Tensor]:
        """Run it; outputs of padding, which are undefined, are set to zero."""
        if backend == "oracle":
            return oracle(*self.arguments, **self.settings)
        o, state, surprise = neural_memory(*self.arguments, **self.settings, return_surprise=True, backend=backend)
        valid = self.settings["valid"]
        if valid is not None:
            o, surprise = (x.masked_fill(~valid[:, :, None, None], 0.0) for x in (o, surprise))
        return o, state, surprise

    def results(self, backend: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values, and the gradients of a random mix of all outputs, of every input by name."""
        o, state, surprise = self(backend)
        values = {"o": o, **named_parts(state)}
        generator = torch.Generator().manual_seed(1)
        mix = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in values.values())
        found = torch.autograd.grad(mix, list(self.leaves.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(self.leaves.items(), found, strict=True)
        }
        values = {**values, "surprise": surprise, "offset": state.offset.double()}
        return {name: x.detach() for name, x in values.items()}, gradients


def named_parts(state: MemoryState) -> dict[str, Tensor]:
    return {f"{name}[{i}]": w for name in ("M", "S", "anchor", "tail") for i, w in enumerate(getattr(state, name))}


class Draw:
    """Random float64 tensors of a case; those made by `leaf` are the ones that gradients are asked for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        self.leaves: dict[str, Tensor] = {}

    def leaf(self, name: str, x: Tensor) -> Tensor:
        self.leaves[name] = x.requires_grad_()
        return x

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def unit(self, name: str) -> Tensor:
        case = self.case
        width = case.width if name == "v" else case.keys or case.width
        return self.leaf(name, F.normalize(self.normal(case.rows, case.tokens, case.heads, width), dim=-1))

    def gate(self, name: str, kind: str, largest: float) -> Tensor | tuple[Tensor, ...]:
        case = self.case
        head = (case.rows, case.tokens, case.heads)
        tails = {"head": [()], "layer": [(case.depth,)], "channel": [(w,) for w in case.widths[:-1]]}[kind]
        parts = []
        for i, tail in enumerate(tails):
            x = largest * self.uniform(*head, *tail)
            if name in case.edges:
                x = torch.where(self.uniform(*head, *tail) < case.edge_share, EDGES[name], x)
            parts.append(self.leaf(f"{name}{i}", x))
        return tuple(parts) if kind == "channel" else parts[0]

    def weights(self, name: str, lead: tuple[int, ...], scale: float = 1.0) -> tuple[Tensor, ...]:
        return tuple(
            self.leaf(f"{name}{i}", self.normal(*lead, *size) * scale / size[0] ** 0.5)
            for i, size in enumerate(pairwise(self.case.widths))
        )


def taking_turns(i: int, chunk: int) -> dict[str, Any]:
    """What the i-th of a list of cases has besides its padding: lengths, starts, forgetting and edges."""
    return {
        "chunk": chunk, "rows": 3, "seed": i, "tokens": (9, 2, 17, 1)[i % 4], "forget_to": ("zero", "init")[i // 2 % 2],
        "offsets": ((), (chunk - 1, 0), (chunk // 2,))[i % 3], "edges": ((), ("theta", "eta", "alpha"))[i // 5 % 2],
    }  # fmt: skip


def make_call(case: Case) -> Call:
    """Draw the tensors of a case.

    Steps and forgetting are small enough for the length that the dynamics stay tame: a memory that explodes or decays
    to the singular point of its LayerNorm has outer gradients of 1e9, and amplifies rounding as much.
    """
    draw = Draw(case)
    q, k, v = (draw.unit(name) for name in "qkv")
    largest = {
        "theta": min(0.05 / case.chunk, 1.0 / case.tokens),
        "eta": 0.8,
        "alpha": min(0.2, 2.0 / case.tokens),
    }
    gates = [draw.gate(name, kind, largest[name]) for name, kind in zip(EDGES, case.gates, strict=True)]
    batch = (case.rows, case.heads)
    initial = draw.weights("initial", (case.heads,)) if case.forget_to == "init" else None
    M = draw.weights("M", batch)
    if case.offsets:
        S, anchor = draw.weights("S", batch, 0.1), draw.weights("anchor", batch)
        offset = torch.tensor([case.offsets[row % len(case.offsets)] for row in range(case.rows)])
    else:
        S, anchor, offset = tuple(map(torch.zeros_like, M)), M, torch.zeros(case.rows, dtype=torch.int64)
    norm = {}
    if case.norm != "none":
        norm["norm_weight"] = draw.leaf("norm_weight", 1.0 + 0.1 * draw.normal(case.heads, case.width))
    if case.norm == "weight and bias":
        norm["norm_bias"] = draw.leaf("norm_bias", 0.1 * draw.normal(case.heads, case.width))
    coefficients = None
    if case.degree:
        coefficients = draw.leaf("coefficients", 0.2 + draw.uniform(case.heads, case.degree + 1) / case.degree)
    network = MemoryNetwork(
        case.activation,
        case.residual,
        **norm,
        objective=case.objective,
        forget_to=case.forget_to,
        initial=initial,
        read_at=case.read_at,
        coefficients=coefficients,
    )
    valid = padding_mask(case.padding, case.rows, case.tokens, draw.generator)
    threshold = None
    if case.objective in THRESHOLDS:  # errors have norms of about 1 to 3, and are on both sides of it
        most = 3.0 if case.objective == "huber" else 1.5
        threshold = draw.leaf("threshold", 0.1 + most * draw.uniform(case.rows, case.tokens, case.heads))
    window, tail = None, ()
    if case.window:
        shares = draw.uniform(case.rows, case.tokens, case.heads, case.window)
        window = draw.leaf("window", shares / shares.sum(-1, keepdim=True))
    if case.window > 1:  # a document that goes on, or one that begins
        size = case.rows, case.window - 1, case.heads
        old = [F.normalize(draw.normal(*size, w), dim=-1) * bool(case.offsets) for w in (case.widths[0], case.width)]
        tail = tuple(draw.leaf(f"tail {name}", x) for name, x in zip("kv", old, strict=True))
    settings = {"network": network, "chunk_size": case.chunk, "valid": valid, "extra": PerToken(threshold, window)}
    return Call(draw.leaves, (q, k, v, *gates, MemoryState(M, S, anchor, offset, tail)), settings)


def disagreement(expected: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """Largest |x − y| of every tensor, as a share of its own largest |x|.

    A tensor that is nothing but rounding (a gradient that cancels to zero) has no relative error: sizes count from
    1e-6 of the largest tensor on, so such a one must agree to 1e-16 of what it was summed from.
    """
    assert expected.keys() == got.keys()
    floor = 1e-6 * max(float(x.abs().max()) for x in expected.values())
    errors = {}
    for name, x in expected.items():
        assert x.shape == got[name].shape, name
        scale = max(float(x.abs().max()), floor)
        errors[name] = float((x - got[name]).abs().max()) / scale if scale else float(got[name].abs().max())
    return errors


def assert_agree(case: Case, expected: str, got: str, tolerance: float = 1e-10) -> None:
    """Both backends give the same values and the same gradients; a NaN agrees with nothing."""
    call = make_call(case)
    for x, y in zip(call.results(expected), call.results(got), strict=True):
        wrong = {name: error for name, error in disagreement(x, y).items() if not error <= tolerance}
        assert not wrong, f"{case}: {got} differs from {expected} by {wrong}"
