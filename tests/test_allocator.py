"""What the C library does with memory that is freed: counted in pages that the kernel had to hand out again."""

import platform
from pathlib import Path

import pytest

from forks import said_by

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = [
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's"),
    pytest.mark.skipif(HUGE.is_file() and "[always]" in HUGE.read_text(), reason="a fault brings 2 MiB here"),
]

PAGES = 64 * 2**20 // 4096
"""Of the tensor of 64 MiB that each round makes and frees; above what glibc ever keeps by itself."""
ROUNDS = """
import resource, torch
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):  # a block that small ones have settled behind is no room for the next of its size
    torch.ones(2**24)
before = faults()
for _ in range(8):
    torch.ones(2**24)
print(faults() - before)
"""
CALL = "from titans_lm.allocator import keep_freed_memory; print(keep_freed_memory())\n"


def run(tmp_path: Path, code: str) -> list[str]:
    return said_by(code, tmp_path / "said").split()


def test_what_is_freed_is_not_asked_for_again(tmp_path: Path):
    before, kept, faults = run(tmp_path, ROUNDS + CALL + ROUNDS)
    assert int(before) > 4 * PAGES  # the test measures something
    assert kept == "True"
    assert int(faults) < PAGES


def test_commands_keep_it(tmp_path: Path):
    code = 'from titans_lm import cli; cli.main(["info", "pretrained:facts"])'
    assert int(run(tmp_path, code + ROUNDS)[-1]) < PAGES


def test_training_keeps_it_on_a_cpu(tmp_path: Path):
    code = """
import torch
from titans_lm.train.loop import fit
from titans_lm.train.settings import FitSettings
loss = lambda model, batch: (model(batch["x"]).square().mean(), {})
fit(torch.nn.Linear(2, 2), lambda step: {"x": torch.ones(1, 2)}, loss, FitSettings(steps=1, device="cpu"))
"""
    assert int(run(tmp_path, code + ROUNDS)[-1]) < PAGES


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_a_user_has_told_glibc_stays(name: str, tmp_path: Path):
    """It is told by the environment, which is looked at in every call; nothing else is asked of glibc here."""
    value = "2" if name.startswith("MALLOC") else "glibc.malloc.arena_max=2"
    told = f"import os; os.environ[{name!r}] = {value!r}\n"
    kept, faults = run(tmp_path, told + CALL + ROUNDS)
    assert kept == "False"
    assert int(faults) > 4 * PAGES
