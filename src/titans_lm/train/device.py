"""Where a model runs, in which precision, and what a number was measured on, at which commit."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titans_lm.config import check_choice

CONTROL_GROUP = Path("/sys/fs/cgroup")


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of that name; "auto" takes a GPU where there is one. ValueError where there is none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each kind of device fails in its own way
        raise ValueError(
            f"got device={name!r}; this machine has {torch.cuda.device_count()} CUDA devices; "
            "expected auto, cpu, or a device that is there, such as cuda:0"
        ) from error
    return device


def mixed_precision(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context that a forward runs in: bfloat16 autocast, or nothing.

    "auto" is bfloat16 on a GPU that computes it natively, and float32 everywhere else.
    """
    check_choice("precision", precision, ("auto", "float32", "bfloat16"))
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" or (precision == "auto" and native):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def environment() -> dict[str, str | int | list[str]]:
    """Describe this machine and the versions of what runs on it, for the record beside a number."""
    packages = {}
    for name in ("titans-lm", "torch", "transformers", "tokenizers", "safetensors", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        **packages,
    }


def commit() -> str:
    """Name the commit of the sources, "+" behind it where files differ from it; "unknown" outside a checkout."""

    def git(*args: str) -> str:
        package = Path(__file__).parent.parent
        return subprocess.run(["git", *args], cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # installed within somebody's checkout it is no part of that
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> dict[str, Any]:
    """Describe the machine, the versions, the commit and what the allocator was told."""
    versions = environment()
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": machine_memory(),
        "gpus": versions.pop("gpus"),
        "system": versions.pop("platform"),
        "c_library": " ".join(platform.libc_ver()).strip() or "unknown",
        "python": versions.pop("python"),
        "threads_of_this_process": versions.pop("threads"),
        "versions": versions,
        "commit": commit(),
        "inherited_allocator": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def asked_threads() -> int | None:
    """Give the threads that OMP_NUM_THREADS asks for, where it is set to a number."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else None


def machine_memory() -> int:
    """Bytes of memory that the machine has, or that the limit of a container leaves of it."""
    files = CONTROL_GROUP / "memory.max", CONTROL_GROUP / "memory" / "memory.limit_in_bytes"  # versions 2 and 1
    said = (file.read_text().strip() for file in files if file.is_file())
    limits = (int(limit) for limit in said if limit.isdecimal())  # "max" is none
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])
