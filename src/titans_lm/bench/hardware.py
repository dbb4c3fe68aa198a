"""What a number was measured on, and at which commit."""

import os
import platform
from datetime import datetime
from typing import Any

from titans_lm.bench.settings import ALLOCATORS
from titans_lm.demo.run import processor, usable_cores
from titans_lm.train.device import commit, environment


def hardware() -> dict[str, Any]:
    """Describe the machine, the versions, the commit and the allocator settings."""
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
        "allocators": ALLOCATORS,
        "inherited_allocator": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
