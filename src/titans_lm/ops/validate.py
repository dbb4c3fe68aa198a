"""What may enter the ops: shapes, dtypes and states, each refusal with what was got and what was expected."""

import torch
from torch import Tensor

from titans_lm.config import THRESHOLDS
from titans_lm.ops.gates import have_channels
from titans_lm.ops.network import MemoryNetwork
from titans_lm.ops.polynomial import count_monomials
from titans_lm.ops.state import MemoryState, PerToken, state_dtype

Gates = list[tuple[Tensor, ...]]
"""θ, η and α, each by layers."""
THRESHOLDS_OF = " or ".join(THRESHOLDS)


def form(x: object) -> str:
    """Say of what has another form than it should what it is."""
    if not isinstance(x, Tensor):
        return f"of type {type(x).__name__}"
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def check_tensors(**given: object) -> None:
    """Refuse, of what a model is given or not, what is no tensor."""
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"got {name} {form(x)}; expected a tensor, rows first, such as torch.tensor([[1, 2]])")


def check_call(
    q: Tensor, k: Tensor, v: Tensor, state: MemoryState, network: MemoryNetwork, chunk_size: int, valid: Tensor | None
) -> None:
    """Refuse what `neural_memory` cannot mean."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.dtype.is_floating_point:
            raise ValueError(f"got {name} {form(x)}; expected a floating point tensor (B, T, H, D)")
        own = name == "v" and not network.residual  # M then may lead to another width
        if x.shape[: 3 if own else 4] != q.shape[: 3 if own else 4] or x.dtype != q.dtype:
            raise ValueError(f"got q {form(q)} and {name} {form(x)}; expected q, k and v of one shape and dtype")
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"got chunk_size={chunk_size!r}; expected an integer of at least 1")
    masks = isinstance(valid, Tensor) and valid.dtype == torch.bool and valid.shape == q.shape[:2]
    if valid is not None and not masks:
        raise ValueError(f"got valid {form(valid)}; expected bool (B, T) = {tuple(q.shape[:2])}")
    check_state(state, q, v.shape[-1])
    check_offset(state.offset, chunk_size)
    check_network(network, state.M, q)


def check_coefficients(q: Tensor, k: Tensor, network: MemoryNetwork) -> tuple[Tensor, Tensor]:
    """Refuse coefficients of polynomials that are none; views of q and k with as many channels as those have."""
    if not isinstance(network, MemoryNetwork):
        raise ValueError(f"got network {form(network)}; expected a MemoryNetwork")
    a = network.coefficients
    if a is None:
        return q, k
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.dim() != 4 or k.shape != q.shape or not q.shape[3]:
        raise ValueError(f"got q {form(q)} and k {form(k)}; expected both (B, T, H, D)")
    if not isinstance(a, Tensor) or not a.dtype.is_floating_point:
        got = a.dtype if isinstance(a, Tensor) else type(a).__name__
        raise ValueError(f"got network.coefficients of {got}; expected a floating point tensor (H, p + 1)")
    if a.is_cpu and not torch.compiler.is_compiling() and (wrong := a[~(a > 0)].tolist()):
        raise ValueError(f"got {wrong[0]:g} among network.coefficients; expected all above 0")
    if a.dim() != 2 or len(a) != q.shape[2] or not a.shape[1]:
        raise ValueError(
            f"got network.coefficients of shape {tuple(a.shape)}; expected (H, p + 1) with H = {q.shape[2]}: one for "
            "each degree from 0 to p"
        )
    channels = count_monomials(q.shape[-1], a.shape[1] - 1)
    wide_q, wide_k = (x[..., :1].expand(*x.shape[:-1], channels) for x in (q, k))
    return wide_q, wide_k


def check_surprise(name: str, got: object) -> None:
    """Refuse what does not say which sizes of surprise are asked for."""
    if not isinstance(got, bool) and got != "parts":
        raise ValueError(
            f'got {name}={got!r}; expected False, True for the momentary surprise, or "parts" for that, the past and '
            "what is forgotten"
        )


def check_state(state: MemoryState, q: Tensor, out: int) -> None:
    """Refuse a state of another batch, model or precision."""
    if not isinstance(state, MemoryState):
        raise ValueError(f"got a state of type {type(state).__name__}; expected MemoryState (see MemoryState.initial)")
    named = (("M", state.M), ("S", state.S), ("anchor", state.anchor))
    for name, weights in named:
        check_weights(f"state.{name}", weights, q, out)
    dtype = state_dtype(state.M[0].dtype)
    for name, weights in named:
        same = len(weights) == len(state.M)
        for w, of in zip(weights, state.M, strict=False):
            same = same and w.shape == of.shape
        if not same:
            raise ValueError(f"got state.{name} of other shapes than state.M; expected the state of one memory")
        for w in weights:
            if w.dtype != dtype:
                raise ValueError(f"got state.{name} in {w.dtype}; expected all of it in float32, or all in float64")
    if q.dtype == torch.float64 and state.M[0].dtype != torch.float64:
        raise ValueError("got q in float64 and a state in float32; expected a float64 state for a float64 model")
    offset = state.offset
    if (
        not isinstance(offset, Tensor)
        or offset.shape != q.shape[:1]
        or offset.is_floating_point()
        or offset.dtype == torch.bool
    ):
        raise ValueError(f"got state.offset {form(offset)}; expected integers (B,) = {tuple(q.shape[:1])}")


def check_offset(offset: Tensor, chunk_size: int) -> None:
    """Refuse a state that stands where no chunk of this size can; on a GPU, looking would make every call wait."""
    if not offset.is_cpu or torch.compiler.is_compiling():
        return
    outside = [x for x in offset.tolist() if not 0 <= x < chunk_size]
    if outside:
        raise ValueError(
            f"got state.offset {outside[0]} with chunk_size={chunk_size}; expected 0 to {chunk_size - 1}: "
            "chunk_size is part of the model, and this state comes from another one"
        )


def check_weights(name: str, weights: tuple[Tensor, ...], q: Tensor, out: int | None) -> None:
    """Refuse weights that are not a network from q's channels to `out` (None: any) for every row and head of q."""
    B, _, H, D = q.shape
    if not isinstance(weights, tuple) or not weights:
        raise ValueError(f"got {name}={type(weights).__name__}; expected a tuple of L tensors (B, H, D_in, D_out)")
    width = D
    for layer, w in enumerate(weights):
        if not isinstance(w, Tensor) or w.dim() != 4 or w.shape[:2] != (B, H) or w.shape[2] != width:
            got = f"of shape {tuple(w.shape)}" if isinstance(w, Tensor) else form(w)
            raise ValueError(
                f"got {name}[{layer}] {got}; expected (B, H, D_in, D_out) = ({B}, {H}, {width}, …) "
                "for these queries: a state belongs to one batch and one model"
            )
        width = w.shape[3]
    if out is not None and width != out:
        of = "head dimension of q" if out == D else "channels of v"
        raise ValueError(f"got {name} ending in {width} channels; expected {out}, the {of}")


