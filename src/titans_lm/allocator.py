"""What the C library does with memory that is freed."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""glibc's settings: when it gives the heap's end back (−1: never), and how many blocks lie outside the heap."""


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed as long as the process lives; says whether it does so now.

    It gives large blocks back to the kernel and asks for them again in the next step, and the kernel zeroes each of
    their pages, which takes up to a fifth of the time of training on a CPU (D57). Other C libraries, and a glibc that
    MALLOC_… or GLIBC_TUNABLES has told what to do, stay as they are.
    """
    told = any(name.startswith("MALLOC_") for name in os.environ)
    if told or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
