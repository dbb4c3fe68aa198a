"""Several processes that train one model: torch's own process groups, DDP and FSDP2, started by torchrun.

Every process makes the same batch of a step, since a batch is a function of the step alone, and takes its own rows of
it. So a run means the same batch, the same order and the same steps on any number of processes.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titans_lm.data.batches import Batch, count_targets
from titans_lm.train.device import choose_device
from titans_lm.train.settings import Parallel

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Distributed:
    """Which of how many processes this is, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def share(self, rows: int) -> int:
        """How many of a batch's rows are each process's; ValueError where they cannot be shared out evenly."""
        if rows % self.size:
            raise ValueError(
                f"got a batch of {rows} rows for {self.size} processes; expected a batch_size that {self.size} divides"
            )
        return rows // self.size

    def rows(self, batch: Batch) -> Batch:
        """This process's rows of a batch."""
        if self.size == 1:
            return batch
        share = self.share(len(next(iter(batch.values()))))
        return {name: part[self.rank * share : (self.rank + 1) * share] for name, part in batch.items()}

    def weight(self, batch: Batch, own: Batch) -> float:
        """What the mean over this process's targets counts in the mean over all: 1 where all have as many."""
        if self.size == 1 or "targets" not in batch:
            return 1.0
        return self.size * count_targets(own) / max(count_targets(batch), 1)

    def mean(self, numbers: list[Tensor]) -> list[Tensor]:
        """The mean of each number over all processes; the same on all of them."""
        if self.size == 1:
            return numbers
        together = torch.stack([number.detach().to(self.device, torch.float64) for number in numbers])
        dist.all_reduce(together)
        return list((together / self.size).unbind())

    def anybody(self, wish: bool) -> bool:
        """Whether any process wishes so."""
        if self.size == 1:
            return wish
        asked = torch.tensor(float(wish), device=self.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)

    def broadcast(self, value: Kind) -> Kind:
        """What the main process says."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_gather(self, value: Kind) -> list[Kind]:
        """What every process says, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def first(self, work: Callable[[], Kind]) -> Kind:
        """Let the main process do something that all need done; if it fails there, it fails everywhere."""
        if self.size == 1:
            return work()
        result, error = None, None
        if self.main:
            try:
                result = work()
            except (OSError, ValueError, RuntimeError) as failed:
                error = failed
        result, failure = self.broadcast((result, error))
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]


ALONE = Distributed(0, 1, torch.device("cpu"))
"""The only process that there is."""


def check_alone(why: str = "models of sequences are small, and trained without torchrun") -> None:
    """Refuse to be one of several processes that torchrun has started."""
    if int(size := os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"got WORLD_SIZE={size}, several processes; expected one: {why}")


PATIENCE = timedelta(hours=2)
"""How long processes wait for one that saves a model, or reads through its data; torchrun ends them where one dies."""


def open_distributed(device: str = "auto") -> Distributed:
    """Join the processes that torchrun has started, or be alone; ValueError for a device that is not there."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Distributed(0, 1, choose_device(device))
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # no other is looked at, which would take its memory
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
    return Distributed(dist.get_rank(), dist.get_world_size(), chosen)


@contextmanager
def joined_distributed(device: str = "auto") -> Iterator[Distributed]:
    """Be with the other processes, and leave them at the end unless somebody had joined them before."""
    before = dist.is_initialized()
    try:
        yield open_distributed(device)
        _settle()
    finally:
        if not before and dist.is_initialized():
            dist.destroy_process_group()


def _settle() -> None:
    """Let gloo's threads, which outlive the interpreter under FSDP2, come to rest while it is still there.

    One that is then still dropping the tensors of the last exchange aborts the process (pytorch/pytorch#179291).
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.barrier()  # leaves no tensors of its own
        time.sleep(0.2)  # microseconds would do, on a machine that has them to spare


def spread(model: nn.Module, how: Parallel, world: Distributed) -> nn.Module:
    """Lay a model out over the processes: as it is, a copy on each (DDP), or a part on each (FSDP2).

    "auto" is DDP where there are several. Under FSDP2 every block is a unit of its own: its parameters, gradients and
    optimizer state are spread over the processes, and gathered while it computes.
    """
    model = model.to(world.device)
    if world.size == 1:
        return model
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        # States that a block returns are views; nobody writes into them, which is what this warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh: DeviceMesh = init_device_mesh(world.device.type, (world.size,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    # Memory caching weighs segments by parameters that a text of one segment does not use.
    unused = any(getattr(part, "open_logit", None) is not None for part in model.modules())
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=unused)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model says it must not be cut inside of, as transformers' models do; none inside another."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    inside = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inside]


def unwrapped(model: nn.Module) -> Any:
    """The model itself, without what spreads it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def full_tensor(number: Tensor) -> Tensor:
    """A number that may be in parts."""
    return number.full_tensor() if isinstance(number, DTensor) else number


def sync_gradients(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Where gradients of several batches are added up: exchange them after the last one only."""
    owner: Any = model
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        owner.set_requires_gradient_sync(last)
    if last or not hasattr(model, "no_sync"):
        return nullcontext()
    return owner.no_sync()


def whole_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """All weights of a model in parts (FSDP2), on the main process, none on the others, which call it too; or None."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)
