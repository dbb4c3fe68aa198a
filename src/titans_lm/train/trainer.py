"""One step of training after another, and everything that the next one depends on: AdamW, its rate, what is skipped."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.backbone import check_compiler
from titans_lm.data.batches import Batch, count_targets, prefetched
from titans_lm.ops.validate import form
from titans_lm.train.checkpoint import load_optimizer, load_trainer, load_weights, random_state, restore_random_state
from titans_lm.train.device import mixed_precision, to_device
from titans_lm.train.parallel import Distributed, blocks_of, full_tensor, spread, sync_gradients, unwrapped
from titans_lm.train.settings import FitSettings

LossFunction = Callable[[Any, Batch], tuple[Tensor, dict[str, Any]]]
Record = dict[str, Any]
COUNTS = ("step", "tokens", "skipped", "seconds")
"""What of a result a checkpoint holds."""
PER_MACHINE = ("device", "workers", "sinks")
"""Settings of training that processes need not have in common."""
UNFIT = "had a loss or gradient that was not finite; lower the learning rate, or look for such values in the data"


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient that was not finite."""


@dataclass
class FitResult:
    """How training ended."""

    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Tokens read, over all sessions of the run."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite, and which changed nothing."""
    seconds: float = 0.0
    """Time in steps, over all sessions of the run; evaluations and checkpoints are not counted."""
    last: Record = field(default_factory=dict)
    """The last step's record."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """What the evaluation after the last step found."""


def decays(model: nn.Module) -> dict[str, bool]:
    """Say for every trained parameter, once each, whether weight decay pulls on it.

    It pulls on weight matrices and convolution kernels only: tensors named `weight` of two dimensions or more in a
    module that is no embedding. Biases, norms, embeddings, and what a module learns beside its layers (persistent
    tokens, initial memories) are not made smaller by a rule; a matrix tied to an embedding counts as the embedding.
    """
    spared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return {
        name: name.rpartition(".")[2] == "weight"
        and parameter.dim() >= 2
        and id(parameter) not in spared
        and not getattr(parameter, "_no_weight_decay", False)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def build_optimizer(model: nn.Module, settings: FitSettings) -> torch.optim.AdamW:
    """Build AdamW with one group that decays and one that does not; ValueError where nothing is trained."""
    parameters = dict(model.named_parameters())
    decay = decays(model)
    if not decay:
        raise ValueError("got a model without a parameter that requires a gradient; expected something to train")
    groups = [
        {"params": [(name, parameters[name]) for name in decay if decay[name] is choice], "weight_decay": weight_decay}
        for choice, weight_decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    fused = all(parameters[name].device.type in ("cpu", "cuda") for name in decay)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        fused=fused,
    )


def learning_rate(step: int, settings: FitSettings) -> float:
    """Return the learning rate of a step, counted from 0: a straight rise, then half a cosine to the floor.

    lr (step + 1) / warmup_steps                              step < warmup_steps
    lr (floor + (1 − floor) (1 + cos π p) / 2)                after, p from 0 to 1 at the last step
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    last = max(settings.steps - 1 - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / last, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.lr_floor + (1.0 - settings.lr_floor) * cosine)


