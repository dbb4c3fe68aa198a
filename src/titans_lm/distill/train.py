"""Train an adapter: what `titans retrofit` runs. What an adapter is trained by, over positions beyond the window:

    loss = w · (d · KL(full attention ‖ ours) + t · (− log p(text)))

w is 1, or `returning_weight` for rows in which passages return: there the window costs nats, on plain text hundredths
of one. Teacher and student are the same weights, read twice: with attention over everything and no memory, and with
both. What that is for is the share of the gap recovered.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from titans_lm.data.batches import Batch
from titans_lm.distill.rows import ReturningRows, as_batch, open_texts
from titans_lm.distill.settings import RetrofitSettings
from titans_lm.distill.start import start_memories
from titans_lm.retrofit.add import add_memory, check_windows, keep_memories
from titans_lm.retrofit.attention import FULL, Reach
from titans_lm.retrofit.cache import PIECE, as_base, check_head, hidden, nats
from titans_lm.retrofit.file import from_pretrained, load_base, read_adapter
from titans_lm.retrofit.memory import adapter_of
from titans_lm.retrofit.saving import FILE, fingerprint, save
from titans_lm.retrofit.settings import AdapterSettings
from titans_lm.train.checkpoint import quiet_transformers
from titans_lm.train.device import choose_device, to_device
from titans_lm.train.files import new_folder
from titans_lm.train.loop import fit
from titans_lm.train.options import plain_settings
from titans_lm.train.parallel import check_alone
from titans_lm.train.progress import ProgressReport
from titans_lm.train.run import MODEL, SETTINGS, RunFolder
from titans_lm.train.trainer import checkpoint_activations

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


def retrofit(
    settings: RetrofitSettings, *, resume: bool = False, progress: ProgressReport | None = None
) -> dict[str, Any]:
    """Train an adapter for a base and report how it went; `out/model` then is the adapter, as of the last
    evaluation while it trains.

    `resume` goes on with the run in `settings.out`. Raises ValueError for a base, a text or settings that will not do,
    and what `fit` raises.
    """
    if settings.model is None or settings.out is None:
        raise ValueError("got no model or no --out; expected titans retrofit MODEL DATA --out DIR")
    check_alone("adapters are trained on one device")
    from transformers import AutoTokenizer

    progress = progress or ProgressReport(quiet=True)
    tokenizer = from_pretrained(AutoTokenizer, settings.model)
    train, held_out = open_texts(settings, tokenizer)
    torch.manual_seed(settings.seed)
    device = choose_device(settings.device)
    exact = device.type == "cpu" or settings.precision == "float32"
    with quiet_transformers():
        model = load_base(settings.model, dtype=torch.float32 if exact else "auto").to(device)
    add_memory(model, **vars(before_choice(settings.adapter, model.config.num_hidden_layers)))
    check_head(model)
    check_windows(model, settings.windows)
    if settings.activation_checkpointing:
        checkpoint_blocks(model)
    gap, rows = Gap(model, ReturningRows(held_out, settings)), ReturningRows(train, settings)
    plain = plain_settings(settings)
    run = RunFolder.open(settings.out, settings=plain) if resume else RunFolder.create(settings.out, plain)
    if (run.path / MODEL / FILE).is_file():
        header, _ = read_adapter(run.path / MODEL / FILE)
        if header["fingerprint"] != fingerprint(model):
            raise ValueError(
                f"got the run {str(run.path)!r}, begun on other weights than {settings.model!r} has; expected its base"
            )
    settings = begin(model, rows, settings, run, progress)
    adapter = adapter_of(model)
    trained = sum(x.numel() for x in adapter.parameters())
    progress.say(f"{trained:,} numbers to train beside {model.num_parameters() - trained:,}; run folder {run.path}")

    def evaluate(_: nn.Module) -> dict[str, Any]:
        with new_folder(run.path / MODEL) as unfinished:
            save(model, unfinished)
            tokenizer.save_pretrained(unfinished)
        return gap()

    loss = Distillation(model, settings.distill, settings.text_loss, settings.returning_weight)
    own = dataclasses.replace(settings, activation_checkpointing=False)  # switched on above, in the base
    result = fit(adapter, rows, loss, own, eval_fn=evaluate, run=run, progress=progress)
    return {
        "model": str(run.path / MODEL),
        "parameters": trained,
        "steps": result.step,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "loss": result.last.get("loss"),
        **result.evaluation,
        "settings": plain_settings(settings),
    }


def before_choice(adapter: AdapterSettings, count: int) -> AdapterSettings:
    """Put a memory in every layer where the best of them are yet to be chosen."""
    if adapter.best is None:
        return adapter
    if adapter.best > count:
        raise ValueError(f"got layers={adapter.layers!r} for a model of {count} layers; expected best:{count} at most")
    return dataclasses.replace(adapter, layers="all")


def begin(
    model: Any, rows: ReturningRows, settings: RetrofitSettings, run: RunFolder, progress: ProgressReport
) -> RetrofitSettings:
    """Start memories with own keys, unless the run goes on, and choose their layers where that is asked for."""
    own, best = settings.adapter, settings.adapter.best
    if run.latest() is not None:
        if best is not None:
            raise ValueError(f"got layers={own.layers!r} for a run that goes on; expected those of its {SETTINGS}")
        return settings
    if own.memory.keys != "hidden":
        return settings
    progress.say("reading rows that tell the memories where to start")
    shares = start_memories(model, rows)
    told = ", ".join(f"{share:.2f} in layer {index}" for index, share in shares.items())
    progress.say(f"of what the window misses, memories start with these shares: {told}")
    if best is None:
        return settings
    chosen = tuple(sorted(sorted(shares, key=shares.__getitem__)[-best:]))
    keep_memories(model, chosen)
    progress.say(f"layers with a memory: {', '.join(map(str, chosen))}")
    settings = dataclasses.replace(settings, adapter=model.retrofit)
    run.settings = plain_settings(settings)  # so that a run that goes on has these layers
    return settings


class Gap:
    """How much of what a window costs the memory wins back, on held-out rows: 0 is the windowed base, 1 is the base.

    share = (windowed − ours) / (windowed − full), in nats per token: on text beyond the window, and on passages that
    return from there, where rows are long enough for these. What the base needs, with its window and without, is
    measured once.
    """

    def __init__(self, model: Any, rows: ReturningRows) -> None:
        settings = rows.settings
        self.model, self.reach = model, Reach(settings.adapter.window, settings.adapter.sinks)
        rng, window, sinks = np.random.default_rng([settings.seed, 0]), settings.adapter.window, settings.adapter.sinks
        device = next(model.parameters()).device

        def drawn(far: int | None) -> Batch:
            while True:  # of rows this long, most have a passage that returns
                row = rows.row(rng, window, far)
                if far is None or row[1].any():
                    return to_device(as_batch([row], window, sinks), device)

        kinds: dict[str, int | None] = {"text": None}
        if settings.seq_len > window + settings.passages[1]:
            kinds["returns"] = settings.seq_len
        self.batches = {name: [drawn(far) for _ in range(settings.eval_rows)] for name, far in kinds.items()}
        self.base: dict[str, dict[str, float]] = {}

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        if not self.base:
            with as_base(self.model):
                windowed = self.reach._replace(memory=False)
                self.base = {"full": self._nats(FULL), "windowed": self._nats(windowed)}
        found: dict[str, Any] = {}
        for kind, ours in self._nats(self.reach).items():
            full, windowed = self.base["full"][kind], self.base["windowed"][kind]
            found |= {f"{kind}_full": full, f"{kind}_windowed": windowed, f"{kind}_ours": ours}
            found[f"{kind}_share"] = (windowed - ours) / (windowed - full) if windowed != full else 0.0
        return found

    def _nats(self, reach: Reach) -> dict[str, float]:
        return {kind: self._mean(batches, reach, kind) for kind, batches in self.batches.items()}

    def _mean(self, batches: list[Batch], reach: Reach, kind: str) -> float:
        found = []
        for batch in batches:
            cost = nats(self.model, batch["input_ids"], batch["targets"], reach)
            found.append(cost[batch["again"]] if kind == "returns" else cost[:, self.reach.window :].flatten())
        return float(torch.cat(found).double().mean())


def checkpoint_blocks(model: Any) -> None:
    """Let blocks keep nothing but what enters them; they do so in training mode, which nothing inside of them takes."""
    checkpoint_activations(model, use_reentrant=False)
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")
