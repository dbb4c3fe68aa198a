"""Rotary positions of a base, turned by its own function: back to none, and of sinks on to where a base can see them.

    k̃_m = R(p) k_m        k_m a sink, p the least multiple of P / 2 with t − p < P for the query at t (D55)

P are the base's positions. A sink stands at the start of its text, so its distance to the query grows with the text,
and beyond P a base has never seen it. R adds p to the place of a key: its distance is then between P / 2 and P.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""`apply_rotary_pos_emb` of a model: q, k, cos, sin and the dimension of heads give both, turned."""


class Rotation(NamedTuple):
    """How a layer turns queries and keys, and the angles (A,) in float64 by which `step` positions turn them."""

    rotate: Rotate
    angles: Float[Tensor, " A"]
    step: int

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
        return {slot for place in places for slot in range(start + -(start + place) % self.step, stop, self.step)}

    def moved_up(self, k: Float[Tensor, "B S H D"], steps: int | Int[Tensor, "B 1"]) -> Float[Tensor, "B S H D"]:
        """The keys of sinks so many steps further on in their text."""
        if isinstance(steps, int):
            if steps == 0:
                return k
            steps = torch.full((1, 1), steps)
        angles = steps[..., None].to(k.device) * self.angles.to(k.device)
        return self._turn(k, angles.cos().to(k.dtype), angles.sin().to(k.dtype))

    def _turn(self, x: Float[Tensor, "B T H D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B T H D"]:
        width = cos.shape[-1]
        turned, _ = self.rotate(x[..., :width], x[..., :1, :width], cos, sin, unsqueeze_dim=2)
        return torch.cat((turned, x[..., width:]), -1)


@torch.no_grad()
def find_rotations(model: "PreTrainedModel", attentions: list[Any]) -> dict[int, Rotation]:
    """Find the rotation of every layer that has one: of those whose answers change where their angles are zero.

    ValueError where it is not a function of the usual name and arguments.
    """
    owner: Any = model
    found, step = dict[int, Rotation](), max(1, owner.config.max_position_embeddings // 2)

    def look(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        given = kwargs.get("position_embeddings")
        if rotate is None or not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(
                f"got a {type(model).__name__}, whose rotation is unknown; expected a model like Llama, Qwen or Mistral"
            )
        cos, sin = given
        still = {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
        answers = [attention.forward(*args, **settings)[0] for settings in (kwargs, still)]
        if not torch.equal(*answers):
            last = torch.atan2(sin[0, -1].double(), cos[0, -1].double())  # whatever both are scaled by
            found[attention.layer_idx] = Rotation(rotate, last, step)

    hooks = [attention.register_forward_pre_hook(look, with_kwargs=True) for attention in attentions]
    was_training = model.training
    model.eval()  # dropout would change answers too
    try:
        places = torch.arange(step - 2, step + 1, device=next(model.parameters()).device)[None]
        owner.base_model(input_ids=torch.arange(3, device=places.device)[None], position_ids=places, use_cache=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found