class Trainer:
    """One step of the optimizer after another, and everything that the next one depends on."""

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Batch],
        loss_fn: LossFunction,
        settings: FitSettings,
        world: Distributed,
        held_out: str = "",
    ) -> None:
        self.world, self.device, self.settings, self.held_out = world, world.device, settings, held_out
        self.loss_fn: Any = loss_fn
        own = {one.name: getattr(settings, one.name) for one in fields(FitSettings) if one.name not in PER_MACHINE}
        marks = world.all_gather((getattr(batches, "fingerprint", ""), own))
        if any(mark != marks[0] for mark in marks):
            other = next(rank for rank, mark in enumerate(marks) if mark != marks[0])
            raise ValueError(
                f"got other data or other settings in process {other} than in process 0; expected the same "
                "files and options on every machine"
            )
        if world.size > 1 and settings.parallel == "fsdp" and hasattr(loss_fn, "forget"):
            raise ValueError(
                "got parallel='fsdp' with a loss that carries a state, which begins outside of the model's forward "
                "pass, where its parameters are in parts; expected parallel='ddp'"
            )
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        if settings.compile:
            _compile_blocks(model, world.device)
        self.wrapped = spread(model, settings.parallel, world)
        self.model = unwrapped(self.wrapped)
        self.batches = batches
        self.coming: Iterator[Batch] = iter(())
        self.optimizer = build_optimizer(self.model, settings)
        if world.rank:  # what is drawn while training, such as dropout, differs from process to process
            torch.manual_seed(settings.seed * 1_000_003 + world.rank)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.result = FitResult()
        self.skipped_in_a_row = 0
        self.rows: list[int] = []
        """Which rows of the text the step has read, where batches say so."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make batches from the step where the run stands on; the processes that make them end with the block."""
        several = self.settings.accumulate
        first, last = self.result.step * several, self.settings.steps * several
        self.coming = prefetched(self.batches, first, last, self.settings.workers)
        try:
            yield
        finally:
            self.coming = iter(())

    def step(self) -> Record:
        """Take one step, and say how it went; a loss or gradient that is not finite changes nothing."""
        started, result = time.perf_counter(), self.result
        lr = learning_rate(result.step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, metrics, tokens = self._backward()
        norm = full_tensor(nn.utils.clip_grad_norm_(self.parameters, self.settings.clip or float("inf")))
        if bool(torch.isfinite(loss) & torch.isfinite(norm)):
            self.optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self._skip()
        seconds = time.perf_counter() - started
        result.step, result.tokens = result.step + 1, result.tokens + tokens
        result.seconds += seconds
        result.last = {
            "step": result.step,
            "loss": float(loss),
            **{name: float(value) for name, value in metrics.items()},
            "lr": lr,
            "grad_norm": float(norm),
            "tokens_per_second": tokens / seconds,
            "seconds": result.seconds,
            "tokens": result.tokens,
            "skipped": result.skipped,
            **({"rows": self.rows} if self.rows else {}),
        }
        return result.last

    def _backward(self) -> tuple[Tensor, dict[str, Any], int]:
        """Add up the gradients of the step's batches; loss and metrics are means over the targets of all of them."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total, tokens, metrics = torch.zeros((), device=self.device), 0, dict[str, Any]()
        self.rows = []
        several = self.settings.accumulate
        batches = [_checked(next(self.coming)) for _ in range(several)]
        targets = [count_targets(batch) for batch in batches]
        for index, (batch, counted) in enumerate(zip(batches, targets, strict=True)):
            rows = self.world.rows(batch)
            weight = self.world.weight(batch, rows) * (several * counted / (sum(targets) or math.nan))
            own = to_device(rows, self.device)
            self.rows += batch["sample"].tolist() if "sample" in batch else []
            with sync_gradients(self.wrapped, index == several - 1):
                with mixed_precision(self.settings.precision, self.device):
                    loss, found = _loss_of(self.loss_fn(self.wrapped, own))
                loss = loss if weight == 1.0 else _weighted(loss, weight)
                (loss / several).backward()
            total += loss.detach() / several
            for name, value in found.items():
                metrics[name] = metrics.get(name, 0.0) + _weighted(value, weight / several)
            tokens += _tokens(batch)
        if self.world.size == 1:
            return total, metrics, tokens
        numbers = [torch.as_tensor(value, device=self.device) for value in metrics.values()]
        total, *numbers = self.world.mean([total, *numbers])
        return total, dict(zip(metrics, numbers, strict=True)), tokens

    def _skip(self) -> None:
        """Count a step that changed nothing, and forget what it may have left in a carried state."""
        self.result.skipped += 1
        self.skipped_in_a_row += 1
        if hasattr(self.loss_fn, "forget"):
            self.loss_fn.forget()
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise Diverged(f"{self.skipped_in_a_row} steps in a row, up to step {self.result.step + 1}, {UNFIT}")

    def evaluate(self, eval_fn: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Evaluate in the precision of training; what comes after is as if this had not been."""
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        with torch.random.fork_rng(devices), torch.no_grad(), mixed_precision(self.settings.precision, self.device):
            return eval_fn(self.model)

    def state(self) -> dict[str, Any]:
        """Take down all that the next step depends on beside weights and optimizer; all processes call it."""
        losses = self.world.all_gather(getattr(self.loss_fn, "state_dict", dict)())
        return {
            **{name: getattr(self.result, name) for name in COUNTS},
            "carried": losses if any(losses) else [],
            "batches": getattr(self.batches, "fingerprint", ""),
            "held_out": self.held_out,
            "accumulate": self.settings.accumulate,
            "random": self.world.all_gather(random_state()),
        }

    def load(self, folder: Path) -> None:
        """Stand where the run stood when the checkpoint was written, which was verified before."""
        saved, world = load_trainer(folder), self.world
        if saved["batches"] != getattr(self.batches, "fingerprint", ""):
            raise ValueError(
                f"{folder} was trained on other data, or with another batch_size, seq_len, seed, boundaries, stateful "
                "or reread, or other steps where reread.share changes over them, than it is to go on with; give those "
                "of the run, or begin a new run"
            )
        if saved.get("held_out", self.held_out) != self.held_out:
            raise ValueError(
                f"{folder} was evaluated on another held-out text than is there now; bring that one back, with the "
                "run's --valid, --held-out and --eval-bytes, or begin a new run"
            )
        before, now = saved.get("accumulate", self.settings.accumulate), self.settings.accumulate
        if before != now:
            raise ValueError(
                f"got accumulate={now} for {folder}, which was trained with accumulate={before}; expected the same: a "
                "step's number says which batches come next"
            )
        if saved["carried"] and len(saved["carried"]) != world.size:
            raise ValueError(
                f"{folder} holds the states that {len(saved['carried'])} processes carried, and there are "
                f"{world.size}; take the run up with as many"
            )
        load_weights(folder, self.model)
        load_optimizer(folder, self.model, self.optimizer)
        if saved["carried"]:
            self.loss_fn.load_state_dict(saved["carried"][world.rank])
        for name in COUNTS:
            setattr(self.result, name, saved[name])
        if len(saved["random"]) == world.size:
            restore_random_state(saved["random"][world.rank])
        else:  # on another number of processes they begin anew, by step and rank
            torch.manual_seed((self.settings.seed * 1_000_003 + self.result.step) * 1_009 + world.rank)


def checkpoint_activations(model: nn.Module, **settings: Any) -> None:
    """Let a model of transformers keep what enters its blocks and recompute the rest, with settings of torch's."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # renamed in transformers 5
    enable: Any = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        raise ValueError(
            f"got activation_checkpointing for a {type(model).__name__}, which has none; expected one of transformers"
        )
    enable(settings or None)


def _compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Compile block by block: they share one graph each kind, and what lies between them need not be traced."""
    check_compiler(device)
    blocks = blocks_of(model)
    if any(type(block).__module__.startswith(__name__.partition(".")[0]) for block in blocks):
        raise ValueError(
            f"got compile for a {type(model).__name__}, whose gradients are written by hand: inside a graph "
            "torch's take their place, and training was no faster; expected another library's model, or no compile"
        )
    if not blocks:
        raise ValueError(f"got compile for a {type(model).__name__}, which names no blocks; expected one that does")
    for block in blocks:
        block.compile()


def _checked(batch: Any) -> Batch:
    """Refuse a batch that is no dict of tensors."""
    if not isinstance(batch, Mapping) or not all(isinstance(part, Tensor) for part in batch.values()):
        got = {name: type(part).__name__ for name, part in batch.items()} if isinstance(batch, Mapping) else type(batch)
        raise ValueError(f"got a batch {got}; expected a dict of tensors, such as input_ids and targets (B, T)")
    return batch  # pyrefly: ignore


def _loss_of(found: Any) -> tuple[Tensor, dict[str, Any]]:
    """Refuse what is no loss with gradients and numbers beside it."""
    pair = isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)
    if not pair or not isinstance(found[0], Tensor) or found[0].dim():
        got = ", ".join(map(form, found)) if isinstance(found, tuple | list) else form(found)
        raise ValueError(
            f"got what is {got} from loss_fn(model, batch); expected (loss, metrics): a tensor of one number, such as "
            "a mean, and a dict of numbers to log, which may be empty"
        )
    if not found[0].requires_grad:
        raise ValueError("got a loss without gradients; expected one made of the model's output, not detached")
    return found  # pyrefly: ignore


def _weighted(value: Any, weight: float) -> Any:
    """A part without targets, whose mean is NaN, adds nothing."""
    return value * weight if weight else torch.as_tensor(value).nan_to_num() * 0.0


def _tokens(batch: Batch) -> int:
    """Count the tokens of a batch; its padding is none."""
    mask = batch.get("attention_mask", batch.get("valid"))
    if mask is not None:
        return int(mask.sum())
    return next((part.shape[0] * part.shape[1] for part in batch.values() if part.dim() > 1), 0)