def check_network(network: MemoryNetwork, weights: tuple[Tensor, ...], q: Tensor) -> None:
    """Refuse a network whose LayerNorm or initial memory is of another size than the weights."""
    H, D = q.shape[2], weights[-1].shape[-1]
    for name, x in (("norm_weight", network.norm_weight), ("norm_bias", network.norm_bias)):
        if x is not None and x.shape != (H, D):
            raise ValueError(f"got network.{name} of shape {tuple(x.shape)}; expected (H, D) = ({H}, {D})")
    if network.forget_to == "init":
        got = [tuple(w.shape) for w in network.initial or ()]
        expected = [tuple(w.shape[1:]) for w in weights]
        if got != expected:
            raise ValueError(
                f"got network.initial of shapes {got}; expected {expected}, as the state has: both are of one model"
            )


def check_read(M: tuple[Tensor, ...], q: Tensor, network: MemoryNetwork) -> None:
    """Refuse what `read` cannot mean."""
    if not isinstance(q, Tensor) or q.dim() != 4 or not q.dtype.is_floating_point:
        raise ValueError(f"got q {form(q)}; expected a floating point tensor (B, T, H, D)")
    check_weights("M", M, q, q.shape[-1] if network.residual else None)
    check_network(network, M, q)


def check_extra(
    extra: PerToken,
    q: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    network: MemoryNetwork,
    valid: Tensor | None,
) -> None:
    """Refuse a window, a tail or a threshold of another form, and what does not go together."""
    if not isinstance(extra, PerToken):
        raise ValueError(f"got extra {form(extra)}; expected PerToken(threshold=…, window=…)")
    if extra.window is not None or state.tail:
        _check_window(extra, q, v, gates, state, network)
    threshold, wants = extra.threshold, network.objective in THRESHOLDS
    if threshold is None and not wants:
        return
    if threshold is None or not wants:
        got, expected = ("no threshold", "one, (B, T, H)") if wants else ("a threshold", f"it with {THRESHOLDS_OF}")
        raise ValueError(f"got {got} with objective={network.objective!r}; expected {expected}")
    if threshold.shape != q.shape[:3] or not threshold.dtype.is_floating_point:
        raise ValueError(f"got threshold {form(threshold)}; expected floating point (B, T, H) = {tuple(q.shape[:3])}")
    if threshold.is_cpu and not torch.compiler.is_compiling():
        real = threshold if valid is None else threshold[valid]
        wrong = real[~(real > 0)].tolist()
        if wrong:
            raise ValueError(f"got a threshold of {wrong[0]:g}; expected all above 0; what writes nothing is θ = 0")


