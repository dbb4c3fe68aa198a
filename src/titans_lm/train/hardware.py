"""What a number was measured on, and at which commit."""

import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

from titans_lm.train.device import commit, environment


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
    """Name the processor as the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def asked_threads() -> int | None:
    """Give the threads that OMP_NUM_THREADS asks for, where it is set to a number."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else None


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
