"""What an adapter is trained by, over positions beyond the window:

    loss = d · KL(full attention ‖ ours) + t · (− log p(text))

Teacher and student are the same weights, read twice: with attention over everything and no memory, and with both.
Before that each layer can learn alone, from what it gets inside the teacher; nothing goes back through the base:

    loss = mean over layers of Σ_t ‖(y_t + m_t − o_t) W_o‖² / Σ_t ‖o_t W_o‖²

o is what attention over everything answers, y attention over sinks and window, m the memory. `unexplained` is the same
in units of Σ_t ‖(y_t − o_t) W_o‖²: 1 is no memory at all.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.data.batches import Batch
from titans_lm.retrofit.add import OUTPUTS
from titans_lm.retrofit.attention import FULL, Call, Layer, LayerState, Reach, read, tokens_of
from titans_lm.retrofit.memory import LayerMemory
from titans_lm.retrofit.reading import PIECE, as_base, hidden

EPS = 1e-12
"""The least that is divided by: of rows shorter than their window nothing is left unexplained."""
Hidden = Float[Tensor, "B N E"]


class Distillation:
    """The loss of a batch, and its parts."""

    def __init__(self, model: Any, distill: float, text: float) -> None:
        self.model, self.weights = model, (distill, text)

    def __call__(self, _: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        window, sinks = int(batch["window"][0]), int(batch["sinks"][0])
        if bool(batch["alone"][0]):
            loss, unexplained = self.layers_alone(batch["input_ids"], Reach(window, sinks))
            return loss, {"unexplained": unexplained}
        ids, targets = batch["input_ids"], batch["targets"][:, window:]
        with torch.no_grad(), as_base(self.model):
            taught = hidden(self.model, ids, FULL)[:, window:] if self.weights[0] else None
        ours = hidden(self.model, ids, Reach(window, sinks))[:, window:]
        loss, parts = HeadLoss.apply(ours, taught, targets, self.model.get_output_embeddings(), self.weights)
        kl, text = parts
        return loss, {"kl": kl, "nats_per_token": text}

    def layers_alone(self, ids: Int[Tensor, "B T"], reach: Reach) -> tuple[Tensor, Tensor]:
        """What the memories leave of what attention answers from beyond the window, a mean over layers."""
        losses, left, layers = (
            [],
            [],
            [m for m in self.model.modules() if isinstance(getattr(m, "memory", None), LayerMemory)],
        )

        def watch(module: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, full: Tensor) -> None:
            weight = next(getattr(module, name) for name in OUTPUTS if hasattr(module, name)).weight

            def size(o: Tensor) -> Tensor:
                return F.linear(o[:, reach.window :].flatten(2), weight).float().square().sum()

            def error(memory: LayerMemory | None) -> Tensor:
                layer = Layer(reach, scale, 0.0, memory, module.rotate)
                tokens = tokens_of(q, k, v, call, layer if memory else layer._replace(rotate=None))
                o, _ = read(tokens, LayerState.start(tokens, layer, whole=False), 0, None, layer)
                return size(o - full)

            with torch.enable_grad():
                found = error(module.memory)
                losses.append(found / size(full))
            left.append(found.detach() / error(None).clamp(min=EPS))

        for layer in layers:
            layer.watch = watch
        try:
            with torch.no_grad(), as_base(self.model):
                hidden(self.model, ids, FULL)
        finally:
            for layer in layers:
                del layer.watch
        return torch.stack(losses).mean(), torch.stack(left).mean()


class HeadLoss(torch.autograd.Function):
    """The loss from hidden states, piece by piece, with its gradient made in the same pass: no logits are kept, and
    none are made a second time.

    With p of ours and q of the teacher, d loss / d logits = d (p − q) + t (p − 1[target]), over the positions' number.
    """

    @staticmethod
    def forward(
        ctx: Any, ours: Hidden, taught: Hidden | None, targets: Int[Tensor, "B N"], head: nn.Linear, weights: Any
    ) -> tuple[Tensor, Tensor]:
        (distill, told), grad, parts = weights, torch.empty_like(ours), []
        wanted, precise = ctx.needs_input_grad[0], torch.promote_types(ours.dtype, torch.float32)
        for a in range(0, targets.shape[1], PIECE):
            part = slice(a, a + PIECE)
            target = targets[:, part, None]
            log_p = head(ours[:, part]).to(precise).log_softmax(-1)
            text, kl = -log_p.gather(-1, target).sum(), log_p.new_zeros(())
            slope = log_p.exp().mul_(distill + told) if wanted else None
            if taught is not None:
                log_q = head(taught[:, part]).to(precise).log_softmax(-1)
                q = log_q.exp()
                kl = log_q.sub_(log_p).mul_(q).sum()
                if slope is not None:
                    slope.sub_(q, alpha=distill)
            if slope is not None:
                slope.scatter_add_(-1, target, slope.new_full((), -told).expand(target.shape))
                grad[:, part] = slope.to(ours.dtype) @ head.weight
            parts.append(torch.stack((kl, text)))
        found = torch.stack(parts).sum(0) / targets.numel()
        ctx.save_for_backward(grad.div_(targets.numel()) if wanted else None)
        ctx.mark_non_differentiable(found)
        return distill * found[0] + told * found[1], found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0], None, None, None, None