def _check_window(
    extra: PerToken, q: Tensor, v: Tensor, gates: Gates, state: MemoryState, network: MemoryNetwork
) -> None:
    window, (B, T, H, D), kept = extra.window, q.shape, [tuple(x.shape) for x in state.tail]
    if window is None:
        raise ValueError(f"got a state with a tail of {kept[0][1]} tokens; expected extra.window (B, T, H, c) with it")
    if window.shape[:-1] != q.shape[:3] or window.shape[-1] < 1 or not window.dtype.is_floating_point:
        raise ValueError(f"got window {form(window)}; expected floating point (B, T, H, c), with {(B, T, H)} first")
    W = window.shape[-1] - 1
    expected = [(B, W, H, D), (B, W, H, v.shape[-1])] if W else []
    if kept != expected:
        raise ValueError(
            f"got state.tail of shapes {kept} with a window of {W + 1}; expected {expected}, the keys and values "
            "before the call: zero at the start of a document"
        )
    if any(x.dtype != state.M[0].dtype for x in state.tail):
        raise ValueError(f"got state.tail in {state.tail[0].dtype}; expected {state.M[0].dtype}, as the memory has")
    if have_channels(gates):
        raise ValueError("got a window with channel-wise gates; expected gates per head, or per head and layer")
    if network.read_at == "anchor":
        raise ValueError("got a window with read_at='anchor'; expected read_at='token': what lags has no windows")
    if network.objective in THRESHOLDS:
        raise ValueError(f"got a window with objective={network.objective!r}; expected l2, dot or lp: no threshold")


def layer_gates(name: str, gate: Tensor | tuple[Tensor, ...], q: Tensor, state: MemoryState) -> tuple[Tensor, ...]:
    """One gate per memory layer: L tensors (B, T, H), or channel-wise (B, T, H, D_{l−1})."""
    L, head = len(state.M), tuple(q.shape[:3])
    for part in gate if isinstance(gate, (tuple, list)) else (gate,):
        if not isinstance(part, Tensor) or not part.dtype.is_floating_point:
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"got {name} of {got}; expected a floating point tensor, or a tuple of them")
    if isinstance(gate, Tensor):
        if tuple(gate.shape) == head:
            return (gate,) * L
        if tuple(gate.shape) == (*head, L):
            return gate.unbind(-1)
        raise ValueError(
            f"got {name} of shape {tuple(gate.shape)}; expected (B, T, H) = {head}, (B, T, H, L) = {(*head, L)}, or a "
            "tuple of L channel-wise tensors (B, T, H, D_in)"
        )
    shapes = [tuple(g.shape) for g in gate]
    expected = [(*head, w.shape[2]) for w in state.M]
    if shapes != expected:
        raise ValueError(f"got {name} as a tuple of shapes {shapes}; expected channel-wise gates {expected}")
    return tuple(gate)
