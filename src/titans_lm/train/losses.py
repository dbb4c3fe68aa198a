"""Losses that the loop minimises: each takes a model and a batch, and returns the loss and what else to log.

They read `model(...).logits`, so any Hugging Face causal language model will do. Targets are explicit (data/batches):
nothing is shifted here.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.data.batches import IGNORED, Batch
from titans_lm.memory import write_gates
from titans_lm.ops.state import detach_state, map_state, select_rows, state_tensors
from titans_lm.train.parallel import unwrapped

Metrics = dict[str, Tensor]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the targets in nats, at least in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def next_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
    """Predict every target from the tokens before it in its row; every row starts anew."""
    loss = token_loss(_call(model, batch).logits, batch["targets"])
    return loss, {"bits_per_token": loss.detach() / math.log(2)}


@dataclass(frozen=True)
class TaskLoss:
    """Predict the targets, report the share of them whose likeliest token is right, and predict all other tokens too.

    The loss is that of the targets plus `lm_loss_weight` times that of every token from the one before it, up to the
    last target of the row (what is behind it fills the batch), both in nats. A row asks for few tokens; those that come
    again anywhere in it teach looking up as well.
    """

    lm_loss_weight: float = 0.0
    gate_l1: float = 0.0
    """Sparsity penalty: the mean of θ and α over all tokens, heads and layers of all memories, times this, is added.

    A memory whose answers are right gets no gradient, and then nothing teaches it to leave alone what it reads in
    vain; in rows much longer than those it was taught by, such writes and fades add up."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        with recorded_gates(unwrapped(model)) if self.gate_l1 else nullcontext([]) as gates:
            logits, ids = _call(model, batch).logits, batch["input_ids"]
        loss, metrics = token_loss(logits, batch["targets"]), {"accuracy": accuracy(logits, batch["targets"])}
        if self.lm_loss_weight:
            before_a_target = (batch["targets"] != IGNORED).flip(1).cumsum(1).flip(1) > 0
            text = token_loss(logits[:, :-1], ids[:, 1:].masked_fill(~before_a_target[:, :-1], IGNORED))
            loss, metrics["text_bits_per_token"] = loss + self.lm_loss_weight * text, text.detach() / math.log(2)
        if gates:
            penalty = torch.stack([gate.mean() for gate in gates]).mean()
            loss, metrics["gates"] = loss + self.gate_l1 * penalty, penalty.detach()
        return loss, metrics


recall_loss = TaskLoss()
"""Predict the targets alone."""


@contextmanager
def recorded_gates(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect θ and α of every memory that a model runs inside of the block, with their gradients."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: object, gate: Tensor | tuple[Tensor, ...]) -> None:
        found.extend(gate if isinstance(gate, tuple) else (gate,))

    with ExitStack() as hooks:
        for gate in write_gates(model):
            hooks.callback(gate.register_forward_hook(keep).remove)
        yield found


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the share of targets that the likeliest token hits."""
    asked = targets != IGNORED
    return (logits.argmax(-1)[asked] == targets[asked]).float().mean()


class CarriedLoss:
    """Predict every target from the document so far: the state is carried from step to step, the gradient is not.

    For batches of `DocumentLanes`: a row whose document starts gets the model's initial state (and trains it), the
    others get the state that the last step left, detached (truncated back-propagation). The state is part of a
    checkpoint.
    """

    def __init__(self) -> None:
        self.state: Any = None
        self.saved: list[Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        owner = unwrapped(model)
        if not hasattr(owner, "init_state"):
            raise ValueError(f"got a {type(owner).__name__}, which has no init_state; expected a model with memory")
        state = owner.init_state(len(batch["input_ids"]))
        carried = self._restored(state) if self.saved is not None else self.state
        if carried is not None:
            state = select_rows(batch["reset"], state, carried)
        output = _call(model, batch, state=state, return_state=True)
        self.state = detach_state(output.state)
        loss = token_loss(output.logits, batch["targets"])
        return loss, {"bits_per_token": loss.detach() / math.log(2)}

    def forget(self) -> None:
        """Start every row anew at the next step: what a step that was not finite left behind is of no use."""
        self.state = self.saved = None

    def state_dict(self) -> dict[str, list[Tensor]]:
        if self.saved is not None:
            return {"carried": self.saved}
        return {"carried": [tensor.cpu().clone() for tensor in state_tensors(self.state)]}

    def load_state_dict(self, saved: dict[str, list[Tensor]]) -> None:
        self.state, self.saved = None, saved["carried"] or None

    def _restored(self, fresh: Any) -> Any:
        """Give saved tensors the structure of a fresh state, which knows the model's shapes and device."""
        shapes = [tensor.shape for tensor in state_tensors(fresh)]
        if shapes != [tensor.shape for tensor in self.saved or []]:
            raise ValueError("got a carried state of another model or batch size than the one that is trained")
        tensors = iter(self.saved or [])
        self.saved = None
        return map_state(lambda like: next(tensors).to(like), fresh)


def _call(model: nn.Module, batch: Batch, **extra: Any) -> Any:
    return model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), use_cache=False, **extra)
