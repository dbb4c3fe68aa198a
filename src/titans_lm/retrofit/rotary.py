"""Rotary positions of a base, turned by its own function: back to none, and of sinks on to where a base can see them.

    k̃_m = R(p) k_m        k_m a sink, p the least multiple of P / 2 with t − p < P for the query at t (D55)

P are the positions that a layer's attention was made for. A sink stands at the start of its text, so its distance to
the query grows with the text, and from P on is new to the base. R adds p to the place of a key: its distance is then
between P / 2 and P.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""`apply_rotary_pos_emb` of a model: q, k, cos, sin and the dimension of heads give both, turned."""
CLOSE = 0.02
"""What angles of one position may differ by from their frequencies, in a base that makes them in bfloat16."""


class Rotation(NamedTuple):
    """How a layer turns queries and keys, where its frequencies are, and by how many positions sinks move at once.

    Frequencies are read where the base has them whenever they are used: it may be on another device by then, have been
    rounded, or scale them by the length of the text.
    """

    rotate: Rotate
    source: nn.Module
    buffer: str
    interleaved: bool
    step: int

    def frequencies(self) -> Float[Tensor, " A"]:
        """What a position turns each channel by, in radians."""
        w = getattr(self.source, self.buffer)
        w = w if w.device.type == "mps" else w.double()
        return w.repeat_interleave(2) if self.interleaved else w.repeat(2)

    def back(self, x: Float[Tensor, "B T H D"], angles: Float[Tensor, "B T _"]) -> Float[Tensor, "B T H D"]:
        """Turn queries or keys back by the cosines and sines of their angles; what these scale them by stays."""
        cos, sin = angles.to(x.dtype).chunk(2, -1)
        return self._turn(x, cos, -sin)

    def steps_at(self, place: Any) -> Any:
        """How many steps sinks have moved up for the query at a place: its distance to them is below two steps."""
        if isinstance(place, int):
            return max(0, place // self.step - 1)
        return (place.div(self.step, rounding_mode="floor") - 1).clamp(min=0)

    def cuts(self, places: list[int], start: int, stop: int) -> set[int]:
        """The slots between these two at which sinks move, in rows whose first slot is at these places."""
        firsts = ((max(start + place, 2 * self.step), place) for place in places)
        return {slot for first, place in firsts for slot in range(first + -first % self.step - place, stop, self.step)}

    def moved_up(self, k: Float[Tensor, "B S H D"], steps: int | Int[Tensor, "B 1"]) -> Float[Tensor, "B S H D"]:
        """The keys of sinks so many steps further on in their text."""
        still = steps == 0 if isinstance(steps, int) else steps.is_cpu and not bool(steps.any())
        if still:
            return k
        if isinstance(steps, int):
            steps = torch.full((1, 1), steps, device=k.device)
        angles = steps[..., None] * self.step * self.frequencies().to(k.device)
        return self._turn(k, angles.cos().to(k.dtype), angles.sin().to(k.dtype))

    def _turn(self, x: Float[Tensor, "B T H D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B T H D"]:
        width = cos.shape[-1]
        turned, _ = self.rotate(x[..., :width], x[..., :1, :width], cos, sin, unsqueeze_dim=2)
        return torch.cat((turned, x[..., width:]), -1)


@torch.no_grad()
def find_rotations(model: "PreTrainedModel", attentions: list[Any]) -> dict[int, Rotation]:
    """Find the rotation of every layer that has one: of those whose answers change where their angles are zero.

    ValueError where it is not a function of the usual name and arguments, or its frequencies are nowhere.
    """
    owner: Any = model
    found, kind = dict[int, Rotation](), type(model).__name__
    sources = [
        (source, name, interleaved)
        for source in model.modules()
        for name, _ in source.named_buffers(recurse=False)
        if "inv_freq" in name and "original" not in name
        for interleaved in (False, True)
    ]

    def look(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        given = kwargs.get("position_embeddings")
        if rotate is None or not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(f"got a {kind}, whose rotation is unknown; expected a model like Llama, Qwen or Mistral")
        cos, sin = given
        still = {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
        answers = [attention.forward(*args, **settings)[0] for settings in (kwargs, still)]
        if torch.equal(*answers):
            return
        positions = min(owner.config.max_position_embeddings, getattr(attention, "sliding_window", None) or sys.maxsize)
        made = [Rotation(rotate, *source, max(1, positions // 2)) for source in sources]
        one = torch.atan2(sin[0, 1].float(), cos[0, 1].float())  # of the second token, whatever both are scaled by
        apart = [_apart(rotation.frequencies(), one) for rotation in made]
        if min(apart, default=CLOSE) >= CLOSE:
            raise ValueError(f"got a {kind}, whose rotary frequencies are unknown; expected a model like Llama or Qwen")
        found[attention.layer_idx] = made[apart.index(min(apart))]

    with ExitStack() as afterwards:
        afterwards.callback(model.train, model.training)
        model.eval()  # dropout would change answers too
        for attention in attentions:
            afterwards.enter_context(attention.register_forward_pre_hook(look, with_kwargs=True))
        device = next(model.parameters()).device
        owner.base_model(input_ids=torch.arange(3, device=device)[None], use_cache=False)
    return found


def _apart(frequencies: Tensor, angles: Tensor) -> float:
    if frequencies.shape != angles.shape:
        return float("inf")
    return float((frequencies.to(angles.device) - angles).abs().max())
