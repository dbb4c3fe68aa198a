"""What an adapter is trained by, over positions beyond the window:

    loss = w · (d · KL(full attention ‖ ours) + t · (− log p(text)))

w is 1, or `returning_weight` for rows in which passages return: there the window costs nats, on plain text hundredths
of one. Teacher and student are the same weights, read twice: with attention over everything and no memory, and with
both.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titans_lm.data.batches import Batch
from titans_lm.retrofit.attention import FULL, Reach
from titans_lm.retrofit.reading import PIECE, as_base, hidden

Hidden = Float[Tensor, "B N E"]


class Distillation:
    """The loss of a batch, and its parts."""

    def __init__(self, model: Any, distill: float, text: float, returning: float = 1.0) -> None:
        self.model, self.weights, self.returning = model, (distill, text), returning

    def __call__(self, _: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        window, sinks = int(batch["window"][0]), int(batch["sinks"][0])
        ids, targets = batch["input_ids"], batch["targets"][:, window:]
        with torch.no_grad(), as_base(self.model):
            taught = hidden(self.model, ids, FULL)[:, window:] if self.weights[0] else None
        ours = hidden(self.model, ids, Reach(window, sinks))[:, window:]
        rows = torch.where(batch["again"].any(1), self.returning, 1.0).to(ours.device)
        loss, parts = HeadLoss.apply(ours, taught, targets, self.model.get_output_embeddings(), self.weights, rows)
        kl, text = parts
        return loss, {"kl": kl, "nats_per_token": text}


class HeadLoss(torch.autograd.Function):
    """The loss from hidden states, piece by piece, with its gradient made in the same pass: no logits are kept, and
    none are made a second time.

    With p of ours and q of the teacher, d loss / d logits = w (d (p − q) + t (p − 1[target])), over the positions'
    number. The two parts that are given beside the loss are without w.
    """

    @staticmethod
    def forward(
        ctx: Any, ours: Hidden, taught: Hidden | None, targets: Int[Tensor, "B N"], head: nn.Linear, weights: Any,
        rows: Float[Tensor, " B"],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (distill, told), grad, parts = weights, torch.empty_like(ours), []
        wanted, precise = ctx.needs_input_grad[0], torch.promote_types(ours.dtype, torch.float32)
        for a in range(0, targets.shape[1], PIECE):
            part = slice(a, a + PIECE)
            target = targets[:, part, None]
            log_p = head(ours[:, part]).to(precise).log_softmax(-1)
            text = -log_p.gather(-1, target).sum((1, 2))
            kl = torch.zeros_like(text)
            slope = log_p.exp().mul_(distill + told) if wanted else None
            if taught is not None:
                log_q = head(taught[:, part]).to(precise).log_softmax(-1)
                q = log_q.exp()
                kl = log_q.sub_(log_p).mul_(q).sum((1, 2))
                if slope is not None:
                    slope.sub_(q, alpha=distill)
            if slope is not None:
                slope.scatter_add_(-1, target, slope.new_full((), -told).expand(target.shape))
                grad[:, part] = slope.to(ours.dtype) @ head.weight
            parts.append(torch.stack((kl, text)))
        by_row, rows = torch.stack(parts).sum(0) / targets.numel(), rows.to(precise)
        ctx.save_for_backward(grad.mul_(rows[:, None, None] / targets.numel()) if wanted else None)
        found, (kl, text) = by_row.sum(1), by_row @ rows
        ctx.mark_non_differentiable(found)
        return distill * kl + told * text, found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0], None, None, None, None, None
