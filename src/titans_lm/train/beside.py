"""Work that goes on beside training: the writing of a checkpoint, from copies of what it holds."""

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from titans_lm.train.parallel import World, is_spread


def copied(value: Any, *, all_to_cpu: bool = True) -> Any:
    """Copy every tensor in dicts, lists and tuples, so that training may go on writing into those it came from.

    What was one tensor under two names (a tied embedding) is one again. The copies are on the CPU; with
    `all_to_cpu=False` tensors of a GPU are left, for somebody else to copy.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_tensor(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" and not all_to_cpu:
            return tensor
        if is_spread(tensor) or tensor.numel() == 0:  # no address to know it by
            return tensor.detach().clone().cpu()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in copies:
            copies[place] = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
        return copies[place]

    def copy_any(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_tensor(value)
        if isinstance(value, dict):
            return {name: copy_any(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            parts = [copy_any(part) for part in value]
            return tuple(parts) if isinstance(value, tuple) else parts
        return value

    return copy_any(value)


class Beside:
    """One piece of work at a time in a thread of its own, on every process that trains."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._pool: ThreadPoolExecutor | None = None
        self._work: Future[Any] | None = None
        self._group: Any = None
        self._into = Path()

    def begin(self, into: Path, work: Callable[[], Any]) -> None:
        """Begin to write something; what was begun before must have been waited for."""
        assert self._work is None
        self._into = into
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="titans-save")
        self._work = self._pool.submit(work)

    def wait(self) -> OSError | None:
        """Wait for the work of all processes; return the same error on all of them where it failed on one."""
        if self._work is None:
            return None
        work, self._work, failed = self._work, None, None
        try:
            work.result()
        except (OSError, ValueError, RuntimeError, CheckpointException) as error:
            failed = f"could not be written: {' '.join(str(error).split())[:300]}"
        told = next((told for told in self.world.gathered(failed) if told is not None), None)
        return None if told is None else OSError(errno.EIO, told, str(self._into))

    def end(self) -> None:
        """Let what was begun come to its end, well or not: nobody asks for it any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool, self._work = None, None

    def group(self) -> Any:
        """Join the processes in a group of its own, over which work beside training may talk; all of them call it."""
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        return self._group
