"""One step of training after another, and everything that the next one depends on."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.backbone import check_compiler
from titans_lm.data.ahead import Ahead
from titans_lm.data.batches import Batch
from titans_lm.train.checkpoint import load_trainer, load_weights, random_state, restore_random_state
from titans_lm.train.device import mixed_precision, to_device
from titans_lm.train.optimiser import build_optimiser, learning_rate, load_whole_optimiser
from titans_lm.train.parallel import World, blocks_of, is_spread, later, plain, spread, whole
from titans_lm.train.settings import FitSettings
from titans_lm.train.sharded import has_state, load_state, load_whole_weights

LossFunction = Callable[[Any, Batch], tuple[Tensor, dict[str, Any]]]
Record = dict[str, Any]
WINDOW = 128
"""Steps that a spike is measured against; half of them are enough to begin with."""


class Diverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient that was not finite, or a spike."""


@dataclass
class FitResult:
    """How training ended."""

    step: int
    """Steps done."""
    tokens: int
    """Tokens read, over all sessions of the run."""
    skipped: int
    """Steps whose loss or gradient was not finite, or a spike, and which changed nothing."""
    seconds: float
    """Time in steps, over all sessions of the run; evaluations and checkpoints are not counted."""
    last: Record = field(default_factory=dict)
    """The last step's record."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """What the evaluation after the last step found."""


class Spikes:
    """Losses and gradient norms of the last steps, and whether new ones stand out: by `sigmas` or more above the mean.

    Only steps that were finite are kept, spikes among them: where training has moved to another level, the window
    follows it.
    """

    def __init__(self, sigmas: float) -> None:
        self.sigmas = sigmas
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)

    def __call__(self, loss: float, norm: float) -> bool:
        if not self.sigmas:
            return False
        found = self._above(self.losses, loss) or self._above(self.norms, norm)
        self.losses.append(loss)
        self.norms.append(norm)
        return found

    def _above(self, before: deque[float], value: float) -> bool:
        if len(before) < WINDOW // 2:
            return False
        return value - statistics.fmean(before) > self.sigmas * statistics.stdev(before)

    def state(self) -> list[list[float]]:
        return [list(self.losses), list(self.norms)]

    def load(self, saved: list[list[float]]) -> None:
        self.losses, self.norms = (deque(part, maxlen=WINDOW) for part in saved)


class Trainer:
    """One step of the optimiser after another, and everything that the next one depends on."""

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Batch],
        loss_fn: LossFunction,
        settings: FitSettings,
        world: World,
    ) -> None:
        self.world, self.device, self.settings = world, world.device, settings
        self.loss_fn: Any = loss_fn
        if world.size > 1 and settings.parallel == "fsdp" and hasattr(loss_fn, "forget"):
            raise ValueError(
                "got parallel='fsdp' with a loss that carries a state, which begins outside of the model's forward "
                "pass, where its parameters are in parts; expected parallel='ddp'"
            )
        if settings.activation_checkpointing:
            _checkpoint_activations(model)
        if settings.compile:
            _compile_blocks(model, world.device)
        self.model = spread(model, settings.parallel, world)
        self.batches = batches
        self.ahead = Ahead(batches, settings.workers, settings.steps * settings.accumulate)
        self.optimiser = build_optimiser(plain(self.model), settings)
        self.spread = any(is_spread(p) for p in plain(self.model).parameters())
        if world.rank:  # what is drawn while training, such as dropout, differs from process to process
            torch.manual_seed(settings.seed * 1_000_003 + world.rank)
        self.parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        self.result = FitResult(step=0, tokens=0, skipped=0, seconds=0.0)
        self.skipped_in_a_row = 0
        self.spikes = Spikes(settings.spike_sigmas)
        self.rows: list[int] = []
        """Which rows of the text the step has read, where batches say so."""

    def step(self) -> Record:
        """Take one step, and say how it went; a loss or gradient that is not finite, or a spike, changes nothing."""
        started, result = time.perf_counter(), self.result
        lr = learning_rate(result.step, self.settings)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        loss, metrics, tokens = self._backward()
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.settings.clip or float("inf")))
        if bool(torch.isfinite(loss) & torch.isfinite(norm)) and not self.spikes(float(loss), float(norm)):
            self.optimiser.step()
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
        """Add up the gradients of the step's batches; the loss is their mean, the metrics are the last one's."""
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        total, tokens, metrics, weight = torch.zeros((), device=self.device), 0, {}, 1.0
        self.rows = []
        several = self.settings.accumulate
        for index in range(several):
            batch = self.ahead(self.result.step * several + index)
            rows = self.world.rows(batch)
            weight = self.world.weight(batch, rows)
            own = to_device(rows, self.device)
            self.rows += batch["sample"].tolist() if "sample" in batch else []
            with later(self.model, index == several - 1):
                with mixed_precision(self.settings.precision, self.device):
                    loss, metrics = self.loss_fn(self.model, own)
                loss = loss if weight == 1.0 else loss * weight
                (loss / several).backward()
            total += loss.detach() / several
            tokens += next((part.shape[0] * part.shape[1] for part in batch.values() if part.dim() > 1), 0)
        if self.world.size == 1:
            return total, metrics, tokens
        numbers = [torch.as_tensor(value, device=self.device) * weight for value in metrics.values()]
        total, *numbers = self.world.mean([total, *numbers])
        return total, dict(zip(metrics, numbers, strict=True)), tokens

    def _skip(self) -> None:
        """Count a step that changed nothing, and forget what it may have left in a carried state."""
        self.result.skipped += 1
        self.skipped_in_a_row += 1
        if hasattr(self.loss_fn, "forget"):
            self.loss_fn.forget()
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row, up to step {self.result.step + 1}, had a loss or gradient "
                f"that was not finite{' or a spike' if self.spikes.sigmas else ''}; lower the learning rate, or look "
                "for such values in the data"
            )

    def evaluate(self, eval_fn: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Evaluate in the precision of training; what comes after is as if this had not been."""
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        with torch.random.fork_rng(devices), torch.no_grad(), mixed_precision(self.settings.precision, self.device):
            return eval_fn(plain(self.model))

    def state(self) -> dict[str, Any]:
        """Take down all that the next step depends on, the weights excepted, and the optimiser of several processes."""
        result, alone = self.result, self.world.size == 1
        carried = self.loss_fn.state_dict() if hasattr(self.loss_fn, "state_dict") else {}
        if not alone:
            everybody = self.world.gathered(carried)
            carried = everybody if any(everybody) else {}
        return {
            "processes": self.world.size,
            "step": result.step,
            "tokens": result.tokens,
            "skipped": result.skipped,
            "seconds": result.seconds,
            "optimiser": self.optimiser.state_dict() if alone else {},
            "loss": carried,
            "spikes": self.spikes.state(),
            "batches": getattr(self.batches, "fingerprint", ""),
            "random": random_state() if alone else self.world.gathered(random_state()),
        }

    def load(self, folder: Path) -> None:
        """Stand where the run stood when the checkpoint was written, which was verified before."""
        alone = self.world.size == 1
        saved = load_trainer(folder)
        if saved["batches"] != getattr(self.batches, "fingerprint", ""):
            raise ValueError(
                f"{folder} was trained on other data, or with another batch_size, seq_len or seed, than it is to go on "
                "with; give those of the run, or begin a new run"
            )
        if saved["loss"] and saved.get("processes", 1) != self.world.size:
            raise ValueError(
                f"{folder} holds the states that {saved.get('processes', 1)} processes carried, and there are "
                f"{self.world.size}; take the run up with as many"
            )
        kept = [{name: group[name] for name in ("weight_decay", "betas")} for group in self.optimiser.param_groups]
        if has_state(folder):
            load_state(folder, self.model, self.optimiser)
        else:
            (load_weights if alone else load_whole_weights)(folder, self.model)
            load_whole_optimiser(self.optimiser, saved["optimiser"])
        for group, settings in zip(self.optimiser.param_groups, kept, strict=True):
            group.update(settings)
        if saved["loss"]:
            self.loss_fn.load_state_dict(saved["loss"] if alone else saved["loss"][self.world.rank])
        self.spikes.load(saved.get("spikes", [[], []]))  # a run may have begun before they were counted
        for name in ("step", "tokens", "skipped", "seconds"):
            setattr(self.result, name, saved[name])
        self._restore_random(saved["random"])

    def _restore_random(self, saved: Any) -> None:
        """Numbers go on where they stood on as many processes; on another number they begin anew, by step and rank."""
        states = saved if isinstance(saved, list) else [saved]
        if len(states) == self.world.size:
            restore_random_state(states[self.world.rank])
        else:
            torch.manual_seed((self.settings.seed * 1_000_003 + self.result.step) * 1_009 + self.world.rank)


def _checkpoint_activations(model: nn.Module) -> None:
    owner: Any = model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"got activation_checkpointing for a {type(model).__name__}, which has none; expected one of transformers"
        )
    owner.gradient_checkpointing_enable()


def _compile_blocks(model: nn.Module, device: torch.device) -> None:
    """Compile block by block: they share one graph each kind, and what lies between them need not be traced."""
    check_compiler(device)
    if any(type(block).__module__.startswith(__name__.partition(".")[0]) for block in blocks_of(model)):
        raise ValueError(
            f"got compile for a {type(model).__name__}, whose gradients are written by hand, which torch.compile does "
            "not trace (torch 2.13 fails on their views); expected another library's model, or no compile"
        )
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"got compile for a {type(model).__name__}, which names no blocks; expected one that does")
    for block in blocks:
        block.compile()
